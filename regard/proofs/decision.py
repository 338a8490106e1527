"""decide: can any input of a neighborhood change the answer? Proved, refuted by an input, or open."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard._check import whole_number
from regard._kinds import names_wrong_kinds
from regard.certificate import Certificate, Hypothesis, round_down, round_up
from regard.domains import Hull, Near
from regard.errors import ArgumentError
from regard.maps import Compose
from regard.norms import Frobenius, TokenMax
from regard.proofs.ball_model.beginning import by_orders
from regard.proofs.ball_model.margin import least
from regard.proofs.ball_model.state import State
from regard.proofs.classifier import Classifier, check_held, check_sequence, check_steps, classifier
from regard.proofs.decision_attack import LeastMargin, lead
from regard.proofs.falsification import Witness
from regard.proofs.question import question
from regard.proofs.subdivision import check_pieces, least_lead
from regard.proofs.theorem import NO_THEOREM, Refusal, assumed, checked
from regard.proofs.theorems.ball_model import THEOREM, arithmetic, run

QUANTITY = "lead of any other class"


@dataclass(frozen=True)
class Decision:
    """Whether the answer is the same for every input of a domain.

    holds: True, proved; False, an input of the domain changes it, was run as the model runs, and is
    `attack.other`; None, open. margin: at most by how much another class leads anywhere, negative where none
    does; the proof is about the model in real arithmetic with its weights as they are. attack: the input
    with the least lead of the label that was found. runner_up: the class that comes nearest.

    Examples:
        >>> from regard.maps import Affine, Compose
        >>> from regard.nonexpansive import Pool
        >>> model = Compose((Pool(), Affine(torch.eye(2, dtype=torch.float64))))
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
        >>> regard.decide(model, x, regard.one_token(x, 0, 0.1)).holds
        True
    """

    holds: bool | None
    label: tuple[int, ...]
    runner_up: int
    margin: Certificate
    attack: Witness
    reason: str = ""

    @property
    def least_margin(self) -> float:
        """At least the lead of the label anywhere in the domain; minus infinity where nothing is proved."""
        return -self.margin.value

    def __str__(self) -> str:
        names = ", ".join(str(label) for label in self.label)
        said = f"the answer {names}" if len(self.label) == 1 else f"the leading set {{{names}}}"
        words = "is not the model's" if self.holds is False and _is_still(self.attack) else WORDS[self.holds]
        lines = [f"{said} {words} on {self.margin.domain}"]
        if self.holds is not False and math.isfinite(self.least_margin):
            lines.append(f"  proved: {_bounded(self.least_margin)}; nearest is {self.runner_up}")
        lines.append(f"  attack: the smallest lead found is {self.attack.value:.6g}")
        lines += [f"  {self.reason}"] if self.reason else []
        return "\n".join(lines + [f"  {hypothesis}" for hypothesis in self.margin.hypotheses])

    __repr__ = __str__


def _bounded(low: float) -> str:
    """A lead that is at least so much."""
    if low > 0:
        return f"it leads by at least {round_down(low)}"
    return f"no other class leads by more than {round_up(-low)}"


WORDS = {True: "cannot change", False: "changes", None: "may or may not change"}


@names_wrong_kinds
def decide(
    model: Any,
    x: Tensor,
    domain: Near,
    *,
    readout: Any = None,
    label: int | Sequence[int] | None = None,
    steps: int = 20,
    pieces: int = 1,
) -> Decision:
    """Whether the label leads all other classes for every input of the domain, which is around x (n, d).

    model: what `certify` takes, from tokens to logits (1, classes); readout: a map that makes them of its
    value. label: None means the class that leads at x; several mean that each of them leads all others (the k
    most probable next tokens). steps: of the attack, which runs first; what it finds is run by the model
    itself, in its own dtype. pieces: how many bounds may be asked for, of parts of a Hull that is cut where
    one bound does not suffice.

    Examples:
        >>> from regard.maps import Affine, Compose
        >>> from regard.nonexpansive import Pool
        >>> readout = Affine(torch.eye(2, dtype=torch.float64))
        >>> model = Compose((regard.Attention(regard.Dot()), Pool(), readout))
        >>> x = torch.tensor([[1.0, 0.0], [0.9, 0.1]], dtype=torch.float64)
        >>> regard.decide(model, x, regard.one_token(x, 1, 0.05)).holds
        True
    """
    check_sequence("x", x)
    check_domain(domain, x)
    check_pieces(pieces, domain)
    check_steps(steps)
    with question():
        found = classifier(model, x, readout)
        check_held(x, found.dtype)
        logits = found.run(x)
        labels = _labels(label, logits)
        here = float(lead(logits.double(), labels))
        if here < 0:
            points = domain.measure.points
            return _refuted(found, domain, labels, Witness(here, points, points, Frobenius()))
        attack = LeastMargin(found, domain, labels).find(steps)
        if attack.changed:
            return _refuted(found, domain, labels, attack.witness)
        return _proved(found, domain, labels, attack.witness, pieces)


def check_domain(domain: Near, x: Tensor) -> None:
    """A neighborhood of x itself."""
    if not isinstance(domain, Near):
        remedy = "give a neighborhood of x: one_token(x, index, radius), Radii, Box, Hull or Neighborhood"
        raise ArgumentError("domain", f"is {domain!r}", remedy)
    points = domain.measure.points
    if points.shape != x.shape or not bool((points == x.detach().double()).all()):
        raise ArgumentError("domain", "is around a different sequence than x", "make it from x itself")


def _labels(label: int | Sequence[int] | None, logits: Tensor) -> tuple[int, ...]:
    classes = logits.shape[-1]
    if label is None:
        return (int(logits.argmax(-1)),)
    given = label.tolist() if isinstance(label, Tensor) else label
    given = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    remedy = f"give one class of 0 … {classes - 1}, or several different ones, but not all"
    labels = tuple(whole_number("label", one, remedy) for one in given)
    outside = [one for one in labels if not 0 <= one < classes]
    if outside or not 0 < len(set(labels)) == len(labels) < classes:
        raise ArgumentError("label", f"is {label!r}", remedy)
    return labels


def _refuted(found: Classifier, domain: Near, labels: tuple[int, ...], witness: Witness) -> Decision:
    rival = _rival(found.run(_moved(witness)), labels)
    margin = Certificate(math.inf, domain, Frobenius(), NO_THEOREM, quantity=QUANTITY)
    where = "at the given input itself" if _is_still(witness) else "there"
    reason = f"class {rival} leads by {-witness.value:.6g} {where}, as the model runs in {found.kind}"
    return Decision(False, labels, rival, margin, witness, reason)


def _is_still(witness: Witness) -> bool:
    """Whether it is the given input itself."""
    return torch.equal(_moved(witness), _given(witness))


def _given(witness: Witness) -> Tensor:
    """The input that was asked about."""
    assert isinstance(witness.point, Tensor)
    return witness.point


def _moved(witness: Witness) -> Tensor:
    """The input that was found."""
    assert isinstance(witness.other, Tensor)
    return witness.other


def _rival(logits: Tensor, labels: tuple[int, ...]) -> int:
    """The class that leads among the others."""
    return int(logits.index_fill(-1, torch.tensor(labels), -math.inf).argmax(-1))


def _proved(
    found: Classifier, domain: Near, labels: tuple[int, ...], witness: Witness, pieces: int
) -> Decision:
    points = domain.measure.points
    rounding = float(found.rounding(points))
    certificate, rival, reason = margin_certificate(found, domain, labels, rounding, pieces)
    holds = True if beyond_rounding(certificate, rounding) else None
    if not float(lead(found.run(points).double(), labels)) > 0:
        reason = "two classes tie at the given input itself, so that no radius is small enough"
    elif holds is None and certificate.value < 0:
        reason = f"rounding in {found.kind} may do more to a lead: {2 * rounding:.3g} near the given input"
    rival = _rival(found.run(_moved(witness)), labels) if rival is None else rival
    return Decision(holds, labels, rival, certificate, witness, reason)


def beyond_rounding(certificate: Certificate, rounding: float) -> bool:
    """Whether the label leads everywhere by more than rounding changes two logits."""
    return certificate.value < -2 * rounding


def margin_certificate(
    found: Classifier, domain: Near, labels: tuple[int, ...], rounding: float, pieces: int = 1
) -> tuple[Certificate, int | None, str]:
    """Upper bound on the lead of another class with exact numbers, that class, and why it is not negative.

    The second order is tried where the first does not suffice, and then parts of the domain, by at most so
    many bounds. rounding: that of one logit, for the hypotheses.
    """
    try:
        (best, rival), count = least_lead(domain, lambda state: better_order(found, state, labels), pieces)
    except Refusal as refusal:
        none = Certificate(
            math.inf, domain, Frobenius(), NO_THEOREM, refused=(str(refusal),), quantity=QUANTITY
        )
        return none, None, f"the bounds say nothing about it: {refusal}"
    trusted = arithmetic_of(found, rounding)
    hypotheses = (checked("all other classes at once, each by its own difference to the label"), *trusted)
    if count > 1:
        hypotheses = (checked(f"the domain was cut into parts, by {count} bounds"), *hypotheses)
    made = Certificate(-best, domain, _norm(domain), THEOREM.cited, hypotheses, quantity=QUANTITY)
    remedy = "more pieces, or nearer embeddings" if isinstance(domain, Hull) else "a smaller radius"
    return made, rival, "" if best > 0 else f"the bounds do not reach so far; use {remedy}"


def better_order(found: Classifier, state: State, labels: tuple[int, ...]) -> tuple[float, int]:
    """At most the least lead of a label, by the first order, and by the second where that does not suffice or
    says nothing at all.
    """
    best: tuple[float, int] | None = None
    for low in by_orders(state, lambda one: _least(found, one, labels)):
        best = low if best is None else max(best, low, key=lambda pair: pair[0])
        if best[0] > 0:
            break
    assert best is not None
    return best


def _norm(domain: Near) -> Any:
    return getattr(domain, "norm", TokenMax())


def arithmetic_of(found: Classifier, rounding: float) -> tuple[Hypothesis, ...]:
    """What is assumed of the machine, and of the dtype that a model runs in."""
    return (*found.agreed, arithmetic(), *dtype_of(found, rounding))


def dtype_of(found: Classifier, rounding: float) -> tuple[Hypothesis, ...]:
    """What is assumed of a dtype with fewer digits than float64."""
    if found.dtype == torch.float64:
        return ()
    near = f"near x, outputs in {found.kind} are off by at most {rounding:.2g}"
    return (assumed(f"{near}, twice the most that was measured"),)


def _least(found: Classifier, state: State, labels: tuple[int, ...]) -> tuple[float, int]:
    """At most the least lead of a label over another class, and that class."""
    body, weights, bias = found.split
    after = run(Compose(body), state)
    weights = torch.eye(after.width, dtype=torch.float64) if weights is None else weights
    bias = torch.zeros(weights.shape[-1], dtype=torch.float64) if bias is None else bias
    others = [k for k in range(weights.shape[-1]) if k not in labels]
    found_least = math.inf, others[0]
    for label in labels:
        directions = weights[:, label].unsqueeze(-1) - weights[:, others]
        values = least(after, directions, bias[label] - bias[others])
        k = int(values.argmin())
        found_least = min(found_least, (float(values[k]), others[k]), key=lambda pair: pair[0])
    low = found_least[0]
    return (low if not math.isnan(low) else -math.inf), found_least[1]
