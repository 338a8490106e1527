"""feature_error: what positive random features get wrong, before they are drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._upper import Upper
from regard.attention import Attention, as_measure
from regard.certificate import Certificate
from regard.domains import Neighborhood
from regard.errors import ArgumentError
from regard.measure import Measure
from regard.normalizers import Softmax
from regard.norms import TokenMax
from regard.potentials import Dot
from regard.proofs.theorem import NO_THEOREM, Bound, assumed, checked
from regard.proofs.theorems import positive_features
from regard.supports import Full


@dataclass(frozen=True, eq=False, repr=False)
class FeatureError:
    """Of so many independent positive features. deviation (m, n): the relative standard deviation of each
    estimate of exp s. expected (m,): the root mean square error of each output, to first order: an estimate.
    certificate: at most how far any of the outputs is off, with its probability; ∞ where they are too few.

    Examples:
        >>> from regard.compression import feature_error
        >>> x = 0.3 * torch.randn(6, 2, dtype=torch.float64)
        >>> found = feature_error(regard.Attention(regard.Dot()), x, 10_000)
        >>> found.deviation.shape, found.certificate.probability
        (torch.Size([6, 6]), 0.95)
    """

    count: int
    deviation: Tensor
    expected: Tensor
    certificate: Certificate

    def __repr__(self) -> str:
        typical = float(self.expected.square().mean().sqrt())
        return f"FeatureError({self.count} features: outputs off by about {typical:.3g}; {self.certificate})"


def feature_error(
    attention: Attention,
    x: Tensor,
    count: int,
    *,
    context: Measure | Tensor | None = None,
    doubt: float = 0.05,
) -> FeatureError:
    """What attention by `count` features, PositiveRandom.draw(..., orthogonal=False), gets wrong, and all
    outputs together but for a probability of `doubt`. One head, dot-product scores.

    Examples:
        >>> from regard.compression import feature_error
        >>> x, layer = 0.3 * torch.randn(6, 2, dtype=torch.float64), regard.Attention(regard.Dot())
        >>> few, many = (feature_error(layer, x, count).expected.max() for count in (100, 10_000))
        >>> round(float(few / many), 6)  # errors fall like the root of the number
        10.0
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ArgumentError("count", f"is {count!r}", "give a number of features of at least one")
    if not 0 < doubt < 1:
        raise ArgumentError("doubt", f"is {doubt}", "give a probability between 0 and 1")
    keys = as_measure("context", x if context is None else context)
    dot = _checked(attention, x, keys)
    queries, projected = _scaled(dot, x.detach().double(), keys.points.detach().double())
    values = attention.lookup.values(keys.points.double(), keys.marks).detach()
    logs = queries @ projected.mT + keys.log_masses().double()
    spread, mass = positive_features.moments(queries, projected, logs, values)
    every = positive_features.bounds(spread, mass, count, doubt / len(x))
    joint = (queries.unsqueeze(1) + projected).square().sum(-1)
    return FeatureError(
        count,
        (torch.expm1(joint) / count).sqrt(),
        (spread.value / count).sqrt(),
        _certificate(every, _needed(mass, doubt / len(x)), x, doubt),
    )


def _certificate(bounds: Upper, needed: int, x: Tensor, doubt: float) -> Certificate:
    held = (checked("softmax rows of dot products"), assumed("features are independent Gaussian ones"))
    domain, what = Neighborhood(x.detach().double(), 0.0), "output error"
    if not math.isfinite(bounds.amax()):
        many = f"more than {needed} features are needed for so small a probability of failure"
        why = f"{positive_features.THEOREM.title}: {many}"
        return Certificate(math.inf, domain, TokenMax(), NO_THEOREM, refused=(why,), quantity=what)
    bound = Bound(bounds.amax(), held, probability=1 - doubt)
    return positive_features.THEOREM.certificate(bound, domain, TokenMax(), what)


def _needed(mass: Upper, doubt: float) -> int:
    """The largest number of features of which nothing is proved, that of the worst row."""
    low, high = 1, 2
    empty = Upper(torch.zeros_like(mass.value))
    while math.isinf(positive_features.bounds(empty, mass, high, doubt).amax()) and high < 2**60:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        few = math.isinf(positive_features.bounds(empty, mass, middle, doubt).amax())
        low, high = (middle, high) if few else (low, middle)
    return low


def _checked(attention: Attention, x: object, keys: Measure) -> Dot:
    potential = attention.potential
    plain = isinstance(potential, Dot) and isinstance(attention.support, Full)
    if not plain or not isinstance(attention.normalizer, Softmax) or attention.normalizer.temperature != 1.0:
        raise ArgumentError("attention", f"is {attention!r}", "give Dot scores, Softmax() and no mask")
    assert isinstance(potential, Dot)
    if (potential.w_q is not None and potential.w_q.ndim > 2) or keys.batch_shape:
        raise ArgumentError("attention", "has heads or a batch", "ask for one head at a time")
    if not isinstance(x, Tensor) or x.ndim != 2:
        raise ArgumentError("x", "is not a sequence (m, d)", "give one sequence of tokens")
    return potential


def _scaled(dot: Dot, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys that share the scale evenly, as LinearKernel has them."""
    sides = ((x, dot.w_q, dot.b_q), (y, dot.w_k, dot.b_k))
    q, k = (_projected(points, w, b) for points, w, b in sides)
    scale = float(dot.factor(q.shape[-1]))
    root = math.sqrt(abs(scale))
    return math.copysign(root, scale) * q, root * k


def _projected(points: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    found = points if w is None else points @ w.detach().double()
    return found if b is None else found + b.detach().double()
