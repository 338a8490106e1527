"""heat: attention as diffusion on the graph of its tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import _check
from regard._object import Object
from regard._upper import Upper, sizes
from regard.attention import Attention
from regard.certificate import Certificate, Hypothesis
from regard.compute.application import problem_of
from regard.dynamics.closures import closure
from regard.dynamics.displacement import Displacement
from regard.errors import ArgumentError, RefusalError
from regard.measure import GaussianMeasure, Measure
from regard.normalizers import Softmax
from regard.norms import TokenMax
from regard.potentials import Gaussian

SUM = 1e-8
"""How far a row may be from a law: what rounding does, and an iteration that was stopped."""
FARTHEST = 2 * (1 - math.exp(-1))
"""No e^{-L} is farther from its P."""


@dataclass(frozen=True, eq=False, repr=False)
class Heat(Object):
    """The random walk P (n, n) of tokens, and the heat equation u' = -L u on their graph, L = 1 - P.

    P is one explicit Euler step of length one; the heat kernel is e^{-tL} = e^{-t} Σ_k t^k P^k / k!, the walk
    that steps at random times. They are not the same: ‖e^{-L} - P‖_∞ ≤ min(‖L‖²/2, 2(1 - 1/e)).

    Examples:
        >>> walk = regard.dynamics.Heat(torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64))
        >>> torch.allclose(walk.kernel(), torch.linalg.matrix_exp(-walk.laplacian))
        True
        >>> walk.found() <= walk.gap().value  # how far one step is from heat
        True
    """

    transition: Tensor

    def __post_init__(self) -> None:
        p = _check.floating("transition", self.transition)
        if p.ndim != 2 or p.shape[0] != p.shape[1] or not len(p):
            raise ArgumentError("transition", f"has shape {list(p.shape)}", "give a square matrix of laws")
        apart = (p.double().sum(-1) - 1).abs().amax()
        if not (bool((p >= 0).all()) and float(apart) <= SUM):
            raise ArgumentError("transition", "has rows that are not laws", "give rows that sum to one")

    @property
    def laplacian(self) -> Tensor:
        """L = 1 - P, of the random walk."""
        return torch.eye(len(self.transition), dtype=self.transition.dtype) - self.transition

    def step(self, u: Tensor, t: float = 1.0) -> Tensor:
        """One explicit Euler step u - t L u; attention itself for t = 1."""
        return u + t * (self.transition @ u - u)

    def kernel(self, t: float = 1.0) -> Tensor:
        """e^{-tL}: a sum of powers of P with positive weights, so that nothing cancels; rows are laws."""
        return self.flow(torch.eye(len(self.transition), dtype=self.transition.dtype), t)

    def flow(self, u: Tensor, t: float = 1.0) -> Tensor:
        """e^{-tL} u, in steps of at most one."""
        if isinstance(t, bool) or not isinstance(t, (int, float)) or not 0 <= t < math.inf:
            raise ArgumentError("t", f"is {t!r}", "give a time that is not negative")
        parts = max(1, math.ceil(t))
        for _ in range(parts):
            u = self._short(u, t / parts)
        return u

    def gap(self) -> Certificate:
        """At most ‖e^{-L} - P‖_∞, the largest sum of |differences| in a row: min(‖L²‖/2, 2(1 - 1/e)).

        e^{-L} - (1 - L) = ∫_0^1 (1-s) e^{-sL} L² ds with ‖e^{-sL}‖ = 1, and ‖L²‖ ≤ ‖L‖². The second: that
        difference is e^{-1} Σ_{k≠1} P^k/k! - (1 - e^{-1}) P, and P^k has norm one.
        """
        count = len(self.transition)
        p = self.transition.detach().double()
        laplacian = torch.eye(count, dtype=torch.float64) - p
        entries, norm = sizes(laplacian @ laplacian), sizes(laplacian).sum().amax()
        rounded = Upper(2.0**-52 * (2 * count + 4)) * norm * norm  # of L, and of its square
        first = (entries.sum().amax() + rounded).halved()
        value = min(float(first), FARTHEST) * (1 + 4 * SUM)
        held = (Hypothesis(f"rows are laws, up to {SUM:.0e}", True),)
        where = f"{count} tokens"
        return Certificate(value, where, TokenMax(), "one Euler step of heat", held, quantity="gap")

    def found(self) -> float:
        """‖e^{-L} - P‖_∞ itself, computed; an estimate beside `gap`."""
        return float((self.kernel() - self.transition).abs().sum(-1).amax())

    def _short(self, u: Tensor, t: float) -> Tensor:
        """e^{-t} Σ_k t^k P^k u / k! for t ≤ 1, until what is left is below rounding."""
        term, total, k = math.exp(-t) * u, math.exp(-t) * u, 0
        while t**k / math.factorial(k) > 1e-18:
            k += 1
            term = (t / k) * (self.transition @ term)
            total = total + term
        return total


def heat(attention: Attention, x: Measure | Tensor) -> Heat:
    """The random walk of attention among the tokens of one sequence, as diffusion.

    Examples:
        >>> attention, x = regard.Attention(regard.Gaussian()), torch.randn(6, 2, dtype=torch.float64)
        >>> torch.allclose(regard.dynamics.heat(attention, x).step(x), attention(x))
        True
    """
    if not isinstance(attention, Attention):
        raise ArgumentError("attention", f"is a {type(attention).__name__}", "give an Attention")
    if not attention.normalizer.laws:
        name = type(attention.normalizer).__name__
        raise RefusalError("heat", [f"rows of {name} are not laws, so there is no random walk."])
    problem = problem_of(attention, x, None).to(torch.float64)
    if problem.batch_shape:
        raise ArgumentError(
            "x", f"gives a batch {list(problem.batch_shape)}", "give one head and one sequence"
        )
    scores = problem.potential.pair(problem.queries, problem.keys)
    return Heat(problem.normalizer.weights(scores, problem.reference()).detach())


def score(attention: Attention, x: Measure | Tensor) -> Tensor:
    """(P x - x)/h² for Gaussian scores of bandwidth h, (n, d): with softmax it is ∇log of the density of the
    tokens, smoothed with that bandwidth, exactly; as h → 0 it tends to ∇log ρ, to half of it with Sinkhorn.

    Examples:
        >>> layer, x = regard.Attention(regard.Gaussian(bandwidth=0.5)), torch.randn(6, 2).double()
        >>> torch.allclose(regard.dynamics.score(layer, x), (layer(x) - x) / 0.5**2)
        True
    """
    points = x.points if isinstance(x, Measure) else x
    found = attention(x)
    moved = found.points if isinstance(found, Measure) else found
    return (moved - points) / _square(attention, points.shape[-1])


def score_slope(attention: Attention, law: GaussianMeasure) -> Tensor:
    """The matrix M (d, d) of the score M(x - m) where tokens have a Gaussian law N(m, S).

    On a line, with variance s: -1/(h² + s) for softmax, (k - 1)/h² with k = (√(1+4t²) - 1)/2t, t = s/h², for
    Sinkhorn: -1/s and -1/2s in the limit h → 0, and no other ratio than two there.

    Examples:
        >>> law = regard.dynamics.GaussianMeasure(torch.zeros(1), torch.eye(1))
        >>> layer = regard.Attention(regard.Gaussian(bandwidth=1.0))
        >>> float(regard.dynamics.score_slope(layer, law))  # -1/(1 + 1)
        -0.5
    """
    affine = closure(Displacement(attention), law).velocity(law)
    return affine.m / _square(attention, len(affine.m))


def _square(attention: Attention, width: int) -> float:
    """h², with the temperature of softmax in it."""
    potential = attention.potential if isinstance(attention, Attention) else None
    if not isinstance(potential, Gaussian) or any(
        w is not None for w in (potential.w_q, potential.w_k, potential.b_q, potential.b_k)
    ):
        raise RefusalError(
            "score", ["scores must be Gaussian in the points themselves: Gaussian(bandwidth=h)."]
        )
    normalizer = attention.normalizer
    temperature = float(normalizer.temperature) if isinstance(normalizer, Softmax) else 1.0
    return float(potential.bandwidth_at(width)) ** 2 * temperature
