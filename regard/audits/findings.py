"""Findings: what in a report deserves a look, why, and what can be done about it.

A cause is named only where it was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from regard.audits import head_findings, stack_findings
from regard.audits.finding import ALARMING, NOTABLE, NOTE, Finding
from regard.audits.report import Report
from regard.audits.samples import UNKNOWN
from regard.audits.words import counted, say
from regard.audits.yardstick import compared

__all__ = ["ALARMING", "NOTABLE", "NOTE", "Finding", "findings"]

UNKNOWN_TOKENS = 0.2
"""Beyond this share of unknown tokens an input is not what the model reads; beyond that of
`regard.audits.samples` it is mentioned.
"""
LOW = ("entropy",)
"""Columns whose small numbers are findings: they are not compared with the largest of known models."""


KIND = "Give inputs of the kind that the model was trained on (--text)."


def findings(report: Report) -> list[Finding]:
    """All findings, the alarming ones first."""
    order = (ALARMING, NOTABLE, NOTE)
    found = [_measured(report, finding) for rule in RULES for finding in rule(report)]
    if report.random_tokens:  # what random tokens do says nothing about texts
        found = [replace(finding, level=NOTE) for finding in found]
    return sorted(found, key=lambda finding: order.index(finding.level))


def _measured(report: Report, finding: Finding) -> Finding:
    """The same with what its number is in known models and in the untrained twin."""
    places = (finding.site, finding.layer, finding.head)
    row = next((row for row in report.rows if (row.site, row.layer, row.head) == places), None)
    if row is None or finding.column in LOW or math.isnan(row.values.get(finding.column, math.nan)):
        return finding
    said = compared(report, row, finding.column)
    if said is None:
        return finding
    numbers, names = {**finding.numbers, **said.numbers}, {**finding.names, **said.names}
    return replace(finding, why=f"{finding.why} {said.text}".strip(), numbers=numbers, names=names)


def _unknown(report: Report) -> Iterator[Finding]:
    """Inputs of which the tokenizer knows little: what is measured there is about the unknown token."""
    strange = [entry for entry in report.inputs if entry.unknown > UNKNOWN]
    if strange:
        worst = max(strange, key=lambda entry: entry.unknown)
        found = say(
            "The tokenizer does not know up to {percent} % of the tokens of {strange} of {inputs} "
            + counted(len(report.inputs), "input")
            + ".",
            percent=round(100 * worst.unknown),
            strange=len(strange),
            inputs=len(report.inputs),
        )
        why = "All unknown words are one token to the model, so these numbers are not about the text."
        advice = f"{worst.repair[:1].upper()}{worst.repair[1:]}." if worst.repair else KIND
        level = ALARMING if worst.unknown > UNKNOWN_TOKENS else NOTABLE
        yield Finding(level, found.text, why, advice, "", -1, -1, "", found.numbers, found.names)


RULES: tuple[Callable[[Report], Iterator[Finding]], ...] = (
    _unknown,
    head_findings.promises,
    head_findings.rounding,
    head_findings.logits,
    head_findings.overflow,
    stack_findings.branches,
    stack_findings.network,
    head_findings.outliers,
    stack_findings.massive,
    stack_findings.collapse,
    head_findings.saturated,
)
