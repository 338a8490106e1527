"""Markov kernels: functions from points to laws,
with composition and their actions on measures and on functions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._object import Object
from regard.errors import ArgumentError
from regard.measure import GaussianMeasure, Measure
from regard.measure import follow as left_action

AnyLaw = Measure | GaussianMeasure


class Kernel(Object):
    """A kernel K(x, dy): for each point a law.

    `kernel(x)` gives the laws at the points x (..., m, d) as a Measure with batch shape (..., m);
    `first @ second` composes, `measure @ kernel` is the left action, `kernel.right(f)` the right action.

    Examples:
        >>> x = torch.randn(4, 2)
        >>> kernel = regard.Attention(regard.Dot()).kernel(x)
        >>> (regard.Measure(x) @ kernel).points.shape
        torch.Size([4, 2])
    """

    @abstractmethod
    def __call__(self, points: Tensor, marks: Tensor | None = None) -> AnyLaw:
        """The laws K(x, ·) at the points x."""

    def after(self, law: Measure) -> AnyLaw:
        """∫ law(dy) K(y, ·): every atom is replaced by its law; for a batch of laws, in each of them."""
        inner = self(law.points, law.marks)
        if not isinstance(inner, Measure):
            raise ArgumentError(
                "kernel", "has laws that are not finite sums of atoms", "end the composition with it instead"
            )
        log_weights = law.log_masses().unsqueeze(-1) + inner.log_masses()
        points = inner.points.expand(*log_weights.shape, -1)
        return Measure(points.flatten(-3, -2), log_weights.flatten(-2))

    def right(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """The right action (Kf)(x) = ∫ f(y) K(x, dy), a function of points again."""

        def integrate(points: Tensor) -> Tensor:
            law = self(points)
            if not isinstance(law, Measure):
                raise ArgumentError(
                    "kernel",
                    "has laws that are not finite sums of atoms",
                    "integrate against law.sample(...) instead",
                )
            return law.integrate(function)

        return integrate

    def __matmul__(self, second: Kernel) -> Kernel:
        return Composed(self, second) if isinstance(second, Kernel) else NotImplemented


@dataclass(frozen=True, eq=False, repr=False)
class Composed(Kernel):
    """(KL)(x, dz) = ∫ K(x, dy) L(y, dz).

    Examples:
        >>> attention = regard.Attention(regard.Dot(), regard.Linear(2 * torch.eye(1)))
        >>> looked = attention.softmatch(torch.ones(3, 1)) @ attention.lookup  # softmatch, then lookup
        >>> type(looked).__name__, looked(torch.zeros(1, 1)).points.flatten().tolist()
        ('Composed', [2.0, 2.0, 2.0])
    """

    first: Kernel
    second: Kernel

    def __call__(self, points: Tensor, marks: Tensor | None = None) -> AnyLaw:
        law = self.first(points, marks)
        if not isinstance(law, Measure):
            raise ArgumentError(
                "first",
                "has laws that are not finite sums of atoms",
                "use it as the last kernel of a composition",
            )
        if law.size == 1 and law.marks is None:  # a moved point keeps its position
            marks = torch.arange(points.shape[-2], device=points.device) if marks is None else marks
            law = Measure(law.points, law.log_weights, marks.unsqueeze(-1).expand(law.points.shape[:-1]))
        return self.second.after(law)


@left_action.rule(Kernel)
def _left_action(kernel: Kernel, measure: Measure) -> AnyLaw:
    """μK = ∫ μ(dx) K(x, ·); where each law is one atom the marks of the points stay with it."""
    laws = kernel(measure.points, measure.marks)
    if not isinstance(laws, Measure):
        return laws
    if laws.size == 1:
        return Measure(laws.points.squeeze(-2), measure.log_weights, measure.marks)
    log_weights = measure.log_masses().unsqueeze(-1) + laws.log_masses()
    points = laws.points.expand(*log_weights.shape, -1)
    marks = None if laws.marks is None else laws.marks.expand(log_weights.shape).flatten(-2)
    return Measure(points.flatten(-3, -2), log_weights.flatten(-2), marks)
