"""decide.html and decide.json: an answer and how far each word carries it, as one page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from regard._files import write_together, writing
from regard._pages import content_hash, environment, markup
from regard._written import plain
from regard.audits.page import TEMPLATES as REPORT
from regard.decisions.asked import EMBEDDING
from regard.decisions.depth_chart import depth_chart
from regard.decisions.word_answers import Answers, WordAnswer, shown_attack, shown_proved

TEMPLATES = Path(__file__).parent / "templates"
SHADES = 10

READING = {
    EMBEDDING: (
        "One token is moved by the given part of its length, in every direction; the cosine of the mean of "
        "all tokens to the original one is then at least what is proved. The attack is the smallest found.",
    ),
    "": (
        "“Proved” is how far the vector of a word may move, in any direction, as a part of its length, while "
        "the answer certainly stays: a theorem about this model on this text, in exact arithmetic with the "
        "weights as they are; the rounding of the proof itself is counted. "
        "“Attack” is the shortest move that was found to change it. The truth is between them.",
        "The vector is the one that enters the first layer. Another word in its place is a move of about "
        "100 %, which no bound of this kind reaches; words of a list, and typos, are therefore run one by "
        "one, which is exact.",
    ),
}


def save(found: Answers, directory: Path, command: str = "") -> list[Path]:
    """Write decide.html and decide.json, both or neither, and give their paths."""
    data = plain(found.written())
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
            tokens=_tokens(found),
            rows=[_row(found, one) for one in found.words],
            typed=any(one.typos is not None or one.reason for one in found.words),
            curve=depth_chart(found.spent),
            reading=READING.get(found.kind, READING[""]),
            command=command,
            style=markup(style),
            style_hash=content_hash(style),
        )
    )


def _shade(found: Answers, one: WordAnswer) -> int:
    """Dark where little is proved, in comparison with the other words."""
    values = [math.log(max(other.proved, 1e-12)) for other in found.words]
    low, high = min(values), max(values)
    if high - low < 1e-9:
        return 3
    return round(SHADES * (high - math.log(max(one.proved, 1e-12))) / (high - low))


def _tokens(found: Answers) -> list[dict[str, Any]]:
    """The text, word by word."""
    by_place = {one.place: one for one in found.words}
    made = []
    for place, word in enumerate(found.tokens):
        if not word:
            continue
        one = by_place.get(place)
        shade = 0 if one is None else _shade(found, one)
        number = "" if one is None else shown_proved(found, one)
        made.append({"word": word, "shade": shade, "deep": shade > SHADES // 2, "number": number})
    return made


def _row(found: Answers, one: WordAnswer) -> dict[str, Any]:
    return {
        "word": one.word,
        "proved": shown_proved(found, one),
        "attack": shown_attack(found, one),
        "reason": one.reason,
        "typos": one.typos,
        "gap": _times(one),
    }


def _times(one: WordAnswer) -> str:
    """How many times as far the attack is."""
    if not 0 < one.proved < math.inf or not one.attack < math.inf:
        return "–"
    ratio = one.attack / one.proved
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"
