"""log|det(I + J)| of a residual layer: exact, exact for causal maps, or a series that is right on average."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard._object import Object
from regard._upper import Upper
from regard.errors import ArgumentError
from regard.nn.contraction import Contraction
from regard.nn.declared import Declaring
from regard.nn.diagonal_blocks import check_causal, diagonal_blocks, opaque_blocks
from regard.nn.kronecker import kronecker
from regard.parameters import width
from regard.proofs.certification import declare
from regard.proofs.theorems.log_determinant import series_remainder


def _whole(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(name, f"is {value!r}", "give a whole number of at least 1")


@dataclass(frozen=True)
class Measured:
    """value: f(x). log_det: log|det(I + J)|, one for each sequence. standard_error: of log_det, None where it
    is exact or where one probe alone says nothing of it.
    """

    value: Tensor
    log_det: Tensor
    standard_error: Tensor | None = None


class LogDeterminant(Object):
    """A way to compute log|det(I + J)|, J the Jacobian of f at x. Abstract.

    Examples:
        >>> from regard.maps import Affine
        >>> from regard.nn import BlockTriangular, Dense, Invertible, LogDeterminant
        >>> f, x = Affine(torch.full((1, 1), 0.5).double()), torch.zeros(3, 1).double()
        >>> for way in (Dense(), BlockTriangular()):
        ...     value, log_det = Invertible(f, log_determinant=way)(x)
        ...     print(isinstance(way, LogDeterminant), round(float(log_det.exp()), 6))  # 1.5³
        True 3.375
        True 3.375
    """

    @abstractmethod
    def check(self, f: nn.Module) -> None:
        """Raise where this is not for f."""

    @abstractmethod
    def of(self, f: Contraction, x: Tensor, constant: float) -> Measured:
        """f(x) and log|det(I + J)| at x (..., n, d), with gradients."""


@dataclass(frozen=True, eq=False, repr=False)
class Dense(LogDeterminant):
    """The determinant of the whole matrix: exact, for sequences that are not long, O((n d)³).

    Examples:
        >>> from regard.maps import Affine
        >>> f = Affine(torch.full((1, 1), 0.5, dtype=torch.float64))
        >>> flow = regard.nn.Invertible(f, log_determinant=regard.nn.Dense())
        >>> round(float(flow(torch.zeros(2, 1, dtype=torch.float64))[1].exp()), 6)  # 1.5²
        2.25
    """

    def check(self, f: nn.Module) -> None:
        return None

    def of(self, f: Contraction, x: Tensor, constant: float) -> Measured:
        flat = x.flatten(0, -3) if x.ndim > 2 else x.unsqueeze(0)
        size = x.shape[-2] * x.shape[-1]

        def at(one: Tensor) -> Tensor:
            return f(one.unflatten(0, x.shape[-2:])).flatten()

        jacobian = torch.func.vmap(torch.func.jacrev(at))(flat.flatten(-2))
        identity = torch.eye(size, dtype=x.dtype, device=x.device)
        return Measured(f(x), torch.linalg.slogdet(identity + jacobian)[1].reshape(x.shape[:-2]))


@dataclass(frozen=True, eq=False, repr=False)
class BlockTriangular(LogDeterminant):
    """Σ_i log|det(I + J_ii)|, for maps whose tokens see no later ones: exact in O(n d³), without series and
    variance.

    Examples:
        >>> from regard.maps import Affine
        >>> f = Affine(torch.full((1, 1), 0.5, dtype=torch.float64))
        >>> flow = regard.nn.Invertible(f, log_determinant=regard.nn.BlockTriangular())
        >>> round(float(flow(torch.zeros(3, 1, dtype=torch.float64))[1].exp()), 6)  # 1.5³
        3.375
    """

    def check(self, f: nn.Module) -> None:
        check_causal(declare.one(f))

    def of(self, f: Contraction, x: Tensor, constant: float) -> Measured:
        if isinstance(f.f, Declaring):
            value, blocks = diagonal_blocks.one(f.f.value(), x)
        else:
            value, blocks = f(x), opaque_blocks(f, x)
        identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        return Measured(value, torch.linalg.slogdet(identity + blocks)[1].sum(-1))


class Length(Object):
    """How many terms of a series are taken. Abstract."""

    @abstractmethod
    def draw(self, count: int, constant: float, generator: torch.Generator | None) -> list[int]:
        """The number of terms for each of `count` probes."""

    @abstractmethod
    def chance(self, term: int, constant: float) -> float:
        """The probability that this term is taken, 1, 2, …"""


@dataclass(frozen=True, eq=False, repr=False)
class Truncated(Length):
    """The first `terms`: the rest is at most n d L^{K+1}/((K + 1)(1 - L)), L in any norm.

    Examples:
        >>> rest = regard.nn.Truncated(terms=10).remainder(0.5, 12)
        >>> float(rest) >= 12 * 0.5**11 / (11 * 0.5)
        True
    """

    terms: int = 10

    def __post_init__(self) -> None:
        _whole("terms", self.terms)

    def draw(self, count: int, constant: float, generator: torch.Generator | None) -> list[int]:
        return [self.terms] * count

    def chance(self, term: int, constant: float) -> float:
        return 1.0 if term <= self.terms else 0.0

    def remainder(self, constant: float, size: int) -> float:
        """At most how far the terms that are left out add up; size = n d."""
        return float(series_remainder(Upper(constant), size, self.terms))


@dataclass(frozen=True, eq=False, repr=False)
class Roulette(Length):
    """The first `certain` terms, and each further one with this probability, over which it is divided: no
    bias (chen2019).

    probability=None is (1 + L²)/2, which keeps the variance finite whatever J is.

    Examples:
        >>> from regard.nn import Roulette, Series
        >>> Series(probes=8, length=Roulette(certain=2, probability=0.5)).length.certain
        2
    """

    certain: int = 4
    probability: float | None = None

    def __post_init__(self) -> None:
        _whole("certain", self.certain)
        if self.probability is not None and not 0 < self.probability < 1:
            raise ArgumentError("probability", f"is {self.probability!r}", "give a number between 0 and 1")

    def draw(self, count: int, constant: float, generator: torch.Generator | None) -> list[int]:
        uniform = torch.rand(count, generator=generator, dtype=torch.float64).clamp_min(1e-300)
        more = (uniform.log() / math.log(self._continue(constant))).floor()
        return [self.certain + int(extra) for extra in more.tolist()]

    def chance(self, term: int, constant: float) -> float:
        return self._continue(constant) ** max(0, term - self.certain)

    def _continue(self, constant: float) -> float:
        return (1 + constant**2) / 2 if self.probability is None else self.probability


@dataclass(frozen=True, eq=False, repr=False)
class Series(LogDeterminant):
    """Σ_k (-1)^{k+1} tr J^k / k with traces from random signs v, E vᵀJ^k v = tr J^k (behrmann2019; chen2019).

    control=True takes the series of J - J₀ and adds log det(I + J₀), J₀ = P ⊗ Mᵀ: what attention does while
    its weights stay as they are. Same mean, less variance; for a single head between affine maps.
    neumann=True takes gradients from E vᵀ(I + J)⁻¹ ∂J v, in the memory of one evaluation; control=True takes
    the chance out of these too.
    seed: the same signs each time, None: those of torch.

    Examples:
        >>> from regard.maps import Affine
        >>> from regard.nn import Invertible, Series, Truncated
        >>> f = Affine(torch.full((1, 1), 0.5, dtype=torch.float64))
        >>> flow = Invertible(f, log_determinant=Series(length=Truncated(30), seed=0))
        >>> round(float(flow(torch.zeros(2, 1, dtype=torch.float64))[1].exp()), 6)
        2.25
    """

    probes: int = 1
    length: Length = Roulette()
    control: bool = False
    neumann: bool = True
    seed: int | None = None

    def __post_init__(self) -> None:
        _whole("probes", self.probes)
        if not isinstance(self.length, Length):
            raise ArgumentError("length", f"is {self.length!r}", "give Roulette() or Truncated(terms)")

    def check(self, f: nn.Module) -> None:
        if self.control:
            declared = declare.one(f)
            kronecker.one(declared, torch.zeros(1, _width(declared), dtype=torch.float64))

    def of(self, f: Contraction, x: Tensor, constant: float) -> Measured:
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        signs = torch.randint(0, 2, (self.probes, *x.shape), generator=generator) * 2 - 1
        drawn = self.length.draw(self.probes, constant, generator)
        tensors = (x, *f.parameters(), *f.buffers())
        wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            many = at.expand(self.probes, *x.shape)
            value = f(many)
        terms = self._terms(drawn, constant, x)
        total = self._series(_pull(value, many), signs.to(x), terms, wanted)
        if self.control:
            total = total + self._controlled(f, x, signs, terms, wanted)
        error = None if self.probes == 1 else total.detach().std(0) / math.sqrt(self.probes)
        log_det, value = total.mean(0), value[0]
        return (
            Measured(value, log_det, error) if wanted else Measured(value.detach(), log_det.detach(), error)
        )

    def _terms(self, drawn: list[int], constant: float, x: Tensor) -> Tensor:
        """1/chance of each term, zero where it is not taken, (terms, probes)."""
        numbers = [
            [0.0 if k > last else 1 / self.length.chance(k, constant) for last in drawn]
            for k in range(1, max(drawn) + 1)
        ]
        return torch.tensor(numbers, dtype=x.dtype, device=x.device)

    def _controlled(self, f: Contraction, x: Tensor, signs: Tensor, terms: Tensor, wanted: bool) -> Tensor:
        """log det(I + J₀) - Σ_k (-1)^{k+1} c_k vᵀJ₀^k v / k, which is zero on average."""
        inner = x.dtype if isinstance(f.f, Declaring) else torch.float64
        with torch.set_grad_enabled(wanted):
            mapping = f.f.value() if isinstance(f.f, Declaring) else declare.one(f.f)
            rows, matrix = kronecker.one(mapping, x.to(inner))
            still = _kronecker_log_det(rows, matrix)

        def pull(u: Tensor, graph: bool) -> Tensor:
            with torch.set_grad_enabled(graph):
                return rows.mT @ u @ matrix.mT

        return (still - self._series(pull, signs.to(rows), terms.to(inner), wanted)).to(x.dtype)

    def _series(self, pull: Pull, v: Tensor, terms: Tensor, wanted: bool) -> Tensor:
        """Σ_k (-1)^{k+1} c_k vᵀJ^k v / k for each probe; gradients, where they are wanted, through every term
        or by Neumann's series.
        """
        through, u, resolvent = wanted and not self.neumann, v, torch.zeros_like(v)
        total = torch.zeros(v.shape[:-2], dtype=v.dtype, device=v.device)
        for k, weight in enumerate(terms, 1):
            weight = weight.reshape(-1, *[1] * (total.ndim - 1))
            resolvent = resolvent + (-1) ** (k - 1) * weight[..., None, None] * u.detach()
            u = pull(u, through)
            total = total + (-1) ** (k + 1) / k * weight * (u * v).sum((-2, -1))
        if not wanted or through:
            return total
        slope = (pull(resolvent, True) * v).sum((-2, -1))
        return total.detach() + slope - slope.detach()


Pull = Callable[[Tensor, bool], Tensor]
"""pull(u, graph) = Jᵀu, with gradients of J where graph is True."""


def _pull(value: Tensor, at: Tensor) -> Pull:
    """By the derivative of a value at a point; zero where it does not depend on it."""

    def pull(u: Tensor, graph: bool) -> Tensor:
        if not value.requires_grad:
            return torch.zeros_like(u)
        return torch.autograd.grad(value, at, u, retain_graph=True, create_graph=graph)[0]

    return pull


def _kronecker_log_det(rows: Tensor, matrix: Tensor) -> Tensor:
    """log|det(I + P ⊗ Mᵀ)| = Σ_ij log|1 + λ_i(P) λ_j(M)|, O(n³ + d³)."""
    first, second = torch.linalg.eigvals(rows), torch.linalg.eigvals(matrix)
    products = first.unsqueeze(-1) * second
    if not bool((products.detach().abs() < 1).all()):
        found = f"is True, and P ⊗ M has an eigenvalue of modulus {float(products.detach().abs().max()):.4g}"
        raise ArgumentError("control", found, "its series adds up below one; give control=False")
    return (1 + products).abs().log().sum((-2, -1))


def _width(map: Any) -> int:
    found = width(map)
    if found is None:
        raise ArgumentError(
            "control", "needs the width of a token", "give the map a projection, or control=False"
        )
    return found
