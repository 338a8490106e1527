"""Vision transformers: all patches see all patches."""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.audits.adapters.base import Adapter, Block, Call, Declared, Matrices, register
from regard.audits.adapters.calls import first_output, hidden_states, options_of
from regard.audits.adapters.declaration import declare_self_attention, potential_of, sizes_of
from regard.audits.adapters.grouped import grouped_matrices, grouped_names
from regard.audits.adapters.masks import masked_pairs
from regard.audits.adapters.surroundings import ancestor, block_at


class Vit(Adapter):
    """Scaled dot products; positions are in the embeddings; norms come first."""

    def declare(self, model: nn.Module, path: str, module: nn.Module, call: Call) -> Declared:
        options = options_of(module, call, {"hidden_states", "attention_mask", "is_causal"})
        points, matrices = hidden_states(options), self.matrices(model, path, module)
        pairs = masked_pairs(module, options, sizes_of(points))
        return declare_self_attention(
            matrices, potential_of(matrices), pairs, points, first_output(call.output)
        )

    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        scale: Any = module.scaling
        return grouped_matrices(module, float(scale))

    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        return block_at(
            model,
            ancestor(path, 1),
            ("layernorm_before", "attention"),
            ("layernorm_after", "mlp"),
            "layernorm",
        )

    def parameters(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
        return grouped_names(path, module)


register(
    *(f"{name}Attention" for name in ("ViT", "DeiT", "ViTMAE", "ViTMSN", "IJepa", "AST", "Vivit")),
    adapter=Vit(),
    package="transformers.",
)
