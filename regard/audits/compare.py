"""Compare: what changed between two reports of one architecture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from regard._written import parsed
from regard.audits.checks.base import Column
from regard.audits.report import Report, Row
from regard.errors import ArgumentError

REPORT = "report.json"


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


def read(path: Path) -> Report:
    """A report from its file, or from the directory it was written to."""
    file = path / REPORT if path.is_dir() else path
    try:
        data = parsed(file.read_bytes())
    except OSError as error:
        raise ArgumentError(
            "REPORT", f"{file} cannot be read ({error.strerror})", f"give a {REPORT} or its directory"
        ) from error
    except ValueError as error:
        raise ArgumentError(
            "REPORT", f"{file} is not JSON ({error})", f"give a {REPORT} that regard audit wrote"
        ) from error
    return _report(file, data)


def _report(file: Path, data: object) -> Report:
    if not isinstance(data, dict):
        raise ArgumentError("REPORT", f"{file} is not a report", f"give a {REPORT} that regard audit wrote")
    try:
        return Report.from_dict(data)
    except ArgumentError as error:
        raise ArgumentError("REPORT", f"{file} {error.found}", error.remedy) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(
            "REPORT",
            f"{file} is not a complete report ({type(error).__name__}: {error})",
            "run the audit again",
        ) from error


def compare(before: Report, after: Report) -> Comparison:
    """What changed from one report to the other."""
    _refuse_other(before, after)
    alike = _inputs(before) == _inputs(after)
    columns = tuple(
        column
        for column in before.columns
        if after.column(column.name) is not None and (alike or column.over == "only")
    )
    covered = [{entry.site for entry in report.covered} for report in (before, after)]
    return Comparison(
        names=(before.name, after.name),
        remarks=tuple(_remarks(before, after, columns)),
        columns=columns,
        changes={column.name: _changes(before, after, column.name) for column in columns},
        gained=tuple(sorted(covered[1] - covered[0])),
        lost=tuple(sorted(covered[0] - covered[1])),
    )


def _inputs(report: Report) -> list[str]:
    return [entry.name for entry in report.inputs]


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


def _remarks(before: Report, after: Report, columns: Sequence[Column]) -> list[str]:
    """Differences other than in the numbers."""
    remarks = [
        f"The {word} report is partial: {r.partial}."
        for word, r in (("first", before), ("second", after))
        if r.partial
    ]
    if before.name != after.name:
        remarks.append(f"The names differ: {before.name}, then {after.name}.")
    if _inputs(before) != _inputs(after):
        remarks.append("The inputs differ, so only numbers of the weights are compared.")
    names = [{column.name for column in report.columns} for report in (before, after)]
    for word, only in (("first", names[0] - names[1]), ("second", names[1] - names[0])):
        if only:
            remarks.append(f"Only the {word} report has {', '.join(sorted(only))}.")
    return remarks + [sentence for column in columns for sentence in _alone(before, after, column.name)]


def _alone(before: Report, after: Report, column: str) -> list[str]:
    """Numbers of modules that both reports cover, and that one of them lacks."""
    both = {entry.site for entry in before.covered} & {entry.site for entry in after.covered}
    single = [
        key for key in _numbers(before, column).keys() ^ _numbers(after, column).keys() if key[1] in both
    ]
    return [f"{len(single)} numbers of {column} are in one report only."] if single else []


def _changes(before: Report, after: Report, column: str) -> tuple[Change, ...]:
    old, new = _numbers(before, column), _numbers(after, column)
    sizes = [abs(value) for _, value in old.values() if math.isfinite(value) and value]
    unit = statistics.median(sizes) if sizes else 1.0
    found = [
        Change(row, value, new[key][1], _relative_change(value, new[key][1], unit))
        for key, (row, value) in old.items()
        if key in new
    ]
    return tuple(sorted(found, key=lambda change: change.moved, reverse=True))


def _numbers(report: Report, column: str) -> dict[tuple[str, str, int], tuple[Row, float]]:
    return {(row.scope, row.site, row.head): (row, row.values[column]) for row in report.ranked(column)}


def _relative_change(before: float, after: float, unit: float) -> float:
    """|after - before| / unit, where two infinities are equal."""
    return 0.0 if before == after else abs(after - before) / unit
