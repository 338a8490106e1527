"""GPT-2: fused projections that are stored transposed, a scale that may fall with depth, causal masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from regard.audits.adapters.base import Adapter, Block, Call, Declared, Matrices, register
from regard.audits.adapters.calls import first_output, hidden_states, options_of, refuse_cache
from regard.audits.adapters.declaration import declare_self_attention, potential_of, sizes_of
from regard.audits.adapters.masks import masked_pairs
from regard.audits.adapters.projections import affine, output_projection, parameter_names, parts, split
from regard.audits.adapters.surroundings import ancestor, block_at

KNOWN = {
    "hidden_states",
    "attention_mask",
    "encoder_hidden_states",
    "encoder_attention_mask",
    "past_key_values",
    "is_causal",
}


class Gpt2(Adapter):
    """Self-attention from one projection c_attn; cross-attention from q_attn,
    and c_attn of the encoder's states.
    """

    def declare(self, model: nn.Module, path: str, module: nn.Module, call: Call) -> Declared:
        options = options_of(module, call, KNOWN | {"position_ids"})
        cross = options.get("encoder_hidden_states") is not None
        points = hidden_states(options)
        context = hidden_states(options, "encoder_hidden_states") if cross else None
        refuse_cache(module, options.get("past_key_values"), sizes_of(points, context)[2], cross)
        pairs = masked_pairs(
            module,
            options,
            sizes_of(points, context),
            "encoder_attention_mask" if cross else "attention_mask",
        )
        matrices = self.matrices(model, path, module)
        return replace(
            declare_self_attention(
                matrices, potential_of(matrices), pairs, points, first_output(call.output)
            ),
            context=context,
        )

    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        heads: Any = module.num_heads
        scale: Any = module.scaling
        if module.is_cross_attention:
            fused = [affine(module, "q_attn"), *parts(affine(module, "c_attn"), 2)]
        else:
            fused = parts(affine(module, "c_attn"), 3)
        (w_q, b_q), (w_k, b_k), (w_v, b_v) = (split(part, heads) for part in fused)
        w_o, b_o = output_projection(affine(module, "c_proj"), heads)
        return Matrices(w_q, w_k, w_v, w_o, float(scale), b_q, b_k, b_v, b_o)

    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        branch = ("ln_cross_attn", "crossattention") if module.is_cross_attention else ("ln_1", "attn")
        return block_at(model, ancestor(path, 1), branch, ("ln_2", "mlp"), "ln_f")

    def parameters(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
        queries = ("q_attn",) if module.is_cross_attention else ()
        return parameter_names(path, module, *queries, "c_attn", "c_proj")


register("GPT2Attention", adapter=Gpt2(), package="transformers.")
