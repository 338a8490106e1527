"""How heavy one key can become for all queries together: bounds of F(μ, y) = ∫ μ(dx) G(x, y)/μ(G_x) over all
laws μ of tokens in a ball. For n tokens F is the sum of a column of the attention matrix.

The theorem `energy` proves log F ≤ E = sup_π ∬ π(dx) π(dz) (s(x, y) - s(x, z)), and for scores (Aᵀm + b)·y
about the center of the ball, m and y within R of it, E = max (Aᵀm + b)·(y - m). With m = Ru, y = Rv that is
the largest value of zᵀNz over z = (u, v, 1), |u|, |v| ≤ 1, and for any numbers λ, τ, σ ≥ 0

    diag(λI, τI, σ) - N ⪰ -δ   gives   E ≤ λ + τ + σ + 3δ.

So multipliers are searched without proof, and one certified eigenvalue is the proof.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._enclosed import length, product_norm
from regard._round import largest_eigenvalue_bound
from regard._upper import ELEMENTARY, Upper, exact, exact_lower, relative_error
from regard._verb import Verb
from regard.attention import log_counts
from regard.domains import Domain, Near
from regard.potentials import Cosine, Gaussian, Laplace, Potential
from regard.potentials.base import linear_terms
from regard.proofs.scores import BallFacts, Form, bandwidth_of, bilinear, same
from regard.proofs.theorem import Refusal

LOG_FOUR_THIRDS = Upper(math.log(4 / 3), ELEMENTARY)
FACTOR = 8
"""Roundings of the factor before a term, which is a product of a few numbers."""
NOTHING = Upper(math.inf)
"""Nothing is known."""


@dataclass(frozen=True)
class Crowd:
    """`energy` ≥ log F(μ, y), and `steepness` ≥ ∫ μ(dx) G(x, y)/μ(G_x) |v(x, y)|², v the key slope of the
    scores; ∞ where only |v| ≤ α is known.
    """

    energy: Upper
    steepness: Upper

    def weighted(self, ratio: Upper) -> Crowd:
        """Where rows count alike and keys do not: e^ratio is at least the quotient of two weights."""
        return Crowd(self.energy + ratio, self.steepness * ratio.exp())


crowds = Verb("crowds")
"""crowds.one(term, factor, ball) -> Crowd, of scores factor · term."""


def crowd(potential: Potential, ball: BallFacts, known: Upper) -> Crowd:
    """How heavy columns of such scores can be, where their logarithms are known to be at most `known`.

    Where some pair of points shows that E is not below what is known, it is not computed.
    """
    form = bilinear.one(potential, len(ball.center))
    if form is not None:
        if not _attained_energy(form, ball) < float(known):
            return Crowd(known, NOTHING)
        return Crowd(known.minimum(bilinear_energy(form, ball.center, ball.radius)), NOTHING)
    terms = linear_terms(potential)
    if len(terms) > 1:
        return Crowd(known, NOTHING)
    ((term, factor),) = terms
    found = crowds.one(term, float(factor), ball)
    return Crowd(known.minimum(found.energy), found.steepness)


def log_ratio(domain: Domain) -> Upper:
    """At least log(w_j/w_i) for the weights of a measure: what a row that counts once is to one that counts
    w_i.
    """
    weights = log_counts(domain.measure) if isinstance(domain, Near) else None
    if weights is None:
        return exact(0.0)
    if not bool(torch.isfinite(weights).all()):
        raise Refusal(
            "a token without mass has a row but no weight, and columns are bounded by weights; leave it out"
        )
    return Upper(weights.amax() - weights.amin(), 1)


# Scores that are not bilinear


@crowds.rule(Potential)
def _any(term: Potential, factor: float, ball: BallFacts) -> Crowd:
    return Crowd(NOTHING, NOTHING)


@crowds.rule(Gaussian)
def _gaussian(term: Gaussian, factor: float, ball: BallFacts) -> Crowd:
    """min(g/2, k/2 log 4/3), g = t|w|²R², t = factor/bandwidth², keys in k dimensions."""
    if not (factor > 0 and _alike(term)):
        return Crowd(NOTHING, NOTHING)
    t = Upper(factor, FACTOR) / exact_lower(bandwidth_of(term, len(ball.center))).square()
    norm = product_norm(term.w_k)
    size = (t * (norm * ball.radius).square()).halved()
    dimension = _dimension(term, ball)
    everywhere = (LOG_FOUR_THIRDS * dimension).halved()
    moment = everywhere.exp() * (4 * dimension) / 3
    return Crowd(size.minimum(everywhere), t * norm.square() * moment)


@crowds.rule(Laplace)
def _laplace(term: Laplace, factor: float, ball: BallFacts) -> Crowd:
    """5/4 where keys are numbers."""
    if not (factor > 0 and _alike(term)) or _dimension(term, ball) > 1:
        return Crowd(NOTHING, NOTHING)
    return Crowd(Upper(math.log(1.25), ELEMENTARY), NOTHING)


@crowds.rule(Cosine)
def _cosine(term: Cosine, factor: float, ball: BallFacts) -> Crowd:
    """t/4: dot products of points in the unit ball."""
    t = factor * float(term.scale)
    if not (t >= 0 and _alike(term)):
        return Crowd(NOTHING, NOTHING)
    return Crowd(Upper(t, FACTOR).halved().halved(), NOTHING)


def _alike(term: Gaussian | Laplace | Cosine) -> bool:
    """Whether queries and keys are the same functions of tokens."""
    return same(term.w_q, term.w_k) and same(term.b_q, term.b_k)


def _dimension(term: Gaussian | Laplace, ball: BallFacts) -> int:
    """How many dimensions keys have at most."""
    width = len(ball.center)
    return width if term.w_k is None else min(width, term.w_k.shape[-1])


# Bilinear scores


def _attained_energy(form: Form, ball: BallFacts) -> float:
    """(Aᵀm + b)·(y - m) at some pairs: m a part of R along a singular vector or b, y the best one for it.

    E ≥ |A|R²/4 is among them. Nothing here is part of a proof.
    """
    at = float(ball.radius)
    a, b = at * at * form.a, at * (ball.center @ form.a + form.beta)
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return math.inf
    vectors = torch.cat([torch.linalg.svd(a).U.mT, torch.nn.functional.normalize(b, dim=0).unsqueeze(0)])
    means = torch.cat([share * vectors for share in (-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0)])
    pulls = means @ a + b
    return float((pulls.norm(dim=-1) - (pulls * means).sum(-1)).max())


def bilinear_energy(form: Form, center: Tensor, radius: Upper) -> Upper:
    """At least max (Aᵀm + b)·(y - m) over |m|, |y| ≤ R, b = Aᵀc + β: the multipliers that were found, and
    what they miss.

    What rounding changed in A and b changes E by at most 2R (R |δA| + |δb|).
    """
    far, size = length(center), length(form.a)
    error, error_beta = form.error, form.error_beta
    rounding = relative_error(2 * len(center) + 4) * (size * far + length(form.beta))
    lost = 2 * radius * (radius * error + error * far + error_beta + rounding)
    at = float(radius)
    a, b = at * at * form.a, at * (center @ form.a + form.beta)
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return Upper(math.inf)
    return _certified(a, b, *_multipliers(a, b)) + lost


def _certified(a: Tensor, b: Tensor, on_mean: float, on_key: float, rest: float) -> Upper:
    """At least the maximum of zᵀNz, from multipliers that need not be good.

    a and b are rounded twice, N once, its diagonal once more: relative to sizes of entries, and |z|² ≤ 3.
    """
    width = len(b)
    below = torch.cat([-(a + a.mT), a.mT, -b.unsqueeze(0)]).mT
    matrix = torch.zeros(2 * width + 1, 2 * width + 1, dtype=torch.float64)
    matrix[:width] = below / 2
    matrix[:, :width] = below.mT / 2
    matrix[width:-1, -1] = matrix[-1, width:-1] = b / 2
    scale = torch.tensor([on_mean] * width + [on_key] * width + [rest], dtype=torch.float64)
    missed = exact(max(0.0, largest_eigenvalue_bound(matrix - scale.diag())))
    sizes = 2 * length(a) + length(b) + exact(scale.max())
    rounded = relative_error(8) * sizes + exact(width * width * 1e-300)
    return exact(on_mean) + exact(on_key) + exact(rest) + 3 * (missed + rounded)


def _multipliers(a: Tensor, b: Tensor) -> tuple[float, float, float]:
    """λ, τ, σ that make λ + τ + σ small: t = 2τ by golden sections, which the value is convex in, then λ by
    the trust region's dual. Nothing here is part of a proof.

    (Aᵀm + b)·y ≤ t/2 + |Aᵀm + b|²/2t is sharp at t = |Aᵀm + b|, which is between a tenth of |A| + |b| and it.
    """
    top = float(max(a.abs().max(), b.abs().max()))
    if not top > 0:
        return 0.0, 0.0, 0.0
    a, b = _on_span(a / top, b / top)
    largest = float(torch.linalg.matrix_norm(a, 2) + b.norm())
    low, high = math.log(largest / 10), math.log(largest)
    first, second = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    left, right = _given(a, b, math.exp(first)), _given(a, b, math.exp(second))
    best = min(left, right, _given(a, b, largest / 2), key=sum)
    for _ in range(SECTIONS if len(b) <= 64 else WIDE):
        if sum(left) < sum(right):
            high, second, right = second, first, left
            first = high - GOLDEN * (high - low)
            left = _given(a, b, math.exp(first))
        else:
            low, first, left = first, second, right
            second = low + GOLDEN * (high - low)
            right = _given(a, b, math.exp(second))
        best = min(best, left, right, key=sum)
    return best[0] * top, best[1] * top, best[2] * top


GOLDEN = (math.sqrt(5) - 1) / 2
SECTIONS = 28
"""Golden sections; where matrices are large, fewer (WIDE)."""
WIDE = 16


def _given(a: Tensor, b: Tensor, t: float) -> tuple[float, float, float]:
    """The best λ and σ for t: λ + σ = |b|²/2t + max_{|m| ≤ 1} mᵀQm + c·m, Q = AAᵀ/2t - (A + Aᵀ)/2, c = Ab/t -
    b.
    """
    values, vectors = torch.linalg.eigh(a @ a.mT / (2 * t) - (a + a.mT) / 2)
    pull = (vectors.mT @ (a @ b / t - b)).square() / 4
    least = max(0.0, float(values[-1]))
    if not float(pull.sum()) > 0:
        return least, t / 2, float(b @ b) / (2 * t)
    at = _secular_root(pull.tolist(), values.tolist(), least, least + math.sqrt(float(pull.sum())))
    rest = torch.where(pull > 0, pull / (at - values), 0.0).sum()
    return at, t / 2, float(rest) + float(b @ b) / (2 * t)


def _secular_root(pull: list[float], values: list[float], low: float, high: float) -> float:
    """λ between `low` and `high` with Σ pull/(λ - values)² = 1, by Newton's method for one over the root of
    the sum, which is nearly linear in λ; halving where that leaves the interval.
    """
    pairs = [(weight, value) for weight, value in zip(pull, values, strict=True) if weight > 0]
    at = high
    for _ in range(60):
        gaps = [(weight, at - value) for weight, value in pairs]
        if min(gap for _, gap in gaps) <= 0:
            low, ahead = at, math.inf
        else:
            steep = sum(weight / gap**2 for weight, gap in gaps)
            low, high = (at, high) if steep > 1 else (low, at)
            ahead = at + steep * (math.sqrt(steep) - 1) / sum(weight / gap**3 for weight, gap in gaps)
        before, at = at, ahead if low < ahead < high else (low + high) / 2
        if abs(at - before) <= 1e-15 * abs(at):
            break
    return at


def _on_span(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The same in coordinates of the span of A, Aᵀ and b, which may be few."""
    if len(b) <= 32:
        return a, b
    values, vectors = torch.linalg.eigh(a @ a.mT + a.mT @ a + b.outer(b))
    basis = vectors[:, values > 1e-13 * values[-1]]
    return basis.mT @ a @ basis, basis.mT @ b
