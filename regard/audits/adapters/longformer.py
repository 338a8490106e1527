"""Longformer and LED's encoder: dot products in a window on both sides, without the padding that they add."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.audits.adapters.base import Block, Call, Declared, Matrices, NotCovered, register
from regard.audits.adapters.bert import Bert, separate_matrices, separate_names
from regard.audits.adapters.calls import first_output, hidden_states, options_of
from regard.audits.adapters.declaration import declare_self_attention, potential_of
from regard.audits.adapters.masks import Pairs, Related
from regard.audits.adapters.surroundings import ancestor, block_at
from regard.supports import Full, Window

KNOWN = {"hidden_states", "attention_mask", "is_index_masked", "is_index_global_attn", "is_global_attn"}


class Longformer(Bert):
    """Without tokens of global attention: those have projections of their own."""

    def declare(self, model: nn.Module, path: str, module: nn.Module, call: Call) -> Declared:
        options = options_of(module, call, KNOWN)
        if bool(options.get("is_global_attn")):
            raise NotCovered(
                "tokens with global attention have projections of their own, which are not declared here"
            )
        points, own = hidden_states(options), first_output(call.output)
        tokens = _seen_tokens(options.get("is_index_masked"), points)
        reach: Any = module.one_sided_attn_window_size
        relation = Window(reach, reach) if reach < tokens - 1 else Full()
        pairs = Pairs(Related(relation, (len(points), tokens, tokens), points.device))
        matrices, heads = self.matrices(model, path, module), self._heads(module)
        heads_of = own[:, :tokens].unflatten(-1, (heads, -1)).transpose(1, 2)
        return declare_self_attention(matrices, potential_of(matrices), pairs, points[:, :tokens], heads_of)

    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        width: Any = module.head_dim
        return separate_matrices(model, path, module, width**-0.5, self._heads(module))

    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        branch = ("attention.self", "attention.output.dense")
        return block_at(model, ancestor(path, 2), branch, ("intermediate", "output.dense"), None)

    def _heads(self, module: nn.Module) -> int:
        found: Any = module.num_heads
        return int(found)


class Led(Longformer):
    """The output projection is in the module around it, and norms come after each branch."""

    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        width: Any = module.head_dim
        return separate_matrices(model, path, module, width**-0.5, self._heads(module), "output")

    def parameters(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
        return separate_names(model, path, module, "output")

    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        return None

    def entering(self, model: nn.Module, path: str, module: nn.Module) -> str | None:
        return None


def _seen_tokens(masked: Tensor | None, points: Tensor) -> int:
    """How many tokens are no padding, which must be at the end, and the same for all inputs of a batch."""
    if masked is None:
        return points.shape[1]
    seen = int((~masked[0]).sum())
    if not bool((masked == (torch.arange(points.shape[1], device=masked.device) >= seen)).all()):
        raise NotCovered("its padding is not at the end of every input; give inputs one at a time")
    return seen


register("LongformerSelfAttention", adapter=Longformer(), package="transformers.")
register("LEDEncoderSelfAttention", adapter=Led(), package="transformers.")
