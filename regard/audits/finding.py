"""Finding: one thing in a report that deserves a look, and how rules make one of a row."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from regard.audits.report import Coverage, Report, Row
from regard.audits.words import Sentence

ALARMING, NOTABLE, NOTE = "alarming", "notable", "note"


@dataclass(frozen=True)
class Finding:
    """One sentence that says what, one that says why it matters, one that says what to do; where it is,
    and its column; every number and name in the first two.
    """

    level: str
    what: str
    why: str
    advice: str
    site: str
    layer: int
    head: int
    column: str
    numbers: dict[str, float] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


def at(row: Row | Coverage, column: str, level: str, what: Sentence, why: Sentence, advice: str) -> Finding:
    whole = what + why
    head = row.head if isinstance(row, Row) else -1
    return Finding(
        level,
        _capital(what.text),
        why.text,
        advice,
        row.site,
        row.layer,
        head,
        column,
        whole.numbers,
        whole.names,
    )


def above(report: Report, column: str, limit: float) -> list[Row]:
    return [row for row in report.ranked(column) if row.values[column] > limit]


def value(row: Row, column: str) -> float:
    return row.values.get(column, math.nan)


def median(report: Report, column: str) -> float:
    known = [row.values[column] for row in report.ranked(column)]
    return statistics.median(known) if known else math.nan


def _capital(text: str) -> str:
    """A sentence begins with a capital, unless it is the path of a module that it begins with."""
    return f"Head{text[4:]}" if text.startswith("head ") else text
