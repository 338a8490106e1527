"""The card: the main numbers of a report and what sort they are, for the description of a model."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Context, Decimal

from regard.audits.checks.base import PROVED, Column
from regard.audits.findings import Finding, findings
from regard.audits.report import Report, Row
from regard.audits.yardstick import compared

MAIN = {
    "expansion": "The changed word that spread most: the tokens of both texts end this many times as far "
    "apart as they began",
    "network_constant": "End to end, a small change of the input can come out this many times as large",
    "attention_branch_constant": "In the steepest attention layer, with its norm, this many times",
    "head_branch_constant": "In the steepest head, with its norm, this many times",
    "block_constant": "In the steepest block, norms and residual connections included, this many times",
    "largest_logit": "The largest score that a softmax sees",
    "word_deviation": "One word of the first input moves by 1 %: a layer's attention amplifies that by",
    "ball_bound": "For every input whose tokens stay in the ball that these tokens fill: a head amplifies by",
    "qk_norm": "Largest QK norm: how fast the scores of a head can grow with its tokens",
    "ov_norm": "Largest OV norm: how strongly the content of a key enters the output",
}
"""The columns that say most, and what to call the largest number of each."""
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Figure:
    """The largest number of a column: what it is in words, and where it is."""

    words: str
    column: Column
    row: Row
    report: Report

    @property
    def value(self) -> float:
        """The number itself."""
        return self.row.values[self.column.name]

    @property
    def yardstick(self) -> str:
        """What it is in known models; nothing where they were not measured."""
        found = compared(self.report, self.column.name, self.value)
        return "" if found is None else found.text

    @property
    def over(self) -> str:
        """How the numbers of several inputs became this one."""
        several = len(self.row.inputs.get(self.column.name, [])) > 1
        return (
            {"mean": "mean over inputs", "median": "median over inputs"}.get(self.column.over, "")
            if several
            else ""
        )


def figures(report: Report) -> list[Figure]:
    """The main numbers that a report has, the most telling first."""
    found = ((words, report.column(name), report.ranked(name)) for name, words in MAIN.items())
    return [
        Figure(words, column, ranked[0], report)
        for words, column, ranked in found
        if column is not None and ranked
    ]


def three_digits(value: float, kind: str) -> str:
    """Three digits; what is proved is rounded up, so that it stays true when printed."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    digits = Context(prec=3, rounding=ROUND_CEILING if kind == PROVED else ROUND_HALF_EVEN).create_decimal(
        Decimal(value)
    )
    return _write_number(digits).replace("-", "−") if digits else "0"


def _write_number(number: Decimal) -> str:
    """7.50, 0.0312, 3350, 2.27·10⁵."""
    exponent = number.adjusted()
    if -3 <= exponent <= 4:
        return f"{number:.{max(0, 2 - exponent)}f}"
    return f"{number.scaleb(-exponent):.2f}·10{str(exponent).translate(SUPERSCRIPTS)}"


def place_in_words(row: Row | Finding) -> str:
    """Where something is: the path of the module, and the head."""
    place = row.site or "the model"
    return f"{place}, head {row.head}" if row.head >= 0 else place


def markdown(report: Report) -> str:
    """A few lines of Markdown: numbers with what sort they are, coverage, findings,
    and how to make them again.
    """
    parts = [
        _heading(report),
        _coverage(report),
        _table(figures(report)),
        _findings(findings(report)),
        _again(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _heading(report: Report) -> str:
    partial = f"\n\n**This report is partial:** {escape(report.partial)}." if report.partial else ""
    return "## Regularity of attention" + partial


def _coverage(report: Report) -> str:
    heads = sum(entry.heads for entry in report.covered)
    inputs = f"on {_count_of(len(report.inputs), 'input')}" if report.inputs else "by the weights alone"
    text = (
        f"{len(report.covered)} of {_count_of(len(report.coverage), 'attention layer')} covered, "
        f"{_count_of(heads, 'head')}, {inputs}."
    )
    if report.random_tokens:
        text += " **The inputs are random tokens of its vocabulary: no finding is an alarm.**"
    if report.observed:
        text += f" {len(report.observed)} of them observed, not declared: nothing is proved about these."
    return "\n".join(
        [text, *(f"- Not covered: `{_code(entry.site)}`: {escape(entry.reason)}" for entry in report.missing)]
    )


def _count_of(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _table(entries: Sequence[Figure]) -> str:
    if not entries:
        return "Nothing was measured."
    lines = [
        f"| {entry.words} | {_value(entry)} | {_sort(entry)} | {escape(place_in_words(entry.row))} |"
        for entry in entries
    ]
    return "\n".join(["| | value | sort | where |", "|---|---:|---|---|", *lines]) + _LEGEND


_LEGEND = (
    "\n\n*exact*: computed at these inputs. *estimated*: found by a search, the truth may be beyond it. "
    "*proved*: a certificate, rounded up; nothing exceeds it under its hypotheses."
)


def _value(entry: Figure) -> str:
    return ("≤ " if entry.column.kind == PROVED else "") + three_digits(entry.value, entry.column.kind)


def _sort(entry: Figure) -> str:
    return ", ".join(part for part in (entry.column.kind, entry.over) if part)


def _findings(found: Sequence[Finding]) -> str:
    return "\n".join(
        f"- **{finding.level}**: {escape(finding.what)} {escape(finding.why)}" for finding in found
    )


def _again(report: Report) -> str:
    return (
        f"Made with `regard audit {_code(report.name)}`; all numbers are in `report.json`, and "
        "`report.html` is a page to read."
    )


def escape(text: str) -> str:
    """A text that Markdown prints as it is, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#&~])", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """A text for a code span, which knows no escapes."""
    return " ".join(text.replace("`", "'").replace("|", "¦").split())
