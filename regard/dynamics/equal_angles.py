"""equiangular: tokens on the sphere with one common cosine, of which one number tells all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._object import Object
from regard.attention import Attention
from regard.dynamics.integration import integrate
from regard.errors import ArgumentError, RefusalError
from regard.lookups import Identity
from regard.moments import Mean
from regard.normalizers import Exponential, Softmax
from regard.potentials import Dot
from regard.supports import Full


@dataclass(frozen=True, eq=False, repr=False)
class Equiangular(Object):
    """ρ' = 2 e^{βρ} (1-ρ)((n-1)ρ+1) / (e^β + (n-1)e^{βρ}) with softmax, and with 1/n for the fraction's
    denominator without it: n tokens with ⟨x_i, x_j⟩ = ρ keep one common ρ (geshkovski2023).

    It is solved for 1 - ρ, which keeps its digits as tokens meet: 1 - ρ falls like e^{-2t}, or e^{-2e^β t}.

    Examples:
        >>> meeting = regard.dynamics.equiangular(regard.Attention(regard.Dot(scale=1.0)), n=5, rho=0.2)
        >>> 0.2 < meeting.at(1.0) < meeting.at(2.0) < 1
        True
    """

    beta: float
    n: int
    rho: float
    laws: bool

    def rate(self, rho: float) -> float:
        """ρ'."""
        return -float(self._falling(torch.tensor([1 - rho], dtype=torch.float64)))

    def at(self, t: float) -> float:
        """ρ(t)."""
        return 1 - self.gap(t)

    def gap(self, t: float) -> float:
        """1 - ρ(t)."""
        if not (isinstance(t, (int, float)) and math.isfinite(t) and t >= 0):
            raise ArgumentError("t", f"is {t!r}", "give a time that is not negative")
        begin = math.log1p(-self.rho)
        log_gap = torch.tensor([begin], dtype=torch.float64)
        if t == 0:
            return math.exp(begin)
        return float(integrate(lambda _, y: self._falling(y.exp()) / y.exp(), log_gap, float(t)).exp())

    def _falling(self, gap: Tensor) -> Tensor:
        """(1-ρ)' as a function of 1 - ρ."""
        if self.laws:
            return _falling(self.beta, self.n, gap)
        decay = (-self.beta * gap).exp()
        return -2 * decay * gap * (self.n - (self.n - 1) * gap) * math.exp(self.beta) / self.n


def equiangular_gaps(beta: Tensor, n: int, rho: Tensor, t: float) -> Tensor:
    """1 - ρ(t) of `equiangular` with softmax, for many β and ρ at once."""
    beta, begin = torch.broadcast_tensors(beta.double(), (1 - rho.double()).log())
    return integrate(lambda _, y: _falling(beta, n, y.exp()) / y.exp(), begin.clone(), float(t)).exp()


def _falling(beta: float | Tensor, n: int, gap: Tensor) -> Tensor:
    """(1-ρ)' of softmax attention as a function of 1 - ρ."""
    decay = (-beta * gap).exp()
    return -2 * decay * gap * (n - (n - 1) * gap) / (1 + (n - 1) * decay)


def equiangular(attention: Attention, n: int, rho: float) -> Equiangular:
    """The equation of n tokens on the sphere with one common cosine rho, for dot products of the points
    themselves with softmax (SA) or exponential weights (USA).

    Examples:
        >>> import math
        >>> late = regard.dynamics.equiangular(regard.Attention(regard.Dot(scale=1.0)), n=5, rho=0.2)
        >>> round(math.log(late.gap(9.0) / late.gap(10.0)), 3)  # 1 - ρ falls like e^(-2t)
        2.0
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 2:
        raise ArgumentError("n", f"is {n!r}", "give a number of tokens of at least two")
    if not (isinstance(rho, (int, float)) and -1 / (n - 1) <= rho < 1):
        found = f"is {rho!r}"
        raise ArgumentError("rho", found, f"{n} unit vectors have a common cosine in [{-1 / (n - 1):.4g}, 1)")
    reasons = _refusals(attention)
    if reasons:
        raise RefusalError("equiangular", reasons)
    beta = attention.potential.scale  # type: ignore[attr-defined]
    softmax = isinstance(attention.normalizer, Softmax)
    if isinstance(attention.normalizer, Softmax):
        beta = beta / attention.normalizer.temperature
    return Equiangular(float(beta), n, float(rho), softmax)


def _refusals(attention: Attention) -> list[str]:
    if not isinstance(attention, Attention):
        raise ArgumentError("attention", f"is a {type(attention).__name__}", "give an Attention")
    potential, normalizer = attention.potential, attention.normalizer
    reasons = []
    if not isinstance(potential, Dot) or any(
        w is not None for w in (potential.w_q, potential.w_k, potential.b_q, potential.b_k)
    ):
        reasons.append("scores must be dot products of the points themselves: Dot(scale=beta).")
    elif not isinstance(potential.scale, (int, float)):
        reasons.append("the scale must be a number: Dot(scale=beta).")
    if not (isinstance(normalizer, Softmax) and isinstance(normalizer.temperature, (int, float))) and not (
        isinstance(normalizer, Exponential) and normalizer.bias is None
    ):
        reasons.append("the normalizer must be Softmax() or Exponential().")
    if not isinstance(attention.lookup, Identity) or not isinstance(attention.moment, Mean):
        reasons.append("values must be the points, and the moment their mean.")
    if not isinstance(attention.support, Full):
        reasons.append("every token must see every token.")
    return reasons
