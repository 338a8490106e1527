"""A cache of atoms: fewer keys than tokens, each with a bias, at the true positions.

The bias travels as one more coordinate of the keys, so that an attention that does not know it fails on the
shape and is never silently wrong.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.compression.batched import HeadAtoms
from regard.errors import ArgumentError
from regard.hf.arguments import Arguments
from regard.hf.masks import split_mask


def has_bias(query: Tensor, key: Tensor) -> bool:
    """Whether keys have one coordinate more than queries."""
    return key.shape[-1] == query.shape[-1] + 1


def attend_atoms(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, arguments: Arguments
) -> Tensor:
    """softmax(scale · q·k + bias) v by the fused kernel, (batch, heads, m, e)."""
    for name in ("softcap", "position_bias", "s_aux", "sliding_window"):
        if getattr(arguments, name) is not None:
            raise ArgumentError(
                name, "is given for a compressed cache", "compress caches of plain softmax layers"
            )
    added = _bias(query, key)
    if mask is None and query.shape[2] > 1:  # the newest keys are those of the queries, in their order
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
        mask = mask[None, None]
    if mask is not None:
        support, more = split_mask(mask, query.shape[2], key.shape[2])
        seen = added.new_zeros(()).masked_fill(~support.mask, -math.inf)  # type: ignore[attr-defined]
        added = added + (seen if more is None else seen + more)
    return _fused(query, key, value, added, arguments.scaling)


def attend_all(query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None) -> Tensor:
    """The same where every query sees every key."""
    return _fused(query, key, value, _bias(query, key), scaling)


def _bias(query: Tensor, key: Tensor) -> Tensor:
    """Of each head, (batch, heads, 1, n)."""
    return key[..., -1].repeat_interleave(query.shape[1] // key.shape[1], 1).unsqueeze(-2)


def _fused(query: Tensor, key: Tensor, value: Tensor, added: Tensor, scaling: float | None) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key[..., :-1], value, added, scale=scaling, enable_gqa=grouped
    )


def atom_cache(layers: list[HeadAtoms], count: int, dtype: torch.dtype) -> Any:
    """A cache of transformers that holds these atoms for `count` tokens; new tokens are added as they are."""
    from transformers.cache_utils import Cache

    made = []
    for atoms in layers:
        layer = _layer_class()()
        layer.keys = torch.cat([atoms.keys, atoms.bias.unsqueeze(-1)], -1).unsqueeze(0).to(dtype)
        layer.values = atoms.values.unsqueeze(0).to(dtype)
        layer.dtype, layer.device, layer.is_initialized = dtype, layer.keys.device, True
        layer.missing = count - layer.keys.shape[-2]
        made.append(layer)
    return Cache(layers=made)


@cache
def _layer_class() -> Any:
    """The class of its layers, made where transformers is there."""
    from transformers.cache_utils import DynamicLayer

    class AtomLayer(DynamicLayer):
        """missing: how many tokens more there were than keys."""

        missing = 0

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> Any:
            wide = F.pad(key_states, (0, 1))
            return super().update(wide, value_states, *args, **options)

        def get_seq_length(self) -> int:
            return self._kept() + self.missing

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self._kept() + query_length, self.missing

        def _kept(self) -> int:
            return 0 if self.keys is None else int(self.keys.shape[-2])

        def reset(self) -> None:
            raise NotImplementedError("a compressed cache is not reset; make a new one")

    return AtomLayer
