"""Invertible residual layers: x + f(x) with a proof that f contracts (behrmann2019).

A residual that converged proves nothing: the published invertible attention (zha2021) divides weights by
norms that are no constants of dot-product attention, and its inverse finds other preimages with residuals of
1e-16. Here construction fails where the constant is not below one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.certificate import Certificate
from regard.costs.account import Cost
from regard.costs.costing import assess
from regard.costs.sizes import Sizes
from regard.domains import Domain, Whole
from regard.errors import ArgumentError, RegardError
from regard.maps import Residual
from regard.nn.contraction import Contraction, check_sequence, into_domain
from regard.nn.digits import blank
from regard.nn.fixed_points import (
    Acceleration,
    Picard,
    Solution,
    below_rounding,
    check_tolerance,
    evaluations_needed,
    rounding_error,
    solve,
)
from regard.nn.implicit import Equation, attach, differentiable
from regard.nn.log_determinant import Dense, LogDeterminant, Measured
from regard.norms import SequenceNorm, TokenMax
from regard.proofs.certification import declare
from regard.proofs.intact import refuse_altered


class OutsideImageError(RegardError, ValueError):
    """A point has no preimage in the domain: it is proved by the residual of the projected iteration.

    residual: |y - x - f(x)| at the point x that comes closest, for each sequence of the batch. outside: which
    of them have no preimage.

    Examples:
        >>> half = regard.Attention(regard.Dot(scale=0.1), regard.Linear(0.5 * torch.eye(2).double()))
        >>> flow = regard.nn.Invertible(half, domain=regard.Ball(1.0))
        >>> try:
        ...     flow.inverse(torch.full((3, 2), 9.0).double())
        ... except regard.nn.OutsideImageError as error:
        ...     print(bool(error.outside), bool(error.residual > 1))
        True True
    """

    def __init__(self, residual: Tensor, outside: Tensor, domain: Domain) -> None:
        self.residual, self.outside = residual, outside
        count, largest = int(outside.sum()), float(residual.max())
        super().__init__(
            f"y: {count} of {outside.numel()} sequences are not x + f(x) for any x in {domain!r} (residual "
            f"{largest:.3g}); give points of the image, or a larger ball"
        )


class Invertible(nn.Module):
    """x ↦ x + f(x), with log|det| of its Jacobian, and its inverse.

    f: a module or a map that certify knows, with a constant L < 1 in the norm on the domain, or construction
    fails and names the scale that would do. On Whole() this is a bijection of all sequences; on a Ball it is
    injective, and points outside the image are reported. The proof is redone when weights change.

    Examples:
        >>> from regard.maps import Affine
        >>> flow = regard.nn.Invertible(Affine(0.5 * torch.eye(2, dtype=torch.float64)))
        >>> x = torch.randn(3, 2, dtype=torch.float64)
        >>> y, log_det = flow(x)
        >>> torch.allclose(flow.inverse(y), x, atol=1e-5), round(float(log_det.exp()), 4)  # 1.5⁶
        (True, 11.3906)
    """

    def __init__(
        self,
        f: Any,
        norm: SequenceNorm = TokenMax(),
        *,
        domain: Domain = Whole(),
        log_determinant: LogDeterminant = Dense(),
        accelerate: Acceleration = Picard(),
    ) -> None:
        super().__init__()
        if not isinstance(log_determinant, LogDeterminant):
            remedy = "give Dense(), BlockTriangular() or Series(probes)"
            raise ArgumentError("log_determinant", f"is {log_determinant!r}", remedy)
        if not isinstance(accelerate, Acceleration):
            raise ArgumentError("accelerate", f"is {accelerate!r}", "give Picard() or Anderson(memory)")
        self.contraction = Contraction(f, norm, domain, "x + f(x) is surely invertible where it is below one")
        self.log_determinant, self.accelerate = log_determinant, accelerate
        if not blank(self):
            log_determinant.check(self.contraction.f)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(x + f(x), log|det(I + J)|) for tokens (..., n, d): one number for each sequence."""
        self._check_inside(x)
        measured = self.log_determinant.of(self.contraction, x, self.contraction.constant)
        return x + measured.value, measured.log_det

    def measure(self, x: Tensor) -> Measured:
        """f(x), and the log-determinant with its standard error where it is estimated."""
        self._check_inside(x)
        return self.log_determinant.of(self.contraction, x, self.contraction.constant)

    def inverse(self, y: Tensor, tolerance: float = 1e-6) -> Tensor:
        """x with x + f(x) = y, to within the tolerance in the norm; a y without an x in the domain is an
        OutsideImageError. Gradients are implicit.
        """
        found = self.solve(y, tolerance).value
        contraction = self.contraction
        names, tensors = differentiable(contraction.f)
        close = min(tolerance, 1e-8)
        equation = Equation(
            contraction.f, -1.0, names, contraction.constant, contraction.norm, close, self.accelerate
        )
        return attach(equation, found, y, tensors)

    def solve(self, y: Tensor, tolerance: float = 1e-6) -> Solution:
        """The inverse without gradients, with its error and how often f was taken: x ← Π(y - f(x)), Π the
        projection on the domain, until L/(1 - L) times the last step is below the tolerance.

        Every x of the domain with x + f(x) = y is a fixed point of this, and there is only one.
        """
        contraction = self.contraction
        check_sequence("y", y, contraction.domain)
        constant, domain = contraction.constant, contraction.domain
        y = y.detach()
        with torch.no_grad():
            found = solve(
                lambda x: into_domain(domain, y - contraction(x)),
                into_domain(domain, y),
                constant=constant,
                norm=contraction.norm,
                tolerance=tolerance,
                acceleration=self.accelerate,
                inside=lambda x: into_domain(domain, x),
            )
            if isinstance(domain, Whole):
                return found
            residual = contraction.norm.of(y - found.value - contraction(found.value))
        outside = residual > (1 + constant) * found.error  # which has room for rounding
        if bool(outside.any()):
            raise OutsideImageError(residual, outside, domain)
        return found

    def iterations(self, y: Tensor, tolerance: float = 1e-6) -> int:
        """How many iterations are enough, before they are run: L^k/(1 - L) times the first step is below the
        tolerance. It takes f once; the stop rule of `inverse` needs far fewer.
        """
        check_tolerance(tolerance)
        contraction = self.contraction
        check_sequence("y", y, contraction.domain)
        with torch.no_grad():
            start = into_domain(contraction.domain, y)
            first = contraction.norm.of(into_domain(contraction.domain, y - contraction(start)) - start)
        least = 2 * rounding_error(contraction.norm, contraction.constant, y)
        if tolerance < least:
            raise below_rounding(tolerance, least, y.dtype)
        return evaluations_needed(contraction.constant, float(first.max()), tolerance)

    def certificate(self) -> Certificate:
        """The proof that f is a contraction, for the weights as they are."""
        return self.contraction.certificate()

    def keep(self) -> Certificate:
        """The proof, and that the log-determinant is one for this f; an error where there is none."""
        self.log_determinant.check(self.contraction.f)
        return self.certificate()

    def declare(self) -> Residual:
        """x + f(x) as a map in float64, cut off from the parameters."""
        return Residual(declare.one(self.contraction.f))

    def _check_inside(self, x: Tensor) -> None:
        domain = self.contraction.domain
        check_sequence("x", x, domain)
        if isinstance(domain, Whole):
            return
        outside = self.contraction.norm.of(x.detach() - into_domain(domain, x.detach()))
        if bool((outside > 8 * torch.finfo(x.dtype).eps * (1 + x.detach().abs().max())).any()):
            found = f"has tokens {float(outside.max()):.3g} outside {domain!r}"
            raise ArgumentError("x", found, "give tokens inside, where the constant is proved")


@declare.rule(Invertible)
def _invertible(module: Invertible) -> Residual:
    refuse_altered(module, Invertible)
    refuse_altered(module.contraction, Contraction)
    return module.declare()


@assess.rule(Invertible)
def _assess(module: Invertible, sizes: Sizes, inputs: Any) -> Cost:
    """That of x + f(x); a product with J takes about as much again, and a determinant is by its table."""
    made: Cost = assess.one(module.declare(), sizes, inputs)
    return made
