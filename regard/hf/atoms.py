"""A cache of atoms: fewer keys than tokens, each with a bias, at the true positions.

The bias travels as one more coordinate of the keys, so that an attention that does not know it fails on the
shape and is never silently wrong. The cache lays it out as the kernel wants it when tokens arrive (`Ready`),
not whenever they are asked.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.compression.batched import HeadAtoms
from regard.errors import ArgumentError
from regard.hf.arguments import Arguments
from regard.hf.masks import split_mask

_fused = F.scaled_dot_product_attention
MORE = 256
"""New tokens that a layer has room for, before it is made anew with twice the room."""


class Ready(NamedTuple):
    """What the kernel takes of wide keys: keys (batch, groups, n, c), and biases (batch, heads, 1, n) whose
    numbers lie side by side.
    """

    keys: Tensor
    bias: Tensor

    @staticmethod
    def of(wide: Tensor, heads: int) -> Ready:
        """As the cache made it that handed out these keys; made now where nobody did."""
        found: Ready | None = getattr(wide, "ready", None)
        return Ready(wide[..., :-1], laid_out(wide, heads)) if found is None else found


def laid_out(wide: Tensor, heads: int) -> Tensor:
    """The biases of each head, (batch, heads, 1, n)."""
    return wide[..., -1].repeat_interleave(heads // wide.shape[1], 1).unsqueeze(-2)


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
    for name in ("dropout", "output_attentions"):
        if getattr(arguments, name):
            found = f"is {getattr(arguments, name)!r} for a compressed cache"
            raise ArgumentError(name, found, "atoms are for inference, and have no weights of tokens")
    if mask is None and query.shape[2] == 1:
        return attend_all(query, key, value, arguments.scaling)
    if mask is None:  # the newest keys are those of the queries, in their order
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
        mask = mask[None, None]
    support, more = split_mask(mask, query.shape[2], key.shape[2])
    ready = Ready.of(key, query.shape[1])
    seen = ready.bias.new_zeros(()).masked_fill(~support.mask, -math.inf)  # type: ignore[attr-defined]
    added = ready.bias + (seen if more is None else seen + more)
    return _fused(query, ready.keys, value, added, scale=arguments.scaling, enable_gqa=True)


def attend_all(query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None) -> Tensor:
    """The same where every query sees every key."""
    ready = Ready.of(key, query.shape[1])
    return _fused(query, ready.keys, value, ready.bias, scale=scaling, enable_gqa=True)


class Room:
    """Wide keys and values with room for more, and the biases of each head, which are zero for new tokens.

    keys, values: what is handed out, views of the room. Tensors that were handed out never change.
    """

    def __init__(self, keys: Tensor, values: Tensor, heads: int, more: int) -> None:
        self.count = keys.shape[-2]
        whole = self.count + more
        self._keys, self._values = (
            torch.cat([part, part.new_zeros(*part.shape[:-2], more, part.shape[-1])], -2)
            for part in (keys, values)
        )
        self._narrow = self._keys[..., :-1]
        self._bias = laid_out(self._keys, heads)
        self._most = whole
        self.keys, self.values = keys, values

    def holds(self, keys: Tensor, more: int) -> bool:
        """Whether these are the keys that it handed out last, and so many more fit."""
        return keys is self.keys and self.count + more <= self._most

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Keys and values (batch, groups, m, ·) of new tokens."""
        more = keys.shape[-2]
        self._narrow.narrow(2, self.count, more).copy_(keys)
        self._values.narrow(2, self.count, more).copy_(values)
        count = self.count = self.count + more
        self.keys, self.values = self._keys.narrow(2, 0, count), self._values.narrow(2, 0, count)
        ready = Ready(self._narrow.narrow(2, 0, count), self._bias.narrow(3, 0, count))
        self.keys.ready = ready  # type: ignore[attr-defined]


def atom_cache(layers: list[HeadAtoms], count: int, dtype: torch.dtype, heads: int) -> Any:
    """A cache of transformers that holds these atoms for `count` tokens and `heads` heads of queries; new
    tokens are added as they are.
    """
    from transformers.cache_utils import Cache

    made = []
    for atoms in layers:
        layer = _layer_class()()
        layer.keys = torch.cat([atoms.keys, atoms.bias.unsqueeze(-1)], -1).unsqueeze(0).to(dtype)
        layer.values = atoms.values.unsqueeze(0).to(dtype)
        layer.dtype, layer.device, layer.is_initialized = dtype, layer.keys.device, True
        layer.missing, layer.heads = count - layer.keys.shape[-2], heads
        made.append(layer)
    return Cache(layers=made)


@cache
def _layer_class() -> Any:
    """The class of its layers, made where transformers is there."""
    from transformers.cache_utils import DynamicLayer

    class AtomLayer(DynamicLayer):
        """missing: how many tokens more there were than keys; heads: of queries."""

        missing, heads = 0, 1
        room: Room | None = None

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> Any:
            if torch.is_grad_enabled() and key_states.requires_grad:
                return super().update(F.pad(key_states, (0, 1)), value_states, *args, **options)
            assert self.keys is not None
            assert self.values is not None
            new = key_states.shape[-2]
            if self.room is None or not self.room.holds(self.keys, new):
                self.room = Room(self.keys, self.values, self.heads, new + max(MORE, self._kept()))
            self.room.append(key_states, value_states)
            self.keys, self.values = self.room.keys, self.room.values
            return self.keys, self.values

        def get_seq_length(self) -> int:
            return self._kept() + self.missing

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self._kept() + query_length, self.missing

        def _kept(self) -> int:
            return 0 if self.keys is None else int(self.keys.shape[-2])

        def reset(self) -> None:
            raise NotImplementedError("a compressed cache is not reset; make a new one")

    return AtomLayer
