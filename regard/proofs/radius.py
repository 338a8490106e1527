"""certified_radius: how far an input can move before a classifier changes its mind, proved and attacked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard import _check
from regard._upper import Lower, Upper, exact, root
from regard.attention import Attention
from regard.certificate import Certificate, Hypothesis, round_down
from regard.domains import Whole
from regard.errors import ArgumentError, RefusalError
from regard.maps import Compose, Map
from regard.norms import EntryMax, Frobenius, SequenceNorm, TokenMax, TokenSum
from regard.proofs.certification import certify, declare
from regard.proofs.decision_attack import ShortestChange
from regard.proofs.theorem import Refusal, assumed, checked

ROUNDING = 1e-9
"""What rounding in float64 may change in a logit, relative to the largest and to one; assumed."""


@dataclass(frozen=True)
class Radius:
    """How far inputs can move without a change of decision; one number for each input of a batch.

    value: proved, in the norm, for all moves that are shorter. attack: the shortest move that was found to
    change the decision, ∞ where none was. label: the decision. margin: by how much its logit leads. moved:
    the inputs that the attack found. The proof is about the map in real arithmetic with the weights as they
    are.
    """

    value: Tensor
    attack: Tensor
    label: Tensor
    margin: Tensor
    moved: Tensor
    norm: SequenceNorm
    certificate: Certificate
    hypotheses: tuple[Hypothesis, ...]

    def __str__(self) -> str:
        if self.value.ndim:
            lead = f"{self.value.numel()} radii, median {float(self.value.median()):.5g} proved"
            return f"{lead}, {float(self.attack.median()):.5g} attacked, in {self.norm!r}"
        below = round_down(float(self.value))
        lines = [f"decision {int(self.label)} holds within {below} in {self.norm!r}"]
        lines.append(f"  changed by an attack at {float(self.attack):.6g}")
        return "\n".join(lines + [f"  {hypothesis}" for hypothesis in self.hypotheses])

    __repr__ = __str__


def certified_radius(
    model: Any,
    x: Tensor,
    token: int | None = None,
    norm: SequenceNorm = Frobenius(),
    *,
    readout: Any = None,
    steps: int = 30,
) -> Radius:
    """margin/(√2 L): two logits cannot meet before the input has moved so far, in the norm; beside an attack.

    model: what `certify` takes, with one token of logits (1, classes) as its value, for each sequence x
    (..., n, d). L is its certificate for all sequences of n tokens. token: only this one moves; None: all
    may. readout: a map from the model's value to logits. steps: of the attack, which finds radii from
    above.
    """
    _check_arguments(x, token, norm, steps)
    whole = _declared(model, readout)
    points = x.detach().double()
    logits = _logits(whole, points)
    top = logits.topk(2, -1)
    margin = top.values[..., 0] - top.values[..., 1]
    certificate = _certificate(whole, Whole(tokens=x.shape[-2]), norm, token)
    slack = 2 * ROUNDING * (1 + logits.abs().amax(-1))
    sides = exact(2.0) if isinstance(norm, EntryMax) else root(2)
    value = (Lower((margin - slack).clamp_min(0.0), 1) / (sides * Upper(certificate.value))).bound
    attack, moved = ShortestChange(whole, top.indices[..., 0], norm, token).find(points, steps)
    hypotheses = (
        checked(f"constant ≤ {certificate.value:.9g} by {certificate.theorem}"),
        assumed(f"rounding of logits in float64 is below {ROUNDING:g} of the largest and one"),
    )
    return Radius(value, attack, top.indices[..., 0], margin, moved, norm, certificate, hypotheses)


def _check_arguments(x: Tensor, token: int | None, norm: SequenceNorm, steps: int) -> None:
    _check.floating("x", x)
    if x.ndim < 2 or 0 in x.shape:
        raise ArgumentError("x", f"has shape {list(x.shape)}", "give sequences (..., n, d)")
    _check.finite("x", x)
    if not isinstance(norm, SequenceNorm):
        raise ArgumentError("norm", f"is {norm!r}", "give Frobenius(), TokenMax(), TokenSum() or EntryMax()")
    if token is not None and not -x.shape[-2] <= token < x.shape[-2]:
        raise ArgumentError("token", f"is {token}", f"there are {x.shape[-2]} tokens")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ArgumentError("steps", f"is {steps!r}", "give a positive integer")


def _declared(model: Any, readout: Any) -> Any:
    """From tokens to logits, as one map."""
    try:
        parts = [
            part if isinstance(part, (Attention, Map)) else declare.one(part)
            for part in _present(model, readout)
        ]
    except Refusal as refusal:
        raise RefusalError("certified_radius", [str(refusal)]) from None
    return parts[0] if len(parts) == 1 else Compose(tuple(parts))


def _present(model: Any, readout: Any) -> list[Any]:
    return [model] if readout is None else [model, readout]


def _logits(whole: Any, points: Tensor) -> Tensor:
    value = whole(points)
    if value.shape[:-2] != points.shape[:-2] or value.shape[-2] != 1 or value.shape[-1] < 2:
        found = f"takes {list(points.shape)} to {list(value.shape)}"
        remedy = "a decision is between logits of one token (1, classes): give a readout that makes them"
        raise ArgumentError("model", found, remedy)
    return value.detach().squeeze(-2)


def _certificate(whole: Any, domain: Whole, norm: SequenceNorm, token: int | None) -> Certificate:
    """The constant; where one token moves, and one comes out, three norms are the same."""
    alike = (Frobenius(), TokenMax(), TokenSum())
    norms = alike if token is not None and not isinstance(norm, EntryMax) else (norm,)
    return min((certify(whole, domain, other) for other in norms), key=lambda found: found.value)
