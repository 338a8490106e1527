"""Llama, Mistral, Qwen2 and others with their layers: grouped queries, rotary positions,
causal masks and windows.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.audits.adapters.base import Adapter, Block, Call, Declared, Matrices, register
from regard.audits.adapters.decoding import declare_decoder
from regard.audits.adapters.grouped import grouped_matrices, grouped_names
from regard.audits.adapters.rotary import fold_scale, turning_of
from regard.audits.adapters.surroundings import ancestor, block_at


class Llama(Adapter):
    """A sliding window reaches the module as a mask; norms come first."""

    def declare(self, model: nn.Module, path: str, module: nn.Module, call: Call) -> Declared:
        return declare_decoder(self, model, path, module, call, "past_key_values")

    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        scale: Any = module.scaling
        width: Any = module.head_dim
        return grouped_matrices(module, fold_scale(turning_of(model, path), float(scale), width))

    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        mlp = ("post_attention_layernorm", "mlp")
        return block_at(model, ancestor(path, 1), ("input_layernorm", "self_attn"), mlp, "norm")

    def parameters(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
        return grouped_names(path, module)


# Families whose attention and decoder layers are those of Llama, Mistral or Qwen2, to the names.
FAMILIES = ("Llama", "Mistral", "Qwen2", "Gemma", "Arcee", "Ministral")

register(*(f"{name}Attention" for name in FAMILIES), adapter=Llama(), package="transformers.")
