"""One head at one sequence: the laws of its rows, how scores change with tokens, and what its values are
there.

For row i with law P: m = Σ P_k x_k, y_k = x_k - m, and the score s_k has the slopes v_k = ∂s_k/∂x_k in its
key and c_k = ∂s_k/∂x_i in its query. `own`_k = c_k - E c + (1{k=i} - P_i) v_i is the slope of the centered
score in the row's own token (N1). Values are z_k = Vᵀy_k. What rounding may have changed is part of each
number, by its type.
"""

from __future__ import annotations

import copy
import math
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import (
    Matrix,
    Numbers,
    Vectors,
    computed_lengths,
    distances,
    half_diameters,
    largest_roots,
)
from regard._round import EPS
from regard._upper import ELEMENTARY, UNIT, Lower, Upper, exact, relative_error
from regard.domains import Near
from regard.proofs.near.curvature import curvature
from regard.proofs.near.local_scores import local_scores, log_law, rounding_of_logs
from regard.proofs.setting import pair_bias
from regard.proofs.subject import Head
from regard.proofs.theorem import Refusal


class LocalHead:
    """One head at one sequence, without its values. Rows are those of `queries`."""

    def __init__(self, head: Head, domain: Near) -> None:
        if not head.softmax:
            raise Refusal(f"rows of {type(head.normalizer).__name__} are not Gibbs laws")
        measure = domain.measure
        points = measure.points
        self.n, self.d = points.shape
        bend = curvature.one(head.potential, self.d)
        if bend is None:
            raise Refusal(
                f"scores of {type(head.potential).__name__} are not bilinear in pairs of tokens; bounds on "
                "a ball that holds them apply"
            )
        self.a: Upper = bend  # at least |A_ij|, the bilinear form of any pair
        away = points - points.mean(0)  # laws and slopes do not see a translation by a vector that is exact
        self.x = Vectors(away, Upper(UNIT) * computed_lengths(away).amax())
        self.radius = self.x.lengths().amax()
        scores = local_scores(head, points, self.x, measure.positions(), self.a)
        bias = pair_bias(head, domain)
        biased = scores.center if bias is None else scores.center + bias
        self.by_query, self.by_key = scores.by_query, scores.by_key
        self.log_law = log_law(biased, bias, scores.error)
        self.seen = self.log_law.center > -math.inf  # a weight that is too small for float64 can still grow
        self.queries = torch.arange(self.n)

    def with_rows(self, queries: Tensor) -> LocalHead:
        """The same head with the rows of some queries: (rows, n) where others are (n, n)."""
        part = copy.copy(self)
        for name, value in LocalHead.__dict__.items():
            if isinstance(value, cached_property):
                part.__dict__.pop(name, None)
        part.queries, part.log_law, part.seen = queries, self.log_law[queries], self.seen[queries]
        part.by_query = self.by_query if len(self.by_query.center) == 1 else self.by_query[queries]
        part.by_key = self.by_key[queries]
        return part

    # The law of a row

    @cached_property
    def p(self) -> Tensor:
        """The law as computed: a weight to start from, not a bound."""
        return self.log_law.center.exp()

    @cached_property
    def law_roundings(self) -> int:
        """How many roundings the error of the logarithm is worth: e^error ≤ (1 - u)^(-error/u)."""
        return min(2**52, math.ceil(float(self.log_law.error) / UNIT)) + ELEMENTARY

    @cached_property
    def law(self) -> Upper:
        """At least P_ik, (rows, n)."""
        return Upper(torch.where(self.seen, self.p.clamp_min(1e-300), 0.0), self.law_roundings)

    @cached_property
    def law_low(self) -> Lower:
        """At most P_ik; nothing where no digit of it is known."""
        known = (self.p > 1e-290) & (self.law_roundings < 2**50)
        return Lower(torch.where(known, self.p, 0.0), self.law_roundings)

    @cached_property
    def log_rest(self) -> Numbers:
        """log(1 - P_ik); for the largest weight of a row from the others,
        since one minus nearly one has no digits.
        """
        logs = self.log_law.center
        top = logs.argmax(-1, keepdim=True)
        others = logs.scatter(-1, top, -math.inf).logsumexp(-1, keepdim=True)
        found = torch.log1p(-self.p.scatter(-1, top, 0.0)).scatter(-1, top, others)
        return Numbers(found, self.log_law.error + rounding_of_logs(found, self.n))

    @cached_property
    def odds(self) -> Numbers:
        """log P_ik/(1 - P_ik)."""
        found = self.log_law.center - self.log_rest.center
        return Numbers(found, self.log_law.error + self.log_rest.error + rounding_of_logs(found, 1))

    @cached_property
    def rest(self) -> Upper:
        """At least 1 - P_ik."""
        return self.log_rest.exp()

    # Tokens about the mean of a row

    @cached_property
    def means(self) -> Vectors:
        """m_i, (rows, d)."""
        rounding = relative_error(self.law_roundings + self.n + 2) * self.radius
        return Vectors(self.p @ self.x.center, self.x.error + rounding)

    @cached_property
    def y(self) -> Vectors:
        """x_k - m_i, (rows, n, d)."""
        return Vectors(self.x.center.unsqueeze(0) - self.means.center.unsqueeze(1), self.y_error)

    @cached_property
    def y_error(self) -> Upper:
        """How far any computed y_ik may be off."""
        return self.x.error + self.means.error + Upper(4 * UNIT) * self.radius

    # Slopes of scores

    @cached_property
    def alpha(self) -> Upper:
        """At least |v_ik|, (rows, n)."""
        return self.by_key.lengths().map(lambda lengths: lengths.expand(len(lengths), self.n))

    @cached_property
    def own(self) -> Vectors:
        """own_ik, (rows, n, d)."""
        rows, queries, c = torch.arange(len(self.p)), self.queries, self.by_query.center
        mean = torch.einsum("ik,ikd->id", self.p, c.expand(len(rows), self.n, self.d))
        diagonal = self.by_key.center[rows, queries if self.by_key.shape[1] > 1 else torch.zeros_like(rows)]
        own = c - mean.unsqueeze(1) - (self.p[rows, queries].unsqueeze(-1) * diagonal).unsqueeze(1)
        own[rows, queries] += diagonal
        longest = self.by_query.lengths().amax() + self.alpha.amax()
        rounding = relative_error(self.law_roundings + self.n + 8) * longest
        return Vectors(own, 2 * self.by_query.error + self.by_key.error + rounding)

    @cached_property
    def own_size(self) -> Upper:
        """At least |own_ik|."""
        return self.own.lengths()

    @cached_property
    def own_spread(self) -> Upper:
        """At least sd(own·e) over unit e, |[√P_ik own_ik]_k|₂, for each row."""
        return self.own_narrow.spreads(self.law)

    @cached_property
    def own_narrow(self) -> Vectors:
        """own_ik in fewer coordinates, where there are many."""
        return (
            self.own if len(self.p) < self.n else self.own.narrow()
        )  # directions of some rows are few themselves

    @cached_property
    def own_apart(self) -> Upper:
        """At least |own_ik - own_il|, (rows, n, n)."""
        return distances(self.own.center) + 2 * self.own.error

    @cached_property
    def query_half(self) -> Upper:
        """At least half of the largest |c_ik - c_il| over the keys that a row sees."""
        return half_diameters(self.by_query, self.seen)

    @cached_property
    def query_centered(self) -> Vectors:
        """c_ik - E c, (rows, n, d)."""
        c = self.by_query.center.expand(len(self.p), self.n, self.d)
        mean = torch.einsum("ik,ikd->id", self.p, c)
        rounding = relative_error(self.law_roundings + self.n + 4) * self.by_query.lengths().amax()
        return Vectors(c - mean.unsqueeze(1), 2 * self.by_query.error + rounding)

    # The derivative of the means

    def covariance_in_query(self, rows: Tensor) -> Tensor:
        """Cov_i(x, c) (rows, d, d): how the mean of a row moves with its query."""
        law, c = self.p[rows], self.by_query.center.expand(self.n, self.n, self.d)[rows]
        away = c - torch.einsum("ik,ikd->id", law, c).unsqueeze(1)
        return ((self.x.center - self.means.center[rows].unsqueeze(1)) * law.unsqueeze(-1)).mT @ away

    def push(self, tangents: Tensor) -> Tensor:
        """How the means of rows move with tangents (n, d, b): E[d] + Cov(x, ∂s), (n, d, b)."""
        change = _along_query(self.by_query.center, tangents) + _along_key(self.by_key.center, tangents)
        law = self.p.unsqueeze(-1)
        centered = law * (change - (law * change).sum(1, keepdim=True))
        return torch.einsum("ik,kdb->idb", self.p, tangents) + torch.einsum(
            "ikb,kd->idb", centered, self.x.center
        )

    def pull(self, cotangents: Tensor) -> Tensor:
        """The transpose of `push`."""
        c, v, law = self.by_query.center, self.by_key.center, self.p.unsqueeze(-1)
        worth = torch.einsum("idb,kd->ikb", cotangents, self.x.center)
        by_scores = law * (worth - (law * worth).sum(1, keepdim=True))
        found = torch.einsum("ik,idb->kdb", self.p, cotangents)
        found += (
            torch.einsum("ikb,kd->idb", by_scores, c[0])
            if len(c) == 1
            else torch.einsum("ikb,ikd->idb", by_scores, c)
        )
        found += (
            torch.einsum("ikb,id->kdb", by_scores, v[:, 0])
            if v.shape[1] == 1
            else torch.einsum("ikb,ikd->kdb", by_scores, v)
        )
        return found


class LocalValues:
    """A head with values Vᵀx: what it adds to the facts of its scores."""

    def __init__(self, local: LocalHead, matrix: Matrix) -> None:
        self.local, self.matrix = local, matrix

    @property
    def w(self) -> Upper:
        """At least |V|."""
        return self.matrix.norm

    @cached_property
    def z(self) -> Vectors:
        """z_ik = Vᵀy_ik, (rows, n, e)."""
        return self.local.y.times(self.matrix)

    @cached_property
    def size(self) -> Upper:
        """At least |z_ik|."""
        return self.z.lengths()

    @cached_property
    def spread(self) -> Upper:
        """At least sd(z·e) over unit e, |[√P_ik z_ik]_k|₂, for each row."""
        return self.z.spreads(self.local.law)

    @cached_property
    def largest(self) -> Upper:
        """At least max_k |z_ik| over the keys that a row sees."""
        return self.size.where(self.local.seen).amax(-1)

    @cached_property
    def half(self) -> Upper:
        """At least half of the largest |Vᵀ(x_k - x_l)| over the keys that a row sees."""
        points = self.local.x.times(self.matrix)
        return half_diameters(Vectors(points.center.unsqueeze(0), points.error), self.local.seen)

    @cached_property
    def own_curvature(self) -> Upper:
        """At least |Σ_k P_k z_k (own_k·e)²| over unit e: λ_max((Pz)ᵀ[(own_k·own_l)²](Pz))^{1/2},
        for each row (N15).
        """
        local = self.local
        z, own = self.z.center, local.own_narrow.center
        weighted = z * local.p.unsqueeze(-1)
        pairs = (own @ own.mT).square()
        lengths, errors = computed_lengths(own), local.own_narrow.error
        whole = (local.law * self.size * lengths.square()).sum(
            -1
        )  # terms cancel in the product, their rounding does not
        rounding = relative_error(4 * local.n + 2 * own.shape[-1] + 8) * whole.square()
        found = largest_roots(weighted.mT @ pairs @ weighted, error=rounding)
        # with z̃, own~ and P̃ for z, own and P: |P - P̃| |z̃||own~|² + P e_z |own|² + P |z| (2 |own~| e + e²)
        inexact = relative_error(local.law_roundings + 8 * local.n) * local.law * self.size * lengths.square()
        moved = local.law * (
            self.z.error * lengths.square() + self.size * (2 * lengths * errors + errors.square())
        )
        return found + (inexact + 2 * moved).sum(-1)

    @cached_property
    def mixed(self) -> Upper:
        """At least |E[η z (own·e)]| over |η| = 1 in L²(P) and unit e: λ_max([√(P_kP_l)
        (z_k·z_l)(own_k·own_l)])^{1/2} (N27).
        """
        local = self.local
        z, own = self.z.center, local.own_narrow.center
        weight = local.p.sqrt()
        gram = (z @ z.mT) * (own @ own.mT) * weight.unsqueeze(-1) * weight.unsqueeze(-2)
        found = largest_roots(gram, z.shape[-1] + own.shape[-1] + 8)
        around = self.z.error * local.own_size + self.size * local.own_narrow.error
        rounding = Upper(found.value, found.roundings + local.law_roundings)
        return rounding + 2 * around.where(local.seen).amax(-1)

    @cached_property
    def singular(self) -> SingularBasis:
        """z in the singular basis of V."""
        return SingularBasis(self)


class SingularBasis:
    """Singular values of V, squares of z in their basis as computed,
    and at least the square of what is outside of it.
    """

    def __init__(self, values: LocalValues) -> None:
        z = values.z.center
        _, self.singular, basis = torch.linalg.svd(values.matrix.center, full_matrices=False)
        self.inside = (z @ basis.mT).square()
        outside = (z.square().sum(-1) - self.inside.sum(-1)).clamp_min(0.0)
        self.outside = Upper(outside) + relative_error(4 * z.shape[-1] + 8) * computed_lengths(z).square()


def _along_query(c: Tensor, tangents: Tensor) -> Tensor:
    """c_ik·t_i for tangents (n, d, b), (n, n, b)."""
    return (
        torch.einsum("kd,idb->ikb", c[0], tangents)
        if len(c) == 1
        else torch.einsum("ikd,idb->ikb", c, tangents)
    )


def _along_key(v: Tensor, tangents: Tensor) -> Tensor:
    """v_ik·t_k, (n, n, b)."""
    return (
        torch.einsum("id,kdb->ikb", v[:, 0], tangents)
        if v.shape[1] == 1
        else torch.einsum("ikd,kdb->ikb", v, tangents)
    )


def value_matrix(head: Head, width: int) -> Matrix:
    """V (d, e), with the rounding of the product that it is."""
    matrix, factors = head.matrix(width), head.factors
    error = exact(0.0)
    if len(factors) > 1:
        inner = sum(factor.shape[0] for factor in factors[1:])
        error = relative_error(inner + len(factors))
        for factor in factors:
            error = error * computed_lengths(factor.flatten())
    return Matrix(matrix, error, head.w)


def narrow_value_matrix(head: Head, width: int) -> Matrix:
    """A matrix with the same lengths |Vᵀy| and fewer columns, V's rank being at most the width of a head.

    V = AB with Bᵀ = QR has |Vᵀy| = |R Aᵀy|; Householder's R is that of B + E with |E|_F ≤ 16 m n · 2u |B|_F,
    generously (Higham 2002, 19.4).
    """
    factors = head.factors
    if len(factors) == 2 and factors[1].shape[0] < factors[1].shape[1]:
        first, second = factors
        made = first @ torch.linalg.qr(second.mT, mode="r")[1].mT
        rounding = Upper(16 * second.numel() * EPS) + relative_error(second.shape[0] + 2)
        error = rounding * computed_lengths(first.flatten()) * computed_lengths(second.flatten())
        return Matrix(made, error, head.w)
    whole = value_matrix(head, width)
    u, s, _ = torch.linalg.svd(whole.center, full_matrices=False)
    keep = max(int((s > 1e-14 * s[0]).sum()) if len(s) else 0, 1)
    rounding = Upper(16 * sum(whole.center.shape) * EPS + 2e-14 * (keep < len(s))) * whole.length
    return Matrix(u[:, :keep] * s[:keep], whole.error + rounding, whole.norm)
