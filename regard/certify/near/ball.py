"""Heads on a Frobenius ball |x' - x|_F ≤ r: the constant of the map and how far its value moves, from facts at the center.

η = P'/P - 1 is the relative change of a row law, `chi` ≥ its length in L²(P). Sums over rows are taken in ℓ², with |d_i|² + Σ_{k≠i}
|d_k|² ≤ r².
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from regard._round import spectral_norm_bound
from regard.certify.near.exponential import quotient
from regard.certify.near.heads import LocalHead, LocalHeads, LocalValues
from regard.certify.near.matrix_norms import MARGIN, largest_root, row_norms, sums_of_others
from regard.certify.near.score_moves import ScoreMoves

STATIONS = 6
DENSE = 1536
"""Up to this many inputs the norm at the center comes from the whole matrix."""
FAILURE = 1e-6
STARTS, POWERS = 4, 128


class BallScores:
    """How far scores and weights of one head can move on the ball."""

    def __init__(self, local: LocalHead, radius: float) -> None:
        self.local, self.r = local, radius
        n, p, a = local.n, local.p, local.a
        eye = torch.eye(n, dtype=torch.bool)
        self.off = p.masked_fill(eye, 0.0)
        alpha = local.alpha.expand(n, n).masked_fill(eye, 0.0)
        self.alpha_top = alpha.amax(-1)
        rest = local.log_rest.exp()  # 1 - p
        keys = sums_of_others((p * alpha).square()) + (rest * alpha).square()
        apart = sums_of_others(self.off.square()) + rest.square().masked_fill(eye, 0.0)
        close = torch.where(eye, rest.diagonal().unsqueeze(-1), p.diagonal().unsqueeze(-1).expand(n, n))
        bend = a * radius**2 * (close + (close.square() + apart).sqrt()) / 2
        reach = radius * (local.own_size.square() + keys).sqrt() + bend
        self.reach = torch.where(local.seen, reach * MARGIN + 4 * local.eta, torch.zeros_like(reach))
        self.top = self.reach.amax(-1)
        each = alpha.square()
        ranged = (
            radius * (local.own_apart.square() + each.unsqueeze(-1) + each.unsqueeze(-2)).sqrt() + a * radius**2 * (1 + math.sqrt(2)) / 2
        )
        ranged = ranged.masked_fill(~(local.seen.unsqueeze(-1) & local.seen.unsqueeze(-2)), 0.0)
        ranged.diagonal(dim1=-2, dim2=-1).zero_()
        climb = ranged.amax(-1) * MARGIN + 8 * local.eta
        self.half = climb.amax(-1) / 2
        self.box = ScoreMoves.boxed(local, self.reach, climb, self.half)
        most = (self.off * alpha.square()).amax(-1)
        spread = radius * (local.own_spread.square() + most).sqrt() + a * radius**2 * p.amax(-1).sqrt() + 4 * local.eta
        self.spread = torch.minimum(torch.minimum(spread * MARGIN, self.top), self.half)

    @cached_property
    def steep(self) -> Tensor:
        """(e^ω - 1)/ω at the largest change of a row."""
        return torch.where(self.top > 1e-100, torch.expm1(self.top) / self.top.clamp_min(1e-150), torch.ones_like(self.top)) * MARGIN

    @cached_property
    def chi(self) -> Tensor:
        """At least |P'/P - 1| in L²(P): Var e^ζ ≤ (steep σ)² and E e^ζ ≥ 1 + bow σ² with σ = sd ζ."""
        bow = self.bow
        deviation = torch.minimum(self.spread, 1 / bow.sqrt())  # where steep σ/(1 + bow σ²) is largest
        found = torch.minimum(self.steep * deviation / (1 + bow * deviation.square()), torch.expm1(self.top).sqrt())
        return torch.minimum(found, torch.sinh(self.half)) * MARGIN

    @cached_property
    def bow(self) -> Tensor:
        """At most (e^x - 1 - x)/x² for x ≥ -ω, ω the largest change of a row."""
        safe = self.top.clamp_min(1e-3)
        return ((torch.expm1(-safe) + safe) / safe.square() * (1 - 1e-9)).clamp_max(0.4995)

    @cached_property
    def excess(self) -> Tensor:
        """At least Z - 1, Z = E e^ζ."""
        return self.spread.square() * quotient(self.top, 2, 2) * MARGIN

    @cached_property
    def apart(self) -> Tensor:
        """At least √λ_max(diag P' - P'P'ᵀ): the deviation of vectors whose lengths are one together."""
        return self.box.high.amax(-1).sqrt().clamp_max(math.sqrt(0.5)) * MARGIN

    @cached_property
    def split(self) -> Tensor:
        """Q with diag P' - P'P'ᵀ ≤ diag Q in every row: P' itself, or 2P'(1 - P') since the left is a graph's Laplacian."""
        high, low = self.box.high, self.box.low
        nearest = torch.minimum(torch.maximum(torch.full_like(high, 0.5), low), high)
        halved = 2 * nearest * (1 - nearest) * MARGIN
        return torch.where((halved.amax(-1) < high.amax(-1)).unsqueeze(-1), halved, high)

    @cached_property
    def ratio(self) -> Tensor:
        """At least max_k |P'_k/P_k - 1|."""
        change = torch.maximum(self.box.high - self.local.p, self.local.p - self.box.low) / self.local.p.clamp_min(1e-300)
        boxed = change.masked_fill(~self.local.seen, 0.0).amax(-1)
        return torch.minimum(boxed, torch.expm1(self.top)) * MARGIN

    @cached_property
    def slopes(self) -> tuple[Tensor, float]:
        """v_ij in fewer coordinates (n, 1 or n, c), and at least the length of what that leaves out."""
        flat = self.local.v.flatten(0, 1)
        values, vectors = torch.linalg.eigh(flat.mT @ flat)
        keep = vectors[:, values > 1e-13 * values[-1].clamp_min(1e-300)]
        narrow = flat @ keep
        left = float((flat - narrow @ keep.mT).norm(dim=-1).max()) * MARGIN
        return narrow.unflatten(0, self.local.v.shape[:2]), left

    def key(self, factors: Tensor, weights: Tensor) -> float:
        """max_j λ_max(Σ_i b_i² Q_ij v_ij v_ijᵀ)^{1/2}."""
        slopes, left = self.slopes
        roots = (factors.square().unsqueeze(-1) * weights).clamp_min(0.0).sqrt()
        rounding = float(roots.square().sum(0).amax().sqrt()) * (left + self.local.tilt)
        scaled = roots.unsqueeze(-1) * slopes
        roots = largest_root(scaled.permute(1, 2, 0) @ scaled.permute(1, 0, 2))
        return float(roots.amax()) + rounding

    def gathered(self, factors: Tensor) -> float:
        """At least the ℓ² length of rows that are bounded by b_i sd_i(ζ)."""
        own = float((factors * self.local.own_spread).amax())
        mixed = factors.square().unsqueeze(-1) * self.local.p
        cross = math.sqrt(float(((mixed + mixed.mT) / 2).amax()))
        return (self.r * (own + self.key(factors, self.off)) + self.local.a * self.r**2 * cross) * MARGIN

    @cached_property
    def law_change(self) -> float:
        """At least |P' - P|_F."""
        return self.gathered(self.local.p.amax(-1).sqrt() * self.steep)

    @cached_property
    def columns(self) -> tuple[float, float]:
        """Roots of the largest column sums of P and of its upper bounds."""
        return math.sqrt(float(self.local.p.sum(0).amax())) * MARGIN, math.sqrt(float(self.box.high.sum(0).amax())) * MARGIN

    @cached_property
    def query_spread(self) -> Tensor:
        """At least the deviation of z = ∂s/∂x_i under every law of the box, beside what tokens move."""
        local = self.local
        mean = (local.p.unsqueeze(-1) * local.z).sum(1, keepdim=True)
        away = (local.z - mean).expand(local.n, local.n, local.d)
        return torch.minimum(row_norms(self.box.high, away), local.query_half) + local.a * local.shift + local.tilt

    def value_spread(self, values: LocalValues) -> Tensor:
        """At least the deviation of Vᵀx under every law of the box, beside what tokens move."""
        return torch.minimum(row_norms(self.box.high, values.z) + values.w * self.local.shift, values.half)


def shifted_values(scores: BallScores, values: LocalValues) -> float:
    """(E' - E)[Vᵀd] over all rows, per unit of movement."""
    return values.w * min(scores.columns[0] * float(scores.chi.amax()), scores.law_change)


def constant_change(scores: BallScores, values: LocalValues) -> float:
    """At least |J(x') - J(x)| of one head."""
    local, r, w, a = scores.local, scores.r, values.w, scores.local.a
    chi, spread, own = scores.chi, values.spread, local.own_spread
    mixed = _mixed(values)
    warped = _warped(scores, values)
    own_part = torch.minimum(mixed * chi, own * warped) + own * spread * chi.square()
    tb = float(own_part.amax()) + scores.key(warped + spread * chi.square(), scores.off)
    top = scores.apart
    wide = scores.value_spread(values)
    tc = 2 * a * r * float((wide * top).amax())
    steep = local.alpha.expand(local.n, local.n).amax(-1) + a * r
    slope = scores.query_spread + a * top * r
    joined = min(
        math.sqrt(float(((top * steep).square().unsqueeze(-1) * scores.box.high).sum(0).amax())),
        scores.columns[1] * float((steep * top).amax()),
    )
    td = w * r * (float((top * slope).amax()) + joined)
    return (shifted_values(scores, values) + tb + tc + td) * MARGIN


def _warped(scores: BallScores, values: LocalValues) -> Tensor:
    """At least |ηz| in L²(P) in any direction: by the largest z, by the largest η, or by |η| ≤ steep |ζ| + Z - 1 and the parts of ζ."""
    local, r, p = scores.local, scores.r, scores.local.p
    alpha = local.alpha.expand(local.n, local.n).masked_fill(torch.eye(local.n, dtype=torch.bool), 0.0)
    longest = (p.sqrt() * values.size).amax(-1)
    by_keys = (p.sqrt() * values.size * alpha).amax(-1) + values.spread * (p * alpha).square().sum(-1).sqrt()
    bent = local.a * r**2 * (longest + values.spread * p.norm(dim=-1))
    turned = r * (_mixed(values).square() + by_keys.square()).sqrt() + bent + 4 * local.eta * values.spread
    whole = scores.steep * turned + scores.excess * values.spread
    return torch.minimum(torch.minimum(values.largest * scores.chi, values.spread * scores.ratio), whole * MARGIN)


def _mixed(values: LocalValues) -> Tensor:
    """λ_max([√(P_kP_l) (z_k·z_l)(own_k·own_l)])^{1/2}: at least |E[η z (own·e)]| over |η| = 1 and unit e."""
    found = values.__dict__.get("_mixed")
    if found is None:
        local = values.local
        root = local.p.sqrt()
        gram = (values.z @ values.z.mT) * (local.own @ local.own.mT) * root.unsqueeze(-1) * root.unsqueeze(-2)
        found = largest_root(gram) + 2 * (
            values.w * local.shift * local.own_size + values.size * (local.a * local.shift + 4 * local.tilt)
        ).amax(-1)
        values.__dict__["_mixed"] = found
    return found


def direct_constant(scores: BallScores, values: LocalValues) -> float:
    """At least |J(x')| of one head, without its value at the center: it saturates instead of growing."""
    local, r, w = scores.local, scores.r, values.w
    top = scores.apart
    wide = scores.value_spread(values) + w * top * r
    slope = scores.query_spread + local.a * top * r
    own = float((wide * slope).amax())
    return (w * scores.columns[1] + scores.key(wide, scores.split) + local.a * r * float((wide * top).amax()) + own) * MARGIN


def remainder_constant(scores: BallScores, values: LocalValues) -> float:
    """At least |F(x') - F(x) - J d|_F of one head."""
    r, spread = scores.r, values.spread
    tail = quotient(scores.top, 2, 2)
    taylor = tail * (torch.minimum(values.largest * scores.spread, spread * scores.top) + spread * scores.spread.square())
    factors = torch.minimum(taylor, _third_factor(scores, values))
    mixed = spread.square().unsqueeze(-1) * scores.local.p
    curved = scores.local.a * r**2 * math.sqrt(float(((mixed + mixed.mT) / 2).amax()))
    return (scores.gathered(factors) + r * shifted_values(scores, values) + curved) * MARGIN


def _third_factor(scores: BallScores, values: LocalValues) -> Tensor:
    """∫ (1 - t) sd_t(z) 2M √(sup P_t/P) dt: with sd_t(ζ) ≤ √(sup P_t/P) sd(ζ), the third cumulant is at most that times sd(ζ)."""
    local, total = scores.local, torch.zeros_like(scores.half)
    for station in range(1, STATIONS + 1):
        start, end = (station - 1) / STATIONS, station / STATIONS
        box = scores.box.at(end)
        grown = (box.high / local.p.clamp_min(1e-300)).masked_fill(~local.seen, 0.0).amax(-1).sqrt()
        wide = torch.minimum(row_norms(box.high, values.z) + values.w * local.shift, values.half)
        total = total + (end - start) * (1 - (start + end) / 2) * wide * grown
    return total * 2 * scores.half * MARGIN


def saturated_move(scores: BallScores, values: LocalValues) -> float:
    """At least |F(x') - F(x)|_F of one head however large the ball."""
    carried = torch.minimum(values.largest, scores.box.carried(values.size))
    carried = torch.minimum(carried, values.spread * scores.chi)
    return (values.w * scores.columns[1] * scores.r + float(carried.norm())) * MARGIN


class FrobeniusBall:
    """All heads on balls of any radius around one sequence."""

    def __init__(self, heads: LocalHeads) -> None:
        self.heads = heads
        self._kept: dict[float, tuple[float, float, float]] = {}

    @cached_property
    def norm(self) -> float:
        """At least |J| at the center, of all heads together; with probability `probability`."""
        n, d = self.heads.n, self.heads.d
        error = float(self.heads.jacobian_error(torch.ones(n, dtype=torch.float64)).norm()) * math.sqrt(n)
        if n * d > DENSE:
            return self._drawn_norm() + error
        jacobian = self.heads.jacobian
        return spectral_norm_bound(jacobian.permute(0, 2, 1, 3).reshape(n * jacobian.shape[2], n * d)) + error

    @property
    def probability(self) -> float:
        """That of the norm at the center, over its own random start."""
        return 1.0 if self.heads.n * self.heads.d <= DENSE else 1 - FAILURE

    def _drawn_norm(self) -> float:
        """√θ max_b |M^{k/2} x_b|^{1/k} with M = JᵀJ: it fails only if each of the independent starts does (dixon1983, Theorem 1)."""
        n, d = self.heads.n, self.heads.d
        block = torch.randn(n, d, STARTS, dtype=torch.float64)  # torch's own generator: torch.manual_seed makes it repeatable
        block = block / block.flatten(0, 1).norm(dim=0)
        logs = torch.zeros(STARTS, dtype=torch.float64)
        for _ in range(POWERS):
            block = self.heads.pull(self.heads.push(block))
            lengths = block.flatten(0, 1).norm(dim=0)
            logs = logs + lengths.log()
            block = block / lengths
        each = FAILURE ** (1 / STARTS) / (0.8 * math.sqrt(n * d)) - 2 * POWERS * 1e-9  # products are right to far less than 1e-9 of |J|
        return float((logs / (2 * POWERS)).exp().amax()) * each ** (-1 / (2 * POWERS)) * MARGIN

    def constant(self, radius: float) -> float:
        """At least the Lipschitz constant on the ball."""
        if radius == 0 and math.isfinite(self.norm):  # the derivative itself
            return self.norm * MARGIN
        change, direct, _ = self._parts(radius)
        return min(self.norm + change, (1.0 if self.heads.residual else 0.0) + direct) * MARGIN

    def deviation(self, radius: float) -> float:
        """At least |F(x') - F(x)|_F on the ball."""
        scores = [BallScores(local, radius) for local in self.heads.heads]
        still = radius if self.heads.residual else 0.0
        taylor = self.norm * radius + self._combined(scores, remainder_constant)
        whole = still + self._combined(scores, saturated_move)
        best = min(taylor, whole)
        if best > 1.5 * self.norm * radius:  # a path cannot be shorter than its linear part
            best = min(best, sum(self.constant(radius * (k + 1) / 4) for k in range(4)) * radius / 4)
        return best * MARGIN

    def _parts(self, radius: float) -> tuple[float, float, float]:
        if radius not in self._kept:
            scores = [BallScores(local, radius) for local in self.heads.heads]
            self._kept[radius] = (self._combined(scores, constant_change), self._combined(scores, direct_constant), 0.0)
        return self._kept[radius]

    def _combined(self, scores: list[BallScores], function: object) -> float:
        separate = [_finite(function(s, v)) for s, v in zip(scores, self.heads.separate, strict=True)]  # type: ignore[operator]
        folded = None
        if self.heads.folded is not None:
            folded = [_finite(function(s, v)) for s, v in zip(scores, self.heads.folded, strict=True)]  # type: ignore[operator]
        return self.heads.subject.combined(separate, folded)


def _finite(value: float) -> float:
    return math.inf if math.isnan(value) else value
