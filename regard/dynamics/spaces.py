"""Spaces: where particles live while they flow."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from regard import _check
from regard._object import Object
from regard._types import Scalar
from regard.errors import ArgumentError

HUGE = 1e15
"""The squares of what is smaller are numbers in every dtype but the half ones."""
Drift: TypeAlias = Callable[[Tensor], Tensor]
"""The map of a flow: points (..., n, d) -> velocities of the same shape."""


class Space(Object):
    """Where particles live while they flow. Abstract.

    Examples:
        >>> from regard.dynamics import Euclidean, Euler, Rescaled, Space, Sphere
        >>> all(isinstance(one, Space) for one in (Euclidean(), Rescaled(1.0), Sphere()))
        True
    """

    @abstractmethod
    def enter(self, x: Tensor) -> Tensor:
        """The points at time 0, checked."""

    @abstractmethod
    def velocity(self, drift: Drift, t: float, z: Tensor) -> Tensor:
        """The velocity of the points z of the space at time t."""

    @abstractmethod
    def retract(self, z: Tensor) -> Tensor:
        """The point of the space that stands for a point beside it."""

    @abstractmethod
    def spread(self, t: float, z: Tensor, noise: Tensor) -> Tensor:
        """What a displacement of the points of the map is in this space."""


@dataclass(frozen=True, eq=False, repr=False)
class Euclidean(Space):
    """R^d: x' = map(x).

    Examples:
        >>> from regard.dynamics import Euclidean, Euler
        >>> attention, x = regard.Attention(regard.Dot()), torch.randn(3, 2)
        >>> end = regard.flow(attention, x, Euler(0.5), 0.5, space=Euclidean()).at(0.5)
        >>> torch.allclose(end, x + 0.5 * attention(x))
        True
    """

    def enter(self, x: Tensor) -> Tensor:
        return x

    def velocity(self, drift: Drift, t: float, z: Tensor) -> Tensor:
        return drift(z)

    def retract(self, z: Tensor) -> Tensor:
        return z

    def spread(self, t: float, z: Tensor, noise: Tensor) -> Tensor:
        return noise


@dataclass(frozen=True, eq=False, repr=False)
class Sphere(Space):
    """|x_i| = 1: x' = map(x) - ⟨x, map(x)⟩ x for each token (geshkovski2023, SA and USA).

    Every stage is evaluated at its point on the sphere and every step ends there, which keeps the order.

    Examples:
        >>> from regard.dynamics import RungeKutta, Sphere
        >>> x = torch.nn.functional.normalize(torch.randn(5, 3), dim=-1)
        >>> path = regard.flow(regard.Attention(regard.Dot()), x, RungeKutta(0.5), 2.0, space=Sphere())
        >>> torch.allclose(path.at(2.0).norm(dim=-1), torch.ones(5))
        True
    """

    def enter(self, x: Tensor) -> Tensor:
        lengths = torch.linalg.vector_norm(x, dim=-1)
        if _check.holds(((lengths - 1).abs() > 1e-5).any()):
            worst = float(lengths.flatten()[(lengths - 1).abs().argmax()])
            raise ArgumentError(
                "x",
                f"has a token of length {worst:.6g}, which is not on the sphere",
                "give x / x.norm(dim=-1, keepdim=True)",
            )
        return self.retract(x)

    def velocity(self, drift: Drift, t: float, z: Tensor) -> Tensor:
        return self.spread(t, z := self.retract(z), drift(z))

    def retract(self, z: Tensor) -> Tensor:
        """z/|z|; what is on the sphere up to rounding stays to the last bit, and squares do not overflow."""
        largest = z.detach().abs().amax(-1, keepdim=True)
        z = z / torch.where(largest > HUGE, largest, torch.ones_like(largest))
        lengths = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
        unit = z / lengths
        near = (lengths - 1).abs() <= 8 * torch.finfo(z.dtype).eps
        return torch.where(near, unit + (z - unit).detach(), unit)  # the value of z, the derivative of z/|z|

    def spread(self, t: float, z: Tensor, noise: Tensor) -> Tensor:
        along = (z * noise).sum(-1, keepdim=True) / z.square().sum(-1, keepdim=True)
        return noise - along * z


@dataclass(frozen=True, eq=False, repr=False)
class Rescaled(Space):
    """z = e^{-tV} x: z' = e^{-tV} map(e^{tV} z) - V z (geshkovski2023emergence).

    v: the number or the matrix (d, d) V, which acts on points as columns: w_vᵀ for the lookup Linear(w_v).
    For V = 1 and laws as weights the convex hull of the z_i never grows.

    Examples:
        >>> from regard.dynamics import Euler, Rescaled
        >>> layer, x = regard.Attention(regard.Dot()), torch.tensor([[-1.0], [2.0]])
        >>> end = regard.flow(layer, x, Euler(0.5), 3.0, space=Rescaled(1.0)).at(3.0)
        >>> bool(end.min() >= -1 and end.max() <= 2)  # the convex hull does not grow
        True
    """

    v: Scalar

    def __post_init__(self) -> None:
        _check.number("v", self.v)
        if isinstance(self.v, Tensor) and self.v.ndim not in (0, 2):
            raise ArgumentError("v", f"has shape {list(self.v.shape)}", "give a number or a matrix (d, d)")

    def enter(self, x: Tensor) -> Tensor:
        if isinstance(self.v, Tensor) and self.v.ndim and self.v.shape != (x.shape[-1],) * 2:
            raise ArgumentError(
                "v",
                f"has shape {list(self.v.shape)} and the points have width {x.shape[-1]}",
                "give a matrix (d, d)",
            )
        return x

    def velocity(self, drift: Drift, t: float, z: Tensor) -> Tensor:
        inner = self._times(self._exponential(-t, z), drift(self.leave(t, z)))
        return inner - self._times(self.v, z)

    def leave(self, t: float, z: Tensor) -> Tensor:
        """x = e^{tV} z."""
        return self._times(self._exponential(t, z), z)

    def retract(self, z: Tensor) -> Tensor:
        return z

    def spread(self, t: float, z: Tensor, noise: Tensor) -> Tensor:
        return self._times(self._exponential(-t, z), noise)

    def _exponential(self, t: float, like: Tensor) -> Scalar:
        if isinstance(self.v, Tensor) and self.v.ndim:
            return torch.linalg.matrix_exp(t * self.v.to(like))
        return torch.as_tensor(t * self.v, dtype=like.dtype, device=like.device).exp()

    @staticmethod
    def _times(matrix: Scalar, z: Tensor) -> Tensor:
        if isinstance(matrix, Tensor) and matrix.ndim:
            return z @ matrix.to(z).mT
        return matrix * z
