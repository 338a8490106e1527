"""approximation_error: a certified bound on what sparse, low-rank or random-feature attention gets wrong."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard import _check
from regard._round import gamma, outward, up, vector_norm_bound
from regard._verb import Verb
from regard.attention import Attention, as_measure, log_counts
from regard.certificate import Certificate, Hypothesis
from regard.domains import Ball, Neighborhood
from regard.errors import ArgumentError
from regard.lookups import Factored, Identity, Linear, Lookup, Table
from regard.measure import Measure
from regard.norms import TokenMax
from regard.potentials import Bilinear, Dot, Potential
from regard.potentials.base import Scaled, Sum
from regard.potentials.positions import PositionPotential
from regard.proofs.subject import Head, single_heads
from regard.proofs.theorem import Bound, Refusal, assumed, checked
from regard.proofs.theorems import approximation, score_perturbation
from regard.transport import distances

Points = Measure | Tensor

_PAIRS = 4096
"""Up to so many keys the diameter of the values is worth its pairs."""


def approximation_error(
    attention: Attention, law: Tensor, x: Points, context: Points | None = None
) -> Certificate:
    """How far Σ_j law_ij v_j is from the attention's output, the largest over queries: √(2 gap_i) times the
    radius of the values it sees.

    law (m, n), or (h, m, n) for heads, whose outputs then stand side by side. A row with mass where attention
    has none makes it infinite.
    """
    queries = _one("x", x)
    domain, exact = Neighborhood(queries, 0.0), queries if context is None else _one("context", context)
    try:
        rows, hypotheses = _rows(attention, law, queries, exact)
    except Refusal as refusal:
        refused = (f"{approximation.THEOREM.title}: {refusal}",)
        return Certificate(
            math.inf, domain, TokenMax(), "no theorem", refused=refused, quantity="output error"
        )
    errors = rows.square().sum(0).sqrt()
    made = approximation.THEOREM.certificate(
        Bound(outward(float(errors.max())), hypotheses), domain, TokenMax(), "output error"
    )
    return made if math.isfinite(made.value) else _outside(made, errors)


def row_errors(attention: Attention, law: Tensor, x: Points, context: Points | None = None) -> Tensor:
    """The same bound for each query: (m,), or (h, m) where `law` has heads."""
    queries = _one("x", x)
    rows, _ = _rows(attention, law, queries, queries if context is None else _one("context", context))
    return rows if law.ndim > 2 else rows.squeeze(0)


def kernel_error(relative_error: float, radius: float) -> Certificate:
    """How far outputs are when every kernel value exp(a) has a relative error of at most η < 1: 2η/(1 + √(1 -
    η²)) times `radius`.

    radius: of the values, about any center. The error is the realized one, for every key: a standard
    deviation is no bound of it.
    """
    if not 0 <= relative_error < 1:
        raise ArgumentError(
            "relative_error", f"is {relative_error}", "give a number of at least 0 and below 1"
        )
    size = 2 * relative_error / (1 + math.sqrt(max(0.0, (1 - relative_error) * (1 + relative_error))))
    hypotheses = (
        assumed(f"every kernel value has a relative error of at most {relative_error!r}"),
        assumed("values are in the ball"),
    )
    bound = Bound(min(outward(size * radius), 2.0 * radius), hypotheses, note="relative errors of kernels")
    return score_perturbation.THEOREM.certificate(bound, Ball(radius), TokenMax(), "output error")


def _outside(made: Certificate, errors: Tensor) -> Certificate:
    bad = int((errors == math.inf).sum())
    why = (
        f"{bad} of {len(errors)} rows have mass on keys that the query does not "
        "see; renormalize them on the support"
    )
    return Certificate(
        made.value,
        made.domain,
        made.norm,
        made.theorem,
        made.hypotheses,
        refused=(why,),
        quantity=made.quantity,
    )


def _one(name: str, x: Points) -> Measure:
    measure = as_measure(name, x)
    if len(measure.batch_shape) or not measure.size:
        raise ArgumentError(
            name,
            f"has shape {list(measure.points.shape)}",
            "give one sequence (n, d); bound batches one by one",
        )
    weights = None if measure.log_weights is None else measure.log_weights.detach().double()
    return Measure(measure.points.detach().double(), weights, measure.marks)


def _rows(
    attention: Attention, law: Tensor, queries: Measure, keys: Measure
) -> tuple[Tensor, tuple[Hypothesis, ...]]:
    """Bounds (h, m) and what they rest on."""
    heads = [Head(head) for head in single_heads(attention)]
    laws = _laws(law, len(heads), queries.size, keys.size)
    rows = torch.tensor(
        [_head_rows(head, one, queries, keys) for head, one in zip(heads, laws, strict=True)],
        dtype=torch.float64,
    )
    known = all(isinstance(size.one(head.potential, queries, keys), float) for head in heads)
    exact = (
        checked("rounding of scores is covered")
        if known
        else assumed("scores in float64 are right to ten digits of the largest")
    )
    return rows, (checked("softmax rows"), checked("rows are laws"), exact)


def _laws(law: Tensor, heads: int, queries: int, keys: int) -> Tensor:
    """The rows of every head in float64, checked."""
    _check.floating("law", law)
    if (
        law.shape[-2:] != (queries, keys)
        or law.ndim > 3
        or (law.ndim == 3 and law.shape[0] not in (1, heads))
    ):
        remedy = f"give rows on the keys: ({queries}, {keys}) or ({heads}, {queries}, {keys})"
        raise ArgumentError("law", f"has shape {list(law.shape)}", remedy)
    law = law.detach().double()
    if not bool(((law >= 0).all(-1) & ((law.sum(-1) - 1).abs() <= 1e-3)).all()):
        raise ArgumentError(
            "law", "has rows that are not probability laws", "give non-negative rows that sum to one"
        )
    return law.expand(heads, queries, keys)


def _head_rows(head: Head, law: Tensor, queries: Measure, keys: Measure) -> list[float]:
    if not head.softmax:
        raise Refusal(
            f"rows of {type(head.normalizer).__name__} have no variational gap; "
            "the attention must have Softmax()"
        )
    totals = law.sum(-1, keepdim=True)
    gaps = head.attention.law_gap(law / totals, queries, keys)
    slack = _slack(head, queries, keys)
    values = head.lookup.values(keys.points, keys.marks)
    spread = _radii(head, values, queries, keys)
    return [
        _row(float(gap) + slack, radius, reach, abs(float(total) - 1) + gamma(4 * keys.size + 64))
        for gap, (radius, reach), total in zip(gaps, spread, totals, strict=True)
    ]


def _row(gap: float, radius: float, reach: float, defect: float) -> float:
    """|ν - P|₁ ρ, and what a row that does not sum to one adds."""
    return (
        math.inf
        if math.isinf(gap)
        else outward(approximation.total_variation_bound(up(gap)) * radius + defect * reach)
    )


def _slack(head: Head, queries: Measure, keys: Measure) -> float:
    """How much rounding can take from a gap: twice the error of a score, and the sums of logarithms."""
    known = size.one(head.potential, queries, keys)
    counts = log_counts(keys)
    log_size = math.log(keys.size + 1) + (
        0.0 if counts is None else float(counts[counts > -math.inf].abs().max())
    )
    found = head.potential.scores(queries.points, keys.points, queries.positions(), keys.positions())
    largest = float(found[found.isfinite()].abs().amax()) if bool(found.isfinite().any()) else 0.0
    scores = largest if known is None else max(known, largest)
    units = gamma(16 * (keys.size + queries.dimension + keys.dimension) + 1024)
    return outward(units * (scores + log_size + 1)) + (1e-10 * largest if known is None else 0.0)


def _radii(head: Head, values: Tensor, queries: Measure, keys: Measure) -> list[tuple[float, float]]:
    """For each query the radius and the reach of the values of the keys that it sees and that have mass."""
    seen = head.support.allows(queries.positions(), keys.positions()).expand(queries.size, keys.size)
    if keys.log_weights is not None:
        seen = seen & (keys.log_weights > -math.inf)
    error, apart = (
        _value_error(head.lookup, values, keys),
        distances(values, values) if len(values) <= _PAIRS else None,
    )
    found: dict[bytes, tuple[float, float]] = {}
    patterns = [bytes(row.tolist()) for row in seen]
    for pattern, row in zip(patterns, seen, strict=True):
        if pattern not in found:  # rows that see the same keys share a radius
            found[pattern] = _radius(values[row], None if apart is None else apart[row][:, row], error)
    return [found[pattern] for pattern in patterns]


def _radius(values: Tensor, apart: Tensor | None, error: float) -> tuple[float, float]:
    """The smaller of a radius and half the diameter; and the longest value."""
    if not len(values):
        return 0.0, 0.0
    centers = (values.mean(0), 0.5 * (values.amax(0) + values.amin(0)))
    radius = min(_largest(values - center) for center in centers)
    radius = radius if apart is None else min(radius, 0.5 * float(apart.max()))
    operations = 4 * values.shape[-1] + 64
    return outward(outward(radius, operations) + error), outward(
        outward(_largest(values), operations) + error
    )


def _largest(vectors: Tensor) -> float:
    return float(torch.linalg.vector_norm(vectors, dim=-1).max())


def _value_error(lookup: Lookup, values: Tensor, keys: Measure) -> float:
    """How far computed values are from exact ones."""
    if isinstance(lookup, (Identity, Table)):
        return 0.0
    factors = (
        (lookup.w_v,)
        if isinstance(lookup, Linear)
        else (lookup.w, lookup.u)
        if isinstance(lookup, Factored)
        else ()
    )
    reach = max(vector_norm_bound(key) for key in keys.points) * math.prod(
        vector_norm_bound(factor) for factor in factors
    )
    units = gamma(2 * sum(factor.shape[-2] for factor in factors) + 64)
    return outward(units * (reach + max(vector_norm_bound(value) for value in values)))


# How large the terms are that a score is summed from: its rounding is a multiple of that

size = Verb("size")
"""size.one(potential, queries, keys) -> float, at least every sum of absolute terms;
None where nothing is known.
"""


@size.rule(Potential)
def _unknown(potential: Potential, queries: Measure, keys: Measure) -> None:
    return None


@size.rule(PositionPotential)
def _position(potential: PositionPotential, queries: Measure, keys: Measure) -> float:
    scores = potential.scores(queries.points, keys.points, queries.positions(), keys.positions())
    return float(scores[scores > -math.inf].abs().max()) if bool((scores > -math.inf).any()) else 0.0


@size.rule(Bilinear)
def _bilinear(potential: Bilinear, queries: Measure, keys: Measure) -> float:
    return outward(_longest(queries) * vector_norm_bound(potential.a) * _longest(keys))


@size.rule(Dot)
def _dot(potential: Dot, queries: Measure, keys: Measure) -> float:
    """|scale| (|w_q|_F |x| + |b_q|)(|w_k|_F |y| + |b_k|)."""
    sides = ((potential.w_q, potential.b_q, queries), (potential.w_k, potential.b_k, keys))
    first, second = (_projected_length(w, b, _longest(points)) for w, b, points in sides)
    width = queries.dimension if potential.w_q is None else potential.w_q.shape[-1]
    return outward(abs(float(potential.factor(width))) * first * second)


@size.rule(Sum)
def _sum(potential: Sum, queries: Measure, keys: Measure) -> float | None:
    found = [size.one(term, queries, keys) for term in potential.terms]
    return None if None in found else outward(sum(found))


@size.rule(Scaled)
def _scaled(potential: Scaled, queries: Measure, keys: Measure) -> float | None:
    found = size.one(potential.potential, queries, keys)
    return None if found is None else outward(abs(float(potential.factor)) * found)


def _projected_length(weight: Tensor | None, bias: Tensor | None, length: float) -> float:
    longest = length if weight is None else length * vector_norm_bound(weight)
    return longest if bias is None else longest + vector_norm_bound(bias)


def _longest(points: Measure) -> float:
    return max(vector_norm_bound(point) for point in points.points)
