"""Findings about blocks and the whole network: branches, massive tokens, collapse, amplification."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from regard.audits.finding import ALARMING, NOTABLE, Finding, above, at, value
from regard.audits.report import Report, Row
from regard.audits.words import Sentence, say

HEAVY_BRANCH = 50.0
"""A branch that amplifies by more than this, and far more than the other one,
carries the irregularity of its block.
"""
ALONE = 4.0
"""A token is responsible alone where it is amplified this many times as much as any other."""
MASSIVE_TOKEN = 20.0
"""A token this many times the median norm is a massive activation."""
COLLAPSED = 0.95
"""Mean cosine of tokens without sinks at which they point the same way."""
LARGE_NETWORK = 1000.0
"""End to end, a change of the input is amplified a thousandfold."""


def branches(report: Report) -> Iterator[Finding]:
    for row in report.layers:
        mlp, attention = value(row, "mlp_branch_constant"), value(row, "attention_branch_constant")
        alike, _ = report.together(row, "mlp_branch_constant", "attention_branch_constant")
        compared = attention if alike == [mlp, attention] else math.nan  # over the same inputs, or not at all
        if mlp > HEAVY_BRANCH and not mlp < 4 * compared:
            beside = " Its attention amplifies by {attention}." if not math.isnan(compared) else ""
            yield at(
                row,
                "mlp_branch_constant",
                ALARMING,
                say(
                    "The MLP of {block} amplifies by {mlp}"
                    + _over(row, "mlp_branch_constant")
                    + "."
                    + beside,
                    block=report.block(row.site),
                    mlp=mlp,
                    **({} if math.isnan(compared) else {"attention": compared}),
                ),
                _responsible(report, row),
                "See the tokens of this layer, and the down projection of this MLP.",
            )
        elif attention > HEAVY_BRANCH:
            yield at(
                row,
                "attention_branch_constant",
                ALARMING,
                say(
                    "Attention in {place}, with the norm before it, amplifies by {attention}.",
                    place=row.site or "the model",
                    attention=attention,
                ),
                say("That is the largest factor for a small change of what enters it, at these inputs."),
                "See which of its heads have the largest constants, and their logits.",
            )


def _over(row: Row, column: str) -> str:
    """How the numbers of several inputs became one."""
    return ", the median over inputs" if len(row.inputs.get(column, [])) > 1 else ""


def _layers(report: Report, rows: list[Row]) -> int:
    """How many layers these are: self- and cross-attention of one block are one."""
    return len({report.block(row.site) for row in rows})


def _responsible(report: Report, row: Row) -> Sentence:
    """Which token an MLP amplifies most, and whether that token is massive: as measured, or that it was
    not.
    """
    tables = [table for table in report.tables.get("constants", []) if table["site"] == row.site]
    if not tables:
        return say("Which token is responsible was not measured.")
    worst = max(tables, key=lambda table: max(table["mlp"]))
    index, by_token = worst["input"], worst["mlp"]
    token = max(range(len(by_token)), key=by_token.__getitem__)
    second = max(value for place, value in enumerate(by_token) if place != token)
    lengths = worst["leaving"]
    facts = {
        "position": token + 1,
        "token": token_name(report, index, token),
        "input": index + 1,
        "amplified": by_token[token],
        "second": second,
    }
    alone = by_token[token] > ALONE * second
    first = "One token is responsible" if alone else "No single token is responsible"
    where = "where it is largest, " if len(row.inputs.get("mlp_branch_constant", [])) > 1 else ""
    return say(
        first + ": " + where + "number {position} of input {input}, “{token}”, is amplified by {amplified}, "
        "the next by {second}.",
        **facts,
    ) + _length(lengths, token)


def _length(lengths: list[float], token: int) -> Sentence:
    """How long a token is when it leaves the block."""
    typical = statistics.median(lengths)
    if not typical > 0:
        return say("")
    ratio = lengths[token] / typical
    massive = ": a massive activation" if ratio > MASSIVE_TOKEN else ""
    return say(
        "It leaves the block with norm {norm}, {ratio} times the median token" + massive + ".",
        norm=lengths[token],
        ratio=ratio,
    )


def token_name(report: Report, index: int, token: int) -> str:
    """The text of a token without the sign for a space before it, signs for a space and for a new line as
    the page shows them; its number where tokens have no names.
    """
    names = report.inputs[index].tokens if index < len(report.inputs) else []
    if token >= len(names):
        return f"token {token + 1}"
    return names[token].lstrip("Ġ▁").replace("Ċ", "⏎") or "␣"


def massive(report: Report) -> Iterator[Finding]:
    large = above(report, "token_ratio", MASSIVE_TOKEN)
    for row in large[:1]:
        yield at(
            row,
            "token_ratio",
            NOTABLE,
            say(
                "A token that enters {place} is {ratio} times as long as the median token.",
                place=report.block(row.site) or "the model",
                ratio=row.values["token_ratio"],
            ),
            _longest(report, row)
            + say(
                "{count} of {layers} layers receive a token more than {limit} times as long as the median.",
                count=_layers(report, large),
                layers=_layers(report, report.ranked("token_ratio")),
                limit=MASSIVE_TOKEN,
            ),
            "Read the columns without sinks; keep such layers in high precision.",
        )


def _longest(report: Report, row: Row) -> Sentence:
    """Which token that is, where it was kept."""
    tables = [table for table in report.tables.get("geometry", []) if table["site"] == row.site]
    ratios = row.inputs.get("token_ratio", [])
    known = [table for table in tables if table["input"] < len(ratios)]
    if not known:
        return say("")
    worst = max(known, key=lambda table: ratios[table["input"]])
    norms = worst["norms"]
    token = max(range(len(norms)), key=norms.__getitem__)
    return say(
        "It is number {position} of input {input}, “{token}”, of norm {norm}.",
        position=token + 1,
        input=worst["input"] + 1,
        token=token_name(report, worst["input"], token),
        norm=norms[token],
    )


def collapse(report: Report) -> Iterator[Finding]:
    near = above(report, "mean_cosine_without_sinks", COLLAPSED)
    for row in near[:1]:
        yield at(
            row,
            "mean_cosine_without_sinks",
            NOTABLE,
            say(
                "Tokens that enter {place} have mean cosine {cosine}, sinks left out.",
                place=report.block(row.site) or "the model",
                cosine=row.values["mean_cosine_without_sinks"],
            ),
            say(
                "They nearly share one direction, as in {count} of {layers} layers.",
                count=_layers(report, near),
                layers=_layers(report, report.ranked("mean_cosine_without_sinks")),
            ),
            "Compare with the layers before; residual scaling or fewer layers are "
            "the remedies in the literature.",
        )


def network(report: Report) -> Iterator[Finding]:
    for row in above(report, "network_constant", LARGE_NETWORK):
        yield at(
            row,
            "network_constant",
            ALARMING,
            say(
                "End to end, {place} amplifies by {constant}.",
                place=row.label,
                constant=row.values["network_constant"],
            ),
            say(
                "There is a direction in which a small change of the input tokens comes out that much larger."
            ),
            "See the depth plot: the layer where the curve jumps is the one to look at.",
        )
