"""The yardstick: what the columns of an audit are in known models, and in the same architectures with random
weights. `python -m benchmarks.yardstick` makes the table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.audits.words import Sentence, inputs_named, joined, say

if TYPE_CHECKING:
    from regard.audits.checks.base import Column
    from regard.audits.report import Report, Row

TABLE = Path(__file__).parent / "yardstick.json"
QUANTILES = (0.1, 0.5, 0.9, 1.0)
"""Of the heads, layers or stacks of a model."""
FAR = 2.0
"""Times the largest of every known model, a number is far above them."""
SIGNATURE = "ov_norm_alone"
"""A column of weights alone, by which a model is known again."""
TWIN_INPUTS = (0,)
"""The inputs on which the untrained twin is measured."""
ALIKE = 1.01
"""Times the largest, it is the same: other texts and roundings change that much."""


@dataclass(frozen=True)
class Known:
    """A model that was measured: quantiles of its columns as it is, and with random weights."""

    name: str
    kind: str
    parameters: int
    columns: dict[str, list[float]]
    random: dict[str, list[float]]

    def is_in(self, report: Report) -> bool:
        """Whether the report is of this very model, which is no yardstick for itself: by its name, or by what
        its weights say on any input.
        """
        if (self.kind, self.parameters) != (report.model.get("kind"), report.model.get("parameters")):
            return False
        own = columns_of(report).get(SIGNATURE)
        return report.name == self.name if own is None else own == self.columns.get(SIGNATURE)


@cache
def table() -> dict[str, Any]:
    """The table as it was made, with its date and texts."""
    found: dict[str, Any] = (
        json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {"models": []}
    )
    return found


def known(report: Report, column: str) -> list[Known]:
    """The models that have a column, but the one that the report is of."""
    names = ("name", "kind", "parameters", "columns", "random")
    every = [Known(*(entry[name] for name in names)) for entry in table()["models"]]
    return [model for model in every if column in model.columns and not model.is_in(report)]


def compared(report: Report, row: Row, column: str) -> Sentence | None:
    """Where a row's number stands among the largest of known models and of the untrained twin; None where
    none has the column.

    Only numbers over the same inputs are compared, and where the report has others too, the sentence says so.
    """
    parts: list[Sentence] = []
    last: Sequence[int] = range(len(report.inputs))
    for inputs, tell in ((_shared(report, column), _among), (TWIN_INPUTS, _twin)):
        own = next((value for one, value in report.over(column, inputs) if one is row), math.nan)
        found = tell(report, column, own)
        if found is None:
            continue
        if tuple(inputs) != tuple(last) and not math.isnan(own) and not _of_weights(report, column):
            place, last = inputs_named(inputs), inputs
            parts.append(Sentence(f"On {place.text}", place.numbers) + say("it is {own}.", own=own))
        parts.append(found)
    return joined(parts, " ") if parts else None


def _twin(report: Report, column: str, own: float) -> Sentence | None:
    twin = report.twin.get(column)
    return None if twin is None or math.isnan(own) else say("Its untrained twin has {twin}.", twin=twin[-1])


def _of_weights(report: Report, column: str) -> bool:
    """Whether the numbers of a column are of weights alone, and so the same on every input."""
    found = report.column(column)
    return found is not None and found.over == "only"


def _shared(report: Report, column: str) -> Sequence[int]:
    """The inputs that are the texts of the table; none where one of these is missing."""
    names, texts = [entry.name for entry in report.inputs], table().get("texts", [])
    if _of_weights(report, column):
        return range(len(names))
    return tuple(names.index(text) for text in texts) if all(text in names for text in texts) else ()


def _among(report: Report, column: str, own: float) -> Sentence | None:
    models = known(report, column)
    if not models:
        return None
    largest = [ALIKE * model.columns[column][-1] for model in models]
    others = "what known models have:" if len(models) > 1 else "what a known model has:"
    words = (
        "On another text" if math.isnan(own)
        else "Ordinary:" if own <= min(largest)
        else f"Within {others}" if own <= max(largest)
        else f"Above {others}" if own <= FAR * max(largest)
        else f"Far above {others}"
    )  # fmt: skip
    found = joined([_one(model, column) for model in models], ", ")
    return Sentence(f"{words} it is {found.text}.", found.numbers, found.names)


def _one(model: Known, column: str) -> Sentence:
    """The largest number of a known model, and of its twin."""
    said = say("{largest} in {model}", model=model.name, largest=model.columns[column][-1])
    if column not in model.random:
        return said
    untrained = say("({random} untrained)", random=model.random[column][-1])
    return said + untrained


def beside(report: Report) -> dict[str, Any]:
    """The part of the table that is about the columns of a report."""
    names = [column.name for column in report.columns]
    models = [
        {"name": model["name"]}
        | {part: {n: model[part][n] for n in names if n in model[part]} for part in ("columns", "random")}
        for model in table()["models"]
    ]
    return {key: value for key, value in table().items() if key != "models"} | {"models": models}


@dataclass(frozen=True)
class Comparison:
    """One column: quantiles of this model, of its untrained twin, and of known models, by their names."""

    column: Column
    rows: list[tuple[str, list[float]]]


def comparisons(report: Report) -> list[Comparison]:
    """Every column that something can be compared with, this model over the same inputs as the other."""
    found = []
    for column in report.columns:
        shared = _shared(report, column.name)
        elsewhere = "" if shared or _of_weights(report, column.name) else ", on another text"
        rows: list[tuple[str, list[float] | None]] = []
        for model in known(report, column.name):
            rows += [
                (f"{model.name}{elsewhere}", model.columns[column.name]),
                (f"{model.name}, untrained{elsewhere}", model.random.get(column.name)),
            ]
        twin = report.twin.get(column.name)
        own = {} if not rows else dict([_own(report, column, shared or range(len(report.inputs)))])
        own |= {} if twin is None else dict([_own(report, column, TWIN_INPUTS)])
        every = [*own.items(), ("its untrained twin", twin), *rows]
        kept = [(name, numbers) for name, numbers in every if numbers]
        if len(kept) > len(own) and any(own.values()):
            found.append(Comparison(column, kept))
    return found


def _own(report: Report, column: Column, inputs: Sequence[int]) -> tuple[str, list[float]]:
    """Quantiles of this model over some inputs, and what to call them."""
    whole = tuple(inputs) == tuple(range(len(report.inputs))) or _of_weights(report, column.name)
    where = "" if whole else f", {inputs_named(inputs).text}"
    values = [value for _, value in report.over(column.name, inputs) if math.isfinite(value)]
    return f"this model{where}", quantiles(values) if values else []


def columns_of(report: Report) -> dict[str, list[float]]:
    """Quantiles over heads, layers or stacks, of each column that has numbers, as they are kept."""
    return {name: [float(f"{value:.4g}") for value in numbers] for name, numbers in _measured(report).items()}


def _measured(report: Report) -> dict[str, list[float]]:
    """The same, each a number of the report."""
    found = {}
    for column in report.columns:
        every = (row.values.get(column.name, math.nan) for row in report.rows)
        values = [value for value in every if math.isfinite(value)]
        if values and column.name != "residual":
            found[column.name] = quantiles(values)
    return found


def quantiles(values: list[float]) -> list[float]:
    """The quantiles of some numbers, each one of them."""
    ordered = sorted(values)
    return [ordered[round(share * (len(ordered) - 1))] for share in QUANTILES]
