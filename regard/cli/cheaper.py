"""regard cheaper: which cheaper attention would do, layer by layer?"""

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
    from regard.choices import Choosing, Found

STOPPED = 130
HELP = """Which cheaper attention would do, layer by layer, on this text? Measured and calibrated, not proved.

MODEL is a directory or hub id of a transformers model. In each layer, queries of the text try a
window, the largest scores, merged atoms, features, low-rank keys, and keys and values in a few bits. Then the
whole model runs with one choice in every layer at once, and its next-token distribution is compared.

\b
Examples
  regard cheaper ./my-model --text book.txt               a quarter of the context, 5 % error
  regard cheaper ./my-model --text book.txt --keep 0.125  an eighth
  regard cheaper ./my-model --text book.txt --error 0.1   at most 10 % error on 95 % of new outputs
  regard cheaper ./my-model --text book.txt --json        numbers for a program

\b
Exit status
  0 done   2 wrong arguments or files   130 stopped: --resume continues
"""


def cheaper(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A directory or a hub id.", show_default=False)
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A file in UTF-8; its beginning is read.")] = None,
    error: Annotated[
        float, typer.Option(help="The largest error of a recommended choice, relative to the output.")
    ] = 0.05,
    keep: Annotated[float, typer.Option(help="The fraction of the keys that candidates keep.")] = 0.25,
    tokens: Annotated[int, typer.Option(help="How many tokens of the text to read, at most.")] = 512,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON and write nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue where an earlier run stopped.")] = False,
    out: Annotated[Path, typer.Option(help="The directory for cheaper.html and cheaper.json.")] = Path(
        "cheaper"
    ),
) -> None:
    """Check every argument before the work begins, then do it."""
    from regard._files import check_writable
    from regard.audits.terminal import output, say
    from regard.choices.page import save

    if text is None:
        raise ArgumentError("--text", "is missing", "name a file with a text like those the model will read")
    if not 0 < error < 1:
        raise ArgumentError("--error", f"is {error}", "give a part of the output, between 0 and 1")
    if not 0 < keep < 1:
        raise ArgumentError("--keep", f"is {keep}", "give a part of the keys, between 0 and 1")
    if tokens < 48:
        raise ArgumentError(
            "--tokens", f"is {tokens}", "give at least 48: in a decoder, half of them are the queries"
        )
    if json_ and resume:
        raise ArgumentError("--resume", "is given with --json, which keeps nothing", "leave one of them out")
    if not json_:
        if importlib.util.find_spec("jinja2") is None:
            raise MissingExtraError("jinja2", "report")
        check_writable(out)
    choosing, name = _prepared(model, text, (error, keep, tokens), None if json_ else out, resume)
    found = _watched(choosing, name)
    if json_:
        print(json.dumps(_plain(found), indent=1, ensure_ascii=False))
        return
    _show(found)
    paths = save(found, out, shlex.join(["regard", *sys.argv[1:]]))
    choosing.store.remove()
    say(output(), f"written: {', '.join(str(path) for path in paths)}")


def _prepared(
    model: str | None, path: Path, numbers: tuple[float, float, int], out: Path | None, resume: bool
) -> tuple[Choosing, str]:
    """The model, loaded, with its text and where results are kept."""
    from regard.audits.checkpoint import find
    from regard.audits.load import load_head, tokenizer_of
    from regard.audits.run import working
    from regard.audits.store import Store, fingerprint
    from regard.choices import Choosing, read_text

    error, keep, tokens = numbers
    checkpoint = find(model)
    tokenizer = tokenizer_of(checkpoint)
    loaded = working(load_head(checkpoint))
    text = read_text(path, tokenizer, loaded, tokens)
    subject = {
        "MODEL": fingerprint(checkpoint.name, checkpoint.identity()),
        "--text": fingerprint(text.ids.tolist()),
        "--keep": str(keep),
        "--error": str(error),
    }
    store = Store() if out is None else Store(out / ".units", subject, resume=resume)
    return Choosing(loaded, text, error=error, share=keep, store=store), checkpoint.name


def _watched(choosing: Choosing, name: str) -> Found:
    """The work with a bar on a terminal; Ctrl-C keeps what there is."""
    from regard.audits import terminal

    try:
        with terminal.Bars(terminal.messages(), choosing.sizes) as bars:
            return choosing.run(name, bars)
    except KeyboardInterrupt:
        kept = f"stopped after {len(choosing.store)} steps; continue with the same command and --resume"
        terminal.say(terminal.messages(), kept)
        raise typer.Exit(STOPPED) from None


def _plain(found: Found) -> object:
    from regard._written import plain

    return plain(found.written())


def _show(found: Found) -> None:
    """The recommended choices and the whole model."""
    from rich.table import Table

    from regard.audits.terminal import output, say
    from regard.choices.wording import shown_part

    console = output()
    for sentence in found.sentences():
        say(console, sentence)
    table = Table("layer", "recommended", "memory", "95 % below", box=None, pad_edge=False)
    for layer, name in zip(found.layers, found.recommended, strict=True):
        below = "" if name is None else shown_part((layer.choices or {})[name]["quantile"])
        table.add_row(
            str(layer.layer), name or layer.refused or "exact", shown_part(layer.memory(name)), below
        )
    console.print(table)
    whole = Table(
        "in all layers", "memory", "KL of the next token", "states move by", box=None, pad_edge=False
    )
    for one in found.applied:
        divergence = "–" if one.divergence is None else f"{one.divergence:.3g}"
        whole.add_row(one.name, shown_part(one.memory), divergence, shown_part(one.moved))
    console.print(whole)
