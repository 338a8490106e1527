"""What positions alone decide, made once for a declaration and a shape: tables of biases, cosines and sines.

Small calls are made again and again with the same declaration, and there making such a table takes longer
than the kernel that reads it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from regard._object import tensors_in
from regard.potentials import Alibi, Potential, Rotary

MOST = 16
"""Tables that are kept at a time; the oldest goes first."""
ENTRIES = 1 << 17
"""Numbers in a table up to which one is made: half a megabyte of float32."""

Table = tuple[Tensor, ...]
_kept: dict[tuple[object, ...], tuple[weakref.ref[Potential], Table, Table]] = {}
"""The declaration, the numbers that its tensors had, and what was made of them."""


def slopes(potential: Alibi, q: Tensor, k: Tensor) -> Tensor | None:
    """The biases of queries 0, 1, ... on keys 0, 1, ..., (h, m, n) or (m, n); None where they are many."""
    heads = potential.slope.numel() if isinstance(potential.slope, Tensor) else 1
    if heads * q.shape[-2] * k.shape[-2] > ENTRIES:
        return None
    return _keep(potential, q, k, lambda: (potential.scores(q, k),))[0]


def turns(potential: Rotary, q: Tensor, k: Tensor) -> Table | None:
    """Cosines and sines of the angles of positions 0, 1, ..., (n, f) each; None where they are many, or
    queries and keys differ in number.
    """
    if q.shape[-2] != k.shape[-2] or q.shape[-2] * q.shape[-1] > ENTRIES:
        return None
    return _keep(potential, q, k, lambda: potential.turns(q, torch.arange(q.shape[-2], device=q.device)))


def _keep(potential: Potential, q: Tensor, k: Tensor, make: Callable[[], Table]) -> Table:
    """What was made for the same declaration with the same numbers, or is made now."""
    key = (id(potential), *q.shape[-2:], k.shape[-2], q.dtype)
    tensors = tuple(tensors_in(potential))
    found = _kept.get(key)
    if found is not None and found[0]() is potential and all(map(torch.equal, found[1], tensors)):
        return found[2]
    with torch.inference_mode(False):
        made, numbers = make(), tuple(t.detach().clone() for t in tensors)
    if all(type(t) is Tensor for t in (*made, *numbers)):  # not what a mode made of them
        _kept.pop(key, None)
        _kept[key] = weakref.ref(potential), numbers, made
        for oldest in list(_kept)[: max(0, len(_kept) - MOST)]:
            _kept.pop(oldest, None)
    return made
