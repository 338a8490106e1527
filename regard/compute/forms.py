"""Fast forms: potentials that give the same scores from better features. The definition stays in the potential."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard import _check
from regard._types import Features
from regard._verb import Verb
from regard.potentials import Additive, Potential
from regard.potentials.reductions import Reduction

fast_form = Verb("fast_form")
"""fast_form.one(potential, queries, keys) -> (potential, queries, keys) with the same scores."""


@fast_form.rule(Potential)
def _as_it_is(potential: Potential, queries: Features, keys: Features) -> tuple[Potential, Features, Features]:
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
        biases = [None if bias is None else bias.unsqueeze(-1) for bias in (folded.row_bias, folded.key_bias)]
        return Reduced(), (folded.queries, biases[0]), (folded.keys, biases[1])


@dataclass(frozen=True, eq=False, repr=False)
class FactoredAdditive(Potential):
    """Σ_c v_c tanh(q_c + k_c) with tanh(a + b) = 1 - 2/(1 + e^{2a} e^{2b}): exponentials of tokens, not of pairs."""

    v: Tensor

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        return x, y

    def pair(self, queries: Features, keys: Features) -> Tensor:
        return _AdditiveScores.apply(queries, keys, self.v)  # type: ignore[no-any-return]

    def width(self, queries: Features, keys: Features) -> int:
        return 4


SATURATED = {torch.float32: 10.0, torch.float64: 20.0}
"""Beyond this tanh is one to the last digit."""
WIDEST = 30.0
"""Half the range of a query coordinate up to which no exponential leaves the floating range."""


@fast_form.rule(Additive)
def _additive(potential: Additive, queries: Tensor, keys: Tensor) -> tuple[Potential, Features, Features]:
    """Center each coordinate of the queries, shift the keys against it, and clamp keys where every pair is saturated."""
    if 0 in (queries.numel(), keys.numel()) or queries.dtype not in SATURATED:
        return potential, queries, keys
    low, high = queries.detach().amin(-2, keepdim=True), queries.detach().amax(-2, keepdim=True)
    center, reach = 0.5 * (low + high), 0.5 * (high - low).amax()
    if not _check.holds(reach <= WIDEST):
        return potential, queries, keys
    limit = reach + SATURATED[queries.dtype]
    return FactoredAdditive(potential.v), queries - center, torch.clamp(keys + center, -limit, limit)


class _AdditiveScores(torch.autograd.Function):
    """Coordinate by coordinate on blocks that stay in cache: two passes a coordinate forward."""

    @staticmethod
    def forward(queries: Tensor, keys: Tensor, v: Tensor) -> Tensor:
        factors, others = (2 * queries).exp(), (2 * keys).exp()
        batch = torch.broadcast_shapes(queries.shape[:-2], keys.shape[:-2], v.shape[:-1])
        scores = v.sum(-1)[..., None, None].expand(*batch, queries.shape[-2], keys.shape[-2]).clone()
        one, product = scores.new_ones(()), torch.empty_like(scores)
        for c in range(queries.shape[-1]):
            torch.addcmul(one, factors[..., c].unsqueeze(-1), others[..., c].unsqueeze(-2), out=product)
            scores.addcdiv_(v[..., c, None, None].expand(scores.shape), product, value=-2.0)
        return scores

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, v = ctx.saved_tensors
        factors, others = (2 * queries).exp(), (2 * keys).exp()
        by_q, by_k, by_v = [], [], []
        for c in range(queries.shape[-1]):
            inverse = torch.addcmul(gradient.new_ones(()), factors[..., c].unsqueeze(-1), others[..., c].unsqueeze(-2)).reciprocal_()
            weighted = gradient * inverse  # G/(1+EF): the tanh is 1 - 2/(1+EF), its derivative 4 (1/(1+EF)) (1 - 1/(1+EF))
            by_v.append(gradient.sum((-1, -2)) - 2 * weighted.sum((-1, -2)))
            slope = torch.addcmul(weighted, weighted, inverse, value=-1).mul_(4 * v[..., c, None, None])
            by_q.append(slope.sum(-1))
            by_k.append(slope.sum(-2))
        return (
            torch.stack(by_q, -1).sum_to_size(queries.shape),
            torch.stack(by_k, -1).sum_to_size(keys.shape),
            torch.stack(by_v, -1).sum_to_size(v.shape),
        )
