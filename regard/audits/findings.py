"""Findings: what in a report deserves a look, why, and what can be done about it.

A cause is named only where it was measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from regard.audits.report import Coverage, Report, Row
from regard.audits.words import Proved, Sentence, counted, say
from regard.audits.yardstick import compared

ALARMING, NOTABLE, NOTE = "alarming", "notable", "note"

UNKNOWN_TOKENS = 0.2
"""Beyond this share of unknown tokens an input is not what the model reads."""
LARGE_LOGIT = 50.0
"""Scores beyond this are rounded to steps of a quarter in bfloat16."""
OUTLIER = 4.0
"""How many times the median makes a head stand out."""
SATURATED = 0.05
"""Rows with less entropy than this, in nats, look at one key."""
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
KEPT = 1 + 1e-6
"""Times its value, a promise counts as kept: rounding."""
LARGE_NETWORK = 1000.0
"""End to end, a change of the input is amplified a thousandfold."""
LOW = ("entropy",)
"""Columns whose small numbers are findings: they are not compared with the largest of known models."""
NAMED = 3
"""How many heads one rule names."""


@dataclass(frozen=True)
class Finding:
    """One sentence that says what, one that says why it matters, one that says what to do; where it is,
    and its column; every number and name in the first two.
    """

    level: str
    what: str
    why: str
    advice: str
    site: str
    layer: int
    head: int
    column: str
    numbers: dict[str, float] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


def findings(report: Report) -> list[Finding]:
    """All findings, the alarming ones first."""
    order = (ALARMING, NOTABLE, NOTE)
    found = [_measured(report, finding) for rule in RULES for finding in rule(report)]
    return sorted(found, key=lambda finding: order.index(finding.level))


def _at(row: Row | Coverage, column: str, level: str, what: Sentence, why: Sentence, advice: str) -> Finding:
    whole = what + why
    head = row.head if isinstance(row, Row) else -1
    return Finding(
        level,
        _capital(what.text),
        why.text,
        advice,
        row.site,
        row.layer,
        head,
        column,
        whole.numbers,
        whole.names,
    )


def _measured(report: Report, finding: Finding) -> Finding:
    """The same with what its number is in known models and in the untrained twin."""
    places = (finding.site, finding.layer, finding.head)
    row = next((row for row in report.rows if (row.site, row.layer, row.head) == places), None)
    size = math.nan if row is None else row.values.get(finding.column, math.nan)
    said = None if math.isnan(size) or finding.column in LOW else compared(report, finding.column, size)
    if said is None:
        return finding
    numbers, names = {**finding.numbers, **said.numbers}, {**finding.names, **said.names}
    return replace(finding, why=f"{finding.why} {said.text}".strip(), numbers=numbers, names=names)


def _above(report: Report, column: str, limit: float) -> list[Row]:
    return [row for row in report.ranked(column) if row.values[column] > limit]


def _unknown(report: Report) -> Iterator[Finding]:
    """Inputs of which the tokenizer knows little: what is measured there is about the unknown token."""
    strange = [entry for entry in report.inputs if entry.unknown > UNKNOWN_TOKENS]
    if strange:
        found = say(
            "The tokenizer does not know up to {percent} % of the tokens of {strange} of {inputs} "
            + counted(len(report.inputs), "input")
            + ".",
            percent=round(100 * max(entry.unknown for entry in strange)),
            strange=len(strange),
            inputs=len(report.inputs),
        )
        why = "All unknown words are one token to the model, so these numbers are not about the text."
        advice = "Give inputs of the kind that the model was trained on (--text)."
        yield Finding(ALARMING, found.text, why, advice, "", -1, -1, "", found.numbers, found.names)


def _value(row: Row, column: str) -> float:
    return row.values.get(column, math.nan)


def _median(report: Report, column: str) -> float:
    known = [row.values[column] for row in report.ranked(column)]
    return statistics.median(known) if known else math.nan


def _promises(report: Report) -> Iterator[Finding]:
    for row in report.ranked("promised"):
        if not row.values["promise_proved"] <= row.values["promised"] * KEPT:
            yield _at(
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


def _rounding(report: Report) -> Iterator[Finding]:
    for entry in report.covered:
        if entry.rounding > 0:
            largest = max(
                (_value(row, "largest_logit") for row in report.heads if row.site == entry.site),
                default=math.nan,
            )
            why = say("The same module in float64 agrees with its declaration, so the digits are lost in it.")
            if not math.isnan(largest):
                why += say("Its largest logit is {logit}.", logit=largest)
            yield _at(
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


def _logits(report: Report) -> Iterator[Finding]:
    large = _above(report, "largest_logit", LARGE_LOGIT)
    for row in large[:NAMED]:
        logit, entropy = row.values["largest_logit"], _value(row, "entropy")
        why = say(
            "In bfloat16 scores of that size are rounded to steps of {step}. {count} of {heads} "
            + counted(len(report.heads), "head")
            + (" has" if len(large) == 1 else " have")
            + " a logit above {limit}.",
            step=_bfloat_step(logit),
            count=len(large),
            heads=len(report.ranked("largest_logit")),
            limit=LARGE_LOGIT,
        )
        if not math.isnan(entropy):
            why += say("The rows of this one have mean entropy {entropy}.", entropy=entropy)
        yield _at(
            row,
            "largest_logit",
            ALARMING,
            say("{place} has a logit of {logit}.", place=row.label, logit=logit),
            why,
            "Normalize queries and keys, cap the scores, or decay W_Q and W_K of this head.",
        )


def _bfloat_step(value: float) -> float:
    """The distance of neighboring numbers of eight bits of significand, at this size."""
    return 2.0 ** (math.floor(math.log2(value)) - 7) if math.isfinite(value) else math.inf


def _outliers(report: Report) -> Iterator[Finding]:
    ranked = report.ranked("qk_norm")
    if len(ranked) < 4:
        return
    typical = _median(report, "qk_norm")
    if not typical > 0:
        return
    for row in _above(report, "qk_norm", OUTLIER * typical)[:NAMED]:
        why = say("The QK norm is how fast scores can grow with the tokens.")
        logit = _value(row, "largest_logit")
        if not math.isnan(logit):
            why += say("On these inputs its largest logit is {logit}.", logit=logit)
        yield _at(
            row,
            "qk_norm",
            NOTABLE,
            say(
                "{place} compares with norm {norm}, {ratio} times the median head.",
                place=row.label,
                norm=row.values["qk_norm"],
                ratio=row.values["qk_norm"] / typical,
            ),
            why,
            "Watch it over checkpoints (regard audit A B …), and decay or normalize its queries and keys "
            "if it grows.",
        )


def _saturated(report: Report) -> Iterator[Finding]:
    low = [row for row in report.ranked("entropy") if row.values["entropy"] < SATURATED]
    typical = _median(report, "head_branch_constant")
    for row in low[:NAMED]:
        yield _at(
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
            "Nothing, if it is a head that looks at a position or at a sink; otherwise see its logits.",
        )


def _steepness(row: Row, typical: float) -> Sentence:
    """Whether a saturated head is flat, as it was measured."""
    own = _value(row, "head_branch_constant")
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


def _branches(report: Report) -> Iterator[Finding]:
    for row in report.layers:
        mlp, attention = _value(row, "mlp_branch_constant"), _value(row, "attention_branch_constant")
        if mlp > HEAVY_BRANCH and not mlp < 4 * attention:
            beside = " Its attention amplifies by {attention}." if not math.isnan(attention) else ""
            yield _at(
                row,
                "mlp_branch_constant",
                ALARMING,
                say(
                    "The MLP of {block} amplifies by {mlp}"
                    + _over(row, "mlp_branch_constant")
                    + "."
                    + beside,
                    block=_block(report, row.site),
                    mlp=mlp,
                    **({} if math.isnan(attention) else {"attention": attention}),
                ),
                _responsible(report, row),
                "See the tokens of this layer, and the down projection of this MLP.",
            )
        elif attention > HEAVY_BRANCH:
            yield _at(
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


def _block(report: Report, site: str) -> str:
    """The block around a module, by its path."""
    return next((entry.block for entry in report.coverage if entry.site == site and entry.block), site)


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
    first = "One token is responsible" if alone else "No token is responsible alone"
    where = "where it is most, " if len(row.inputs.get("mlp_branch_constant", [])) > 1 else ""
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
    """The text of a token without the sign for a space before it, or its number where tokens have no
    names.
    """
    names = report.inputs[index].tokens if index < len(report.inputs) else []
    if token >= len(names):
        return f"token {token + 1}"
    return names[token].lstrip("Ġ▁") or names[token]


def _massive(report: Report) -> Iterator[Finding]:
    large = _above(report, "token_ratio", MASSIVE_TOKEN)
    for row in large[:1]:
        yield _at(
            row,
            "token_ratio",
            NOTABLE,
            say(
                "A token that enters {place} is {ratio} times as long as the median token.",
                place=_block(report, row.site) or "the model",
                ratio=row.values["token_ratio"],
            ),
            _longest(report, row)
            + say(
                "{count} of {layers} layers are entered by one more than {limit} times as long as "
                "the median.",
                count=len(large),
                layers=len(report.ranked("token_ratio")),
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


def _collapse(report: Report) -> Iterator[Finding]:
    near = _above(report, "mean_cosine_without_sinks", COLLAPSED)
    for row in near[:1]:
        yield _at(
            row,
            "mean_cosine_without_sinks",
            NOTABLE,
            say(
                "Tokens that enter {place} have mean cosine {cosine}, sinks left out.",
                place=_block(report, row.site) or "the model",
                cosine=row.values["mean_cosine_without_sinks"],
            ),
            say(
                "They nearly share one direction. That is so in {count} of {layers} layers.",
                count=len(near),
                layers=len(report.ranked("mean_cosine_without_sinks")),
            ),
            "Compare with the layers before; residual scaling or fewer layers are "
            "the remedies in the literature.",
        )


def _network(report: Report) -> Iterator[Finding]:
    for row in _above(report, "network_constant", LARGE_NETWORK):
        yield _at(
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


def _capital(text: str) -> str:
    """A sentence begins with a capital, unless it is the path of a module that it begins with."""
    return f"Head{text[4:]}" if text.startswith("head ") else text


RULES: tuple[Callable[[Report], Iterator[Finding]], ...] = (
    _unknown, _promises, _rounding, _logits, _branches, _network, _outliers, _massive, _collapse,
    _saturated,
)  # fmt: skip
