"""The card: the main numbers of a report with their status, for the description of a model."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal

from regard.audits.checks.base import STATUSES, Column
from regard.audits.findings import Finding, findings
from regard.audits.report import Report, Row
from regard.audits.summary import GAINS
from regard.audits.words import inputs_named
from regard.audits.yardstick import compared

MAIN = {
    "expansion": "Most amplified {unit} change (distance of the tokens after the network over before)",
    "network_constant": "End-to-end gain for a small change of the input",
    "attention_branch_constant": "Largest attention gain, including its norm",
    "head_branch_constant": "Largest head gain, including its norm",
    "mlp_branch_constant": "Largest MLP gain, including its norm",
    "block_constant": "Largest block gain, including norms and residual connections",
    "largest_logit": "Largest score before a softmax",
    "word_deviation": "Largest attention gain for a 1 % move of one token",
    "ball_bound": "Largest head gain for all inputs whose tokens stay in the ball that these fill",
    "qk_norm": "Largest QK norm (how fast the scores of a head can grow with its tokens)",
    "ov_norm": "Largest OV norm (how strongly the content of a key enters the output)",
}
"""The columns that say most, and what to call the largest number of each; unit: what was changed in texts."""
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
    def status(self) -> str:
        """Run, measured, searched or proved; over which inputs; and what it is compared with there."""
        return ", ".join(part for part in (self.column.kind, self.over, self.beside) if part)

    @property
    def shown(self) -> str:
        """Three digits, behind ≤ or ≥ where it is a bound."""
        return f"{self.column.side} {three_digits(self.value, self.column.side)}".strip()

    @property
    def place(self) -> str:
        """Where it is: the head, the attention module, or the block around it."""
        if self.column.name in ("mlp_branch_constant", "block_constant"):
            return self.report.block(self.row.site) or place_in_words(self.row)
        return place_in_words(self.row)

    @property
    def yardstick(self) -> str:
        """What it is in known models; nothing where they were not measured."""
        found = compared(self.report, self.row, self.column.name)
        return "" if found is None else found.text

    @property
    def over(self) -> str:
        """How the numbers of several inputs became this one, and which inputs these are."""
        numbers = self.row.inputs.get(self.column.name, [])
        inputs = [place for place, value in enumerate(numbers) if not math.isnan(value)]
        if len(numbers) < 2:
            return ""
        if len(inputs) == 1:
            return inputs_named(inputs).text
        some = "inputs" if len(inputs) == len(numbers) else f"{len(inputs)} of {len(numbers)} inputs"
        return f"{self.column.over} over {some}"

    @property
    def beside(self) -> str:
        """What a number is compared with, over the same inputs; nothing where that is not known."""
        values, _ = self.report.together(self.row, self.column.name, self.column.beside)
        other = self.report.column(self.column.beside)
        if not values or other is None or other.kind == self.column.kind or values[0] != self.value:
            return ""
        words = " ".join(part for part in (other.kind, other.side) if part)
        return f"{words or other.title} {three_digits(values[1], other.side)} there"


def figures(report: Report) -> list[Figure]:
    """The main numbers that a report has, the most telling first, and of the parts of a layer the largest."""
    every = ((words, report.column(name), report.ranked(name)) for name, words in MAIN.items())
    found = [
        Figure(words.format(unit=report.unit), column, ranked[0], report)
        for words, column, ranked in every
        if column is not None and ranked
    ]
    parts = iter(sorted((one for one in found if one.column.name in GAINS), key=lambda one: -one.value))
    return [next(parts) if one.column.name in GAINS else one for one in found]


def three_digits(value: float, side: str = "") -> str:
    """Three digits; what stands behind ≤ is rounded up and behind ≥ down, so that it stays true."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    rounding = {"≤": ROUND_CEILING, "≥": ROUND_FLOOR}.get(side, ROUND_HALF_EVEN)
    digits = Context(prec=3, rounding=rounding).create_decimal(Decimal(value))
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
    """A few lines of Markdown: numbers with their status, coverage, findings,
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
        f"| {entry.words} | {entry.shown} | {entry.status} | {escape(entry.place)} |" for entry in entries
    ]
    return "\n".join(["| | value | status | where |", "|---|---:|---|---|", *lines]) + _LEGEND


_LEGEND = "\n\n" + " ".join(f"*{word}*: {meaning}." for word, meaning in STATUSES.items())


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
