"""Series: how each head moves over the checkpoints of one training run, by its weights."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regard._files import write_together, writing
from regard._written import plain
from regard.audits.checks.base import HEAD, Column
from regard.audits.report import Coverage, Report
from regard.errors import ArgumentError

SCHEMA = 1
FAST = math.log(2.0)
"""A head that grows twice as much as the median head from one checkpoint to the next deserves a look."""
LARGE, HOLDS = 4096.0, 65504
"""A logit that deserves a word where it still grows, and what float16 holds: a product of query and key is
larger than its logit by one over the scale, 8 for heads of width 64 and 11.3 for 128, so that half is left.
"""
BOUNDED = ("row_stiffness",)
"""Columns that cannot run away."""
CURVES = 8
"""Of how many heads of a column curves are drawn, those that grow most."""


@dataclass(frozen=True)
class Track:
    """One number of one head along a series. typical: the growth of the median head in each step."""

    column: str
    site: str
    layer: int
    head: int
    values: tuple[float, ...]
    typical: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        """How a reader finds the head."""
        return f"head {self.head} of {self.site}"

    @property
    def growth(self) -> float:
        """log(last / first)."""
        return log_ratio(self.values[0], self.values[-1])

    @property
    def steps(self) -> tuple[float, ...]:
        """log(next / this) for each step."""
        return tuple(log_ratio(a, b) for a, b in zip(self.values, self.values[1:], strict=False))

    @property
    def steepest(self) -> int:
        """The step, from 0, in which it grew most."""
        return max(range(len(self.steps)), key=lambda step: _or_least(self.steps[step]))

    @property
    def ahead(self) -> tuple[float, ...]:
        """How much more it grew than the median head in each step, as a log."""
        usual = self.typical or (0.0,) * len(self.steps)
        return tuple(own - median for own, median in zip(self.steps, usual, strict=True))

    @property
    def fast(self) -> bool:
        """Whether it grew twice as much as the median head in one step: what all heads do is no sign."""
        return max((_or_least(step) for step in self.ahead), default=-math.inf) >= FAST


@dataclass(frozen=True)
class Series:
    """The checkpoints in the order given, and the tracks of all heads. source: a fingerprint of where the
    checkpoints are, where they were audited from files.
    """

    kind: str
    names: tuple[str, ...]
    columns: tuple[Column, ...]
    tracks: tuple[Track, ...]
    missing: tuple[Coverage, ...]
    source: str = ""

    def ranked(self, column: str) -> list[Track]:
        """The tracks of a column, the fastest growing first."""
        own = [track for track in self.tracks if track.column == column]
        return sorted(own, key=lambda track: (track.fast, _or_least(track.growth)), reverse=True)

    def runaway(self) -> tuple[int, Track] | None:
        """The checkpoint, from 0, at which the logits of a head run away, and which head."""
        return runaway([track for track in self.tracks if track.column == "largest_logit"])

    def to_dict(self) -> dict[str, Any]:
        """Every number, with the version of the schema."""
        away = self.runaway()
        tracks = [
            {
                "column": t.column,
                "site": t.site,
                "layer": t.layer,
                "head": t.head,
                "values": t.values,
                "growth": t.growth,
                "steepest_step": t.steepest,
                "steepest_growth": t.steps[t.steepest],
                "fast": t.fast,
                "ahead": t.ahead,
            }
            for column in self.columns
            for t in self.ranked(column.name)
        ]
        missing = [{"site": entry.site, "kind": entry.kind, "reason": entry.reason} for entry in self.missing]
        return plain(
            {
                "schema": SCHEMA,
                "kind": self.kind,
                "checkpoints": self.names,
                "columns": {column.name: column.kind for column in self.columns},
                "source": self.source,
                "tracks": tracks,
                "missing": missing,
                "runaway": None
                if away is None
                else {"checkpoint": self.names[away[0]], "site": away[1].site, "head": away[1].head},
            }
        )


def runaway(tracks: Sequence[Track], limit: float = LARGE) -> tuple[int, Track] | None:
    """The first checkpoint after which a largest logit had grown above a limit, and the head whose is largest
    there; None where there is none.

    `python -m benchmarks.divergence` is what that is worth.
    """
    for place in range(1, min((len(track.values) for track in tracks), default=0)):
        grown = [track for track in tracks if track.values[place] > max(limit, track.values[place - 1])]
        if grown:
            return place, max(grown, key=lambda track: track.values[place])
    return None


def series(reports: Sequence[Report], names: Sequence[str]) -> Series:
    """The series of some reports, which must be of one architecture."""
    if len(reports) < 2:
        raise ArgumentError(
            "MODEL",
            f"a series has {len(reports)} checkpoint",
            "give two or more, the earliest first",
        )
    for report, name in zip(reports, names, strict=True):
        refuse_other(reports[0], names[0], report, name)
    columns = tuple(
        c for c in reports[0].columns if c.scope == HEAD and c.high_is_alarming and c.name not in BOUNDED
    )
    missing = {entry.site: entry for report in reports for entry in report.missing}
    tracks = [track for column in columns for track in _tracks(reports, column.name)]
    return Series(
        str(reports[0].model["kind"]), tuple(names), columns, tuple(tracks), tuple(missing.values())
    )


def _tracks(reports: Sequence[Report], column: str) -> list[Track]:
    """A track for each head that every report has a number for."""
    numbers = [
        {
            (row.site, row.head): value
            for row in report.heads
            if not math.isnan(value := row.values.get(column, math.nan))
        }
        for report in reports
    ]
    found = [
        Track(column, row.site, row.layer, row.head, tuple(known[row.site, row.head] for known in numbers))
        for row in reports[0].heads
        if all((row.site, row.head) in known for known in numbers)
    ]
    steps = zip(*(track.steps for track in found), strict=True)
    typical = tuple(_median([step for step in own if math.isfinite(step)]) for own in steps)
    return [replace(track, typical=typical) for track in found]


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def refuse_other(first: Report, first_name: str, other: Report, name: str) -> None:
    """Refuse reports of different architectures: a head of one is not a later state of a head of the
    other.
    """
    if _shape(first) != _shape(other):
        found = f"{first_name} ({_describe(first)}) and {name} ({_describe(other)}) have different attention"
        raise ArgumentError("MODEL", found, "a series is of checkpoints of one model")


def _shape(report: Report) -> Any:
    """The kind of model and its attention layers; a layer that could not be read does not say how many
    heads it has.
    """
    return (
        report.model["kind"],
        report.model["parameters"],
        [(entry.site, entry.kind) for entry in report.coverage],
        _heads(report),
    )


def _heads(report: Report) -> list[int]:
    return sorted({entry.heads for entry in report.covered})


def _describe(report: Report) -> str:
    heads = "/".join(map(str, _heads(report))) or "no"
    return (
        f"{report.model['kind']}, {len(report.coverage)} attention layers of {heads} heads, "
        f"{report.model['parameters']:,} parameters"
    )


def log_ratio(first: float, last: float) -> float:
    """log(last / first); infinite from zero, and not a number where nothing was and nothing is."""
    if first > 0 and last > 0:
        return math.log(last / first)
    return math.nan if first == last else math.copysign(math.inf, last - first)


def _or_least(value: float) -> float:
    """A number to sort by: what is not known comes last."""
    return -math.inf if math.isnan(value) else value


def save(found: Series, directory: Path) -> list[Path]:
    """Write series.json and series.html, both or none."""
    from regard.audits.series_page import html

    written = json.dumps(found.to_dict(), ensure_ascii=False, indent=1, allow_nan=False)
    texts = {directory / "series.json": written, directory / "series.html": html(found)}
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        write_together({path: text.encode() for path, text in texts.items()})
    return list(texts)
