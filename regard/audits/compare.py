"""Compare: what changed between two reports of one architecture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard._written import parsed
from regard.audits.checks import Check, checks
from regard.audits.checks.base import Column
from regard.audits.report import Report, Row
from regard.audits.words import counted
from regard.errors import ArgumentError

REPORT = "report.json"
NAMED = 3
"""How many names of columns a sentence lists."""
SETTINGS = ("arithmetic", "seed", "thorough", "every_word", "pairs")
"""Settings that may change the numbers of the same checks on the same inputs."""


@dataclass(frozen=True)
class Change:
    """A number of one row before and after; moved:
    their distance in units of the column's median size before.
    """

    row: Row
    before: float
    after: float
    moved: float


@dataclass(frozen=True)
class Comparison:
    """Two reports side by side. remarks: sentences on what makes numbers hard to compare; changes:
    by column, the largest first.
    """

    names: tuple[str, str]
    remarks: tuple[str, ...]
    columns: tuple[Column, ...]
    changes: dict[str, tuple[Change, ...]]
    gained: tuple[str, ...]
    lost: tuple[str, ...]

    def changed(self, column: str) -> tuple[Change, ...]:
        """The rows whose number is another."""
        return tuple(change for change in self.changes[column] if change.moved > 0)

    def to_dict(self) -> dict[str, Any]:
        """All changes as plain values, by column."""
        return {
            "before": self.names[0],
            "after": self.names[1],
            "remarks": list(self.remarks),
            "gained": list(self.gained),
            "lost": list(self.lost),
            "columns": {
                column.name: [
                    {"row": one.row.label, "before": one.before, "after": one.after, "moved": one.moved}
                    for one in self.changed(column.name)
                ]
                for column in self.columns
            },
        }


def read(path: Path, argument: str = "REPORT") -> Report:
    """A report from its file, or from the directory it was written to; errors name the argument."""
    file = path / REPORT if path.is_dir() else path
    try:
        data = parsed(file.read_bytes())
    except OSError as error:
        raise ArgumentError(
            argument, f"{file} cannot be read ({error.strerror})", f"give a {REPORT} or its directory"
        ) from error
    except ValueError as error:
        raise ArgumentError(
            argument, f"{file} is not JSON ({error})", f"give a {REPORT} that regard audit wrote"
        ) from error
    return _report(file, data, argument)


def _report(file: Path, data: object, argument: str) -> Report:
    if not isinstance(data, dict):
        raise ArgumentError(argument, f"{file} is not a report", f"give a {REPORT} that regard audit wrote")
    try:
        return Report.from_dict(data)
    except ArgumentError as error:
        raise ArgumentError(argument, f"{file} {error.found}", error.remedy) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(
            argument,
            f"{file} is not a complete report ({type(error).__name__}: {error})",
            "run the audit again",
        ) from error


def compare(before: Report, after: Report, called: tuple[str, str] = ("first", "second")) -> Comparison:
    """What changed from one report to the other; remarks use the words that they are called by."""
    _refuse_other(before, after)
    apart = [*_quick_in_one(before, after), *_other_pairs(before, after)]
    other = {column.name for check in apart for column in check.columns}
    shared = [
        column
        for column in before.columns
        if after.column(column.name) is not None and column.name not in other
    ]
    alike = _inputs(before) == _inputs(after)
    columns = tuple(column for column in shared if alike or column.over == "only")
    omitted = _omitted(before, after, len(shared) - len(columns), len(shared))
    covered = [{entry.site for entry in report.covered} for report in (before, after)]
    return Comparison(
        names=(before.name, after.name),
        remarks=(*_remarks(before, after, called), *omitted, *_alone(before, after, columns)),
        columns=columns,
        changes={column.name: _changes(before, after, column) for column in columns},
        gained=tuple(sorted(covered[1] - covered[0])),
        lost=tuple(sorted(covered[0] - covered[1])),
    )


def _quick_in_one(before: Report, after: Report) -> list[Check]:
    """The checks that one report has in the quick form and the other as a whole."""
    quick = [set(report.settings.get("quick", ())) for report in (before, after)]
    return [check for check in checks() if check.name in quick[0] ^ quick[1]]


def _other_pairs(before: Report, after: Report) -> list[Check]:
    """The check of the user's own pairs, where these differ."""
    given = [report.settings.get("pairs", "") for report in (before, after)]
    return [] if given[0] == given[1] else [check for check in checks() if check.name == "pairs"]


def _inputs(report: Report) -> list[tuple[str, list[str]]]:
    return [(entry.name, entry.tokens) for entry in report.inputs]


def _refuse_other(before: Report, after: Report) -> None:
    """Rows are paired by module and head, which is meaningless between architectures."""
    shapes = [[(entry.site, entry.kind) for entry in report.coverage] for report in (before, after)]
    heads = [{entry.site: entry.heads for entry in report.covered} for report in (before, after)]
    same = all(heads[0][site] == heads[1][site] for site in heads[0].keys() & heads[1].keys())
    if shapes[0] != shapes[1] or not same:
        found = (
            f"{before.name} ({_describe(before)}) and {after.name} ({_describe(after)}) are different models"
        )
        raise ArgumentError("REPORT", found, "compare reports of one architecture")


def _describe(report: Report) -> str:
    return (
        f"{report.model['kind']}, {len(report.coverage)} attention layers, "
        f"{sum(entry.heads for entry in report.covered)} heads"
    )


def _remarks(before: Report, after: Report, called: tuple[str, str]) -> list[str]:
    """Differences other than in the numbers."""
    remarks = [
        f"The {word} report is partial: {r.partial}."
        for word, r in zip(called, (before, after), strict=True)
        if r.partial
    ]
    if before.name != after.name:
        remarks.append(f"The names differ: {before.name}, then {after.name}.")
    for name in SETTINGS:
        values = [report.settings.get(name) for report in (before, after)]
        if None not in values and values[0] != values[1]:
            remarks.append(f"The setting {name} differs: {values[0]}, then {values[1]}.")
    quick = [check.name for check in _quick_in_one(before, after)]
    if quick:
        remarks.append(f"Not compared, as one audit is a quick one: {', '.join(quick)}.")
    names = [{column.name for column in report.columns} for report in (before, after)]
    for word, only in zip(called, (names[0] - names[1], names[1] - names[0]), strict=True):
        if only:
            remarks.append(f"Only the {word} report has {_listed(sorted(only))}; they are omitted.")
    return remarks


def _omitted(before: Report, after: Report, count: int, of: int) -> list[str]:
    """The columns that other inputs make incomparable, and how to compare them."""
    if count == 0:
        return []
    numbers = [len(report.inputs) for report in (before, after)]
    counts = f"{numbers[0]} and {numbers[1]}" if numbers[0] != numbers[1] else f"{numbers[0]} each"
    return [
        f"Omitted: {count} of {of} columns, because they depend on the inputs and the inputs differ "
        f"({counts}). To compare them, audit both models with the same --text or --text-file."
    ]


def _listed(names: Sequence[str]) -> str:
    """A few names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _alone(before: Report, after: Report, columns: Sequence[Column]) -> list[str]:
    """Numbers of modules that both reports cover: those that one of them lacks, and those of which it lacks
    some inputs; one sentence each, for all columns.
    """
    found = {column.name: _incomplete(before, after, column) for column in columns}
    said = []
    for place, ending in enumerate(
        ("in one report only and omitted", "compared over the inputs that both reports have")
    ):
        total = sum(counts[place] for counts in found.values())
        names = [name for name, counts in found.items() if counts[place]]
        if total:
            verb = "is" if total == 1 else "are"
            said.append(f"{total} {counted(total, 'number')} of {_listed(names)} {verb} {ending}.")
    return said


def _incomplete(before: Report, after: Report, column: Column) -> tuple[int, int]:
    """How many numbers of a column one report lacks, and of how many it lacks some inputs."""
    both = {entry.site for entry in before.covered} & {entry.site for entry in after.covered}
    old, new = _numbers(before, column.name), _numbers(after, column.name)
    pairs = {key: _pair(column, row, new[key]) for key, row in old.items() if key in new}
    absent = {key for key, (first, _) in pairs.items() if math.isnan(first)}
    single = sum(key[1] in both for key in old.keys() ^ new.keys()) + len(absent)
    fewer = sum(
        pair != (old[key].values[column.name], new[key].values[column.name])
        for key, pair in pairs.items()
        if key not in absent
    )
    return single, fewer


def _changes(before: Report, after: Report, column: Column) -> tuple[Change, ...]:
    old, new = _numbers(before, column.name), _numbers(after, column.name)
    sizes = [abs(value) for row in old.values() for value in [row.values[column.name]]]
    sizes = [size for size in sizes if math.isfinite(size) and size]
    unit = statistics.median(sizes) if sizes else 1.0
    pairs = {key: _pair(column, row, new[key]) for key, row in old.items() if key in new}
    found = [
        Change(old[key], first, second, _relative_change(first, second, unit))
        for key, (first, second) in pairs.items()
        if not math.isnan(first)
    ]
    return tuple(sorted(found, key=lambda change: change.moved, reverse=True))


def _numbers(report: Report, column: str) -> dict[tuple[str, str, int], Row]:
    """The rows that have a column, by what they are."""
    return {(row.scope, row.site, row.head): row for row in report.ranked(column)}


def _pair(column: Column, before: Row, after: Row) -> tuple[float, float]:
    """A number of one row in two reports, both over the inputs that both have; NaN where there is none."""
    numbers = [row.inputs.get(column.name, []) for row in (before, after)]
    known = [[place for place, value in enumerate(own) if not math.isnan(value)] for own in numbers]
    if known[0] == known[1]:
        return before.values[column.name], after.values[column.name]
    shared = [place for place in known[0] if place in known[1]]
    first, second = (column.combined(own[place] for place in shared) for own in numbers)
    return first, second


def _relative_change(before: float, after: float, unit: float) -> float:
    """|after - before| / unit, where two infinities are equal."""
    return 0.0 if before == after else abs(after - before) / unit
