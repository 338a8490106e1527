"""The yardstick: what the columns of an audit are in known models, and in the same architectures with random
weights. `python -m benchmarks.yardstick` makes the table.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.audits.words import Sentence, joined, say

if TYPE_CHECKING:
    from regard.audits.checks.base import Column
    from regard.audits.report import Report

TABLE = Path(__file__).parent / "yardstick.json"
QUANTILES = (0.1, 0.5, 0.9, 1.0)
"""Of the heads, layers or stacks of a model."""
FAR = 2.0
"""Times the largest of every known model, a number is far above them."""
SIGNATURE = "ov_norm_alone"
"""A column of weights alone, by which a model is known again."""
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


def compared(report: Report, column: str, value: float) -> Sentence | None:
    """Where a largest number stands among those of known models and of the untrained twin; None where none
    has the column.
    """
    parts = [part for part in (_among(report, column, value), _twin(report, column)) if part is not None]
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _twin(report: Report, column: str) -> Sentence | None:
    own = report.twin.get(column)
    return None if own is None else say("Its untrained twin has {twin}.", twin=own[-1])


def _among(report: Report, column: str, value: float) -> Sentence | None:
    models = known(report, column)
    if not models:
        return None
    largest = [ALIKE * model.columns[column][-1] for model in models]
    others = "what known models have:" if len(models) > 1 else "what a known model has:"
    words = (
        "Ordinary:" if value <= min(largest)
        else f"Within {others}" if value <= max(largest)
        else f"Above {others}" if value <= FAR * max(largest)
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
    """One column: quantiles of this model, of its untrained twin, and of known models; None where one has
    none.
    """

    column: Column
    rows: list[tuple[str, list[float] | None]]


def comparisons(report: Report) -> list[Comparison]:
    """Every column that something can be compared with."""
    own, found = _measured(report), []
    for column in report.columns:
        others: list[tuple[str, list[float] | None]] = [("its untrained twin", report.twin.get(column.name))]
        for model in known(report, column.name):
            others += [
                (model.name, model.columns[column.name]),
                (f"{model.name}, untrained", model.random.get(column.name)),
            ]
        others = [(name, numbers) for name, numbers in others if numbers is not None]
        if column.name in own and others:
            found.append(Comparison(column, [("this model", own[column.name]), *others]))
    return found


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
