"""regard flow: the layers of a model, each repeated on the tokens of a text."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import Json, Open, Out, Text, TextFile, announce, print_json
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.audits.inputs import Input

HELP = """What a network of one layer alone would do to the tokens of a text, for each layer of a model.

With MODEL (a directory or a hub id, as for regard audit; without one, all-MiniLM-L6-v2) each layer is
applied to its own output again and again, from the tokens that enter it on a text: clusters, effective rank
and mean cosine after every step. That is an observation on this text, not a theorem.

--out gets flow.html, which plays from disk, and flow.json with every number. regard simulate shows particles
without a model.

\b
Examples
  regard flow                                        the demonstration model
  regard flow ./my-model --layer 3 --text "A text."  one layer of yours
  regard flow ./my-model --attention --steps 64      attention alone
  regard flow ./my-model --text-file text.txt        another text

\b
Exit status
  0 done   2 wrong arguments or files   130 stopped by Ctrl-C
"""


def flow(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A directory or a hub id.", show_default=False)
    ] = None,
    layer: Annotated[
        list[int] | None,
        typer.Option(help="Which layer, from 0; may be repeated.", show_default="every layer"),
    ] = None,
    text: Text = None,
    text_file: TextFile = None,
    steps: Annotated[int, typer.Option(help="How often a layer is repeated.")] = 32,
    attention: Annotated[
        bool,
        typer.Option(
            "--attention", help="Attention with its norm and residual connection, without the feed-forward."
        ),
    ] = False,
    json_: Json = False,
    open_: Open = False,
    out: Out = Path("flow"),
) -> None:
    """Check every argument before the work begins, then do it."""
    from regard._files import check_writable
    from regard.audits.inputs import read_texts
    from regard.audits.run import included_sentences
    from regard.audits.terminal import messages, output, say
    from regard.flows import iterated, layers_of, save
    from regard.flows.layers import report

    if steps < 1:
        raise ArgumentError("--steps", f"is {steps}", "give one or more")
    check_writable(out)
    texts = read_texts(text or [], text_file or []) or included_sentences()
    loaded, item, name = _loaded(model, " ".join(texts))
    if item.cut:
        say(messages(), f"the text is longer than the model takes: cut to {len(item.tokens)} tokens")
    found = [iterated(one, steps) for one in _watched(layers_of(loaded, item, layer, attention=attention))]
    data = report(found, name, item, steps)
    if json_:
        print_json(data)
    else:
        for sentence in data["words"]:
            say(output(), sentence)
    announce(save(data, out, shlex.join(["regard", *sys.argv[1:]])), json_=json_, open_=open_)


def _loaded(model: str | None, text: str) -> tuple[Any, Input, str]:
    """The model, the text as its input, and its name."""
    from regard.audits.inputs import inputs_of
    from regard.audits.load import load
    from regard.audits.terminal import messages

    console = messages()
    with console.status("loading the model") if console.is_terminal else nullcontext():
        loaded, tokenizer, name = load(model)
    (item,) = inputs_of(loaded, [text], tokenizer)
    return loaded, item, name


def _watched(layers: list[Any]) -> Iterable[Any]:
    """The layers, with a progress bar on a terminal."""
    from rich.progress import track

    from regard.audits.terminal import messages

    console = messages()
    return track(layers, "layers", console=console, transient=True, disable=not console.is_terminal)
