"""ModernBERT: one fused projection, rotary positions of two kinds, windows in most layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.audits.adapters.base import Adapter, Block, Call, Declared, Matrices, register
from regard.audits.adapters.calls import hidden_states, options_of
from regard.audits.adapters.declaration import declare_rotary, sizes_of
from regard.audits.adapters.masks import masked_pairs
from regard.audits.adapters.projections import affine, output_projection, parameter_names, parts, split
from regard.audits.adapters.rotary import Turning, fold_scale, turning_of
from regard.audits.adapters.surroundings import ancestor, block_at


class ModernBert(Adapter):
    """Queries, keys and values are the three thirds of one projection;
    local layers turn at other frequencies than global ones.
    """

    def declare(self, model: nn.Module, path: str, module: nn.Module, call: Call) -> Declared:
        options = options_of(
            module,
            call,
            {"hidden_states", "attention_mask", "is_causal", "position_embeddings", "position_ids"},
        )
        pairs = masked_pairs(module, options, sizes_of(hidden_states(options)))
        return declare_rotary(
            self.matrices(model, path, module), self._turning(model, path, module), options, pairs, call
        )

    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        width: Any = module.head_dim
        heads = module.get_submodule("Wo").in_features // width
        (w_q, b_q), (w_k, b_k), (w_v, b_v) = (split(part, heads) for part in parts(affine(module, "Wqkv"), 3))
        w_o, b_o = output_projection(affine(module, "Wo"), heads)
        scale = fold_scale(self._turning(model, path, module), width**-0.5, width)
        return Matrices(w_q, w_k, w_v, w_o, scale, b_q, b_k, b_v, b_o)

    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        return block_at(model, ancestor(path, 1), ("attn_norm", "attn"), ("mlp_norm", "mlp"), "final_norm")

    def parameters(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
        return parameter_names(path, module, "Wqkv", "Wo")

    def _turning(self, model: nn.Module, path: str, module: nn.Module) -> Turning:
        config, layer = module.config, module.layer_idx
        return turning_of(model, path, f"{config.layer_types[layer]}_")  # type: ignore[union-attr,index]


register("ModernBertAttention", adapter=ModernBert(), package="transformers.")
