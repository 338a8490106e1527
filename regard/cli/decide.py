"""regard decide: could a typo change this answer?"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    from regard.audits.terminal import Bars
    from regard.decisions.asked import Asked
    from regard.decisions.kept import Kept
    from regard.decisions.word_answers import Answers, WordAnswer

STOPPED = 130

TEXT = "The film was not boring, although the plot was weak."
"""What the shipped classifier is asked, unless another text is given."""

HELP = """Could a typo change this answer? Each word of a text: how far it can move, proved and attacked.

Without MODEL, the question goes to a small opinion classifier that comes with regard (three layers, trained
on sentences written for it). MODEL is a directory or a hub id of a sequence classifier, a GPT-2 (its next
token) or an encoder (the cosine of its embedding), of the families BERT, RoBERTa, DistilBERT
and GPT-2.

An interrupted run continues where it stopped when the same command is repeated with the same --out.

For each word: how far its vector can move, relative to its length, without changing the answer (proved), and
the shortest change that was found to do so (attack). With the shipped classifier, every one-letter typo
is also tried.

\b
Examples
  regard decide                                        the shipped classifier
  regard decide --text "I loved the soup."             another sentence
  regard decide ./my-classifier --text "A warm film."  yours
  regard decide ./my-classifier --text "…" --json      numbers for a program

\b
Exit status
  0 done   2 wrong arguments or files   130 stopped: the same command continues
"""


def decide(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A directory or a hub id.", show_default=False)
    ] = None,
    text: Annotated[str | None, typer.Option(help="One sentence.", show_default=TEXT)] = None,
    radius: Annotated[
        float, typer.Option(help="For embeddings: how far a word moves, relative to its length.")
    ] = 1e-3,
    resolution: Annotated[
        float, typer.Option(help="How closely to search for the largest proved radius, as a factor.")
    ] = 1.04,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON and write nothing.")] = False,
    out: Annotated[Path, typer.Option(help="The directory for decide.html and decide.json.")] = Path(
        "decide"
    ),
) -> None:
    """Check every argument before the work begins, then do it."""
    from regard._allocation import keep_freed_memory
    from regard._files import check_writable
    from regard.audits.terminal import output, say
    from regard.decisions import loaded_on, shipped_on
    from regard.decisions.kept import Kept, question_of
    from regard.decisions.page import save

    if not 0 < radius < 1:
        raise ArgumentError("--radius", f"is {radius}", "give a part of a token's length, between 0 and 1")
    if not resolution > 1:
        raise ArgumentError("--resolution", f"is {resolution}", "give a factor above 1, such as 1.1")
    if model is not None and text is None:
        raise ArgumentError("--text", "is missing", "give the text that the model is to be asked about")
    if not json_:
        if importlib.util.find_spec("jinja2") is None:
            raise MissingExtraError("jinja2", "report")
        check_writable(out)
    keep_freed_memory()
    asked = shipped_on(TEXT if text is None else text) if model is None else loaded_on(model, str(text))
    kept = None if json_ else Kept(out, question_of(asked, radius, resolution))
    found = _answers(asked, radius, resolution, kept)
    if json_:
        print(json.dumps(found.written(), indent=1, ensure_ascii=False))
        return
    _show(found)
    paths = save(found, out, shlex.join(["regard", *sys.argv[1:]]))
    if kept is not None:
        kept.remove()
    say(output(), f"written: {', '.join(str(path) for path in paths)}")


def _answers(asked: Asked, radius: float, resolution: float, kept: Kept | None) -> Answers:
    """The work with a bar on a terminal, and a line now and then elsewhere; Ctrl-C keeps what there is."""
    from regard.audits import terminal
    from regard.decisions import answers

    known = 0 if kept is None else len(kept.words)
    if known:
        said = f"known from an earlier run: {known} of {len(asked.moving)} words"
        terminal.say(terminal.messages(), said)
    try:
        with terminal.Bars(terminal.messages(), [len(asked.moving)]) as bars:
            watched = partial(_watched, asked, bars)
            return answers(asked, watched, radius=radius, resolution=resolution, kept=kept)
    except KeyboardInterrupt:
        count = 0 if kept is None else len(kept.words)
        words = "1 word is" if count == 1 else f"{count} words are"
        more = f"; {words} kept: the same command continues" if count else ""
        terminal.say(terminal.messages(), f"regard: stopped{more}")
        raise typer.Exit(STOPPED) from None


def _watched(asked: Asked, bars: Bars, places: list[int]) -> Iterator[int]:
    """The places, with what is shown of them."""
    for done, place in enumerate(places):
        bars(f"“{asked.words[place]}”", done, len(places))
        yield place


def _show(found: Answers) -> None:
    """A table of words, the weakest of them colored most."""
    from rich.table import Table
    from rich.text import Text

    from regard.audits.terminal import output, say
    from regard.decisions.word_answers import shown_attack, shown_proved

    console = output()
    for sentence in found.sentences():
        say(console, sentence)
    columns, typed = ["word", "proved", "attack"], any(one.typos is not None for one in found.words)
    table = Table(*columns, *(["typos of one letter"] if typed else []), box=None, pad_edge=False)
    for one in found.words:
        style = _style(found, one)
        proved = Text(shown_proved(found, one), style)
        more = [typos_said(one)] if typed else []
        table.add_row(Text(one.word, style), proved, shown_attack(found, one), *more)
    console.print(table)
    if console.is_terminal and len(found.words) > 1:
        say(console, "red: the third of the words about which least is proved; green: most")


def _style(found: Answers, one: WordAnswer) -> str:
    """Thirds of the words: the least proved in red, the most in green."""
    rank = sorted(other.proved for other in found.words).index(one.proved)
    return ("bold red", "yellow", "green")[min(2, 3 * rank // len(found.words))]


def typos_said(one: WordAnswer) -> str:
    """What became of the typos of a word."""
    if one.typos is None:
        return "–"
    if not one.typos.changed:
        return f"none of {one.typos.count} changes it"
    examples = ", ".join(typo for typo, _ in one.typos.examples)
    more = ", …" if one.typos.changed > len(one.typos.examples) else ""
    verb = "changes" if one.typos.changed == 1 else "change"
    return f"{one.typos.changed} of {one.typos.count} {verb} it: {examples}{more}"
