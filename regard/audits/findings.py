"""Findings: what in a report deserves a look, why, and what can be done about it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from regard.audits.report import Report, Row, in_words
from regard.certificate import round_up

ALARMING, NOTABLE, NOTE = "alarming", "notable", "note"

UNKNOWN_TOKENS = 0.2
"""Beyond this share of unknown tokens an input is not what the model reads."""
LARGE_LOGIT = 50.0
"""Beyond this a softmax is one-hot in float16 and gradients through it vanish."""
OUTLIER = 4.0
"""How many times the median makes a head stand out."""
HEAVY_BRANCH = 50.0
"""A branch that amplifies by more than this, and far more than the other one,
carries the irregularity of its block.
"""
MASSIVE_TOKEN = 20.0
"""A token this many times the median norm is a massive activation."""
COLLAPSED = 0.95
"""Mean cosine of tokens without sinks at which they point the same way."""
KEPT = 1 + 1e-6
"""Times its value, a promise counts as kept: rounding."""
LARGE_NETWORK = 1000.0
"""End to end, a change of the input is amplified a thousandfold."""


@dataclass(frozen=True)
class Finding:
    """One sentence that says what, one that says why it matters, one that says what to do; where it is,
    and its column.
    """

    level: str
    what: str
    why: str
    advice: str
    site: str
    layer: int
    head: int
    column: str


def findings(report: Report) -> list[Finding]:
    """All findings, the alarming ones first."""
    order = (ALARMING, NOTABLE, NOTE)
    found = [finding for rule in RULES for finding in rule(report)]
    return sorted(found, key=lambda finding: order.index(finding.level))


def _at(row: Row, column: str, level: str, what: str, why: str, advice: str) -> Finding:
    return Finding(level, what, why, advice, row.site, row.layer, row.head, column)


def _above(report: Report, column: str, limit: float) -> list[Row]:
    return [row for row in report.ranked(column) if row.values[column] > limit]


def _unknown(report: Report) -> Iterator[Finding]:
    """Inputs of which the tokenizer knows little: what is measured there is about the unknown token."""
    strange = [entry for entry in report.inputs if entry.unknown > UNKNOWN_TOKENS]
    if strange:
        worst = max(entry.unknown for entry in strange)
        yield Finding(
            ALARMING,
            f"The tokenizer does not know up to {worst:.0%} of the tokens of {len(strange)} of "
            f"{len(report.inputs)} inputs.",
            "All unknown words are one token to the model, so these numbers are not about the text.",
            "Give inputs of the kind that the model was trained on (--text).",
            "",
            -1,
            -1,
            "",
        )


def _promises(report: Report) -> Iterator[Finding]:
    for row in report.ranked("promised"):
        if not row.values["promise_proved"] <= row.values["promised"] * KEPT:
            yield _at(
                row,
                "promise_proved",
                ALARMING,
                f"The promise of {row.label} is broken: {in_words(row.values['promised'])} was promised, and "
                f"the weights prove {round_up(row.values['promise_proved'])}.",
                "What was built on the promise (certified radii, inverses, fixed points) no longer holds.",
                "Load the weights as they were saved; do not edit them by hand.",
            )


def _logits(report: Report) -> Iterator[Finding]:
    for row in _above(report, "largest_logit", LARGE_LOGIT)[:5]:
        yield _at(
            row,
            "largest_logit",
            ALARMING,
            f"Head {row.label} has a logit of {in_words(row.values['largest_logit'])}.",
            "Rows of such a head are one-hot: gradients vanish, and in half "
            "precision scores overflow or tie.",
            "Normalize queries and keys, cap the scores, or decay W_Q and W_K of this head.",
        )


def _outliers(report: Report) -> Iterator[Finding]:
    ranked = report.ranked("qk_norm")
    if len(ranked) < 4:
        return
    typical = statistics.median(row.values["qk_norm"] for row in ranked)
    for row in _above(report, "qk_norm", OUTLIER * typical)[:3]:
        yield _at(
            row,
            "qk_norm",
            NOTABLE,
            f"Head {row.label} compares with norm {in_words(row.values['qk_norm'])}, "
            f"{row.values['qk_norm'] / typical:.1f} times the median.",
            "The QK norm bounds how fast scores grow with the tokens; an outlier is the head that "
            "saturates first in further training.",
            "Watch it over checkpoints (regard audit A B …), and decay or normalize its queries and keys "
            "if it grows.",
        )


def _flat_entropies(report: Report) -> Iterator[Finding]:
    flat = [row for row in report.heads if row.values.get("entropy", 1.0) < 0.05]
    for row in flat[:3]:
        yield _at(
            row,
            "entropy",
            NOTE,
            f"Head {row.label} is saturated: its rows have entropy {row.values['entropy']:.2g}.",
            "It looks at one key on all of these inputs, so it is flat: a small constant here is not "
            "robustness but a missing gradient.",
            "Nothing, if it is a position head; otherwise see its logits.",
        )


def _branches(report: Report) -> Iterator[Finding]:
    for row in report.layers:
        mlp, attention = (
            row.values.get("mlp_branch_constant", math.nan),
            row.values.get("attention_branch_constant", math.nan),
        )
        if mlp > HEAVY_BRANCH and not mlp < 4 * attention:
            yield _at(
                row,
                "mlp_branch_constant",
                ALARMING,
                f"The MLP of layer {row.layer} amplifies by {in_words(mlp)}, its attention by "
                f"{in_words(attention)}.",
                "The irregularity of this block is not in its attention; a massive activation of one token "
                "is the usual cause.",
                "Look at the token norms of the next layer, and at the down projection of this MLP.",
            )
        elif attention > HEAVY_BRANCH:
            yield _at(
                row,
                "attention_branch_constant",
                ALARMING,
                f"Attention of layer {row.layer} amplifies by {in_words(attention)}.",
                "A small change of its input is amplified that much at a real input, exactly.",
                "See which heads have the largest constants, and their logits.",
            )


def _massive(report: Report) -> Iterator[Finding]:
    for row in _above(report, "token_ratio", MASSIVE_TOKEN)[:2]:
        yield _at(
            row,
            "token_ratio",
            NOTABLE,
            f"A token that enters layer {row.layer} is {in_words(row.values['token_ratio'])} times as long "
            "as the median.",
            "Massive activations act as biases and sinks; they dominate ranks, radii and bounds of that "
            "layer, and break low precision.",
            "Read the columns without sinks; keep this layer in high precision.",
        )


def _collapse(report: Report) -> Iterator[Finding]:
    for row in _above(report, "mean_cosine_without_sinks", COLLAPSED)[:1]:
        yield _at(
            row,
            "mean_cosine_without_sinks",
            NOTABLE,
            f"Tokens that enter layer {row.layer} have mean cosine "
            f"{row.values['mean_cosine_without_sinks']:.2f}, sinks left out.",
            "Tokens have nearly collapsed to one direction: later attention cannot tell them apart.",
            "Compare with the layers before; residual scaling or fewer layers are "
            "the remedies in the literature.",
        )


def _network(report: Report) -> Iterator[Finding]:
    for row in _above(report, "network_constant", LARGE_NETWORK):
        yield _at(
            row,
            "network_constant",
            ALARMING,
            f"End to end, {row.label} amplifies by {in_words(row.values['network_constant'])}.",
            "There is a direction in which a change of the input tokens comes out a thousand times as large.",
            "See the depth plot: the layer where the curve jumps is the one to look at.",
        )


RULES: tuple[Callable[[Report], Iterator[Finding]], ...] = (
    _unknown,
    _promises, _logits, _branches, _network, _outliers, _massive, _collapse, _flat_entropies,
)  # fmt: skip
