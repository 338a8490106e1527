"""regard cheaper: which cheaper attention is good enough, layer by layer?"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.options import Json, Open, Out, Resume, Seed, Text, TextFile, announce, print_json
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.choices import Choosing, Found

STOPPED = 130
SHOWN = 40
"""Letters of a text that stand for it."""
HELP = """Which cheaper attention is good enough, layer by layer, on this text? Measured and calibrated, not
proved.

MODEL is a directory or hub id of a transformers model. In each layer, queries of the text are answered by a
window, the largest scores, merged atoms, features, low-rank keys, and keys and values in a few bits. Then the
whole model runs with one choice in every layer at once, and its output is compared: the next-token
distribution of a language model, the last hidden states of any other.

Memory is relative to keys and values in the dtype of the checkpoint. The time is predicted before the work
begins, from a few heads that are timed.

\b
Examples
  regard cheaper ./my-model --text-file f.txt               a quarter kept
  regard cheaper ./my-model --text-file f.txt --keep 0.125  an eighth
  regard cheaper ./my-model --text-file f.txt --error 0.1   10 % error
  regard cheaper ./my-model --text-file f.txt --json        for a program

\b
Exit status
  0 done   2 wrong arguments or files   130 stopped: --resume continues
"""


def cheaper(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A directory or a hub id.", show_default=False)
    ] = None,
    text: Text = None,
    text_file: TextFile = None,
    error: Annotated[
        float, typer.Option(help="The largest error of a recommended choice, relative to the output.")
    ] = 0.05,
    keep: Annotated[float, typer.Option(help="The fraction of the keys that candidates keep.")] = 0.25,
    tokens: Annotated[int, typer.Option(help="How many tokens to read at most; the texts are joined.")] = 512,
    seed: Seed = None,
    resume: Resume = False,
    json_: Json = False,
    open_: Open = False,
    out: Out = Path("cheaper"),
) -> None:
    """Check every argument before the work begins, then do it."""
    from regard._files import check_writable
    from regard.audits.inputs import read_texts
    from regard.choices.page import save

    texts = read_texts(text or [], text_file or [])
    if not texts:
        remedy = "name a file with a text like those that the model will read"
        raise ArgumentError("--text-file", "is missing", remedy)
    if not 0 < error < 1:
        raise ArgumentError("--error", f"is {error}", "give a fraction of the output, between 0 and 1")
    if not 0 < keep < 1:
        raise ArgumentError("--keep", f"is {keep}", "give a fraction of the keys, between 0 and 1")
    if tokens < 48:
        remedy = "give at least 48: in a decoder, half of them are the queries"
        raise ArgumentError("--tokens", f"is {tokens}", remedy)
    check_writable(out)
    name = ", ".join([*(one[:SHOWN] for one in text or []), *(path.name for path in text_file or [])])
    choosing, called = _prepared(model, (texts, name), (error, keep, tokens, seed or 0), out, resume)
    _predict(choosing)
    found = _watched(choosing, called)
    if json_:
        print_json(found.written())
    else:
        _show(found)
    paths = save(found, out, shlex.join(["regard", *sys.argv[1:]]))
    choosing.store.remove()
    announce(paths, json_=json_, open_=open_)


def _prepared(
    model: str | None,
    texts: tuple[list[str], str],
    numbers: tuple[float, float, int, int],
    out: Path,
    resume: bool,
) -> tuple[Choosing, str]:
    """The model, loaded, with its text and the place of its results."""
    from regard.audits.checkpoint import find
    from regard.audits.load import load_head, tokenizer_of
    from regard.audits.run import working
    from regard.audits.store import Store, fingerprint
    from regard.choices import Choosing, read_text
    from regard.choices.seen import dtype_of

    error, keep, tokens, seed = numbers
    checkpoint = find(model)
    tokenizer = tokenizer_of(checkpoint)
    loaded = load_head(checkpoint)
    dtype, loaded = dtype_of(loaded), working(loaded)
    text = read_text(*texts, tokenizer, loaded, tokens)
    subject = {
        "MODEL": fingerprint(checkpoint.name, checkpoint.identity()),
        "--text or --text-file": fingerprint(text.ids.tolist()),
        "--keep": str(keep),
        "--error": str(error),
        "--seed": str(seed),
    }
    store = Store(out / ".units", subject, resume=resume)
    made = Choosing(loaded, text, error=error, share=keep, seed=seed, dtype=dtype, store=store)
    return made, checkpoint.name


def _predict(choosing: Choosing) -> None:
    """Print how long the work will take, before it begins."""
    from regard._durations import spoken_time
    from regard.audits.terminal import messages, say

    seconds = choosing.predicted()
    if seconds is not None:
        source = "from the time of a few heads and of one run of the model"
        say(messages(), f"predicted to take {spoken_time(seconds)}, {source}")


def _watched(choosing: Choosing, name: str) -> Found:
    """The work with a bar on a terminal; Ctrl-C leaves the results so far on disk."""
    from regard.audits import terminal

    try:
        with terminal.Bars(terminal.messages(), choosing.sizes) as bars:
            return choosing.run(name, bars)
    except KeyboardInterrupt:
        kept = f"stopped after {len(choosing.store)} steps; continue with the same command and --resume"
        terminal.say(terminal.messages(), kept)
        raise typer.Exit(STOPPED) from None


def _show(found: Found) -> None:
    """The recommended choices and the whole model; columns without any number are left out."""
    from regard.audits.terminal import output, say
    from regard.choices.wording import NOTHING, shown_part

    for sentence in found.sentences():
        say(output(), sentence)
    layers = []
    for layer, name in zip(found.layers, found.recommended, strict=True):
        below = NOTHING if name is None else shown_part((layer.choices or {})[name]["quantile"])
        choice = name or layer.refused or "exact"
        layers.append((str(layer.layer), choice, shown_part(layer.memory(name)), below))
    _table(("layer", "recommended", "memory", "error, 95 % below"), layers)
    whole = []
    for one in found.applied:
        divergence = NOTHING if one.divergence is None else f"{one.divergence:.3g}"
        whole.append((one.name, shown_part(one.memory), divergence, shown_part(one.moved)))
    _table(("in all layers", "memory", "KL of the next token", "change of the last states"), whole)
    for name, why in found.refused.items():
        say(output(), f"Not shown: {name} ({why}).")


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """A table of the columns that have a number or a word in some row."""
    from rich.table import Table

    from regard.audits.terminal import output
    from regard.choices.wording import filled

    names, cells = filled(columns, rows)
    table = Table(*names, box=None, pad_edge=False)
    for row in cells:
        table.add_row(*row)
    output().print(table)
