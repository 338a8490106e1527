"""regard decide: whether a typo changes the answer of a model."""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.audit import STOPPED, UNITS
from regard.cli.directories import default_directory, refuse_other, source_of
from regard.cli.options import Json, Open, OutByModel, Pairs, Resume, Text, TextFile, announce, print_json
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.audits.store import Store
    from regard.decisions import Answers
    from regard.decisions.asked import Asked

TEXT = "The film was not boring, although the plot was weak."
"""What the shipped classifier is asked, unless another text is given."""

HELP = """Whether a typo changes the answer of a model. Every one-letter typo is run; small moves are proved.

Without MODEL, a small opinion classifier that comes with regard answers (three layers, trained on sentences
written for it). MODEL is a directory or a hub id of a sequence classifier, a decoder (its next token) or an
encoder (the cosine of its embedding, the mean of its last tokens). Proofs are for the families BERT, RoBERTa,
DistilBERT and GPT-2; the typos of every other model are run, too.

First, in seconds: each word with one letter missing, added or replaced, or two swapped, is run by the model.
Then, in seconds to minutes per token: how far the vector of a token can move, relative to its length, without
changing the answer (proved), and the shortest change that was found to do so (attack). Such moves are far
smaller than a typo: the distance to the nearest other word is printed next to them.

With --pairs each changed text is run next to its original. Without a text, only the pairs are run.

\b
Examples
  regard decide                                     the shipped classifier
  regard decide --text "I loved the soup."          another sentence
  regard decide ./my-classifier --text "A film."    your model
  regard decide ./my-classifier --pairs typos.tsv   your own changes
  regard decide ./my-classifier --text "…" --json   numbers for a program

\b
Exit status
  0 done   2 wrong arguments or files   130 stopped: --resume continues
"""


def decide(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A directory or a hub id.", show_default=False)
    ] = None,
    text: Text = None,
    text_file: TextFile = None,
    pairs: Pairs = None,
    radius: Annotated[
        float, typer.Option(help="For embeddings: how far a word moves, relative to its length.")
    ] = 1e-3,
    level: Annotated[
        float, typer.Option(help="For embeddings: a change counts if it takes the cosine below this.")
    ] = 0.9,
    resolution: Annotated[
        float, typer.Option(help="How closely to search for the largest proved radius, as a factor.")
    ] = 1.04,
    resume: Resume = False,
    out: OutByModel = None,
    open_: Open = False,
    json_: Json = False,
) -> None:
    """Check every argument before the work begins, then do it."""
    from regard._files import check_writable
    from regard.audits.inputs import read_pairs, read_texts
    from regard.decisions.page import save
    from regard.decisions.shipped import NAME

    if not 0 < radius < 1:
        raise ArgumentError("--radius", f"is {radius}", "give a part of a token's length, between 0 and 1")
    if not resolution > 1:
        raise ArgumentError("--resolution", f"is {resolution}", "give a factor above 1, such as 1.1")
    if not -1 < level <= 1:
        raise ArgumentError("--level", f"is {level}", "give a cosine, such as 0.9")
    changes = [] if pairs is None else read_pairs(pairs)
    said = _only_text(read_texts(text or [], text_file or []), model, bool(changes))
    models = [NAME if model is None else model]
    if out is None:
        out = Path("decide") if model is None else default_directory("decide", models)
    refuse_other(out / "decide.json", models)
    check_writable(out)
    found, store = _found(model, said, changes, Settings(out, radius, resolution, level, resume, not json_))
    found = replace(found, source=source_of(models))
    paths = save(found, out, shlex.join(["regard", *sys.argv[1:]]))
    store.remove()
    if json_:
        print_json(found.written())
    announce(paths, json_=json_, open_=open_)


@dataclass(frozen=True)
class Settings:
    """How a run is done, and whether its results are shown as tables."""

    out: Path
    radius: float
    resolution: float
    level: float
    resume: bool
    tables: bool


def _only_text(texts: list[str], model: str | None, paired: bool) -> str | None:
    """The one text; None where only pairs are run."""
    if len(texts) > 1:
        remedy = "give one text, and changes of others with --pairs"
        raise ArgumentError("--text", f"is {len(texts)} texts, and typos are run of one", remedy)
    if not texts and model is not None and not paired:
        raise ArgumentError("--text", "is missing", "give the text to answer, or changes with --pairs")
    return texts[0] if texts else None if paired else TEXT


def _found(
    model: str | None, said: str | None, pairs: list[tuple[str, str]], way: Settings
) -> tuple[Answers, Store]:
    """All answers, and the store that has them until they are written; Ctrl-C keeps it."""
    from regard._allocation import keep_freed_memory
    from regard.audits.owning import succession
    from regard.audits.store import Store, fingerprint
    from regard.audits.terminal import messages, say
    from regard.audits.words import counted
    from regard.decisions import loaded_on, shipped_on

    keep_freed_memory()
    first = pairs[0][0] if said is None else said
    asked = shipped_on(first) if model is None else loaded_on(model, first)
    texts = [] if said is None else [said]
    cut = sum(map(asked.cuts, [*texts, *(text for pair in pairs for text in pair)]))
    if cut:
        say(messages(), f"{cut} {counted(cut, 'text')} cut to the tokens that the model takes")
    for note in asked.notes:
        say(messages(), note)
    subject = {
        "MODEL": asked.identity(),
        "--text": fingerprint(said),
        "--radius": str(way.radius),
        "--resolution": str(way.resolution),
        "--level": str(way.level),
    }
    store = Store(way.out / UNITS, subject, resume=way.resume)
    if store.predecessor:
        say(messages(), succession(store.predecessor, way.resume))
    try:
        return _answered(asked, said, pairs, way, store), store
    except KeyboardInterrupt:
        kept = f"stopped; {len(store)} {counted(len(store), 'result')} kept"
        say(messages(), f"regard: {kept}: the same command with --resume continues")
        raise typer.Exit(STOPPED) from None


def _answered(
    asked: Asked, said: str | None, pairs: list[tuple[str, str]], way: Settings, store: Store
) -> Answers:
    """The pairs, the typos and then the proofs, each shown as soon as it is there."""
    from regard.audits.terminal import Bars, messages
    from regard.decisions import Answers, prove_moves, run_pairs, try_typos

    ran = run_pairs(asked, pairs, way.level)
    found = Answers(asked.kind, asked.name, "", "", math.nan, None, [], level=way.level, pairs=ran)
    if way.tables and ran:
        _show_pairs(found)
    if said is None:
        return found
    with Bars(messages(), [1]) as bars:
        found = replace(try_typos(asked, bars, level=way.level, store=store), pairs=ran)
    if way.tables:
        _show_typos(found)
    with Bars(messages(), [1]) as bars:
        settings = {"radius": way.radius, "resolution": way.resolution}
        found = prove_moves(asked, found, bars, **settings, store=store)
    if way.tables:
        _show_proofs(found)
    return found


def _show_pairs(found: Answers) -> None:
    """The pairs that were given, with the answers to both texts."""
    from rich.table import Table
    from rich.text import Text

    from regard.audits.terminal import output, say

    console = output()
    say(console, found.sentences()[0])
    table = Table("original", "changed", found.measure, box=None, pad_edge=False)
    for one in found.pairs:
        style = "bold red" if one.differs else "green"
        table.add_row(Text(one.original), Text(one.changed), Text(one.shown, style))
    console.print(table)


def _show_typos(found: Answers) -> None:
    """The question, what the typos did, and which words they are of."""
    from rich.table import Table
    from rich.text import Text

    from regard.audits.terminal import output, say
    from regard.decisions.typo_runs import shown_examples

    console = output()
    for sentence in [found.question, *found.sentences()[bool(found.pairs) :]]:
        say(console, sentence)
    if not found.typos:
        return
    table = Table(found.unit, found.effect, "the largest effects", box=None, pad_edge=False)
    for one in found.typos:
        style = "green" if not one.changed else "bold red" if one.share >= 0.5 else "yellow"
        table.add_row(Text(one.word, style), f"{one.changed} of {one.count}", Text(shown_examples(one)))
    console.print(table)
    if console.is_terminal:
        say(console, f"green: no typo of the {found.unit} counts; red: at least half of them do")


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
    table = Table("token", "proved", "attack", f"nearest other {found.unit}", box=None, pad_edge=False)
    for one in found.words:
        table.add_row(
            Text(one.word), shown_proved(found, one), shown_attack(found, one), Text(shown_nearest(one))
        )
    console.print(table)
