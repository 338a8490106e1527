"""decide.html and decide.json: what typos do to an answer, and what small moves cannot do, as one page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from regard._files import write_together, writing
from regard._pages import content_hash, environment, markup
from regard.audits.outputs import EMBEDDING
from regard.audits.page import TEMPLATES as REPORT
from regard.decisions.depth_chart import depth_chart
from regard.decisions.typo_runs import Typos, shown_examples
from regard.decisions.word_answers import Answers, WordAnswer, percent, shown_attack, shown_proved

TEMPLATES = Path(__file__).parent / "templates"
SHADES = 10

READING = (
    "“Run” is what happened: the model itself computed its answer to every text in which one {unit} has one "
    "letter missing, added or replaced, or two neighbors swapped. It is about these texts only.",
    "“Proved” is a theorem about this model on this text, in exact arithmetic with the weights as they are; "
    "the rounding of the proof itself is counted. {proved} “Attack” is {attack}. The truth is between them.",
    "The vector is the one that enters the first layer. A typo or another {unit} in its place is a far "
    "larger move than those that can be proved: the table has the distance of the nearest one. No proof "
    "here covers typos; that is why they are run.",
)
PROVED = {
    EMBEDDING: (
        "The vector of one token moves by at most {radius} of its length, in any direction, and the cosine "
        "of the mean of all tokens to the original one stays above the number.",
        "the smallest cosine that was found",
    ),
    "": (
        "The vector of one token may move by at most this part of its length, in any direction, while the "
        "answer stays.",
        "the shortest move that was found to change the answer",
    ),
}
"""What is proved, and what an attack finds, by the kind of answer."""


def save(found: Answers, directory: Path, command: str = "") -> list[Path]:
    """Write decide.html and decide.json, both or neither, and give their paths."""
    data = found.written()
    texts = {
        "decide.html": html(found, command),
        "decide.json": json.dumps(data, indent=1, ensure_ascii=False),
    }
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        write_together({directory / name: text.encode() for name, text in texts.items()})
    return [directory / name for name in texts]


def html(found: Answers, command: str = "") -> str:
    """The whole page as text."""
    style = "".join(
        path.read_text(encoding="utf-8") for path in (REPORT / "report.css", TEMPLATES / "decide.css")
    )
    style += "".join(f".shade-{k} {{ --s: {k / SHADES}; }}\n" for k in range(SHADES + 1))
    return str(
        environment(TEMPLATES)
        .get_template("decide.html.j2")
        .render(
            found=found,
            embedding=found.kind == EMBEDDING,
            sentences=found.sentences(),
            pieces=_pieces(found),
            typos=[_typos_row(one) for one in found.typos or ()],
            rows=[_row(found, one) for one in found.words],
            reasons=any(one.reason for one in found.words),
            curve=depth_chart(found.spent),
            reading=_reading(found),
            command=command,
            style=markup(style),
            style_hash=content_hash(style),
        )
    )


def _reading(found: Answers) -> list[str]:
    proved, attack = PROVED.get(found.kind, PROVED[""])
    words = {"proved": proved.format(radius=percent(found.radius)), "attack": attack, "unit": found.unit}
    return [paragraph.format(**words) for paragraph in READING]


def _shade(found: Answers, one: Typos) -> int:
    """Dark where most typos change the answer, in comparison with the other words."""
    most = max(other.share for other in found.typos or ())
    return round(SHADES * one.share / most) if most else 0


def _pieces(found: Answers) -> list[dict[str, Any]]:
    """The text in order: its words with their typos, and what is between them."""
    made, place = list[dict[str, Any]](), 0
    for one in found.typos or ():
        made += _between(found.text[place : one.start])
        shade, place = _shade(found, one), one.start + len(one.word)
        number = f"{one.changed} of {one.count}"
        made.append({"word": one.word, "shade": shade, "deep": shade > SHADES // 2, "number": number})
    return made + _between(found.text[place:])


def _between(text: str) -> list[dict[str, Any]]:
    return [{"word": word, "shade": 0, "deep": False, "number": ""} for word in text.split()]


def _typos_row(one: Typos) -> dict[str, Any]:
    numbers = {"word": one.word, "changed": one.changed, "count": one.count}
    return {**numbers, "examples": shown_examples(one)}


def _row(found: Answers, one: WordAnswer) -> dict[str, Any]:
    return {
        "word": one.word,
        "proved": shown_proved(found, one),
        "attack": shown_attack(found, one),
        "reason": one.reason,
        "nearest": one.nearest,
        "distance": percent(one.distance),
        "gap": _times(one),
    }


def _times(one: WordAnswer) -> str:
    """How many times as far the attack is."""
    if not 0 < one.proved < math.inf or not one.attack < math.inf:
        return "–"
    ratio = one.attack / one.proved
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"
