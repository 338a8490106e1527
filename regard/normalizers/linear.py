"""Linear attention: exp(a) replaced by an inner product of positive features,
so that sums over keys are taken once.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard import _check
from regard._object import Object
from regard._refused import Refused
from regard._types import Features, Scalar
from regard.errors import ArgumentError
from regard.normalizers.base import Normalizer, Reference
from regard.normalizers.softmax import Softmax
from regard.parameters import number, parameter, part
from regard.potentials import Bilinear, Cosine, Dot, Gaussian, Potential
from regard.potentials.base import with_simple_parts
from regard.potentials.reductions import Reduction, reduce


class FeatureMap(Object):
    """φ with positive entries: the kernel is φ(q)·φ(k). Abstract.

    Examples:
        >>> features = regard.normalizers.Elu()
        >>> isinstance(features, regard.normalizers.FeatureMap)
        True
        >>> features.log_features(torch.zeros(2)).tolist()  # logarithms, because entries are positive
        [0.0, 0.0]
    """

    @abstractmethod
    def log_features(self, z: Tensor) -> Tensor:
        """log φ(z), (..., n, c) -> (..., n, r)."""


@dataclass(frozen=True, eq=False, repr=False)
class Elu(FeatureMap):
    """φ(z) = elu(z) + 1 (katharopoulos2020).

    Examples:
        >>> regard.normalizers.Elu().log_features(torch.tensor([0.0, 2.0])).exp().tolist()
        [1.0, 3.0]
    """

    def log_features(self, z: Tensor) -> Tensor:
        return torch.where(z > 0, z.clamp_min(0).log1p(), z)  # log(1 + z), and log exp(z)


@dataclass(frozen=True, eq=False, repr=False)
class PositiveRandom(FeatureMap):
    """φ(z) = r^{-1/2} exp(Ωz - |z|²/2): an unbiased positive estimate of exp(q·k) (choromanski2021,
    FAVOR+). omega (r, c).

    Examples:
        >>> features = regard.normalizers.PositiveRandom.draw(2, 4096, 0)
        >>> q, k = torch.tensor([0.5, 0.2]), torch.tensor([0.1, 0.4])
        >>> estimate = features.log_features(q).exp() @ features.log_features(k).exp()
        >>> bool((estimate - (q @ k).exp()).abs() < 0.05)
        True
    """

    omega: Tensor = parameter(rank=2)

    def __post_init__(self) -> None:
        _check.parameter("omega", self.omega, 2, "(r, c)")

    @staticmethod
    def draw(
        width: int, count: int, seed: int, dtype: torch.dtype = torch.float32, orthogonal: bool = True
    ) -> PositiveRandom:
        """`count` features for queries of this width: orthogonal in blocks, Gaussian lengths,
        the same for the same seed; independent Gaussian ones where they need not be orthogonal.
        """
        if width < 1 or count < 1:
            raise ArgumentError(
                "width and count",
                f"are {width} and {count}",
                "give the projected width and the number of features, both positive",
            )
        generator = torch.Generator().manual_seed(seed)
        if not orthogonal:
            drawn = torch.randn(count, width, generator=generator, dtype=torch.float64)
            return PositiveRandom(drawn.to(dtype))
        blocks = []
        for _ in range(math.ceil(count / width)):
            directions, triangle = torch.linalg.qr(
                torch.randn(width, width, generator=generator, dtype=torch.float64)
            )
            directions = (
                directions * torch.diagonal(triangle).sign()
            )  # without the signs the directions are not uniform, the estimate biased
            lengths = torch.randn(width, width, generator=generator, dtype=torch.float64).norm(
                dim=-1, keepdim=True
            )
            blocks.append(directions.mT * lengths)
        return PositiveRandom(torch.cat(blocks)[:count].to(dtype))

    def log_features(self, z: Tensor) -> Tensor:
        if z.shape[-1] != self.omega.shape[-1]:
            raise ArgumentError(
                "omega",
                f"has width {self.omega.shape[-1]} and the projected points {z.shape[-1]}",
                "draw it with the projected width",
            )
        norms = 0.5 * z.square().sum(-1, keepdim=True)
        return z @ self.omega.to(z.dtype).mT - norms - 0.5 * math.log(self.omega.shape[-2])


@dataclass(frozen=True, eq=False, repr=False)
class LinearKernel(Normalizer):
    """p_j ∝ c_j φ(q)·φ(k_j): softmax with the kernel exp(a) replaced by a feature kernel; O(n) where the
    support allows it.

    The potential must reduce to a dot product plus a key bias; its scale is shared evenly, φ(±√|scale|
    q)·φ(√|scale| k) e^{bias}.

    Examples:
        >>> from regard.normalizers import Elu
        >>> q, k, v = (torch.randn(1, 2, 64, 8) for _ in range(3))
        >>> regard.attend(q, k, v, normalizer=regard.LinearKernel(Elu())).shape  # O(n)
        torch.Size([1, 2, 64, 8])
    """

    feature_map: FeatureMap = part()
    laws: ClassVar[bool] = True
    variational: ClassVar[bool] = False

    def acting(self, potential: Potential) -> tuple[Potential, Normalizer]:
        return FeatureKernel(potential, self.feature_map), Softmax()

    def weights(self, scores: Tensor, reference: Reference) -> Tensor:
        raise TypeError("LinearKernel needs features, not scores; use acting(potential)")


@dataclass(frozen=True, eq=False, repr=False)
class _PlainGaussian(Potential):
    """A Gaussian that reduces about the origin.

    Its score does not depend on the origin, but φ(q)·φ(k) does: the data must not move it.
    """

    bandwidth: Scalar | None = number()
    positional: ClassVar[bool] = False

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        return x, y

    def pair(self, queries: Features, keys: Features) -> Tensor:
        return Gaussian(bandwidth=self.bandwidth).pair(queries, keys)


@reduce.rule(_PlainGaussian)
def _plain_gaussian(potential: _PlainGaussian, queries: Tensor, keys: Tensor, causal: bool) -> Reduction:
    inverse = 1 / Gaussian(bandwidth=potential.bandwidth).bandwidth_at(queries.shape[-1]) ** 2
    precision = inverse.unsqueeze(-1) if isinstance(inverse, Tensor) else inverse
    key_bias, row_bias = (-0.5 * precision * z.square().sum(-1) for z in (keys, queries))
    return Reduction(queries, keys, inverse, key_bias=key_bias, row_bias=lambda: row_bias)


def _at_origin(potential: Potential) -> Potential:
    """The same potential with the origin of its points where it is."""
    if isinstance(potential, Gaussian):
        return _PlainGaussian(potential.bandwidth)
    if isinstance(potential, (Dot, Bilinear, Cosine)):  # these have no parts
        return potential
    return with_simple_parts(
        potential, lambda part: _PlainGaussian(part.bandwidth) if isinstance(part, Gaussian) else part
    )


@dataclass(frozen=True, eq=False, repr=False)
class FeatureKernel(Potential):
    """a(x, y) = log φ(q)·φ(k) + key bias.

    Features: φ over its largest entry, and the log of that entry with the biases.

    Examples:
        >>> from regard.normalizers import Elu, FeatureKernel
        >>> x = torch.zeros(1, 3)
        >>> float(FeatureKernel(regard.Dot(scale=1.0), Elu()).scores(x, x).exp())  # φ(0)·φ(0)
        3.0
    """

    potential: Potential = part()
    feature_map: FeatureMap = part()
    positional: ClassVar[bool] = False

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        reduction = reduce.one(
            _at_origin(self.potential), *self.potential.projections(x, y, x_marks, y_marks), False
        )
        if isinstance(reduction, Refused) or reduction.residues:
            why = reduction.why if isinstance(reduction, Refused) else "it has a bias on pairs of positions."
            raise ArgumentError(
                "potential",
                f"cannot become a feature kernel: {why}",
                "use Dot, Bilinear, Gaussian, Cosine, Rotary of these, or sums",
            )
        return self._stable(reduction)

    def _stable(self, reduction: Reduction) -> tuple[Features, Features]:
        if reduction.queries.shape[-1] == 0:
            raise ArgumentError(
                "potential", "projects to width zero", "a feature kernel needs at least one coordinate"
            )
        kind = torch.promote_types(reduction.queries.dtype, torch.float32)
        reduction = reduction.replace(
            queries=reduction.queries.to(kind), keys=reduction.keys.to(kind)
        ).shared()
        log_q, log_k = (
            self.feature_map.log_features(reduction.queries),
            self.feature_map.log_features(reduction.keys),
        )
        top_q, top_k = log_q.detach().amax(-1, keepdim=True), log_k.detach().amax(-1, keepdim=True)
        bias_q = top_q if reduction.row_bias is None else top_q + reduction.row_bias().unsqueeze(-1)
        bias_k = top_k if reduction.key_bias is None else top_k + reduction.key_bias.unsqueeze(-1)
        return ((log_q - top_q).exp(), bias_q), ((log_k - top_k).exp(), bias_k)

    def pair(self, queries: Features, keys: Features) -> Tensor:
        return (queries[0] @ keys[0].mT).log() + queries[1] + keys[1].mT
