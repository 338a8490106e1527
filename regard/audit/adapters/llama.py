"""Llama, Mistral, Qwen2 and others with their layers: grouped queries, rotary positions, causal masks and windows."""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.audit.adapters.base import Adapter, Block, Call, Declared, Matrices, register
from regard.audit.adapters.calls import hidden_states, options_of, refuse_cache
from regard.audit.adapters.declaration import declared_rotary, sizes_of
from regard.audit.adapters.grouped import grouped_matrices, grouped_names
from regard.audit.adapters.masks import masked_pairs
from regard.audit.adapters.rotary import folded, turning_of
from regard.audit.adapters.surroundings import ancestor, block_at

KNOWN = {"hidden_states", "attention_mask", "past_key_values", "position_embeddings", "position_ids", "is_causal"}


class Llama(Adapter):
    """A sliding window reaches the module as a mask; norms come first."""

    def declare(self, model: nn.Module, path: str, module: nn.Module, call: Call) -> Declared:
        options = options_of(module, call, KNOWN)
        points = hidden_states(options)
        refuse_cache(module, options.get("past_key_values"), points.shape[1])
        pairs = masked_pairs(module, options, sizes_of(points))
        return declared_rotary(self.matrices(model, path, module), turning_of(model, path), options, pairs, call)

    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        scale: Any = module.scaling
        width: Any = module.head_dim
        return grouped_matrices(module, folded(turning_of(model, path), float(scale), width))

    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        mlp = ("post_attention_layernorm", "mlp")
        return block_at(model, ancestor(path, 1), ("input_layernorm", "self_attn"), mlp, "norm")

    def parameters(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
        return grouped_names(path, module)


# Families whose attention and decoder layers are those of Llama, Mistral or Qwen2, to the names.
FAMILIES = ("Llama", "Mistral", "Qwen2", "Gemma", "Arcee", "Ministral")

register(*(f"{name}Attention" for name in FAMILIES), adapter=Llama(), package="transformers.")
