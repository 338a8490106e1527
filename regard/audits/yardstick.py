"""The yardstick: what the columns of an audit are in known models, and in the same architectures with random
weights. `python -m benchmarks.yardstick` makes the table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.audits.words import Sentence, joined, say

if TYPE_CHECKING:
    from regard.audits.report import Report

TABLE = Path(__file__).parent / "yardstick.json"
QUANTILES = (0.1, 0.5, 0.9, 1.0)
"""Of the heads, layers or stacks of a model."""
FAR = 2.0
"""Times the largest of every known model, a number is far above them."""
ALIKE = 1.01
"""Times the largest, it is the same: other texts and roundings change that much."""


@dataclass(frozen=True)
class Known:
    """A model that was measured: quantiles of its columns as it is, and with random weights."""

    name: str
    columns: dict[str, list[float]]
    random: dict[str, list[float]]

    def largest(self, column: str, random: bool = False) -> float | None:
        """The largest number of a column."""
        own = (self.random if random else self.columns).get(column)
        return None if own is None else own[-1]


@cache
def table() -> dict[str, Any]:
    """The table as it was made, with its date and texts."""
    found: dict[str, Any] = (
        json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {"models": []}
    )
    return found


def known(column: str) -> list[Known]:
    """The models that have a column."""
    every = [Known(entry["name"], entry["columns"], entry["random"]) for entry in table()["models"]]
    return [model for model in every if column in model.columns]


def compared(column: str, value: float) -> Sentence | None:
    """Where a largest number stands among those of known models; None where none has the column."""
    models = known(column)
    if not models:
        return None
    most = max(model.columns[column][-1] for model in models)
    most *= ALIKE
    word = "Ordinary" if value <= most else "Above" if value <= FAR * most else "Far above"
    verb = ":" if value <= most else " what known models have:"
    parts = [
        say("{largest} in {model}", model=model.name, largest=model.columns[column][-1]) for model in models
    ]
    drawn = [model.random[column][-1] for model in models if column in model.random]
    found = joined(parts, ", ")
    said = Sentence(f"{word}{verb} it is {found.text}", found.numbers, found.names)
    if not drawn:
        return Sentence(f"{said.text}.", said.numbers, said.names)
    random = joined([say("{random}", random=value) for value in drawn], " and ")
    text = f"{said.text}; {random.text} with random weights."
    return Sentence(text, {**said.numbers, **random.numbers}, said.names)


def beside(report: Report) -> dict[str, Any]:
    """The part of the table that is about the columns of a report."""
    names = [column.name for column in report.columns]
    models = [
        {"name": model["name"]}
        | {part: {n: model[part][n] for n in names if n in model[part]} for part in ("columns", "random")}
        for model in table()["models"]
    ]
    return {key: value for key, value in table().items() if key != "models"} | {"models": models}


def quantiles(values: list[float]) -> list[float]:
    """The quantiles of some numbers, each one of them."""
    ordered = sorted(values)
    return [ordered[round(share * (len(ordered) - 1))] for share in QUANTILES]
