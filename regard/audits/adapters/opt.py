"""OPT: queries scaled by the module itself, causal masks, norms before or after."""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.audits.adapters.base import Adapter, Block, Call, Declared, Matrices, register
from regard.audits.adapters.calls import first_output, hidden_states, options_of, refuse_cache
from regard.audits.adapters.declaration import declare_self_attention, potential_of, sizes_of
from regard.audits.adapters.masks import masked_pairs
from regard.audits.adapters.projections import affine, output_projection, parameter_names, split
from regard.audits.adapters.surroundings import ancestor, block_at


class Opt(Adapter):
    """Scaled dot products; positions are in the embeddings."""

    def declare(self, model: nn.Module, path: str, module: nn.Module, call: Call) -> Declared:
        options = options_of(
            module, call, {"hidden_states", "attention_mask", "past_key_values", "is_causal", "position_ids"}
        )
        points, matrices = hidden_states(options), self.matrices(model, path, module)
        refuse_cache(module, options.get("past_key_values"), points.shape[1])
        pairs = masked_pairs(module, options, sizes_of(points))
        return declare_self_attention(
            matrices, potential_of(matrices), pairs, points, first_output(call.output)
        )

    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        heads: Any = module.num_heads
        scale: Any = module.scaling
        (w_q, b_q), (w_k, b_k), (w_v, b_v) = (
            split(affine(module, name), heads) for name in ("q_proj", "k_proj", "v_proj")
        )
        w_o, b_o = output_projection(affine(module, "out_proj"), heads)
        return Matrices(w_q, w_k, w_v, w_o, float(scale), b_q, b_k, b_v, b_o)

    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        above = ancestor(path, 1)
        if not above:
            return None
        first = model.get_submodule(above).do_layer_norm_before
        attention = ("self_attn_layer_norm", "self_attn") if first else ("self_attn",)
        mlp = ("fc1", "activation_fn", "fc2")
        return block_at(
            model, above, attention, ("final_layer_norm", *mlp) if first else mlp, "final_layer_norm"
        )

    def parameters(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
        return parameter_names(path, module, "q_proj", "k_proj", "v_proj", "out_proj")


register("OPTAttention", adapter=Opt(), package="transformers.")
