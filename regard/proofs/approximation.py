"""approximation_error: a certified bound on what sparse, low-rank or random-feature attention gets wrong."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard import _check
from regard._enclosed import Numbers, length, lengths
from regard._upper import Upper, exact, exact_lower, least, product, sizes, stack, total
from regard._upper import relative_error as rounding_error
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
from regard.proofs.locating import projected_size
from regard.proofs.scores import FACTOR
from regard.proofs.setting import radius_of
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

    Examples:
        >>> layer, x = regard.Attention(regard.Dot()), torch.randn(4, 2, dtype=torch.float64)
        >>> law = torch.full((4, 4), 0.25, dtype=torch.float64)  # uniform rows in place of softmax
        >>> bound = regard.proofs.approximation_error(layer, law, x)
        >>> bool((law @ x - layer(x)).norm(dim=-1).max() <= bound.value)
        True
    """
    queries = one_sequence("x", x)
    domain, exact = (
        Neighborhood(queries, 0.0),
        queries if context is None else one_sequence("context", context),
    )
    try:
        rows, hypotheses = _rows(attention, law, queries, exact)
    except Refusal as refusal:
        refused = (f"{approximation.THEOREM.title}: {refusal}",)
        return Certificate(
            math.inf, domain, TokenMax(), "no theorem", refused=refused, quantity="output error"
        )
    errors = lengths(rows.bound.mT)
    made = approximation.THEOREM.certificate(
        Bound(errors.amax(), hypotheses), domain, TokenMax(), "output error"
    )
    return made if math.isfinite(made.value) else _outside(made, errors.bound)


def row_errors(attention: Attention, law: Tensor, x: Points, context: Points | None = None) -> Tensor:
    """The same bound for each query: (m,), or (h, m) where `law` has heads.

    Examples:
        >>> layer, x = regard.Attention(regard.Dot()), torch.randn(4, 2, dtype=torch.float64)
        >>> law = torch.full((4, 4), 0.25, dtype=torch.float64)
        >>> bounds = regard.proofs.row_errors(layer, law, x)
        >>> bool(((law @ x - layer(x)).norm(dim=-1) <= bounds).all())
        True
    """
    queries = one_sequence("x", x)
    rows, _ = _rows(attention, law, queries, queries if context is None else one_sequence("context", context))
    return rows.bound if law.ndim > 2 else rows.bound.squeeze(0)


def kernel_error(relative_error: float, radius: float) -> Certificate:
    """How far outputs are when every kernel value exp(a) has a relative error of at most η < 1: 2η/(1 + √(1 -
    η²)) times `radius`.

    radius: of the values, about any center. The error is the realized one, for every key: a standard
    deviation is no bound of it.

    Examples:
        >>> bound = regard.proofs.kernel_error(0.1, radius=1.0)  # every exp(score) within ten percent
        >>> 0.1 < bound.value < 0.101
        True
    """
    if not 0 <= relative_error < 1:
        raise ArgumentError(
            "relative_error", f"is {relative_error}", "give a number of at least 0 and below 1"
        )
    domain, eta = Ball(radius), exact(relative_error)
    whole = radius_of(domain)
    size = 2 * eta / (1 + ((1 - eta) * (1 + exact_lower(relative_error))).sqrt())
    hypotheses = (
        assumed(f"every kernel value has a relative error of at most {relative_error!r}"),
        assumed("values are in the ball"),
    )
    bound = Bound((size * whole).minimum(2 * whole), hypotheses, note="relative errors of kernels")
    return score_perturbation.THEOREM.certificate(bound, domain, TokenMax(), "output error")


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


def one_sequence(name: str, x: Points) -> Measure:
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
) -> tuple[Upper, tuple[Hypothesis, ...]]:
    """Bounds (h, m) and what they rest on."""
    heads = [Head(head) for head in single_heads(attention)]
    laws = laws_of(law, len(heads), queries.size, keys.size)
    rows = stack([_head_rows(head, one, queries, keys) for head, one in zip(heads, laws, strict=True)])
    known = all(size.one(head.potential, queries, keys) is not None for head in heads)
    exact = (
        checked("rounding of scores is covered")
        if known
        else assumed("scores in float64 are right to ten digits of the largest")
    )
    return rows, (checked("softmax rows"), checked("rows are laws"), exact)


def laws_of(law: Tensor, heads: int, queries: int, keys: int) -> Tensor:
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


def _head_rows(head: Head, law: Tensor, queries: Measure, keys: Measure) -> Upper:
    """|ν - P|₁ ρ for each row, and what a row that does not sum to one adds."""
    if not head.softmax:
        raise Refusal(
            f"rows of {type(head.normalizer).__name__} have no variational gap; "
            "the attention must have Softmax()"
        )
    totals = law.sum(-1, keepdim=True)
    gaps = head.attention.law_gap(law / totals, queries, keys)
    highest = Numbers(gaps, slack_of(head, queries, keys)).largest().clamp_min(0.0)
    spread = spreads(head, head.lookup.values(keys.points, keys.marks), queries, keys)
    radius, reach = (stack(part) for part in zip(*spread, strict=True))
    defect = sizes(totals.squeeze(-1) - 1) + rounding_error(4 * keys.size + 64)
    found = approximation.total_variation_bound(exact(highest)) * radius + defect * reach
    return found.map(lambda value: torch.where(torch.isinf(gaps), math.inf, value))


def slack_of(head: Head, queries: Measure, keys: Measure) -> Upper:
    """How much rounding can take from a gap: twice the error of a score, and the sums of logarithms."""
    known = size.one(head.potential, queries, keys)
    counts = log_counts(keys)
    log_size = exact(keys.size).log1p()
    log_size = log_size if counts is None else log_size + sizes(counts[counts > -math.inf]).amax()
    found = head.potential.scores(queries.points, keys.points, queries.positions(), keys.positions())
    largest = sizes(found[found.isfinite()].double()).amax()
    scores = largest if known is None else largest.maximum(known)
    units = rounding_error(16 * (keys.size + queries.dimension + keys.dimension) + 1024)
    slack = units * (scores + log_size + 1)
    return slack + TEN_DIGITS * largest if known is None else slack


TEN_DIGITS = Upper(1e-10)
"""What is assumed of scores whose rounding is not known, relative to the largest."""


def spreads(head: Head, values: Tensor, queries: Measure, keys: Measure) -> list[tuple[Upper, Upper]]:
    """For each query the radius and the reach of the values of the keys that it sees and that have mass."""
    seen = head.support.allows(queries.positions(), keys.positions()).expand(queries.size, keys.size)
    if keys.log_weights is not None:
        seen = seen & (keys.log_weights > -math.inf)
    error, apart = (
        value_error(head.lookup, values, keys),
        distances(values, values) if len(values) <= _PAIRS else None,
    )
    found: dict[bytes, tuple[Upper, Upper]] = {}
    patterns = [bytes(row.tolist()) for row in seen]
    for pattern, row in zip(patterns, seen, strict=True):
        if pattern not in found:  # rows that see the same keys share a radius
            found[pattern] = _radius(values[row], None if apart is None else apart[row][:, row], error)
    return [found[pattern] for pattern in patterns]


def _radius(values: Tensor, apart: Tensor | None, error: Upper) -> tuple[Upper, Upper]:
    """Half the diameter, which no radius is below (a radius where pairs are too many); the longest value."""
    if not len(values):
        return exact(0.0), exact(0.0)
    if apart is not None:
        radius = Upper(apart.max(), values.shape[-1] + 4).halved()
    else:
        centers = (values.mean(0), 0.5 * (values.amax(0) + values.amin(0)))
        radius = least([lengths(values - center, 1).amax() for center in centers])
    return radius + error, lengths(values).amax() + error


def value_error(lookup: Lookup, values: Tensor, keys: Measure) -> Upper:
    """How far computed values are from exact ones."""
    if isinstance(lookup, (Identity, Table)):
        return exact(0.0)
    factors = (
        (lookup.w_v,)
        if isinstance(lookup, Linear)
        else (lookup.w, lookup.u)
        if isinstance(lookup, Factored)
        else ()
    )
    reach = _longest(keys) * product([length(factor) for factor in factors])
    units = rounding_error(2 * sum(factor.shape[-2] for factor in factors) + 64)
    return units * (reach + lengths(values).amax())


# How large the terms are that a score is summed from: its rounding is a multiple of that

size = Verb("size")
"""size.one(potential, queries, keys) -> Upper, at least every sum of absolute terms;
None where nothing is known.
"""


@size.rule(Potential)
def _unknown(potential: Potential, queries: Measure, keys: Measure) -> None:
    return None


@size.rule(PositionPotential)
def _position(potential: PositionPotential, queries: Measure, keys: Measure) -> Upper:
    scores = potential.scores(queries.points, keys.points, queries.positions(), keys.positions())
    return sizes(scores[scores > -math.inf].double()).amax()


@size.rule(Bilinear)
def _bilinear(potential: Bilinear, queries: Measure, keys: Measure) -> Upper:
    return _longest(queries) * length(potential.a) * _longest(keys)


@size.rule(Dot)
def _dot(potential: Dot, queries: Measure, keys: Measure) -> Upper:
    """|scale| (|w_q|_F |x| + |b_q|)(|w_k|_F |y| + |b_k|)."""
    sides = ((potential.w_q, potential.b_q, queries), (potential.w_k, potential.b_k, keys))
    first, second = (projected_size(w, b, _longest(points)) for w, b, points in sides)
    width = queries.dimension if potential.w_q is None else potential.w_q.shape[-1]
    return Upper(abs(float(potential.factor(width))), FACTOR) * first * second


@size.rule(Sum)
def _sum(potential: Sum, queries: Measure, keys: Measure) -> Upper | None:
    found = [size.one(term, queries, keys) for term in potential.terms]
    return None if None in found else total(found)


@size.rule(Scaled)
def _scaled(potential: Scaled, queries: Measure, keys: Measure) -> Upper | None:
    found = size.one(potential.potential, queries, keys)
    return None if found is None else Upper(abs(float(potential.factor)), FACTOR) * found


def _longest(points: Measure) -> Upper:
    return lengths(points.points).amax()
