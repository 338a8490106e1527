"""certified_radius: how far an input can move before a classifier changes its mind, proved and attacked.

Two proofs: a margin over a constant for all inputs, and the ball model near this one. The larger radius
counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard import _check
from regard._kinds import names_wrong_kinds
from regard._upper import Lower, Upper, exact, root
from regard.certificate import Certificate, Hypothesis, round_down
from regard.domains import Box, Near, Neighborhood, Radii, Whole
from regard.errors import ArgumentError
from regard.norms import EntryMax, Frobenius, SequenceNorm, TokenMax, TokenSum
from regard.proofs.certification import certify
from regard.proofs.classifier import Classifier, check_steps, classifier
from regard.proofs.decision import beyond_rounding, dtype_of, margin_certificate
from regard.proofs.decision_attack import ShortestChange, leads_of
from regard.proofs.theorem import assumed, checked

ROUNDING = 1e-9
"""What rounding in float64 may change in a logit, relative to the largest and to one; assumed."""


@dataclass(frozen=True)
class Radius:
    """How far inputs can move without a change of decision; one number for each input of a batch.

    value: proved, in the norm, for all moves that are no longer. attack: the shortest move that was found to
    change the decision, ∞ where none was. label: the decision of the model as it runs. margin: the lead of
    its logit in float64, negative where another class leads there and nothing is proved. moved: the inputs
    that the attack found. token: the only one that moves, None for all. The proof is about the map in real
    arithmetic with the weights as they are; it counts where the label leads by more than twice the rounding
    of the model's dtype near x.

    Examples:
        >>> from regard.maps import Affine, Compose
        >>> from regard.nonexpansive import Pool
        >>> model = Compose((Pool(), Affine(torch.eye(2, dtype=torch.float64))))
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
        >>> found = regard.certified_radius(model, x)
        >>> bool(0 < found.value <= found.attack)
        True
    """

    value: Tensor
    attack: Tensor
    label: Tensor
    margin: Tensor
    moved: Tensor
    norm: SequenceNorm
    certificate: Certificate
    hypotheses: tuple[Hypothesis, ...]
    token: int | None = None

    def __str__(self) -> str:
        if self.value.ndim:
            lead = f"{self.value.numel()} radii, median {float(self.value.median()):.5g} proved"
            told = "by one constant for all; more is proved of one sequence at a time"
            return f"{lead}, {float(self.attack.median()):.5g} attacked, in {self.norm!r} ({told})"
        below, which = round_down(float(self.value)), "" if self.token is None else f" of token {self.token},"
        lines = [f"decision {int(self.label)} holds within {below}{which} in {self.norm!r}"]
        if not float(self.margin) > 0:
            lines = [f"two classes tie with decision {int(self.label)}, so that no radius is small enough"]
        if float(self.margin) < 0:
            other = f"with exact numbers another class leads by {-float(self.margin):.3g}"
            lines = [f"the model answers {int(self.label)}, and {other}: no radius is proved"]
        far = float(self.attack)
        found = f"changed by an attack at {far:.6g}" if math.isfinite(far) else "no attack changed it"
        lines.append(f"  {found}")
        return "\n".join(lines + [f"  {hypothesis}" for hypothesis in self.hypotheses])

    __repr__ = __str__


@names_wrong_kinds
def certified_radius(
    model: Any,
    x: Tensor,
    token: int | None = None,
    norm: SequenceNorm = Frobenius(),
    *,
    readout: Any = None,
    steps: int = 30,
    resolution: float = 1.04,
) -> Radius:
    """How far x may move in the norm while the answer stays: proved from below, attacked from above.

    model: what `certify` takes, with one token of logits (1, classes) as its value, for each sequence x
    (..., n, d). Two logits cannot meet within margin/(√2 L), L the certificate for all sequences of n tokens;
    for one sequence (n, d) the ball model is asked too, radius by radius, and the one that is returned was
    itself proved. token: only this one moves; None: all may. readout: a map from the model's value to logits.
    steps: of the attack. resolution: how close the largest radius that was proved is to the smallest that was
    not, as a factor.

    Examples:
        >>> from regard.nn import Guaranteed, Orthogonal
        >>> from regard.nonexpansive import Pool
        >>> network = Guaranteed([Orthogonal(4, 8), Pool(), Orthogonal(8, 3)], tokens=6)
        >>> bool(regard.certified_radius(network, torch.randn(6, 4)).value > 0)
        True
    """
    _check_arguments(x, token, norm, steps)
    if not resolution > 1:
        raise ArgumentError("resolution", f"is {resolution!r}", "give a factor above 1")
    found = classifier(model, x.flatten(0, -3)[0] if x.ndim > 2 else x, readout, "certified_radius")
    whole = found.exact
    points = x.detach().double()
    logits, label = found.logits(points).detach(), found.run(points).argmax(-1)
    margin, rounding = leads_of(logits, label.unsqueeze(-1)), found.rounding(points)
    certificate = _certificate(whole, Whole(tokens=x.shape[-2]), norm, token)
    slack = 2 * ROUNDING * (1 + logits.abs().amax(-1)) + 2 * rounding
    sides = exact(2.0) if isinstance(norm, EntryMax) else root(2)
    value = (Lower((margin - slack).clamp_min(0.0), 1) / (sides * Upper(certificate.value))).bound
    attack, moved = ShortestChange(whole, label, norm, token).find(points, steps)
    hypotheses: tuple[Hypothesis, ...] = (
        checked(f"constant ≤ {certificate.value:.9g} by {certificate.theorem}")
        if math.isfinite(certificate.value)
        else checked("no theorem bounds the constant for all inputs"),
        assumed(f"rounding of logits in float64 is below {ROUNDING:g} of the largest and one"),
        *dtype_of(found, float(rounding.max())),
    )
    if x.ndim == 2 and float(margin) > 2 * float(rounding):
        about = _Near(found, points, token, norm, int(label), float(rounding))
        near = about.search(float(value), float(attack), resolution)
        if near is not None:
            value, certificate = torch.tensor(near[0], dtype=torch.float64), near[1]
            hypotheses = (checked(f"proved at this radius by {certificate.theorem}"), *certificate.hypotheses)
    return Radius(value, attack, label, margin, moved, norm, certificate, hypotheses, token)


TRIES = 14
"""How many radii are tried."""


@dataclass
class _Near:
    """The ball model about one sequence, at one radius after another."""

    found: Classifier
    points: Tensor
    token: int | None
    norm: SequenceNorm
    label: int
    rounding: float

    def domain(self, radius: float) -> Near:
        """The inputs within a radius."""
        n = len(self.points)
        if self.token is None and isinstance(self.norm, (Frobenius, TokenSum)):
            return Neighborhood(self.points, radius, Frobenius())  # no input is farther in Frobenius norm
        radii = torch.zeros(n, dtype=torch.float64)
        radii[slice(None) if self.token is None else self.token] = radius
        return (Box if isinstance(self.norm, EntryMax) else Radii)(self.points, radii)

    def proved(self, radius: float) -> Certificate | None:
        """The certificate that the label leads within a radius."""
        domain = self.domain(radius)
        certificate, *_ = margin_certificate(self.found, domain, (self.label,), self.rounding)
        return certificate if beyond_rounding(certificate, self.rounding) else None

    def search(self, known: float, attack: float, resolution: float) -> tuple[float, Certificate] | None:
        """The largest radius that is proved, where it is more than what is known: up or down by factors from
        a guess, then between the last two.
        """
        best: tuple[float, Certificate] | None = None
        low, high = known, attack
        radius = (attack if math.isfinite(attack) else float(self.points.norm())) / 16
        radius = radius if radius > known else _up(low, high)
        for _ in range(TRIES):
            if not low < radius < high or (low > 0 and high / low < resolution):
                break
            certificate = self.proved(radius)
            if certificate is None:
                high = radius
                down = best is None and radius / 4 > low
                radius = radius / 4 if down else math.sqrt(low * high)
            else:
                low, best = radius, (radius, certificate)
                radius = _up(low, high)
        return best


def _up(low: float, high: float) -> float:
    return min(2 * low, math.sqrt(low * high)) if math.isfinite(high) else 2 * low


def _check_arguments(x: Tensor, token: int | None, norm: SequenceNorm, steps: int) -> None:
    _check.floating("x", x)
    if x.ndim < 2 or 0 in x.shape:
        raise ArgumentError("x", f"has shape {list(x.shape)}", "give sequences (..., n, d)")
    _check.finite("x", x)
    if not isinstance(norm, SequenceNorm):
        raise ArgumentError("norm", f"is {norm!r}", "give Frobenius(), TokenMax(), TokenSum() or EntryMax()")
    if token is not None:
        _check.whole_number("token", token, "give the position of a token, or None for all")
    if token is not None and not -x.shape[-2] <= token < x.shape[-2]:
        raise ArgumentError("token", f"is {token}", f"there are {x.shape[-2]} tokens")
    check_steps(steps)


def _certificate(whole: Any, domain: Whole, norm: SequenceNorm, token: int | None) -> Certificate:
    """The constant; where one token moves, and one comes out, three norms are the same."""
    alike = (Frobenius(), TokenMax(), TokenSum())
    norms = alike if token is not None and not isinstance(norm, EntryMax) else (norm,)
    return min((certify(whole, domain, other) for other in norms), key=lambda found: found.value)
