"""Signed numbers with what rounding may have changed in them: numbers, vectors and matrices, each within an
error of the true one.

The error is an `Upper`, in Euclidean length for vectors and in spectral norm for matrices; it may be one
number for all of them. So rounding is looked after where a number is made, and the formulas of theorems read
`lengths()`, `spreads(law)`, `norm`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._round import product_norm_bound, spectral_norm_bound, vector_norm_bound
from regard._upper import ELEMENTARY, UNIT, Lower, Upper, exact, relative_error

_INFINITE = torch.tensor(math.inf, dtype=torch.float64)


@dataclass(frozen=True)
class Numbers:
    """Each entry of `center` is within `error` of a true number; minus infinity is exact."""

    center: Tensor
    error: Upper

    def __getitem__(self, index: object) -> Numbers:
        return Numbers(self.center[index], self.error)  # type: ignore[index]

    def largest(self, more: Upper | None = None) -> Tensor:
        """No true number, and `more` added to it, is above this."""
        added = self.error.bound if more is None else (self.error + more).bound
        return torch.nextafter(self.center + added, _INFINITE)

    def smallest(self, less: Upper | None = None) -> Tensor:
        """No true number, and `less` taken from it, is below this."""
        taken = self.error.bound if less is None else (self.error + less).bound
        return torch.nextafter(self.center - taken, -_INFINITE)

    def exp(self, more: Upper | None = None) -> Upper:
        """At least e^(x + more)."""
        found = torch.exp(self.largest(more))
        return Upper(torch.where(self.center == -math.inf, 0.0, found.clamp_min(1e-300)), ELEMENTARY)

    def exp_low(self, less: Upper | None = None) -> Lower:
        """At most e^(x - less)."""
        return Lower(torch.exp(self.smallest(less)), ELEMENTARY).map(_without_subnormal)

    def logistic(self, more: Upper | None = None) -> Upper:
        """At least σ(x + more), σ(x) = 1/(1 + e^{-x}), which is at most one."""
        found = torch.sigmoid(self.largest(more)).clamp_min(1e-300)
        return Upper(torch.where(self.center == -math.inf, 0.0, found), ELEMENTARY).minimum(exact(1.0))

    def logistic_low(self, less: Upper | None = None) -> Lower:
        """At most σ(x - less)."""
        return Lower(torch.sigmoid(self.smallest(less)), ELEMENTARY).map(_without_subnormal)


@dataclass(frozen=True)
class Vectors:
    """Each vector along the last dimension of `center` is within `error`, in length, of a true one."""

    center: Tensor
    error: Upper

    @property
    def shape(self) -> torch.Size:
        return self.center.shape

    def __getitem__(self, index: object) -> Vectors:
        """Some of them; for an error that is one number for all."""
        return Vectors(self.center[index], self.error)  # type: ignore[index]

    def lengths(self) -> Upper:
        """At least |v| of each."""
        return computed_lengths(self.center) + self.error

    def lengths_low(self) -> Lower:
        """At most |v| of each; zero where it may be nothing but lifted squares that vanished."""
        found = computed_lengths(self.center)
        known = torch.where(found.value > 1e-139, found.value, 0.0)
        return Lower(known, found.roundings) - self.error

    def scaled_norm(self, factors: Upper) -> Upper:
        """At least |[f_k v_k]_k|₂ of vectors (n, d): their errors add |f| · error."""
        norms = spectral_norms(factors.value.unsqueeze(-1) * self.center)
        return Upper(norms.value, norms.roundings + factors.roundings + 1) + factors.norm() * self.error

    def times(self, matrix: Matrix) -> Vectors:
        """vᵀM of each: |ṽᵀM̃ - vᵀM| ≤ |M| e_v + |ṽ| e_M + γ |ṽ| |M̃|_F."""
        longest = computed_lengths(self.center).amax()
        width = self.center.shape[-1]
        rounding = relative_error(width + 1) * longest * matrix.length
        error = matrix.norm * self.error + longest * matrix.error + rounding
        return Vectors(self.center @ matrix.center, error)

    def spreads(self, law: Upper) -> Upper:
        """At least |[√P_k v_k]_k|₂ for every law P below `law` (…, rows, n), of each row of vectors (rows, n,
        d).

        The errors add |[√P_k e_k]|₂ ≤ √ΣP · error, and a law sums to one.
        """
        norms = spectral_norms(self.center * law.value.sqrt().unsqueeze(-1))
        return Upper(norms.value, norms.roundings + law.roundings // 2 + 3) + self.error

    def narrow(self) -> Vectors:
        """In the coordinates of their span, where that has fewer: no length and no spread is less than
        before.

        With Q of nearly orthonormal columns, v = Q(Qᵀv) + rest, so |v| ≤ |Q| |Qᵀv| + |rest|.
        """
        flat = self.center.flatten(0, -2)
        values, vectors = torch.linalg.eigh(flat.mT @ flat)
        basis = vectors[:, values > 1e-13 * values[-1].clamp_min(1e-300)]
        inside = flat @ basis
        stretch = Upper(spectral_norm_bound(basis))
        rounding = (
            relative_error(2 * flat.shape[-1] + 4)
            * computed_lengths(flat).amax()
            * computed_lengths(basis.flatten())
        )
        left = computed_lengths(flat - inside @ basis.mT).amax() + rounding * (stretch + 1)
        scaled = (inside * stretch.bound).unflatten(0, self.center.shape[:-1])
        return Vectors(scaled, self.error + left + Upper(4 * UNIT) * computed_lengths(scaled).amax())


@dataclass(frozen=True)
class Matrix:
    """A matrix within `error` of a true one, in spectral norm, with `norm` at least that of the true one."""

    center: Tensor
    error: Upper
    norm: Upper

    @property
    def length(self) -> Upper:
        """At least |M̃|_F of the center."""
        return computed_lengths(self.center.flatten())


def exact_matrix(matrix: Tensor) -> Matrix:
    """A matrix that is the true one."""
    return Matrix(matrix, exact(0.0), Upper(spectral_norm_bound(matrix)))


def product_norm(*factors: Tensor | None) -> Upper:
    """At least the spectral norm of a product of matrices as they are; None is an identity."""
    return Upper(product_norm_bound(*factors))


def length(vector: Tensor) -> Upper:
    """At least the Euclidean length of a vector as it is, and the Frobenius norm of a matrix."""
    return Upper(vector_norm_bound(vector))


def lengths(vectors: Tensor, roundings: int = 0) -> Upper:
    """At least the lengths of vectors, (…, d) to (…), whose entries have gone through so many roundings."""
    vectors, scale = _near_one(vectors)
    found = computed_lengths(vectors).where((vectors != 0).any(-1))
    return Upper(found.value * scale, found.roundings + roundings)


def root_of_squares(parts: Sequence[Upper]) -> Upper:
    """√Σ x² of single numbers."""
    return lengths(torch.stack([part.bound for part in parts]))


def lengths_below(vectors: Tensor) -> Lower:
    """At most the lengths of vectors as they are."""
    vectors, scale = _near_one(vectors)
    squares = vectors.square().sum(-1)
    found = Lower(torch.where(squares > 1e-280, squares, 0.0), vectors.shape[-1]).sqrt()
    return Lower(found.value * scale, found.roundings)


LONGEST = 1000
"""The largest exponent of a scale: it is a number itself, and the squares of all numbers over it are."""


def _near_one(vectors: Tensor) -> tuple[Tensor, float]:
    """Vectors over a power of two that makes the largest entry near one, and that power: squares of very
    large and very small numbers leave the range.
    """
    vectors = vectors.detach().double()
    widest = float(vectors.abs().amax()) if vectors.numel() else 0.0
    scale = 2.0 ** max(-LONGEST, min(LONGEST, math.frexp(widest)[1]))
    return vectors / scale, scale


LONG = 4096
"""From how many entries on the squares of a vector are summed where they are."""
LARGE = 1_000_000
"""The same for all vectors together."""


def computed_lengths(vectors: Tensor) -> Upper:
    """At least the lengths of vectors as they are, (…, d) to (…)."""
    width = vectors.shape[-1]
    if width < LONG and vectors.numel() < LARGE:
        squares, roundings = vectors.square().sum(-1), width + 2
    else:  # without a copy; a root and its square are three roundings more
        squares, roundings = torch.linalg.vector_norm(vectors, dim=-1).square(), width + 5
    vanished = width * 1e-305 * (squares < 1e-280).double()
    return Upper(squares + vanished, roundings).sqrt()


def distances(points: Tensor) -> Upper:
    """At least |p_k - p_l| of points as they are, (…, n, d) to (…, n, n).

    Squares vanish below 1e-162, and what they lose is nothing beside 1e-150.
    """
    apart = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    return Upper(apart.clamp_min(1e-150), points.shape[-1] + 4)


def spectral_norms(matrices: Tensor) -> Upper:
    """At least the spectral norm of each matrix (…, a, b) as it is, from the smaller Gram matrix."""
    a, b = matrices.shape[-2:]
    if a == 1 or b == 1:
        return computed_lengths(matrices.flatten(-2))
    gram = matrices @ matrices.mT if a <= b else matrices.mT @ matrices
    return largest_roots(gram, max(a, b))


def largest_roots(gram: Tensor, terms: int = 0, error: Upper | None = None) -> Upper:
    """At least √λ_max of symmetric positive matrices (…, a, a).

    The eigenvalue is backward stable: it is within 8 a · 2u · trace of a true one (assumed of LAPACK; it is
    far less). terms: how many products were added for each entry of a Gram matrix AᵀA, whose rounding γ
    |A|_F² = γ trace bounds; what products may have lost by vanishing is added. error: what else the matrices
    may be off, in spectral norm.
    """
    size = gram.shape[-1]
    if not size:
        return Upper(gram.new_zeros(gram.shape[:-2]))
    finite = torch.isfinite(gram).flatten(-2).all(-1)
    gram = torch.where(finite[..., None, None], gram, 0.0)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0)
    top = torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0)
    small = trace < 1e-280 if terms else (trace > 0) & (trace < 1e-280)
    vanished = (size * terms + 1) * 1e-305 * small.double()
    square = top + (16 * size + 2 * terms + 2) * UNIT * trace + vanished
    found = Upper(torch.where(finite, square, math.inf), size + 4)
    return (found if error is None else found + error).sqrt()


WIDE = 192
"""From what size on an eigenvalue is guessed and proved, which is faster than to compute it."""


def near_largest_roots(gram: Tensor, terms: int = 0) -> Upper:
    """The same, at most a few percent more: λ from a few steps of Lanczos is proved by a Cholesky factor of
    λI - G that runs to its end, so that λI - G ≥ -γ/(1-γ) tr(λI - G) (Rump 2006). Where it does not, a
    larger λ; and where that does not, an eigenvalue.
    """
    size = gram.shape[-1]
    if size < WIDE:
        return largest_roots(gram, terms)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0)
    near = _guessed(gram).clamp_min(1e-250)
    level = 1.001 * near
    failed = _fails(gram, level)
    if bool(failed.any()):
        level = torch.where(failed, 1.02 * near, level)
        failed[failed.clone()] = _fails(gram[failed], level[failed])
    if bool(failed.any()) or not bool(torch.isfinite(level + trace).all()):
        return largest_roots(gram, terms)
    vanished = (size * terms + 1) * 1e-305 * (trace < 1e-280).double() + size * size * 1e-300
    less = (
        4 * size * (size + 4) * UNIT * level
    )  # of the factor, whose trace is at most size λ, and of the shift
    return Upper(level + less + (2 * terms + 2 * size + 2) * UNIT * trace + vanished, 8).sqrt()


def _fails(gram: Tensor, level: Tensor) -> Tensor:
    """Whether λI - G has no Cholesky factor in numbers."""
    shifted = -gram
    shifted.diagonal(dim1=-2, dim2=-1).add_(level.unsqueeze(-1))
    return torch.linalg.cholesky_ex(shifted.mT, upper=True)[1] != 0  # by columns, as LAPACK has it


STEPS = 10
"""Steps of Lanczos: the largest eigenvalue of a Gram matrix is then right to a thousandth, as a rule."""


def _guessed(gram: Tensor) -> Tensor:
    """About the largest eigenvalue: that of the tridiagonal matrix of a few steps of Lanczos. Nothing is
    taken on trust of it.
    """
    z = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt().unsqueeze(-1) + 1e-140
    z = z / torch.linalg.vector_norm(z, dim=-2, keepdim=True)
    before, beside = torch.zeros_like(z), z.new_zeros(())
    inner, outer = [], []
    for _ in range(STEPS):
        turned = _turned(gram, z) - beside * before
        along = (z * turned).sum(-2, keepdim=True)
        turned = turned - along * z
        beside = torch.linalg.vector_norm(turned, dim=-2, keepdim=True)
        inner.append(along.flatten(-2))
        outer.append(beside.flatten(-2))
        before, z = z, turned / beside.clamp_min(1e-290)
    upper = torch.diag_embed(torch.cat(outer[:-1], -1), 1)
    small = torch.diag_embed(torch.cat(inner, -1)) + upper + upper.mT
    return torch.linalg.eigvalsh(torch.nan_to_num(small))[..., -1]


def _turned(gram: Tensor, z: Tensor) -> Tensor:
    """Gz of each, one after the other: torch's product of batches reads a matrix many times."""
    pairs = zip(gram.reshape(-1, *gram.shape[-2:]), z.reshape(-1, z.shape[-2]), strict=True)
    return torch.stack([torch.mv(*pair) for pair in pairs]).reshape(z.shape)


def half_diameters(points: Vectors, seen: Tensor) -> Upper:
    """At least half of the largest distance of points (1 or rows, n, d) among those that each row sees.

    No law on them has a larger deviation in any direction (Popoviciu's inequality).
    """
    both = seen.unsqueeze(-1) & seen.unsqueeze(-2)
    widest = distances(points.center).where(both).map(lambda apart: apart.flatten(1).amax(-1))
    return widest.halved() + points.error


def _without_subnormal(value: Tensor) -> Tensor:
    return torch.where(value > 1e-290, value, 0.0)
