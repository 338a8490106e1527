"""Findings about single heads and layers: promises, rounding, logits, norms and entropies."""

from __future__ import annotations

import math
from collections.abc import Iterator

from regard.audits.finding import ALARMING, NOTABLE, NOTE, Finding, above, at, median, value
from regard.audits.report import Report, Row
from regard.audits.words import Proved, Sentence, counted, say

LARGE_LOGIT = 50.0
"""Scores beyond this are rounded to steps of a quarter in bfloat16."""
OVERFLOW = 65504.0
"""The largest number of float16."""
OUTLIER = 4.0
"""How many times the median makes a head stand out."""
SATURATED = 0.05
"""Rows with less entropy than this, in nats, look at one key."""
KEPT = 1 + 1e-6
"""Times its value, a promise counts as kept: rounding."""
NAMED = 3
"""How many heads one rule names."""


def promises(report: Report) -> Iterator[Finding]:
    for row in report.ranked("promised"):
        if not row.values["promise_proved"] <= row.values["promised"] * KEPT:
            yield at(
                row,
                "promise_proved",
                ALARMING,
                say(
                    "The promise of {place} is broken: {promised} was promised, and the weights "
                    "prove {proved}.",
                    place=row.label,
                    promised=row.values["promised"],
                    proved=Proved(row.values["promise_proved"]),
                ),
                say(
                    "What was built on the promise (certified radii, inverses, fixed points) no longer holds."
                ),
                "Load the weights as they were saved; do not edit them by hand.",
            )


def rounding(report: Report) -> Iterator[Finding]:
    for entry in report.covered:
        if entry.rounding > 0:
            largest = max(
                (value(row, "largest_logit") for row in report.heads if row.site == entry.site),
                default=math.nan,
            )
            why = say("The same module in float64 agrees with its declaration, so the digits are lost in it.")
            if not math.isnan(largest):
                why += say("Its largest logit is {logit}.", logit=largest)
            yield at(
                entry,
                "rounding",
                ALARMING,
                say(
                    "{place} rounds badly: its output in its own arithmetic is off by {rounding}, relative.",
                    place=entry.site,
                    rounding=entry.rounding,
                ),
                why,
                "Run it in higher precision, or make its scores smaller (normalize queries and keys).",
            )


def logits(report: Report) -> Iterator[Finding]:
    """Logits that vary within a row: what is the same for a whole row changes no weight."""
    large = [row for row in report.ranked("largest_logit") if _varying(row) > LARGE_LOGIT]
    large = sorted((row for row in large if not _constant(row) > OVERFLOW), key=_varying, reverse=True)
    for row in large[:NAMED]:
        logit, entropy = row.values["largest_logit"], value(row, "entropy")
        why = say(
            "In bfloat16 scores of that size are rounded to steps of {step}. {count} of {heads} "
            + counted(len(report.heads), "head")
            + (" has" if len(large) == 1 else " have")
            + " logits that vary by more than {limit} within a row.",
            step=_bfloat_step(_varying(row)),
            count=len(large),
            heads=len(report.ranked("largest_logit")),
            limit=LARGE_LOGIT,
        )
        if not math.isnan(entropy):
            why += say("The rows of this one have mean entropy {entropy}.", entropy=entropy)
        yield at(
            row,
            "largest_logit",
            ALARMING,
            say(
                "{place} has a logit of {logit}; within a row its logits vary by {spread}.",
                place=row.label,
                logit=logit,
                spread=_varying(row),
            ),
            why,
            "Normalize queries and keys, cap the scores, or decay W_Q and W_K of this head.",
        )


def overflow(report: Report) -> Iterator[Finding]:
    """Logits whose part that is the same for a whole row is beyond float16."""
    large = [row for row in report.ranked("largest_logit") if _constant(row) > OVERFLOW]
    for row in large[:NAMED]:
        yield at(
            row,
            "largest_logit",
            ALARMING,
            say(
                "{place} overflows in float16: it has a logit of {logit}.",
                place=row.label,
                logit=row.values["largest_logit"],
            ),
            say(
                "At least {constant} of it is the same for all keys of a row and changes no weight: it is "
                "from the bias of the keys, or from what they have in common. Within a row its logits "
                "vary by {spread}. The largest number of float16 is {limit}.",
                constant=_constant(row),
                spread=_varying(row),
                limit=OVERFLOW,
            ),
            "Set the bias of its keys to zero, or subtract their mean from them: its weights stay the same.",
        )


def _varying(row: Row) -> float:
    """What of the largest logit varies within a row; all of it where that was not measured."""
    return min(row.values["largest_logit"], row.values.get("logit_spread", math.inf))


def _constant(row: Row) -> float:
    """Lower bound on the part of the largest logit that is the same for all keys of its row."""
    return row.values["largest_logit"] - _varying(row)


def _bfloat_step(value: float) -> float:
    """The distance of neighboring numbers of eight bits of significand, at this size."""
    return 2.0 ** (math.floor(math.log2(value)) - 7) if math.isfinite(value) else math.inf


def outliers(report: Report) -> Iterator[Finding]:
    ranked = report.ranked("qk_norm")
    if len(ranked) < 4:
        return
    typical = median(report, "qk_norm")
    if not typical > 0:
        return
    for row in above(report, "qk_norm", OUTLIER * typical)[:NAMED]:
        why = say("The QK norm is how fast scores can grow with the tokens.")
        logit = value(row, "largest_logit")
        if not math.isnan(logit):
            why += say("On these inputs its largest logit is {logit}.", logit=logit)
        yield at(
            row,
            "qk_norm",
            NOTABLE,
            say(
                "{place} has a QK norm of {norm}, {ratio} times that of the median head.",
                place=row.label,
                norm=row.values["qk_norm"],
                ratio=row.values["qk_norm"] / typical,
            ),
            why,
            "Watch it over checkpoints (regard track A B …), and decay or normalize its queries and keys "
            "if it grows.",
        )


def saturated(report: Report) -> Iterator[Finding]:
    low = [row for row in report.ranked("entropy") if row.values["entropy"] < SATURATED]
    typical = median(report, "head_branch_constant")
    for row in low[:NAMED]:
        yield at(
            row,
            "entropy",
            NOTE,
            say(
                "{place} is saturated: the mean entropy of its rows is {entropy}.",
                place=row.label,
                entropy=row.values["entropy"],
            ),
            say(
                "{count} of {heads} heads " + ("has" if len(low) == 1 else "have") + " less than {limit}.",
                count=len(low),
                heads=len(report.ranked("entropy")),
                limit=SATURATED,
            )
            + _steepness(row, typical),
            "Nothing, if the head looks at a position or at a sink; otherwise look at its logits.",
        )


def _steepness(row: Row, typical: float) -> Sentence:
    """Whether a saturated head is flat, as it was measured."""
    own = value(row, "head_branch_constant")
    if math.isnan(own) or not typical > 0:
        return say("Whether it is flat was not measured.")
    flat = (
        "flatter than"
        if own < 0.5 * typical
        else "steeper than"
        if own > 2 * typical
        else "about as steep as"
    )
    return say(
        "It amplifies by {constant} and the median head by {median}: it is " + flat + " most.",
        constant=own,
        median=typical,
    )
