"""The first words of a report: what was covered, what is least regular, how large,
and whether anything is alarming.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from typing import Any

from regard.audits.findings import ALARMING, findings
from regard.audits.report import Report, Row, in_words
from regard.certificate import round_up


def summary(report: Report) -> list[str]:
    """What a reader should know first, in sentences."""
    parts = [
        _partial,
        _coverage,
        _heads,
        _layers,
        _network,
        _promises,
        _proof_sentence,
        _words,
        _alarm,
        _omission_sentence,
    ]
    return [sentence for part in parts for sentence in [part(report)] if sentence]


def _partial(report: Report) -> str:
    return f"This report is partial: {report.partial}." if report.partial else ""


def _coverage(report: Report) -> str:
    if not report.coverage:
        return "This model has no attention that regard finds."
    total, heads = len(report.coverage), sum(entry.heads for entry in report.covered)
    worst = max(
        (entry.disagreement for entry in report.covered if not math.isnan(entry.disagreement)),
        default=math.nan,
    )
    what = "each declaration equals the module's own output"
    what += ", and what was observed the output of its call," if report.observed else ""
    where = (
        f" on {len(report.inputs)} input{'s' if len(report.inputs) != 1 else ''}"
        if report.inputs
        else " by their weights alone"
    )
    size = "exactly" if worst == 0 else f"to {worst:.0e} or better"
    proof = "" if math.isnan(worst) else f"; {what} {size}"
    cut = sum(entry.cut for entry in report.inputs)
    proof += (
        f"; {cut} of the texts {'was' if cut == 1 else 'were'} cut to what the model takes" if cut else ""
    )
    missing = "".join(
        f" Not covered: {entry.site} ({entry.kind}): {entry.reason}." for entry in report.missing
    )
    return (
        f"{len(report.covered)} of {total} attention layers are covered: {heads} "
        f"heads{where}{proof}.{_observed(report)}{missing}"
    )


def _observed(report: Report) -> str:
    """Layers that are measured as they were seen to compute, and what of them was not understood."""
    reasons = Counter(entry.reason for entry in report.observed)
    return "".join(
        f" {count} of them {'is' if count == 1 else 'are'} observed, not declared ({reason}): measured as "
        f"{'it was' if count == 1 else 'they were'} seen to compute, with nothing proved."
        for reason, count in reasons.items()
    )


def _name_rows(rows: list[Row], column: str) -> str:
    return ", ".join(f"{row.label} {in_words(row.values[column])}" for row in rows)


def _heads(report: Report) -> str:
    named = {
        "head_constant": "Least regular heads (layer, head), by their exact local constants",
        "qk_norm": "Largest QK norms",
    }
    for column, words in named.items():
        ranked = report.ranked(column)
        if ranked:
            typical = statistics.median(row.values[column] for row in ranked)
            return f"{words}: {_name_rows(ranked[:4], column)}; the median head has {in_words(typical)}."
    return ""


def _layers(report: Report) -> str:
    ranked = report.ranked("layer_constant")
    if not ranked:
        return ""
    first = ranked[0]
    text = (
        f"Least regular attention: {first.label}, which amplifies by "
        f"{in_words(first.values['layer_constant'])}"
    )
    blocks = report.ranked("block_constant")
    return text + (
        f"; largest block: {blocks[0].label}, {in_words(blocks[0].values['block_constant'])}."
        if blocks
        else "."
    )


def _network(report: Report) -> str:
    texts = []
    for row in report.ranked("network_constant"):
        product = row.values.get("product", math.nan)
        beside = (
            ""
            if math.isnan(product)
            else f", where the product of its blocks and its last norm is {in_words(product)}"
        )
        texts.append(
            f"End to end, {row.label} amplifies by {in_words(row.values['network_constant'])}{beside}."
        )
    return " ".join(texts)


def _promises(report: Report) -> str:
    return " ".join(
        f"Promised of {row.label}: {in_words(row.values['promised'])}; its weights prove "
        f"{round_up(row.values['promise_proved'])}, and an attack finds "
        f"{in_words(row.values['promise_attacked'])}."
        for row in report.ranked("promised")
    )


def _proof_sentence(report: Report) -> str:
    ratios = {name: _ratios(report, name) for name in ("ball_bound", "point_bound")}
    if not all(ratios.values()):
        return ""
    here, everywhere = (statistics.median(ratios[name]) for name in ("point_bound", "ball_bound"))
    above = "less than 0.01" if here < 1.0001 else f"{100 * (here - 1):.2g}"
    close = (
        f"{above} % above the exact constant" if here < 1.1 else f"{in_words(here)} times the exact constant"
    )
    return (
        f"Proved, per head: at the input {close}, on the whole ball that its tokens fill "
        f"{in_words(everywhere)} times it (medians)."
    )


def _ratios(report: Report, name: str) -> list[float]:
    """A bound over the exact constant, for each head and input that has both."""
    pairs = [
        (bound, exact)
        for row in report.heads
        for bound, exact in zip(row.inputs.get(name, []), row.inputs.get("head_constant", []), strict=False)
    ]
    return [bound / exact for bound, exact in pairs if exact > 0 and math.isfinite(bound)]


def _words(report: Report) -> str:
    worst = max(changes(report), key=lambda entry: entry["moved"], default=None)
    if worst is None:
        return ""
    return (
        f"The change of one word that moved the output most: {worst['kind']} of “{worst['word']}”, which "
        f"made “{worst['text']}”."
    )


def changes(report: Report) -> list[dict[str, Any]]:
    """Every changed word of every input."""
    return [change for table in report.tables.get("misspecification", []) for change in table["changes"]]


def _alarm(report: Report) -> str:
    alarming = [finding.what for finding in findings(report) if finding.level == ALARMING]
    return (
        f"Alarming: {' '.join(alarming)}"
        if alarming
        else "Nothing is alarming by the limits of this report."
        if report.rows
        else ""
    )


def _omission_sentence(report: Report) -> str:
    names = sorted({entry.check for entry in report.skipped})
    return f"Not measured everywhere: {', '.join(names)} (see the reasons below)." if names else ""
