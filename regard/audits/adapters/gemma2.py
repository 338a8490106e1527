"""Gemma 2: capped scores, a scale of its own, windows in every other layer,
norms on both sides of each branch.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.audits.adapters.base import Adapter, Block, Call, Declared, Matrices, register
from regard.audits.adapters.decoding import declare_decoder
from regard.audits.adapters.grouped import grouped_matrices, grouped_names
from regard.audits.adapters.rotary import fold_scale, turning_of
from regard.audits.adapters.surroundings import ancestor, block_at


class Gemma2(Adapter):
    """Scores are cap · tanh(score / cap) where attn_logit_softcapping is set."""

    def declare(self, model: nn.Module, path: str, module: nn.Module, call: Call) -> Declared:
        return declare_decoder(self, model, path, module, call, "past_key_values")

    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        scale: Any = module.scaling
        width: Any = module.head_dim
        cap: Any = module.attn_logit_softcapping
        return grouped_matrices(
            module,
            fold_scale(turning_of(model, path), float(scale), width),
            None if cap is None else float(cap),
        )

    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        attention = ("input_layernorm", "self_attn", "post_attention_layernorm")
        mlp = ("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm")
        return block_at(model, ancestor(path, 1), attention, mlp, "norm")

    def parameters(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
        return grouped_names(path, module)


register("Gemma2Attention", adapter=Gemma2(), package="transformers.")
