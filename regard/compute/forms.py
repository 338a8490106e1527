"""Fast forms: other potentials that give the same scores from features that are cheaper to compare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import _check
from regard._transforms import forward_rule
from regard._types import Features
from regard._verb import Verb
from regard.potentials import Additive, Potential
from regard.potentials.reductions import Reduction

fast_form = Verb("fast_form")
"""fast_form.one(potential, queries, keys) -> (potential, queries, keys) with the same scores."""


@fast_form.rule(Potential)
def _as_it_is(
    potential: Potential, queries: Features, keys: Features
) -> tuple[Potential, Features, Features]:
    return potential, queries, keys


@dataclass(frozen=True, eq=False, repr=False)
class Reduced(Potential):
    """scale · q·k + key bias + row bias from the features of a Reduction."""

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        return (x, None), (y, None)

    def pair(self, queries: Features, keys: Features) -> Tensor:
        scores = queries[0] @ keys[0].mT
        for bias in (queries[1], None if keys[1] is None else keys[1].mT):
            scores = scores if bias is None else scores + bias
        return scores

    @staticmethod
    def of(reduction: Reduction) -> tuple[Potential, Features, Features]:  # type: ignore[override]
        """The form of a reduction without residues."""
        folded = reduction.folded()
        biases = [
            None if bias is None else bias.unsqueeze(-1)
            for bias in (folded.row_bias and folded.row_bias(), folded.key_bias)
        ]
        return Reduced(), (folded.queries, biases[0]), (folded.keys, biases[1])


@dataclass(frozen=True, eq=False, repr=False)
class RationalAdditive(Potential):
    """Σ_c v_c tanh(q_c + k_c) as Σ_groups N/D, where exponentials are of tokens, not of pairs.

    With x_c = e^{2 q_c} e^{2 k_c}, tanh = (x-1)/(x+1). Over a group of g coordinates the common denominator
    Π(1 + x_c) is the sum over subsets S of Π_S x_c = (Π_S e^{2q_c})(Π_S e^{2k_c}): a dot product of 2^g
    features. So is the numerator, with the coefficients Σ_{c∈S} v_c - Σ_{c∉S} v_c. coefficients (..., groups,
    2^g); features (..., tokens, groups · 2^g).
    """

    coefficients: Tensor

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        return x, y

    def pair(self, queries: Features, keys: Features) -> Tensor:
        return _RationalSum.apply(queries, keys, self.coefficients)

    def width(self, queries: Features, keys: Features) -> int:
        return 2


SATURATED = {torch.float32: 10.0, torch.float64: 20.0}
"""Beyond this tanh is one to the last digit."""
LARGEST_EXPONENT = {torch.float32: 80.0, torch.float64: 300.0}
"""Products of exponentials must stay in the floating range."""


@fast_form.rule(Additive)
def _additive(potential: Additive, queries: Tensor, keys: Tensor) -> tuple[Potential, Features, Features]:
    """Center the queries, shift the keys against it, and clamp keys where every pair is saturated."""
    if 0 in (queries.numel(), keys.numel()) or queries.dtype not in SATURATED:
        return potential, queries, keys
    low, high = queries.detach().amin(-2, keepdim=True), queries.detach().amax(-2, keepdim=True)
    center, reach = 0.5 * (low + high), 0.5 * (high - low).amax()
    limit = reach + SATURATED[queries.dtype]
    queries, shifted = queries - center, torch.clamp(keys + center, -limit, limit)
    exponent = 2 * (reach + shifted.detach().abs().amax())
    for group in (3, 2, 1):
        if _check.holds(group * exponent <= LARGEST_EXPONENT[queries.dtype]):
            coefficients = _in_groups(potential.v, group) @ _signs(group, queries)
            return (
                RationalAdditive(coefficients),
                _subset_products(queries, group),
                _subset_products(shifted, group),
            )
    return potential, queries + center, keys


def _in_groups(z: Tensor, group: int) -> Tensor:
    """(..., c) as (..., groups, g), padded with zeros."""
    return F.pad(z, (0, -z.shape[-1] % group)).unflatten(-1, (-1, group))


def _signs(group: int, like: Tensor) -> Tensor:
    """(g, 2^g): +1 where a coordinate is in the subset, -1 where it is not."""
    subsets = torch.arange(1 << group, device=like.device)
    return (2 * ((subsets >> torch.arange(group, device=like.device).unsqueeze(-1)) & 1) - 1).to(like.dtype)


def _subset_products(z: Tensor, group: int) -> Tensor:
    """Π_{c∈S} e^{2 z_c} for every subset S of every group, (..., n, groups · 2^g)."""
    inside = (_signs(group, z) + 1) / 2
    return (2 * _in_groups(z, group) @ inside).exp().flatten(-2)


class _RationalSum(torch.autograd.Function):
    """Σ_groups N/D: one matrix product and one division a group, forward; matrix products again, backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(queries: Tensor, keys: Tensor, coefficients: Tensor) -> Tensor:
        total: Tensor | None = None
        for _, _, _, above, below in _groups(queries, keys, coefficients):
            total = above / below if total is None else total.addcdiv_(above, below)
        assert total is not None
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, by_q: Tensor | None, by_k: Tensor | None, by_c: Tensor | None) -> Tensor:
        with forward_rule(ctx) as (queries, keys, coefficients):
            own = ((queries, by_q), (keys, by_k), (coefficients, by_c))
            dq, dk, dc = (torch.zeros_like(tensor) if by is None else by for tensor, by in own)
            size = coefficients.shape[-1]
            total: Tensor | None = None
            for index, (q, k, coefficient, above, below) in enumerate(_groups(queries, keys, coefficients)):
                some = slice(index * size, (index + 1) * size)
                by_below = dq[..., some] @ k.mT + q @ dk[..., some].mT
                weighted = dq[..., some] * coefficient + q * dc[..., index, :].unsqueeze(-2)
                by_above = weighted @ k.mT + (q * coefficient) @ dk[..., some].mT
                change = (by_above - by_below * (above / below)) / below
                total = change if total is None else total + change
            assert total is not None
            return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, coefficients = ctx.saved_tensors
        by_q, by_k, by_c = [], [], []
        for q, k, coefficient, above, below in _groups(queries, keys, coefficients):
            by_above = gradient / below
            by_below = -by_above * (above / below)
            pulled = by_above @ k
            by_q.append(by_below @ k + pulled * coefficient)
            by_k.append(by_below.mT @ q + by_above.mT @ (q * coefficient))
            by_c.append((pulled * q).sum(-2))
        return (
            torch.cat(by_q, -1).sum_to_size(queries.shape),
            torch.cat(by_k, -1).sum_to_size(keys.shape),
            torch.stack(by_c, -2).sum_to_size(coefficients.shape),
        )


def _groups(
    queries: Tensor, keys: Tensor, coefficients: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """For each group: features, coefficients (..., 1, 2^g), numerator and denominator (..., m, n)."""
    size, rows = coefficients.shape[-1], queries.shape[-2]
    for index in range(coefficients.shape[-2]):
        some = slice(index * size, (index + 1) * size)
        q, k, coefficient = queries[..., some], keys[..., some], coefficients[..., index, :].unsqueeze(-2)
        both = torch.cat(torch.broadcast_tensors(q * coefficient, q), -2) @ k.mT
        yield q, k, coefficient, both[..., :rows, :], both[..., rows:, :]
