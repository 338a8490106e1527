"""Numbers that are proofs: norms that are certainly large enough, as floats."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps


def up(value: float) -> float:
    """The next float above, so that a rounded result is an upper bound."""
    return math.nextafter(value, math.inf)


def outward(value: float, operations: int = 4000) -> float:
    """A number that went through so many roundings, rounded up past all of them."""
    return value if value == 0 else up(value * (1 + gamma(operations)))


@cache
def gamma(count: int) -> float:
    """The relative error of a sum of `count` products, in any order: at least k u / (1 - k u), u the unit
    roundoff.

    k u is exact, and the 2 k u below it is more than the rounding of the quotient.
    """
    units = count * EPS / 2
    return math.inf if units >= 0.5 else units / (1 - 2 * units)


def _scale_by_power(matrix: Tensor) -> tuple[Tensor, int]:
    """A matrix times a power of two, so that its largest entry is near one,
    and the exponent that undoes it.
    """
    exponent = math.frexp(float(matrix.abs().max()))[1]
    half = -exponent // 2  # two factors: one alone may leave the range
    return matrix * 2.0**half * 2.0 ** (-exponent - half), exponent


def _times_power(bound: float, exponent: int) -> float:
    """bound · 2^exponent, rounded up where so small a number has fewer digits."""
    found = math.ldexp(bound, exponent)
    return found if math.ldexp(found, -exponent) == bound else up(found)


def frobenius_bound(matrix: Tensor) -> float:
    """An upper bound of the Frobenius norm of a float64 matrix whose entries are near one or smaller."""
    total = float(matrix.square().sum()) + matrix.numel() * 1e-300  # squares that vanished
    return outward(math.sqrt(total), matrix.numel() + 4)


def vector_norm_bound(vector: Tensor) -> float:
    """An upper bound of the Euclidean length of a vector, as given."""
    vector = vector.detach().double()
    largest = float(vector.abs().max()) if vector.numel() else 0.0
    if largest == 0:
        return 0.0
    if not math.isfinite(largest):
        return math.inf
    scaled, exponent = _scale_by_power(vector)  # squares of very small numbers vanish
    return _times_power(frobenius_bound(scaled), exponent)


TALL = 64
"""From this many rows on, the first factor of a product is replaced by a small triangular one of the same
norm.
"""


def product_norm_bound(*factors: Tensor | None) -> float:
    """An upper bound of the spectral norm of a product of matrices; None is an identity. The rounding of the
    product is added.

    A tall first factor A is replaced by the R of A + ΔA = QR, |ΔA|_F ≤ c m n u |A|_F for Householder's method
    (Higham 2002, 19.4), with a c that is generous: then the product is as small as the factor is narrow.
    """
    present = [factor.detach().double() for factor in factors if factor is not None]
    if not present:
        return 1.0
    product, sizes, inner = present[0], [vector_norm_bound(present[0])], 0
    turned = 0.0
    if len(present) > 1 and 2 * product.shape[-1] <= product.shape[0] >= TALL and math.isfinite(sizes[0]):
        rows, columns = product.shape
        turned = 16 * rows * columns * EPS
        product = torch.linalg.qr(product, mode="r")[1]
    for factor in present[1:]:
        inner += product.shape[-1]
        product = product @ factor
        sizes.append(vector_norm_bound(factor))
    found = spectral_norm_bound(product)
    if not inner or 0.0 in sizes:
        return found
    # beside γ(inner): one for each product of sizes, one for that with γ, and one for the sum
    return found + math.prod(sizes) * (gamma(inner + len(present) + 1) + turned)


def spectral_norm_bound(matrix: Tensor) -> float:
    """An upper bound of the largest singular value of a real matrix, almost always tight to ten digits.

    With G = fl(AᵀA), a Cholesky factorization of λI - G that runs to its end proves λI - G ⪰ -c, c =
    γ(k+2)/(1-γ(k+2)) · tr(λI - G) (Rump 2006); |G - AᵀA|₂ ≤ γ(n) |A|_F² is added, and so is the rounding of
    λI - G itself.
    """
    matrix = matrix.detach().double()
    if matrix.numel() == 0:
        return 0.0
    if not bool(torch.isfinite(matrix).all()):
        return math.inf
    if not bool((matrix != 0).any()):
        return 0.0
    if matrix.shape[0] < matrix.shape[1]:
        matrix = matrix.mT
    matrix, exponent = _scale_by_power(matrix)
    length, size = frobenius_bound(matrix), matrix.shape[1]
    gram = matrix.mT @ matrix
    gram = 0.5 * (gram + gram.mT)
    near = float(torch.linalg.eigvalsh(gram)[-1])
    forming, best = length**2 * gamma(matrix.shape[0] + 2), length**2
    for slack in (1e-13, 1e-11, 1e-9, 1e-6, 1e-3):
        level = near * (1 + slack) + size * size * EPS * near
        shifted = level * torch.eye(size, dtype=torch.float64) - gram
        _, failed = torch.linalg.cholesky_ex(shifted)
        if int(failed) == 0:
            trace = float(shifted.diagonal().abs().sum()) * (1 + gamma(size))
            bend = gamma(size + 2)
            rounding = bend / (1 - bend) * trace + 2 * EPS * level  # λI - G is rounded on its diagonal alone
            best = min(best, level + rounding + forming)
            break
    return _times_power(outward(math.sqrt(best), 16), exponent)  # no number above is rounded that often


def largest_eigenvalue_bound(matrix: Tensor) -> float:
    """An upper bound of the largest eigenvalue of a real symmetric matrix as it is, which may be negative;
    almost always within 1e-12 of the largest entry.

    A Cholesky factorization of λI - M that runs to its end proves λI - M ⪰ -c, c = γ(k+2)/(1-γ(k+2)) · tr(λI
    - M) (Rump 2006); the rounding of λI - M is added. What vanished below the range of numbers is paid for
    by k² 1e-300, entries being near one.
    """
    matrix = matrix.detach().double()
    size = matrix.shape[-1]
    if size == 0 or not bool((matrix != 0).any()):
        return 0.0
    if not bool(torch.isfinite(matrix).all()):
        return math.inf
    matrix, exponent = _scale_by_power(matrix)
    near, scale = float(torch.linalg.eigvalsh(matrix)[-1]), frobenius_bound(matrix)
    best = scale  # no eigenvalue is larger than the Frobenius norm
    for slack in (1e-15, 1e-14, 1e-13, 1e-12, 1e-10, 1e-8, 1e-5, 1e-2):
        level = near + size * slack * scale
        shifted = level * torch.eye(size, dtype=torch.float64) - matrix
        _, failed = torch.linalg.cholesky_ex(shifted)
        if int(failed) == 0:
            trace = up(float(shifted.diagonal().sum()) * (1 + gamma(size)))
            bend = gamma(size + 2)
            rounding = up(up(bend / (1 - bend) * trace) + 2 * EPS * (abs(level) + 1)) + size * size * 1e-300
            best = min(best, up(level + up(rounding)))
            break
    return up(math.ldexp(best, exponent))
