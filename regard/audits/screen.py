"""The first screen of a report, made of data: the terminal and the page print the same blocks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from regard.audits.card import three_digits
from regard.audits.checks.base import HEAD, MEASURED, PROVED, RUN
from regard.audits.findings import ALARMING, NOTABLE, NOTE, findings
from regard.audits.outputs import CLASSES, EMBEDDING, NEXT
from regard.audits.rates import shown_rate, upper_limit
from regard.audits.report import Report, Row
from regard.audits.summary import closing
from regard.audits.words import counted, in_words
from regard.audits.yardstick import TWIN_INPUTS

LABELS = {"typo": "two letters swapped", "replacement": "another {unit}", "deletion": "{unit} left out"}
"""Kinds of changes; {unit} is a word, or a token of a text without words."""
PARTS = {
    "mlp_branch_constant": "largest MLP gains",
    "attention_branch_constant": "largest attention gains",
    "head_branch_constant": "largest head gains",
}
FIRST, LOOKS = 3, 5
"""How many parts of a kind, and how many findings, the first screen names."""
CHANGED, OFTEN = 0.9, 0.05
"""A change that takes the cosine below this counts; where more typos or pairs count than this share, serving
the model needs an action.
"""


@dataclass(frozen=True)
class Line:
    """A label, numbers under the headings of its block, and a note."""

    label: str
    cells: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Block:
    """A title, the status of its numbers in one word, how they were found, the headings of its columns, and
    its lines.
    """

    title: str
    kind: str
    how: str
    headings: tuple[str, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Screen:
    """What a reader sees first: facts about the audit, a verdict with an action for each situation, blocks,
    and what was read and what was not.
    """

    facts: tuple[str, ...]
    level: str
    mark: str
    verdict: str
    actions: tuple[str, ...]
    blocks: tuple[Block, ...]
    closing: tuple[str, ...]


def screen(report: Report) -> Screen:
    """The first screen of a report."""
    level, mark, verdict = _verdict(report)
    blocks = [*_changed(report), *_tiny(report), *_proved(report), *_worth(report)]
    return Screen(
        facts(report),
        level,
        mark,
        verdict,
        _actions(report),
        tuple(blocks),
        tuple(sentence.text for sentence in closing(report)),
    )


def facts(report: Report) -> tuple[str, ...]:
    """The size of the model and the number of inputs."""
    heads, layers = sum(entry.heads for entry in report.coverage), len(report.coverage)
    found = [f"{_millions(report.model['parameters'])} parameters"] if "parameters" in report.model else []
    found.append(f"{layers} attention {counted(layers, 'layer')}, {heads} {counted(heads, 'head')}")
    texts = "text" if report.tables.get("words") else "input"
    inputs = len(report.inputs)
    found.append(f"{inputs} {counted(inputs, texts)}" if inputs else "weights alone")
    return tuple(found)


def _millions(count: int) -> str:
    for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return str(count)


def _verdict(report: Report) -> tuple[str, str, str]:
    """How serious the findings are, a sign for it, and one line in words."""
    if not report.measured:
        return ALARMING, "▲", "Nothing was measured, so nothing can be said about this model."
    if report.random_tokens:
        return (
            NOTE,
            "○",
            (
                "The inputs are random tokens of its vocabulary, because the tokenizer knows none of the "
                "included texts: no finding is an alarm. Give texts of its kind with --text-file."
            ),
        )
    found = findings(report)
    alarms = sum(finding.level == ALARMING for finding in found)
    noted = sum(finding.level == NOTABLE for finding in found)
    missing, total = len(report.missing), len(report.coverage)
    if alarms:
        words = f"{alarms} {counted(alarms, 'finding')} {'is' if alarms == 1 else 'are'} alarming."
        level, mark = ALARMING, "▲"
    elif missing:
        words = f"{missing} of {total} attention {counted(total, 'layer')} could not be measured."
        level, mark = NOTABLE, "◆"
    else:
        words, level, mark = "No head and no layer is alarming.", NOTE, "○"
    more = _changed_verdicts(report)
    if noted:
        more.append(f"{noted} {counted(noted, 'finding')} {'is' if noted == 1 else 'are'} worth a look.")
    return level, mark, " ".join([words, *more]).strip()


def _changed_verdicts(report: Report) -> list[str]:
    """What typos and the user's own changes do to the answer, a sentence each."""
    typos = [entry for entry in _entries(report)[1] if entry["kind"] == "typo"]
    pairs = [entry for table in report.tables.get("pairs", []) for entry in table["changes"]]
    found = []
    for entries, name in ((typos, "typos"), (pairs, "of your pairs")):
        if entries:
            count, limit = _counted_changes(entries)
            found.append(
                f"{count:,} of {len(entries):,} {name} (95 % limit: {limit} %) {_effect(report, count)}."
            )
    return found


def _counted_changes(entries: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """How many changes count, and the 95 % limit on their rate in percent."""
    count = sum(entry["cosine"] < CHANGED if "cosine" in entry else entry["changed"] for entry in entries)
    return count, math.ceil(100 * upper_limit(count, len(entries)))


def _effect(report: Report, count: int) -> str:
    """What a change does that counts, as a verb phrase."""
    tables = [*report.tables.get("words", []), *report.tables.get("pairs", [])]
    ending = "s" if count == 1 else ""
    if tables[0]["measure"] == EMBEDDING:
        return f"take{ending} the cosine below {CHANGED:g}"
    return f"change{ending} the {'label' if tables[0]['measure'] == CLASSES else 'next token'}"


def _actions(report: Report) -> tuple[str, ...]:
    """An action for each situation."""
    if not report.measured or report.random_tokens:
        return ()
    found = findings(report)
    alarms = any(finding.level == ALARMING for finding in found)
    heads = any(finding.head >= 0 and finding.level != NOTE for finding in found)
    changed = [entry for table in report.tables.get("pairs", []) for entry in table["changes"]]
    changed += [entry for entry in _entries(report)[1] if entry["kind"] == "typo"]
    serving = "no action needed"
    if changed and _counted_changes(changed)[0] > OFTEN * len(changed):
        serving = "typos matter here: correct the spelling first, or test for them (--pairs, --fail-if)"
    serving = "resolve the alarms below first" if alarms else serving
    training = "watch these heads with regard track" if heads else "no action needed"
    return f"Serving: {serving}.", f"Training: {training}."


def _entries(report: Report) -> tuple[str, list[dict[str, Any]]]:
    """The measure of the model, and every changed text with its input."""
    tables = report.tables.get("words", [])
    measure = tables[0]["measure"] if tables else ""
    return measure, [{**entry, "input": table["input"]} for table in tables for entry in table["changes"]]


def _changed(report: Report) -> Iterator[Block]:
    """What changed words do, by the kind of the change."""
    tables = report.tables.get("words", [])
    measure, entries = _entries(report)
    pairs = next(iter(report.tables.get("pairs", [])), None)
    lines = []
    if entries:
        unit = tables[0]["unit"]
        for kind, label in LABELS.items():
            own = [entry for entry in entries if entry["kind"] == kind]
            if own:
                lines.append(_change_line(report, label.format(unit=unit), measure, own))
    if pairs is not None:
        measure = pairs["measure"]
        lines.append(_change_line(report, "your pairs", measure, pairs["changes"]))
    if lines:
        yield Block(
            f"A changed {report.unit}", RUN, _how(report, tables, measure), HEADINGS[measure], tuple(lines)
        )


HEADINGS = {
    EMBEDDING: ("changes", "median", "worst"),
    CLASSES: ("labels flipped",),
    NEXT: ("next token changed", "median KL", "worst KL"),
}
MEASURES = {
    EMBEDDING: "cosine to the original",
    CLASSES: "rates with 95 % limits",
    NEXT: "rates with 95 % limits, KL in nats",
}


def _how(report: Report, tables: Sequence[dict[str, Any]], measure: str) -> str:
    """How many texts were changed, whether that is a sample, and the measure."""
    if not tables:
        return MEASURES[measure]
    changes = sum(len(table["changes"]) for table in tables)
    words, possible = (sum(table[name] for table in tables) for name in ("words", "possible"))
    of = f"{len(tables)} of {len(report.inputs)} {counted(len(report.inputs), 'text')}"
    sample = (
        ""
        if words == possible
        else f" (a sample of {words:,} of {possible:,} {report.unit}s; --every-word: all)"
    )
    return f"{changes:,} changes in {of}{sample}; {MEASURES[measure]}"


def _change_line(report: Report, label: str, measure: str, own: list[dict[str, Any]]) -> Line:
    """The changes of one kind: typical and worst, and the worst text with its change marked."""
    key, sign = ("cosine", -1) if measure == EMBEDDING else ("divergence", 1)
    if measure == CLASSES:
        worst = next((entry for entry in own if entry["changed"]), None)
    else:
        worst = max(own, key=lambda entry: sign * entry[key])
    rate = shown_rate(sum(entry.get("changed", False) for entry in own), len(own))
    spread = (
        [statistics.median(entry[key] for entry in own), worst[key]] if measure != CLASSES and worst else []
    )
    numbers = tuple(f"{value:.2f}" if measure == EMBEDDING else in_words(value) for value in spread)
    cells = (f"{len(own):,}", *numbers) if measure == EMBEDDING else (rate, *numbers)
    if worst is None:
        return Line(label, cells)
    note = marked(_original(report, worst), worst["text"])
    return Line(label, cells, f"{note} → {worst['answer']}" if measure == CLASSES else note)


@dataclass(frozen=True)
class ChangedText:
    """A changed text with its change marked, and the answer to it; heading: what that answer is."""

    kind: str
    text: str
    answer: str
    heading: str


def every_change(report: Report) -> list[ChangedText]:
    """The changed texts with their answers: the user's own pairs, then those with the largest effect."""
    measure, entries = _entries(report)
    pairs = [(table["measure"], one) for table in report.tables.get("pairs", []) for one in table["changes"]]
    every = [*pairs, *((measure, entry) for entry in entries)]
    order = sorted(every, key=lambda one: (one[1]["kind"] != "pair", _kept(one[1])))
    return [
        ChangedText(
            LABELS.get(entry["kind"], "your pair").format(unit=report.unit),
            marked(_original(report, entry), entry["text"]),
            _shown_answer(entry),
            {EMBEDDING: "cosine", CLASSES: "label"}.get(kind, "next token, KL"),
        )
        for kind, entry in order
    ]


def _kept(entry: dict[str, Any]) -> float:
    """A number that is smaller the more a change does."""
    if "cosine" in entry:
        return float(entry["cosine"])
    return -float(entry["divergence"]) if "divergence" in entry else float(not entry["changed"])


def _shown_answer(entry: dict[str, Any]) -> str:
    if "cosine" in entry:
        return f"{entry['cosine']:.3f}"
    far = f", {in_words(entry['divergence'])}" if "divergence" in entry else ""
    return f"{entry['answer']}{far}"


def _original(report: Report, entry: dict[str, Any]) -> str:
    """The text before the change."""
    return str(entry["original"]) if "original" in entry else report.inputs[entry["input"]].name


def marked(before: str, after: str, around: int = 20) -> str:
    """Return the changed text near its change, which is marked: The (cat → cta) sat on the mat."""
    start, most = 0, min(len(before), len(after))
    while start < most and before[start] == after[start]:
        start += 1
    end = 0
    while end < most - start and before[-1 - end] == after[-1 - end]:
        end += 1
    while start > 0 and before[start - 1].isalnum() and _in_word(before, after, start, start):
        start -= 1
    last, other = len(before) - end, len(after) - end
    while last < len(before) and before[last].isalnum() and _in_word(before, after, last - 1, other - 1):
        last, other = last + 1, other + 1
    end = len(before) - last
    old, new = before[start : len(before) - end].strip(), after[start : len(after) - end].strip()
    left, right = before[:start].rstrip(), before[len(before) - end :].lstrip()
    left = left if len(left) <= around else f"… {left[-around:].partition(' ')[2] or left[-around:]}"
    right = right if len(right) <= around else f"{right[:around].rpartition(' ')[0] or right[:around]} …"
    gap = "" if right[:1] in ".,;:!?)" else " "
    return f"{left} ({f'{old} → {new}'.strip()}){gap}{right}".strip()


def _in_word(before: str, after: str, first: int, second: int) -> bool:
    """Whether a place inside the changed part of either text is a letter or a digit."""
    return any(0 <= k < len(text) and text[k].isalnum() for text, k in ((before, first), (after, second)))


def _tiny(report: Report) -> Iterator[Block]:
    """Gains for a small change in the worst direction: the whole model, then its parts in one ranking."""
    lines = [_whole(report, row) for row in _ranked(report, "network_constant")]
    parts = [
        (rows[0].values[name], _parts_line(report, name, label, rows))
        for name, label in PARTS.items()
        for rows in [_ranked(report, name)]
        if rows
    ]
    lines += [line for _, line in sorted(parts, key=lambda part: -part[0])]
    if lines:
        over = f", median over {len(report.inputs)} inputs" if len(report.inputs) > 1 else ""
        yield Block("A tiny change", MEASURED, f"gain in the worst direction{over}", (), tuple(lines))


def _ranked(report: Report, name: str) -> list[Row]:
    return [] if report.column(name) is None else report.ranked(name)


def _whole(report: Report, row: Row) -> Line:
    """The gain of the whole model, its range over the inputs, and the same architecture untrained."""
    name = "network_constant"
    known = [value for value in row.inputs.get(name, []) if not math.isnan(value)]
    label = "whole model" if len(_ranked(report, name)) == 1 else row.label
    note = f"{in_words(min(known))} to {in_words(max(known))}" if len(known) > 1 else ""
    own = next((value for one, value in report.over(name, TWIN_INPUTS) if one is row), math.nan)
    if name in report.twin and not math.isnan(own):
        random = in_words(report.twin[name][-1])
        note += f"{'; ' if note else ''}input 1: {in_words(own)}, random weights {random}"
    return Line(label, (in_words(row.values[name]),), note)


def _parts_line(report: Report, name: str, label: str, rows: list[Row]) -> Line:
    """The parts of one kind with the largest gains; of a block with two attentions, the MLP once."""
    places: dict[str, float] = {}
    for row in rows:
        places.setdefault(_place(report, name, row), row.values[name])
    cells = tuple(f"{in_words(value)} {place}" for place, value in list(places.items())[:FIRST])
    median = statistics.median(row.values[name] for row in rows)
    return Line(label, cells, f"median head {in_words(median)}" if rows[0].scope == HEAD else "")


def _place(report: Report, name: str, row: Row) -> str:
    """The layer by its number; by its path where a block holds several attentions."""
    blocks = [entry.block for entry in report.coverage]
    single = len(set(blocks)) == len(blocks)
    if row.scope == HEAD:
        return f"head {row.layer}.{row.head}" if single else f"head {row.head} of {row.site}"
    return f"layer {row.layer}" if single else report.block(row.site) if name.startswith("mlp") else row.site


def _proved(report: Report) -> Iterator[Block]:
    """What is proved of one token that moves, and what no proof covers."""
    lines = []
    rows = _ranked(report, "word_deviation")
    if rows:
        worst = rows[0]
        bound = three_digits(worst.values["word_deviation"], "≤")
        place = _place(report, "word_deviation", worst)
        said = "If one token moves by 1 %, the output of attention moves at most {} × as far ({})."
        lines.append(Line(said.format(bound, place)))
    for table in report.tables.get("radius", []):
        lines += [Line(sentence) for sentence in table["sentences"]]
    if not lines:
        return
    near = [table["nearest"] for table in report.tables.get("words", []) if table.get("nearest")]
    far = (
        f" (nearest other token: a move of {100 * near[0][0]:.0f} to {100 * near[0][1]:.0f} %)"
        if near
        else ""
    )
    lines.append(Line(f"Not covered by any proof: typos and other words{far}."))
    yield Block("Proved", PROVED, "input 1 only" if len(report.inputs) > 1 else "", (), tuple(lines))


def _worth(report: Report) -> Iterator[Block]:
    """The findings that matter most."""
    found = [finding for finding in findings(report) if finding.level != NOTE]
    lines = [Line(f"{finding.level}: {finding.what}") for finding in found[:LOOKS]]
    if len(found) > LOOKS:
        lines.append(Line(f"{len(found) - LOOKS} more in report.html"))
    if lines:
        yield Block("Worth a look", "", "", (), tuple(lines))
