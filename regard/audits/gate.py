"""Gate: what a CI job fails on: conditions on the numbers of a report, and numbers that got worse."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from regard.audits.checks import Check
from regard.audits.checks import checks as known_checks
from regard.audits.checks.base import STACK, Column
from regard.audits.compare import Change, Comparison, compare, read
from regard.audits.report import TOLERANCE, Report, Row
from regard.errors import ArgumentError

SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
FORM = re.compile(r"\s*([^\s<>=]+)\s*(<=|>=|<|>)\s*([^\s<>=]+)\s*")


@dataclass(frozen=True)
class Gate:
    """Why a report fails, and what could not be decided: one sentence each. A report with no failures passes.

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> report = regard.audit(model, torch.randn(1, 6, 8), checks=["rows"])
        >>> report.gate("rows.entropy<0")
        Gate(failures=(), remarks=())
        >>> len(report.gate(["rows.entropy<9", "rows.largest_logit>1e4"]).failures)
        1
    """

    failures: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Condition:
    """A condition under which a report fails: its text, the check and column, and the comparison."""

    text: str
    check: str
    column: Column
    sign: str
    limit: float

    def holds(self, value: float) -> bool:
        """Whether a number fulfils the condition; NaN fulfils none."""
        return SIGNS[self.sign](value, self.limit)

    @property
    def high(self) -> bool:
        """Whether the largest of the rows is their worst: by the column's direction, else by the sign."""
        alarming = self.column.high_is_alarming
        return self.sign.startswith(">") if alarming is None else alarming


def conditions(texts: Sequence[str], made: Sequence[Check], argument: str) -> tuple[Condition, ...]:
    """Read conditions such as words.expansion>3 on the columns of these checks.

    An ArgumentError names the argument where a text is no condition, or is about a column that no check has
    or that these checks do not have.
    """
    return tuple(_condition(text, _addresses(made), argument) for text in texts)


def check_tolerance(share: float, argument: str) -> None:
    """Refuse what is no share by which a number may be worse; the error names the argument."""
    if not 0 <= share < math.inf:
        raise ArgumentError(argument, f"is {share}", "give a share of 0 or more: 0.05 is 5 %")


def gate(
    report: Report, found: Sequence[Condition], baseline: Report | None = None, tolerance: float = TOLERANCE
) -> Gate:
    """Judge a report by conditions, and by an earlier report of the same architecture."""
    if report.partial and (found or baseline is not None):
        return Gate((f"The report is partial: {report.partial}.",))
    parts = [_judge(report, condition) for condition in found]
    if baseline is not None:
        parts.append(_against(baseline, report, tolerance))
    failures = tuple(sentence for part in parts for sentence in part.failures)
    return Gate(failures, tuple(sentence for part in parts for sentence in part.remarks))


def gate_of(
    report: Report,
    texts: str | Sequence[str],
    baseline: Report | str | PathLike[str] | None,
    tolerance: float,
) -> Gate:
    """Judge a report by Python's arguments: conditions as texts, and the baseline as a report or its file."""
    check_tolerance(tolerance, "tolerance")
    found = conditions([texts] if isinstance(texts, str) else texts, _made(report), "conditions")
    before = (
        baseline if baseline is None or isinstance(baseline, Report) else read(Path(baseline), "baseline")
    )
    return gate(report, found, before, tolerance)


def _made(report: Report) -> list[Check]:
    """The checks of a report, with the columns that it has; those of users are known by the report alone."""
    known = {check.name: check for check in known_checks()}
    owned = {column.name for check in known.values() for column in check.columns}
    strange = tuple(column for column in report.columns if column.name not in owned)
    return [known.get(name) or Check(name, "", strange) for name in report.settings["checks"]]


def _addresses(checks: Sequence[Check]) -> dict[str, tuple[str, Column]]:
    """The check and the column by CHECK.COLUMN."""
    return {
        f"{check.name}.{column.name}": (check.name, column) for check in checks for column in check.columns
    }


def _condition(text: str, made: dict[str, tuple[str, Column]], argument: str) -> Condition:
    parts = FORM.fullmatch(text)
    try:
        limit = math.nan if parts is None else float(parts[3])
    except ValueError:
        limit = math.nan
    if parts is None or math.isnan(limit):
        remedy = "give CHECK.COLUMN, one of < <= > >= and a number, as in words.expansion>3"
        raise ArgumentError(argument, f"{text!r} is no condition", remedy)
    if parts[1] not in made:
        _refuse_unknown(parts[1], made, argument)
    return Condition(text.strip(), *made[parts[1]], parts[2], limit)


def _refuse_unknown(address: str, made: dict[str, tuple[str, Column]], argument: str) -> None:
    """Raise with what is wrong with an address: a check that is not made, or a name that is unknown."""
    known = _addresses(known_checks()) | made
    if address in known:
        name = known[address][0]
        found = f"{address} is a number of the check {name}, which is not made"
        dashes = "--" * argument.startswith("--")
        remedy = f"give {dashes}pairs" if name == "pairs" else f"add {name} to {dashes}checks"
        raise ArgumentError(argument, found, remedy)
    check, _, column = address.partition(".")
    own = [name for name in known if name.partition(".")[0] == check]
    near = difflib.get_close_matches(address, own, 3, 0.6)
    near = near or [name for name in known if name.partition(".")[2] in (check, column)]
    near = near or difflib.get_close_matches(address, known, 3, 0.6)
    near = near or own
    some = f"CHECK.COLUMN with a check of {', '.join(dict.fromkeys(name for name, _ in made.values()))}"
    raise ArgumentError(argument, f"there is no column {address!r}", f"use {', '.join(near) or some}")


def _judge(report: Report, condition: Condition) -> Gate:
    """Whether the worst row fulfils a condition; a column without a number fails with the reason."""
    name = condition.column.name
    rows = [row for row in report.rows if not math.isnan(row.values.get(name, math.nan))]
    reasons = _reasons(report, condition.check)
    if not rows:
        quick = condition.check in report.settings.get("quick", [])
        nothing = "the check found nothing to measure on these inputs"
        omitted = "the quick form of the check omits it" if quick else nothing
        why = reasons or [omitted]
        return Gate((f"{condition.text}: there is no number: {_short(why)}.",))
    worst = (max if condition.high else min)(rows, key=lambda row: row.values[name])
    value = worst.values[name]
    told = f"{condition.text}: the number is {_written(value)}, of {_where(worst, condition.column)}."
    unseen = (f"{condition.text}: not measured everywhere: {_short(reasons)}.",) if reasons else ()
    return Gate((told,) if condition.holds(value) else (), unseen)


def _reasons(report: Report, check: str) -> list[str]:
    """Why a check has no number somewhere, each reason once with its first place."""
    found: dict[str, str] = {}
    for entry in report.skipped:
        if entry.check in (check, "every check"):
            place = entry.site or ("the model" if entry.input is None else "")
            number = "" if entry.input is None else f"input {entry.input + 1}"
            found.setdefault(entry.reason, ", ".join(filter(None, (place, number))))
    for module in report.missing:
        found.setdefault(module.reason, module.site)
    if not report.coverage:
        found.setdefault("no attention was found in it", "the model")
    return [f"{reason} ({place})" for reason, place in found.items()]


def _short(reasons: Sequence[str]) -> str:
    """The first reason, and how many others there are."""
    return reasons[0].rstrip(".") + (f"; and {len(reasons) - 1} more reasons" if reasons[1:] else "")


def _where(row: Row, column: Column) -> str:
    """A row in words, with the input that has its number, where that is the number of one input."""
    numbers = row.inputs.get(column.name, [])
    if (
        len(numbers) < 2
        or row.values[column.name] not in numbers
        or column.over not in ("largest", "smallest")
    ):
        return row.label
    return f"{row.label} on input {numbers.index(row.values[column.name]) + 1}"


def _written(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else "infinity" if value > 0 else "minus infinity"


def _against(baseline: Report, report: Report, tolerance: float) -> Gate:
    """What got worse than in the baseline, column by column, and what is not compared."""
    try:
        found = compare(baseline, report, ("baseline", "new"))
    except ArgumentError as error:
        return Gate((f"The baseline is of another model: {error.found}.",))
    columns = [column for column in found.columns if column.high_is_alarming is not None]
    owners = {column.name: address for address, (_, column) in _addresses(_made(report)).items()}
    failures = [f"{site} was measured in the baseline, and is not now." for site in found.lost]
    for column in columns:
        failures += _worse(found, column, owners[column.name], tolerance)
        failures += _lost(baseline, report, found, column, owners[column.name])
    if not any(found.changes[column.name] for column in columns):
        failures.append("Nothing can be compared with the baseline: no number is in both reports.")
    return Gate(tuple(failures), tuple(f"Compared with the baseline: {remark}" for remark in found.remarks))


def _worse(found: Comparison, column: Column, address: str, tolerance: float) -> list[str]:
    """One sentence on a column of which a number got worse by more than the tolerance, with the worst one."""
    changes = found.changes[column.name]
    worse = [change for change in changes if _got_worse(change, column, tolerance)]
    if not worse:
        return []
    first = max(worse, key=lambda change: change.moved)
    share = abs(first.after - first.before) / abs(first.before) if first.before else math.inf
    size = f", {100 * share:.3g} % worse" if math.isfinite(share) else ""
    others = f"; {len(worse)} of {len(changes)} rows are worse by more than {100 * tolerance:g} %"
    numbers = f"{_written(first.before)} before, {_written(first.after)} now{size}"
    return [f"{address}: {numbers}, of {first.row.label}{others}."]


def _got_worse(change: Change, column: Column, tolerance: float) -> bool:
    """Whether a number moved in the bad direction by more than the tolerance, a share of the number before
    or of the column's median size, whichever is larger.
    """
    rise = change.after - change.before if column.high_is_alarming else change.before - change.after
    if change.after == change.before or not rise > 0:
        return False
    return math.isinf(rise) or (change.moved > tolerance and rise > tolerance * abs(change.before))


def _lost(baseline: Report, report: Report, found: Comparison, column: Column, address: str) -> list[str]:
    """One sentence where numbers of the baseline are missing now, in modules that are still covered."""
    now = {(row.scope, row.site, row.head) for row in report.ranked(column.name)}
    gone = [
        row
        for row in baseline.ranked(column.name)
        if (row.scope, row.site, row.head) not in now and (row.scope == STACK or row.site not in found.lost)
    ]
    if not gone:
        return []
    check = address.partition(".")[0]
    reasons = _reasons(report, check)
    why = f": {_short(reasons)}" if reasons else ""
    first = f"{gone[0].label} had {_written(gone[0].values[column.name])}"
    return [f"{address}: {len(gone)} of the baseline's numbers are missing now; {first}{why}."]
