"""Rule: when the growth of a head is worth a warning, from the history of measurements alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from regard._written import number
from regard.errors import ArgumentError

QUANTITIES = {"max_logit": "largest logit", "qk_norm": "QK norm"}
"""What is watched, by its name in the history."""
SMALL = 1.0
"""Logits below this are as good as none: growth is counted from here."""

Entry = dict[str, Any]


@dataclass(frozen=True)
class Growth:
    """One quantity of one head, then and now."""

    layer: str
    head: int
    quantity: str
    before: float
    now: float
    since: int
    step: int

    @property
    def factor(self) -> float:
        """The ratio of the number now to the number then, as the rule reads it: a logit counts from 1 on;
        infinite where the number became NaN.
        """
        small = SMALL if self.quantity == "max_logit" else math.ulp(0.0)
        return self.now / max(self.before, small) if math.isfinite(self.now) else math.inf

    def __str__(self) -> str:
        what = f"{self.layer}, head {self.head}: the {QUANTITIES[self.quantity]}"
        if not math.isfinite(self.now):
            return f"{what} is not finite at step {self.step} (it was {self.before:.4g} at step {self.since})"
        times = f" ({self.now / self.before:.3g} times)" if self.before > 0 else ""
        return (
            f"{what} went from {self.before:.4g} at step {self.since} to {self.now:.4g} at step "
            f"{self.step}{times}"
        )


@dataclass(frozen=True)
class Rule:
    """A head is named where, against the smallest of the `window` measurements before,

    its largest logit is `growth` times as large and at least `level`; or its QK norm is `growth` times as
    large and its largest logit at least `level / growth`: once more and it is there. Also where either is not
    finite. A head that was named is compared with what came after that. Without logits finite growth is not
    judged: norms that double while they are small are how training begins.
    """

    window: int
    growth: float
    level: float

    def found(self, history: Sequence[Entry]) -> list[Growth]:
        """What is to be said of the newest measurement."""
        return [growth for growth in self.compared(history) if self._counts(growth, history[-1])]

    def compared(self, history: Sequence[Entry]) -> Iterator[Growth]:
        """Every quantity of every head now, against its smallest number in the window before."""
        recent, now = history[-self.window - 1 : -1], history[-1]
        for layer, numbers in now["layers"].items():
            for quantity in QUANTITIES:
                for head, value in enumerate(numbers.get(quantity) or []):
                    yield self._growth(recent, (layer, head, quantity), number(value), now["step"])

    def _growth(
        self, recent: Sequence[Entry], place: tuple[str, int, str], value: float, step: int
    ) -> Growth:
        before = [
            (past, entry["step"])
            for entry in _since_last_warning(recent, place)
            if math.isfinite(past := _at(entry, place))
        ]
        smallest, since = min(before, default=(value, step))
        return Growth(*place, smallest, value, since, step)

    def _counts(self, growth: Growth, entry: Entry) -> bool:
        if not math.isfinite(growth.now):
            return math.isfinite(growth.before)  # said once
        logit = _at(entry, (growth.layer, growth.head, "max_logit"))
        enough = self.level if growth.quantity == "max_logit" else self.level / self.growth
        return growth.since < growth.step and growth.factor >= self.growth and logit >= enough


def suspect(rule: Rule, history: Sequence[Entry]) -> Growth | None:
    """The head whose largest logit grew most in the window; its QK norm where no pass was seen.

    None without two measurements.
    """
    found = [growth for growth in rule.compared(history) if growth.since < growth.step] if history else []
    return max(
        found, key=lambda growth: (growth.quantity == "max_logit", growth.factor, growth.before), default=None
    )


def check_history(history: Sequence[Entry]) -> list[Entry]:
    """A history that a monitor wrote, checked entry by entry before anything is computed from it."""
    remedy = "give the `history` of a monitor, as it is or as json.loads reads it"
    if not isinstance(history, Sequence) or isinstance(history, str):
        raise ArgumentError("history", f"is {history!r:.60}", remedy)
    for index, entry in enumerate(history):
        if not _is_entry(entry):
            raise ArgumentError(
                "history", f"has {entry!r:.60} at {index}, which is not a measurement", remedy
            )
    return list(history)


def _is_entry(entry: Any) -> bool:
    """Whether this has a step, numbers by head for each layer, and warnings that name a head."""
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
        return False
    layers, warned = entry.get("layers"), entry.get("warnings")
    if not isinstance(layers, dict) or not isinstance(warned, list):
        return False
    numbers = [part.get(name) for part in layers.values() if isinstance(part, dict) for name in QUANTITIES]
    fields = {"layer", "head", "quantity"}
    return (
        all(isinstance(part, dict) for part in layers.values())
        and all(values is None or isinstance(values, list) for values in numbers)
        and all(isinstance(warning, dict) and fields <= warning.keys() for warning in warned)
    )


def as_entry(growth: Growth) -> Entry:
    """A warning as plain values."""
    return {"layer": growth.layer, "head": growth.head, "quantity": growth.quantity, "message": str(growth)}


def _since_last_warning(recent: Sequence[Entry], place: tuple[str, int, str]) -> Sequence[Entry]:
    """The measurements from the last one on that named this head for this quantity."""
    last = [
        index
        for index, entry in enumerate(recent)
        if any(_place(warning) == place for warning in entry["warnings"])
    ]
    return recent[last[-1] :] if last else recent


def _place(warning: Entry) -> tuple[str, int, str]:
    return warning["layer"], warning["head"], warning["quantity"]


def _at(entry: Entry, place: tuple[str, int, str]) -> float:
    """A number of the history; NaN where it was not measured."""
    layer, head, quantity = place
    values = entry["layers"].get(layer, {}).get(quantity)
    return number(values[head]) if values is not None and head < len(values) else math.nan
