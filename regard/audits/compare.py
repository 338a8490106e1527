"""Compare: what changed between two reports of one architecture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard._written import parsed
from regard.audits.checks.base import Column
from regard.audits.report import Report, Row
from regard.audits.words import counted
from regard.errors import ArgumentError

REPORT = "report.json"
NAMED = 3
"""How many names of columns a sentence lists."""


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
    """What changed from one report to the other. Only numbers of the same inputs are compared, over the
    inputs that have them in both reports.
    """
    _refuse_other(before, after)
    shared = [column for column in before.columns if after.column(column.name) is not None]
    alike = _inputs(before) == _inputs(after)
    columns = tuple(column for column in shared if alike or column.over == "only")
    covered = [{entry.site for entry in report.covered} for report in (before, after)]
    found = {column.name: _paired(before, after, column) for column in columns}
    omitted = _omitted(before, after, len(shared) - len(columns), len(shared))
    return Comparison(
        names=(before.name, after.name),
        remarks=(*_remarks(before, after), *omitted, *_alone(before, after, found)),
        columns=columns,
        changes={name: _changes(pairs) for name, pairs in found.items()},
        gained=tuple(sorted(covered[1] - covered[0])),
        lost=tuple(sorted(covered[0] - covered[1])),
    )


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


def _remarks(before: Report, after: Report) -> list[str]:
    """Differences other than in the numbers."""
    remarks = [
        f"The {word} report is partial: {r.partial}."
        for word, r in (("first", before), ("second", after))
        if r.partial
    ]
    if before.name != after.name:
        remarks.append(f"The names differ: {before.name}, then {after.name}.")
    names = [[column.name for column in report.columns] for report in (before, after)]
    for word, own, other in (("first", names[0], names[1]), ("second", names[1], names[0])):
        if only := sorted(set(own) - set(other)):
            remarks.append(f"Only the {word} report has {_listed(only)}; they are omitted.")
    return remarks


def _omitted(before: Report, after: Report, count: int, of: int) -> list[str]:
    """What other inputs make incomparable, and how to compare it."""
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


_Pairs = dict[tuple[str, str, int], tuple[Row, float, float]]
"""By scope, module and head: a row with its numbers before and after."""


def _alone(before: Report, after: Report, found: dict[str, _Pairs]) -> list[str]:
    """Numbers of modules that both reports cover, and that one of them lacks."""
    both = {entry.site for entry in before.covered} & {entry.site for entry in after.covered}
    counts = {
        name: sum(
            key[1] in both
            for key in (_numbers(before, name).keys() | _numbers(after, name).keys()) - pairs.keys()
        )
        for name, pairs in found.items()
    }
    single = [name for name, count in counts.items() if count]
    if not single:
        return []
    total = sum(counts.values())
    return [
        f"{total} {counted(total, 'number')} of {_listed(single)} {'is' if total == 1 else 'are'} in one "
        "report only and omitted."
    ]


def _paired(before: Report, after: Report, column: Column) -> _Pairs:
    """The numbers of the rows that have one in both reports, over the inputs that have both."""
    old, new = (_numbers(report, column.name) for report in (before, after))
    found = {}
    for key in (key for key in old if key in new):
        row, pair = old[key], (old[key].values[column.name], new[key].values[column.name])
        if column.over != "only":
            pair = _over_both(column, row.inputs[column.name], new[key].inputs[column.name])
        if not any(map(math.isnan, pair)):
            found[key] = (row, *pair)
    return found


def _over_both(column: Column, old: Sequence[float], new: Sequence[float]) -> tuple[float, float]:
    pairs = [pair for pair in zip(old, new, strict=False) if not any(map(math.isnan, pair))]
    return column.combined(a for a, _ in pairs), column.combined(b for _, b in pairs)


def _changes(pairs: _Pairs) -> tuple[Change, ...]:
    sizes = [abs(before) for _, before, _ in pairs.values() if math.isfinite(before) and before]
    unit = statistics.median(sizes) if sizes else 1.0
    found = [
        Change(row, before, after, _relative_change(before, after, unit))
        for row, before, after in pairs.values()
    ]
    return tuple(sorted(found, key=lambda change: change.moved, reverse=True))


def _numbers(report: Report, column: str) -> dict[tuple[str, str, int], Row]:
    return {(row.scope, row.site, row.head): row for row in report.ranked(column)}


def _relative_change(before: float, after: float, unit: float) -> float:
    """|after - before| / unit, where two infinities are equal."""
    return 0.0 if before == after else abs(after - before) / unit
