"""Contractions: a map whose constant is proved to be below one, from the weights as they are now."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from regard._enclosed import product_norm
from regard._upper import product
from regard.attention import Attention
from regard.certificate import Certificate, round_up
from regard.domains import Ball, Domain, Whole
from regard.errors import ArgumentError
from regard.maps import Affine, Compose, Heads, Map
from regard.nn.declaration import exact
from regard.nn.declared import Declared
from regard.nn.digits import blank
from regard.nonexpansive import IntoBall
from regard.norms import Frobenius, Norm, OwnToken, SequenceNorm, TokenMax, TokenSum
from regard.proofs.certification import certify, declare
from regard.proofs.setting import width_of
from regard.proofs.subject import subject_of
from regard.proofs.theorem import Refusal


class Contraction(nn.Module):
    """f with the proof that |f(x) - f(x')| ≤ L |x - x'|, L < 1, in a norm on a domain.

    f: a module or a map that certify knows. The proof is made on construction and again whenever the weights
    have changed since, so that no training step makes it stale.
    """

    def __init__(self, f: Any, norm: SequenceNorm, domain: Domain, why: str) -> None:
        super().__init__()
        check_norm(norm)
        check_domain(domain)
        if not isinstance(f, (nn.Module, Map, Attention)):
            remedy = "give a module of torch or a map that certify knows"
            raise ArgumentError("f", f"is a {type(f).__name__}", remedy)
        self.f: nn.Module = f if isinstance(f, nn.Module) else Declared(f)
        self.norm, self.domain, self._why = norm, domain, why
        self._seen: tuple[Any, Certificate] | None = None
        if not blank(self):
            self.certificate()

    def forward(self, x: Tensor) -> Tensor:
        """f(x)."""
        value: Tensor = self.f(x)
        if value.shape != x.shape:
            found = f"takes {list(x.shape)} to {list(value.shape)}"
            raise ArgumentError("f", found, "give a map that keeps the shape of a sequence")
        return value

    def certificate(self) -> Certificate:
        """The proof that L < 1 for the weights as they are, or an error with what would repair it."""
        declared = _declared(self.f)
        if self._seen is None or declared is None or self._seen[0] != declared:
            found = certify(self.f, self.domain, self.norm)
            if not found.value < 1:
                raise _too_large(self.f, found, self._why)
            self._seen = declared, found
        return self._seen[1]

    @property
    def constant(self) -> float:
        """L."""
        return self.certificate().value

    def extra_repr(self) -> str:
        return f"{self.norm!r}, {self.domain!r}"


def _declared(f: nn.Module) -> Any:
    """What a proof is about: the map, with copies of its numbers; None where it cannot be declared."""
    try:
        return exact(declare.one(f))
    except Refusal:
        return None


def check_norm(norm: Any) -> None:
    """A norm whose dual is known."""
    if isinstance(norm, OwnToken):
        found = "is OwnToken(), which makes a causal x + f(x) a bijection and gives its inverse no rate"
        raise ArgumentError(
            "norm", found, "give TokenMax(); BlockTriangular() has the determinant either way"
        )
    if not isinstance(norm, (TokenMax, Frobenius, TokenSum)):
        raise ArgumentError("norm", f"is {norm!r}", "give TokenMax(), Frobenius() or TokenSum()")


def check_domain(domain: Any) -> None:
    """All of space, or a ball on which tokens can be projected."""
    if not isinstance(domain, (Whole, Ball)):
        raise ArgumentError("domain", f"is {domain!r}", "give Whole() or Ball(radius)")


def check_sequence(name: str, x: Any, domain: Any) -> None:
    """Finite tokens (..., n, d), as many as the domain says."""
    if not isinstance(x, Tensor) or x.ndim < 2 or not x.dtype.is_floating_point or 0 in x.shape:
        found = f"is a {type(x).__name__}" if not isinstance(x, Tensor) else f"is {x.dtype} {list(x.shape)}"
        raise ArgumentError(name, found, "give tokens (..., n, d) of real numbers, one or more")
    if domain.tokens is not None and x.shape[-2] != domain.tokens:
        found = f"has {x.shape[-2]} tokens and the constant is proved for {domain.tokens}"
        raise ArgumentError(name, found, "give as many, or make a domain without tokens=")
    if not bool(torch.isfinite(x.detach()).all()):
        raise ArgumentError(name, "holds NaN or infinity", "a fixed point needs finite numbers")


def into_domain(domain: Domain, x: Tensor) -> Tensor:
    """Each token to the nearest point of the domain."""
    if not isinstance(domain, Ball):
        return x
    if domain.center is None:
        return IntoBall(domain.radius)(x) if domain.radius > 0 else torch.zeros_like(x)
    center = domain.center.to(x)
    return center + into_domain(Ball(domain.radius), x - center)


def dual(norm: Norm) -> SequenceNorm:
    """The norm in which transposes have the norms that matrices have in this one."""
    if isinstance(norm, TokenMax):
        return TokenSum()
    return TokenMax() if isinstance(norm, TokenSum) else Frobenius()


# What would repair it


def _too_large(f: nn.Module, found: Certificate, why: str) -> ArgumentError:
    where = f"in {found.norm!r} on {found.domain!r}"
    if not math.isfinite(found.value):
        reasons = ". ".join(found.refused[:2])
        remedy = "put IntoBall(radius) before dot products, or give domain=Ball(radius)"
        return ArgumentError("f", f"has no finite constant {where}, and {why} ({reasons})", remedy)
    scale = math.floor(0.99 / found.value * 1e4) / 1e4
    ways = [f"multiply f by {scale:g} (its values, or what comes after them)"]
    return ArgumentError(
        "f",
        f"has the constant L = {round_up(found.value)} {where}, and {why}",
        " or ".join([*ways, *_scores(f, found)]),
    )


def _scores(f: nn.Module, found: Certificate) -> list[str]:
    """How far scores would have to come down, for one head of dot products on a ball:
    w (√(1 + g²) + g) < 1 where g < (1 - w²)/2w.
    """
    if not isinstance(found.norm, TokenMax):
        return []
    try:
        declared = declare.one(f)
        steps = declared.maps if isinstance(declared, Compose) else (declared,)
        heads = [step for step in steps if isinstance(step, (Attention, Heads))]
        rest = [step for step in steps if not isinstance(step, (Attention, Heads, IntoBall, Affine))]
        if len(heads) != 1 or rest:
            return []
        subject = subject_of(heads[0])
        if len(subject.separate) != 1:
            return []
        head = (subject.folded or subject.separate)[0]
        affine = [product_norm(step.w) for step in steps if isinstance(step, Affine)]
        w = float(product([head.w, *affine]))
        radii = [step.radius for step in steps if isinstance(step, IntoBall)]
        form = head.form(head.width(width_of(found.domain)))
    except (Refusal, ArgumentError):
        return []
    if isinstance(found.domain, Ball) and found.domain.center is None:
        radii.append(found.domain.radius)
    if form is None or not radii or not 0 < w < 1:
        return []
    limit = (1 - w * w) / (2 * w)
    return [f"lower the scores to g = |A|R² <= {limit:.4g} = (1 - w²)/2w at w = {w:.4g}"]
