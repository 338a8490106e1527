"""Supports and position biases of one pair at a time, as compiled kernels take them.

A kernel asks with the number of an element of the batch and two positions, and gets a truth value or a
number. What is looked up keeps the batch dimensions that it has, so that nothing is copied for each head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from regard._refused import Refused
from regard._verb import Verb
from regard.potentials import Alibi, PairBias, Potential, RelativeBias, Scaled
from regard.supports import And, Causal, Document, Full, Or, Padding, Support, Where, Window

Element: TypeAlias = Callable[[Tensor, Tensor, Tensor], Any]
"""(element of the batch, position of the query, position of the key) -> a value."""

sees = Verb("sees")
"""sees.one(support, batch) -> Element of truth values, or Refused."""
adds = Verb("adds")
"""adds.one(potential, batch) -> Element of scores, or Refused."""


def by_element(tensor: Tensor, kept: int, batch: torch.Size) -> Callable[..., Any]:
    """(element of the batch, place, ...) -> the entry of a tensor (..., *kept dimensions) that broadcasts to
    a batch; nothing is looked up about elements where it is the same for all.
    """
    lead = tensor.shape[: tensor.ndim - kept]
    flat = tensor.reshape(-1, *tensor.shape[tensor.ndim - kept :])
    if flat.shape[0] == 1:
        return lambda b, *places: flat[(0, *places)]
    numbers = torch.arange(flat.shape[0], device=tensor.device).reshape(lead)
    own = numbers.expand(*batch).reshape(-1)
    return lambda b, *places: flat[(own[b], *places)]


@sees.rule(Support)
def _unknown(support: Support, batch: torch.Size) -> Refused:
    return Refused(f"{type(support).__name__} has no form for one pair at a time.")


@sees.rule(Full)
def _full(support: Full, batch: torch.Size) -> Element:
    return lambda b, s, t: t == t


@sees.rule(Causal)
def _causal(support: Causal, batch: torch.Size) -> Element:
    return lambda b, s, t: t <= s


@sees.rule(Window)
def _window(support: Window, batch: torch.Size) -> Element:
    left, right = support.left, support.right

    def element(b: Tensor, s: Tensor, t: Tensor) -> Tensor:
        inside = t == t
        inside = inside if left is None else inside & (t - s >= -left)
        return inside if right is None else inside & (t - s <= right)

    return element


@sees.rule(Document)
def _document(support: Document, batch: torch.Size) -> Element:
    document = by_element(support.ids, 1, batch)
    return lambda b, s, t: document(b, s) == document(b, t)


@sees.rule(Padding)
def _padding(support: Padding, batch: torch.Size) -> Element:
    length = by_element(support.lengths, 0, batch)
    return lambda b, s, t: t < length(b)


@sees.rule(Where)
def _where(support: Where, batch: torch.Size) -> Element:
    mask = by_element(support.mask, 2, batch)
    rows, columns = (0 if size == 1 else 1 for size in support.mask.shape[-2:])
    return lambda b, s, t: mask(b, s * rows, t * columns)


@sees.rule(And)
@sees.rule(Or)
def _joined(support: And | Or, batch: torch.Size) -> Element | Refused:
    parts = [sees.one(part, batch) for part in support.parts]
    for part in parts:
        if isinstance(part, Refused):
            return part
    all_of = isinstance(support, And)

    def element(b: Tensor, s: Tensor, t: Tensor) -> Tensor:
        found = t == t if all_of else t != t
        for part in parts:
            found = found & part(b, s, t) if all_of else found | part(b, s, t)
        return found

    return element


@adds.rule(Potential)
def _no_score(potential: Potential, batch: torch.Size) -> Refused:
    return Refused(f"{type(potential).__name__} has no form for one pair at a time.")


@adds.rule(Alibi)
def _slope(potential: Alibi, batch: torch.Size) -> Element:
    if not isinstance(potential.slope, Tensor):
        slope = float(potential.slope)
        return lambda b, s, t: -slope * (s - t).abs()
    own = by_element(potential.slope, 0, batch)
    return lambda b, s, t: -own(b) * (s - t).abs()


@adds.rule(RelativeBias)
def _relative(potential: RelativeBias, batch: torch.Size) -> Element:
    table = by_element(potential.table, 1, batch)
    return lambda b, s, t: table(b, potential.buckets.index(t - s))


@adds.rule(PairBias)
def _pair(potential: PairBias, batch: torch.Size) -> Element:
    bias = by_element(potential.bias, 2, batch)
    rows, columns = (0 if size == 1 else 1 for size in potential.bias.shape[-2:])
    return lambda b, s, t: bias(b, s.long() * rows, t.long() * columns)


@adds.rule(Scaled)
def _scaled(potential: Scaled, batch: torch.Size) -> Element | Refused:
    inner = adds.one(potential.potential, batch)
    if isinstance(inner, Refused):
        return inner
    if not isinstance(potential.factor, Tensor):
        factor = float(potential.factor)
        return lambda b, s, t: factor * inner(b, s, t)
    own = by_element(potential.factor, 0, batch)
    return lambda b, s, t: own(b) * inner(b, s, t)
