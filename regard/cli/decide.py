"""regard decide: could a typo change this answer?"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    from regard.decisions.asked import Asked
    from regard.decisions.kept import Kept
    from regard.decisions.word_answers import Answers

STOPPED = 130

TEXT = "The film was not boring, although the plot was weak."
"""What the shipped classifier is asked, unless another text is given."""

HELP = """Could a typo change this answer? Every one-letter typo of a text is run; small moves are proved.

Without MODEL, the question goes to a small opinion classifier that comes with regard (three layers, trained
on sentences written for it). MODEL is a directory or a hub id of a sequence classifier, a decoder (its next
token) or an encoder (the cosine of its embedding, the mean of its last tokens). Proofs are for the families
BERT, RoBERTa, DistilBERT and GPT-2; the typos of every other model are run, too.

First, in seconds: each word with one letter missing, added or replaced, or two swapped, is run by the model.
Then, in seconds to minutes per token: how far the vector of a token can move, relative to its length, without
changing the answer (proved), and the shortest change that was found to do so (attack). Such moves are far
smaller than a typo: the distance to the nearest other word is printed beside them.

An interrupted run continues where it stopped when the same command is repeated with the same --out.

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
    level: Annotated[
        float, typer.Option(help="For embeddings: a typo counts if it takes the cosine below this.")
    ] = 0.9,
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
    from regard.audits.inputs import read_texts
    from regard.audits.terminal import messages, output, say
    from regard.decisions import loaded_on, shipped_on
    from regard.decisions.kept import Kept, question_of
    from regard.decisions.page import save

    if not 0 < radius < 1:
        raise ArgumentError("--radius", f"is {radius}", "give a part of a token's length, between 0 and 1")
    if not resolution > 1:
        raise ArgumentError("--resolution", f"is {resolution}", "give a factor above 1, such as 1.1")
    if not -1 < level <= 1:
        raise ArgumentError("--level", f"is {level}", "give a cosine, such as 0.9")
    if model is not None and text is None:
        raise ArgumentError("--text", "is missing", "give the text that the model is to be asked about")
    said = TEXT if text is None else read_texts([text])[0]
    if not json_:
        if importlib.util.find_spec("jinja2") is None:
            raise MissingExtraError("jinja2", "report")
        check_writable(out)
    keep_freed_memory()
    asked = shipped_on(said) if model is None else loaded_on(model, said)
    if asked.cut:
        say(messages(), f"the text is longer than the model takes: cut to {len(asked.words)} tokens")
    kept = None if json_ else Kept(out, question_of(asked, radius, resolution, level))
    found = _found(asked, (radius, resolution, level), kept)
    if json_:
        print(json.dumps(found.written(), indent=1, ensure_ascii=False))
        return
    paths = save(found, out, shlex.join(["regard", *sys.argv[1:]]))
    if kept is not None:
        kept.remove()
    say(output(), f"written: {', '.join(str(path) for path in paths)}")


def _found(asked: Asked, numbers: tuple[float, float, float], kept: Kept | None) -> Answers:
    """The typos and then the proofs, each shown as soon as it is there; Ctrl-C keeps the results."""
    from regard.audits.terminal import Bars, messages, say
    from regard.decisions import prove_moves, try_typos

    radius, resolution, level = numbers
    if kept is not None and kept.found:
        say(messages(), f"{_results(len(kept.found))} known from an earlier run")
    try:
        with Bars(messages(), [1]) as bars:
            found = try_typos(asked, bars, level=level, kept=kept)
        if kept is not None:
            _show_typos(found)
        with Bars(messages(), [1]) as bars:
            found = prove_moves(asked, found, bars, radius=radius, resolution=resolution, kept=kept)
        if kept is not None:
            _show_proofs(found)
    except KeyboardInterrupt:
        count = 0 if kept is None else len(kept.found)
        more = f"; {_results(count)} kept: the same command continues" if count else ""
        say(messages(), f"regard: stopped{more}")
        raise typer.Exit(STOPPED) from None
    return found


def _results(count: int) -> str:
    return "1 result is" if count == 1 else f"{count} results are"


def _show_typos(found: Answers) -> None:
    """The question, what the typos did, and which words they are of."""
    from rich.table import Table
    from rich.text import Text

    from regard.audits.terminal import output, say
    from regard.decisions.typo_runs import shown_examples

    console = output()
    for sentence in [found.question, *found.sentences()]:
        say(console, sentence)
    if not found.typos:
        return
    table = Table("word", found.effect, "the largest effects", box=None, pad_edge=False)
    for one in found.typos:
        style = "green" if not one.changed else "bold red" if one.share >= 0.5 else "yellow"
        table.add_row(Text(one.word, style), f"{one.changed} of {one.count}", Text(shown_examples(one)))
    console.print(table)
    if console.is_terminal:
        say(console, "green: no typo of the word counts; red: at least half of them do")


def _show_proofs(found: Answers) -> None:
    """What is proved about each token, and how far away another word is."""
    from rich.table import Table
    from rich.text import Text

    from regard.audits.terminal import output, say
    from regard.decisions.word_answers import shown_attack, shown_nearest, shown_proved

    console = output()
    say(console, found.sentences()[-1])
    if not found.words:
        return
    table = Table("token", "proved", "attack", "nearest other word", box=None, pad_edge=False)
    for one in found.words:
        table.add_row(
            Text(one.word), shown_proved(found, one), shown_attack(found, one), Text(shown_nearest(one))
        )
    console.print(table)
