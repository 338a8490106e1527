"""Certificate: a number that is proved, with what it rests on."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard import domains, norms
from regard._written import read_object, write_object
from regard.norms import Norm

SHOWN = 3
"""How many refusals the repr of an infinite bound shows; print and ladder() have all."""


@dataclass(frozen=True)
class Hypothesis:
    """A condition of a theorem; `checked` says whether it was verified here or is assumed.

    Examples:
        >>> layer, unit = regard.Attention(regard.Dot()), regard.Ball(1.0, tokens=4, width=2)
        >>> bound = regard.certify(layer, unit, regard.Frobenius())
        >>> all(isinstance(one, regard.certificate.Hypothesis) for one in bound.hypotheses)
        True
        >>> {one.checked for one in bound.hypotheses} <= {True, False}
        True
    """

    statement: str
    checked: bool

    def __str__(self) -> str:
        return f"{'checked' if self.checked else 'assumed'}: {self.statement}"


@dataclass(frozen=True)
class Certificate:
    """An upper bound that holds with the given probability, over the randomness of its own proof and nothing
    else.

    value: the bound. domain: where it holds. theorem: what proves it. parts: the certificates it was built
    from.
    refused: theorems that do not apply, each with a sentence. others: what other theorems prove of the same
    quantity.
    quantity: what is bounded, a "constant" (how much a change is amplified) or another word.

    Examples:
        >>> layer = regard.Attention(regard.Dot())
        >>> bound = regard.certify(layer, regard.Ball(1.0, tokens=4, width=2), regard.Frobenius())
        >>> bound.value == float(bound), len(bound.ladder()) > 0
        (True, True)
    """

    value: float
    domain: Any
    norm: Norm
    theorem: str
    hypotheses: tuple[Hypothesis, ...] = ()
    parts: tuple[Certificate, ...] = ()
    refused: tuple[str, ...] = ()
    probability: float = 1.0
    others: tuple[Certificate, ...] = ()
    quantity: str = "constant"

    def __str__(self) -> str:
        return self._text(len(self.refused))

    def __repr__(self) -> str:
        return self._text(SHOWN)

    def _text(self, refusals: int) -> str:
        """The bound and what it rests on; why it is infinite, in so many sentences."""
        lines = [
            f"{self.quantity} ≤ {round_up(self.value)} in {self.norm!r} on {self.domain}{self._chance()}",
            f"  by {self.theorem}",
        ]
        lines += [f"  {hypothesis}" for hypothesis in self.hypotheses]
        if self.parts:
            lines.append(f"  from {_count(len(self.parts), 'part')}: see tree()")
        if self.others:
            lines.append(f"  the smallest of {1 + len(self.others)} bounds: see ladder()")
        if math.isinf(self.value):
            lines += [f"  {why}" for why in self.refused[:refusals]]
            more = len(self.refused) - refusals
            lines += [f"  {_count(more, 'more theorem')} refused: see ladder()"] if more > 0 else []
        elif self.refused:
            lines.append(f"  {_count(len(self.refused), 'theorem')} refused: see ladder()")
        return "\n".join(lines)

    def __float__(self) -> float:
        return self.value

    def _repr_html_(self) -> str:
        """The bound, what it rests on, and the ladder to unfold, for notebooks."""
        chance, bound = escape(self._chance()), escape(round_up(self.value))
        place = f"in {escape(repr(self.norm))} on {escape(str(self.domain))}{chance}"
        rests = "".join(f"<li>{escape(str(hypothesis))}</li>" for hypothesis in self.hypotheses)
        head = f"<p>{escape(self.quantity)} ≤ <b>{bound}</b> {place}<br/>by {escape(self.theorem)}</p>"
        ladder = f"<details><summary>all bounds</summary><pre>{escape(self.ladder())}</pre></details>"
        return f"<div>{head}<ul>{rests}</ul>{ladder}</div>"

    def to(self, device: Any) -> Certificate:
        """The same with the tensors of its domain and its norm on another device; the number stays."""
        place = torch.device(device)

        def moved(value: Any) -> Any:
            return pytree.tree_map(lambda part: part.to(place) if isinstance(part, Tensor) else part, value)

        return replace(
            self,
            domain=moved(self.domain),
            norm=moved(self.norm),
            parts=tuple(part.to(place) for part in self.parts),
            others=tuple(other.to(place) for other in self.others),
        )

    def tree(self) -> str:
        """How the bound was composed, each hypothesis checked or assumed."""
        return "\n".join(self._branch(0))

    def ladder(self) -> str:
        """All bounds of this quantity, smallest first, and the theorems that refused."""
        rungs = sorted((self, *self.others), key=lambda rung: rung.value)
        lines = [f"{round_up(rung.value):>12}  {rung.theorem}" for rung in rungs]
        return "\n".join(lines + [f"{'–':>12}  {why}" for why in self.refused])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` reads them back."""
        return {
            "value": _plain(self.value),
            "domain": write_object(self.domain),
            "norm": write_object(self.norm),
            "theorem": self.theorem,
            "hypotheses": [{"statement": h.statement, "checked": h.checked} for h in self.hypotheses],
            "parts": [part.to_dict() for part in self.parts],
            "refused": list(self.refused),
            "probability": self.probability,
            "others": [other.to_dict() for other in self.others],
            "quantity": self.quantity,
        }

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Certificate:
        """The certificate that `to_dict` wrote."""
        return Certificate(
            float(values["value"]),
            read_object(values["domain"], (domains, norms)),
            read_object(values["norm"], (norms,)),
            values["theorem"],
            tuple(Hypothesis(h["statement"], h["checked"]) for h in values["hypotheses"]),
            tuple(Certificate.from_dict(part) for part in values["parts"]),
            tuple(values["refused"]),
            values["probability"],
            tuple(Certificate.from_dict(other) for other in values["others"]),
            values["quantity"],
        )

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Certificate:
        """The certificate that `to_json` wrote."""
        return Certificate.from_dict(json.loads(text))

    def _chance(self) -> str:
        return "" if self.probability == 1 else f", with probability at least {self.probability:.9g}"

    def _branch(self, depth: int) -> list[str]:
        indent = "  " * depth
        lines = [
            f"{indent}≤ {round_up(self.value)}  {self.quantity} in {self.norm!r} on "
            f"{self.domain}{self._chance()}"
        ]
        lines += [f"{indent}  by {self.theorem}"]
        lines += [f"{indent}  {hypothesis}" for hypothesis in self.hypotheses]
        for part in self.parts:
            lines += part._branch(depth + 1)
        return lines


def round_up(value: float) -> str:
    """Rounded up, so that what is printed is a bound too.

    Examples:
        >>> regard.certificate.round_up(1.00000001), regard.certificate.round_down(1.99999999)
        ('1.0001', '1.9999')
    """
    if value == 0 or not math.isfinite(value):
        return "∞" if value == math.inf else f"{value:g}"
    digits = f"{value:.5g}"
    if float(digits) < value:
        exponent = math.floor(math.log10(abs(value))) - 4
        digits = f"{value + 10.0**exponent:.5g}"
    return digits


def round_down(value: float) -> str:
    """Rounded down, for numbers that are at most true ones.

    Examples:
        >>> regard.certificate.round_down(0.123456789)
        '0.12345'
    """
    if value == 0 or not math.isfinite(value):
        return "∞" if value == math.inf else f"{value:g}"
    digits = f"{value:.5g}"
    if float(digits) > value:
        exponent = math.floor(math.log10(abs(value))) - 4
        digits = f"{value - 10.0**exponent:.5g}"
    return digits


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
