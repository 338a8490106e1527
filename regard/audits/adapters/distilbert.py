"""DistilBERT: separate affine projections with the output projection inside the module."""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.audits.adapters.base import Adapter, Block, Call, Declared, Matrices, register
from regard.audits.adapters.calls import first_output, hidden_states, options_of
from regard.audits.adapters.declaration import declare_self_attention, potential_of, sizes_of
from regard.audits.adapters.masks import masked_pairs
from regard.audits.adapters.projections import affine, output_projection, parameter_names, split
from regard.audits.adapters.surroundings import ancestor, block_at, norm_before


class DistilBert(Adapter):
    """Scaled dot products; the norm comes after the residual connection."""

    def declare(self, model: nn.Module, path: str, module: nn.Module, call: Call) -> Declared:
        options = options_of(module, call, {"hidden_states", "attention_mask", "is_causal", "position_ids"})
        points, matrices = hidden_states(options), self.matrices(model, path, module)
        pairs = masked_pairs(module, options, sizes_of(points))
        return declare_self_attention(
            matrices, potential_of(matrices), pairs, points, first_output(call.output)
        )

    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        heads: Any = module.n_heads
        scale: Any = module.scaling
        (w_q, b_q), (w_k, b_k), (w_v, b_v) = (
            split(affine(module, name), heads) for name in ("q_lin", "k_lin", "v_lin")
        )
        w_o, b_o = output_projection(affine(module, "out_lin"), heads)
        return Matrices(w_q, w_k, w_v, w_o, float(scale), b_q, b_k, b_v, b_o)

    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        return block_at(model, ancestor(path, 1), ("attention",), ("ffn",), None)

    def parameters(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
        return parameter_names(path, module, "q_lin", "k_lin", "v_lin", "out_lin")

    def entering(self, model: nn.Module, path: str, module: nn.Module) -> str | None:
        return norm_before(model, path, ancestor(path, 1), "output_layer_norm", "embeddings.LayerNorm")


register("DistilBertSelfAttention", adapter=DistilBert(), package="transformers.")
