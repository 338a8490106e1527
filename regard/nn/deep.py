"""Infinitely deep networks: the fixed point of one layer that sees its input at every depth (bai2019)."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from regard.certificate import Certificate
from regard.costs.account import Cost
from regard.costs.costing import assess
from regard.costs.sizes import Sizes
from regard.domains import Ball, Domain, Whole
from regard.errors import ArgumentError
from regard.fixed_point import FixedPoint
from regard.nn.contraction import Contraction, check_sequence, into_domain
from regard.nn.fixed_points import (
    Acceleration,
    Anderson,
    Solution,
    below_rounding,
    check_tolerance,
    evaluations_needed,
    rounding_error,
    solve,
)
from regard.nn.implicit import Equation, attach, differentiable
from regard.norms import SequenceNorm, TokenMax
from regard.proofs.agreement import slack
from regard.proofs.certification import declare
from regard.proofs.imaging import image
from regard.proofs.intact import refuse_altered


class ForgettingWarning(UserWarning):
    """A fixed point without injected input is the same for every input.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as heard:
        ...     warnings.simplefilter("always")
        ...     deep = regard.nn.Deep(regard.maps.Affine(0.5 * torch.eye(1)), 1e-4, injected=False)
        >>> heard[0].category is regard.nn.ForgettingWarning
        True
    """


class Deep(nn.Module):
    """u ↦ z with z = f(z) + u: the layer f, infinitely often, each time with the input added.

    f: a module or a map that certify knows, with a constant L < 1 in the norm on the domain; where it is not,
    construction fails and says what would repair it. The result is within `tolerance` of the fixed point, by
    |z - z*| ≤ L/(1 - L) |z - z₋|. Gradients are implicit: memory does not grow with the number of iterations;
    they are within `tolerance`, relative to the gradient that comes in, in the dual norm. Second derivatives
    are there too.
    injected=False drops u: f has one fixed point, whatever the input was, and a warning says so.

    Examples:
        >>> from regard.maps import Affine
        >>> deep = regard.nn.Deep(Affine(0.5 * torch.eye(1, dtype=torch.float64)))
        >>> u = torch.ones(1, 1, dtype=torch.float64)
        >>> round(float(deep(u)), 6), deep.certificate().value <= 0.500001  # z = z/2 + 1
        (2.0, True)
    """

    def __init__(
        self,
        f: Any,
        tolerance: float = 1e-8,
        accelerate: Acceleration = Anderson(5),
        *,
        norm: SequenceNorm = TokenMax(),
        domain: Domain = Whole(),
        injected: bool = True,
    ) -> None:
        super().__init__()
        check_tolerance(tolerance)
        if not isinstance(accelerate, Acceleration):
            raise ArgumentError("accelerate", f"is {accelerate!r}", "give Picard() or Anderson(memory)")
        self.contraction = Contraction(f, norm, domain, "a fixed point is certain where it is below one")
        self.tolerance, self.accelerate, self.injected = tolerance, accelerate, injected
        if not injected:
            message = (
                "without injected input a contraction has one fixed point, whatever it starts from: this "
                "network forgets its input; leave injected=True"
            )
            warnings.warn(message, ForgettingWarning, stacklevel=2)

    def forward(self, u: Tensor) -> Tensor:
        """The fixed point for injected tokens (..., n, d), with gradients for u and the parameters of f."""
        found = self.solve(u).value
        contraction = self.contraction
        names, tensors = differentiable(contraction.f)
        equation = Equation(
            contraction.f, 1.0, names, contraction.constant, contraction.norm, self.tolerance, self.accelerate
        )
        return attach(equation, found, u if self.injected else torch.zeros_like(u), tensors)

    def solve(self, u: Tensor) -> Solution:
        """The fixed point without gradients, with its error and how often f was taken."""
        contraction = self.contraction
        check_sequence("u", u, contraction.domain)
        constant = contraction.constant
        start = u.detach()
        added = start if self.injected else torch.zeros_like(start)
        self._check_ball(added)
        with torch.no_grad():
            return solve(
                lambda z: contraction(z) + added,
                into_domain(contraction.domain, start),
                constant=constant,
                norm=contraction.norm,
                tolerance=self.tolerance,
                acceleration=self.accelerate,
                inside=lambda z: into_domain(contraction.domain, z),
            )

    def iterations(self, u: Tensor, tolerance: float | None = None) -> int:
        """How many plain iterations are enough, before they are run: from L and one evaluation of f."""
        tolerance = self.tolerance if tolerance is None else tolerance
        check_tolerance(tolerance)
        contraction = self.contraction
        check_sequence("u", u, contraction.domain)
        with torch.no_grad():
            added = u if self.injected else torch.zeros_like(u)
            start = into_domain(contraction.domain, u)
            step = contraction(start) + added - start
        least = 2 * rounding_error(contraction.norm, contraction.constant, u)
        if tolerance < least:
            raise below_rounding(tolerance, least, u.dtype)
        return evaluations_needed(contraction.constant, float(contraction.norm.of(step).max()), tolerance)

    def certificate(self) -> Certificate:
        """The proof that f is a contraction, for the weights as they are."""
        return self.contraction.certificate()

    def keep(self) -> Certificate:
        """The same: an error where there is none."""
        return self.certificate()

    def declare(self) -> FixedPoint:
        """u ↦ z as a map in float64, cut off from the parameters, with as many steps as bring tokens within
        1e-12 of where they end, relative to the first step.
        """
        if not self.injected:
            raise ArgumentError(
                "injected", "is False", "a fixed point without input is not a map; inject the input"
            )
        steps = evaluations_needed(self.contraction.constant, 1.0, 1e-12)
        return FixedPoint(declare.one(self.contraction.f), steps)

    def _check_ball(self, added: Tensor) -> None:
        """On a ball, f + u has to stay in it."""
        domain = self.contraction.domain
        if not isinstance(domain, Ball):
            return
        found = image(declare.one(self.contraction.f), domain)  # `contraction` has compared it with f
        if not isinstance(found, Ball):
            raise ArgumentError(
                "domain", "is not mapped into itself by f", "put IntoBall(radius) first and use Whole()"
            )
        center = torch.zeros_like(added[..., :1, :]) if found.center is None else found.center.to(added)
        if domain.center is not None:
            center = center - domain.center.to(added)
        reach = float(torch.linalg.vector_norm(center + added, dim=-1).max()) + found.radius
        if reach > domain.radius:
            remedy = f"give tokens up to about {max(0.0, domain.radius - found.radius):.4g}, or a larger ball"
            raise ArgumentError("u", f"takes f(z) + u to {reach:.4g}, out of {domain!r}", remedy)

    def extra_repr(self) -> str:
        return f"tolerance={self.tolerance:g}, accelerate={self.accelerate!r}"


@declare.rule(Deep)
def _deep(module: Deep) -> FixedPoint:
    refuse_altered(module, Deep)
    refuse_altered(module.contraction, Contraction)
    return module.declare()


@slack.rule(Deep)
def _slack(module: Deep) -> float:
    return module.tolerance


@assess.rule(Deep)
def _assess(module: Deep, sizes: Sizes, inputs: Any) -> Cost:
    """That of as many steps of f as are enough for the tolerance after a first step of length one."""
    steps = evaluations_needed(module.contraction.constant, 1.0, module.tolerance)
    made: Cost = assess.one(module.declare().replace(steps=steps), sizes, inputs)
    return made
