"""The first words of a report: what was covered, what acts most strongly, what a typo did,
and whether anything is alarming.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable

from regard._durations import spoken_time
from regard.audits.findings import ALARMING, findings
from regard.audits.outputs import CLASSES, EMBEDDING
from regard.audits.report import Report, Row
from regard.audits.words import Proved, Sentence, counted, inputs_named, joined, say
from regard.audits.yardstick import TWIN_INPUTS

FIRST = 3
"""How many heads are named."""


def summary(report: Report) -> list[str]:
    """What a reader should know first, in sentences."""
    return [sentence.text for sentence in sentences(report)]


def sentences(report: Report) -> list[Sentence]:
    """The same with every number and name in them."""
    return [found for part in PARTS for found in [part(report)] if found is not None and found.text]


def closing(report: Report) -> list[Sentence]:
    """What was read and what was not, for the end of the first screen."""
    hint = _radius_hint(report)
    found = [_partial(report), _coverage(report), _omissions(report), hint if hint.text else None]
    return [sentence for sentence in found if sentence is not None]


def _partial(report: Report) -> Sentence | None:
    return say("This report is partial: {reason}.", reason=report.partial) if report.partial else None


def _coverage(report: Report) -> Sentence | None:
    if not report.coverage:
        return say("This model has no attention that regard can find, so nothing was measured.")
    covered, total = len(report.covered), len(report.coverage)
    heads = sum(entry.heads for entry in report.covered)
    found = say(
        "Read: {covered} of {total} attention layers, {heads} "
        + counted(heads, "head")
        + (_where(report) if report.inputs else ", by the weights alone")
        + ".",
        covered=covered,
        total=total,
        heads=heads,
        **({"inputs": len(report.inputs)} if report.inputs else {}),
    )
    for extra in (_agreement(report), _observed(report), _cut(report), _missing(report)):
        found = found if extra is None else found + extra
    return found


def _where(report: Report) -> str:
    return " on {inputs} " + counted(len(report.inputs), "input")


def _agreement(report: Report) -> Sentence | None:
    gaps = [entry.disagreement for entry in report.covered if not math.isnan(entry.disagreement)]
    if not gaps:
        return None
    if max(gaps) == 0:
        return say("Recomputed outputs equal the model's own.")
    return say("Recomputed outputs agree with the model's own to {gap}.", gap=_ceiling(max(gaps)))


def _observed(report: Report) -> Sentence | None:
    """Layers that are measured as they were seen to compute, and what of them was not understood."""
    parts = [
        say("{count} because {reason}", count=count, reason=reason)
        for reason, count in Counter(entry.reason for entry in report.observed).items()
    ]
    found = joined(parts, "; ")
    text = f"Observed, not declared, so nothing is proved about them: {found.text}."
    return Sentence(text, found.numbers, found.names) if parts else None


def _ceiling(value: float) -> float:
    """The next number above with one digit."""
    unit = 10.0 ** math.floor(math.log10(value))
    return float(f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.1g}")


def _cut(report: Report) -> Sentence | None:
    cut = sum(entry.cut for entry in report.inputs)
    verb = "was" if cut == 1 else "were"
    return say("{cut} of the texts " + verb + " cut to what the model takes.", cut=cut) if cut else None


def _missing(report: Report) -> Sentence | None:
    parts = [
        say("{site} ({kind}): {reason}", site=entry.site or "the model", kind=entry.kind, reason=entry.reason)
        for entry in report.missing
    ]
    found = joined(parts, "; ")
    return Sentence(f"Not covered: {found.text}.", found.numbers, found.names) if parts else None


def _words(report: Report) -> Sentence | None:
    """The changed word with the largest effect on the answer, in the measure of the model."""
    tables = report.tables.get("words", [])
    entries = [(table, entry) for table in tables for entry in table["changes"]]
    if not entries:
        return None
    measure = tables[0]["measure"]
    if measure == CLASSES:
        changed = sum(entry["changed"] for _, entry in entries)
        found = say(
            "{changed} of {count} changed " + report.unit + "s flip the label.",
            changed=changed,
            count=len(entries),
        )
        return found + _radius_hint(report)
    key, sign = ("cosine", -1) if measure == EMBEDDING else ("divergence", 1)
    _, worst = max(entries, key=lambda pair: sign * pair[1][key])
    what = "it takes the cosine to" if measure == EMBEDDING else "the KL of the next token is"
    found = say(
        "Of {count} changed "
        + report.unit
        + "s in {texts} of {inputs} "
        + counted(len(report.inputs), "input")
        + ", the {kind} of “{word}” changes the answer most; "
        + what
        + " {number}: “{text}”",
        count=len(entries),
        texts=len(tables),
        inputs=len(report.inputs),
        kind=worst["kind"],
        word=worst["word"],
        number=worst[key],
        text=worst["text"],
    )
    return found + _radius_hint(report)


def _radius_hint(report: Report) -> Sentence:
    """Where every typo of the first text, and proofs about it, can be had; nothing where they cannot."""
    seconds = report.settings.get("radius")
    if seconds is None:
        return say("")
    return say(
        "To run every typo of the first text and prove what small moves cannot do: --checks radius "
        "({taken} of one core).",
        taken=spoken_time(seconds),
    )


def _decision(report: Report) -> Sentence | None:
    """Up to where one word changes nothing, and where that is lost."""
    table = next(iter(report.tables.get("radius", [])), None)
    if table is None:
        return None
    found = say("{answer}", answer=" ".join([table["question"], *table["sentences"]]))
    shares = [100 * entry["share"] for entry in table["spent"]]
    if len(shares) < 2:
        return found
    grown = [after - before for before, after in zip([0.0, *shares], shares, strict=False)]
    worst = grown.index(max(grown))
    return found + say(
        "Of the move that the proof allows for, {first} % is beyond the derivative after the first block "
        "and {last} % "
        "after the last; block {block} adds most of it ({added} %).",
        first=shares[0],
        last=shares[-1],
        block=worst + 1,
        added=grown[worst],
    )


def _name_rows(rows: list[Row], column: str) -> Sentence:
    parts = [say("{place} ({value})", place=row.label, value=row.values[column]) for row in rows]
    return joined(parts, ", ")


def _normed(report: Report, alone: str, branch: str) -> bool:
    """Whether something stands before attention anywhere: the numbers with it and without it differ."""
    pairs = [(row.values.get(alone), row.values.get(branch)) for row in report.rows]
    return any(one != other for one, other in pairs if other is not None)


def _heads(report: Report) -> Sentence | None:
    before = ", with the norm before them" if _normed(report, "head_constant", "head_branch_constant") else ""
    named = {
        "head_branch_constant": f"Heads that amplify most{before}",
        "qk_norm": "Heads with the largest QK norms",
    }
    for column, words in named.items():
        ranked = report.ranked(column)
        if ranked:
            typical = statistics.median(row.values[column] for row in ranked)
            first = _name_rows(ranked[:FIRST], column)
            text = Sentence(f"{words}: {first.text};", first.numbers, first.names)
            return text + say("the median head has {median}.", median=typical)
    return None


GAINS = {
    "attention_branch_constant": "attention in {place}",
    "mlp_branch_constant": "the MLP of {place}",
    "block_constant": "the block {place}",
}
"""The parts of a layer, which are ranked together."""


def _parts(report: Report) -> Sentence | None:
    """The parts of all layers with the largest gains, and the largest of each sort that is not among them."""
    gains: dict[tuple[str, str], float] = {}  # a block with two attentions is one part
    for name in GAINS:
        for row in report.ranked(name):
            place = row.label if name == "attention_branch_constant" else report.block(row.site) or row.label
            gains.setdefault((name, place), row.values[name])
    if not gains:
        return None
    ranked = sorted(gains, key=lambda part: -gains[part])
    named = ranked[:FIRST]
    for name in GAINS:
        if name not in [sort for sort, _ in named]:
            named += [part for part in ranked if part[0] == name][:1]
    parts = [say(GAINS[name] + " ({gain})", place=place, gain=gains[name, place]) for name, place in named]
    before = _normed(report, "layer_constant", "attention_branch_constant")
    listed = joined(parts, ", ")
    text = f"Parts that amplify most{', with the norms before them' if before else ''}: {listed.text}."
    return Sentence(text, listed.numbers, listed.names)


def _network(report: Report) -> Sentence | None:
    parts = []
    for row in report.ranked("network_constant"):
        whole = say(
            "End to end, {place} amplifies by {constant}",
            place=row.label,
            constant=row.values["network_constant"],
        )
        values, inputs = report.together(row, "network_constant", "product")
        if inputs:
            whole = _with_product(report, whole, row, values, inputs)
        parts.append(Sentence(f"{whole.text}.", whole.numbers, whole.names))
    return joined(parts, " ") if parts else None


def _with_product(
    report: Report, whole: Sentence, row: Row, values: list[float], inputs: list[int]
) -> Sentence:
    """The gain of a network beside the product of its blocks, both over the inputs that have both."""
    norm = " and its last norm" if _last_norm(report, row.site) else ""
    product = say("where the product of its blocks" + norm + " is {product}", product=values[1])
    between = ", "
    if values[0] != whole.numbers["constant"]:
        there, between = inputs_named(inputs), "; "
        alike = say("it amplifies by {alike},", alike=values[0])
        product = Sentence(f"on {there.text}", there.numbers) + alike + product
    return Sentence(f"{whole.text}{between}{product.text}", {**whole.numbers, **product.numbers}, whole.names)


def _last_norm(report: Report, stack: str) -> bool:
    """Whether a norm reads what the last block of a stack returns."""
    curves = (table["stacks"].get(stack, {}) for table in report.tables.get("depth", []))
    return any(curve.get("final") not in (None, 1.0) for curve in curves)


def _medians(report: Report) -> Sentence | None:
    """How the numbers of several inputs became those above."""
    several = len(report.inputs) > 1 and report.ranked("attention_branch_constant")
    return (
        say("Where no input is named, these are medians over {inputs} inputs.", inputs=len(report.inputs))
        if several
        else None
    )


TWINS = {
    "head_branch_constant": "largest head gain",
    "attention_branch_constant": "largest attention gain",
    "network_constant": "end-to-end gain",
}
"""What is compared with the untrained twin."""


def _twin(report: Report) -> Sentence | None:
    """What the architecture alone gives, on the input on which its twin was measured."""
    parts = []
    for name, words in TWINS.items():
        own = [value for _, value in report.over(name, TWIN_INPUTS)]
        if name in report.twin and own:
            parts.append(say(words + " {own} (twin {twin})", own=max(own), twin=report.twin[name][-1]))
    if not parts:
        return None
    found = joined(parts, ", ")
    where = inputs_named(TWIN_INPUTS)
    text = "Compared with its untrained twin, the same architecture with random weights"
    if len(report.inputs) == 1:
        return Sentence(f"{text}: {found.text}.", found.numbers)
    return Sentence(f"{text}, on {where.text}: {found.text}.", {**where.numbers, **found.numbers})


def _promises(report: Report) -> Sentence | None:
    parts = [
        say(
            "Promised for {place}: {promised}; its weights prove {proved}, and an attack finds {attacked}.",
            place=row.label,
            promised=row.values["promised"],
            proved=Proved(row.values["promise_proved"]),
            attacked=row.values["promise_attacked"],
        )
        for row in report.ranked("promised")
    ]
    return joined(parts, " ") if parts else None


def _proofs(report: Report) -> Sentence | None:
    ratios = {name: _ratios(report, name) for name in ("ball_bound", "point_bound")}
    if not all(ratios.values()):
        return None
    here, everywhere = (statistics.median(ratios[name]) for name in ("point_bound", "ball_bound"))
    percent = 100 * (here - 1)
    close = (
        say("less than {above} % above the measured constant", above=0.01)
        if percent < 0.01
        else say("{above} % above the measured constant", above=percent)
        if here < 1.1
        else say("{times} times the measured constant", times=here)
    )
    return (
        say("Proved, per head:")
        + close
        + say(
            "of the same input, and {everywhere} times it on the whole ball that its tokens fill (medians).",
            everywhere=everywhere,
        )
    )


def _ratios(report: Report, name: str) -> list[float]:
    """A bound over the measured constant, for each head and input that has both."""
    pairs = [
        (bound, measured)
        for row in report.heads
        for bound, measured in zip(
            row.inputs.get(name, []), row.inputs.get("head_constant", []), strict=False
        )
    ]
    return [bound / measured for bound, measured in pairs if measured > 0 and math.isfinite(bound)]


def _alarm(report: Report) -> Sentence | None:
    """Never calm where nothing was measured, nor about what was not."""
    if not report.measured:
        return say("Nothing was measured, so nothing can be said about this model.")
    if report.random_tokens:
        repair = next((entry.repair for entry in report.inputs if entry.repair), "")
        return say(
            "The tokenizer knows none of the included texts, so the inputs are random tokens of its "
            "vocabulary and no finding is an alarm. {remedy}.",
            remedy=repair[:1].upper() + repair[1:] if repair else "Give texts of its kind with --text",
        )
    alarming = [finding for finding in findings(report) if finding.level == ALARMING]
    parts = [Sentence(one.what, one.numbers, one.names) for one in alarming]
    if parts:
        found = joined(parts, " ")
        return Sentence(f"Alarming: {found.text}", found.numbers, found.names)
    if report.missing:
        return say(
            "Nothing is alarming in what was measured; {missing} of {total} attention layers were not.",
            missing=len(report.missing),
            total=len(report.coverage),
        )
    return say("Nothing is alarming by the limits of this report.")


def _omissions(report: Report) -> Sentence | None:
    """What could not be measured, each with its reason."""
    found: dict[tuple[str, str], int] = {}
    for entry in report.skipped:
        found[entry.check, entry.reason] = found.get((entry.check, entry.reason), 0) + 1
    parts = [
        say(
            "{check} in {places} " + counted(count, "place") + " ({reason})",
            check=check,
            places=count,
            reason=reason,
        )
        for (check, reason), count in found.items()
    ]
    whole = joined(parts, "; ")
    return Sentence(f"Not measured: {whole.text}.", whole.numbers, whole.names) if parts else None


PARTS: tuple[Callable[[Report], Sentence | None], ...] = (
    _partial, _coverage, _alarm, _decision, _words, _heads, _parts, _network, _medians, _twin, _promises,
    _proofs, _omissions,
)  # fmt: skip
