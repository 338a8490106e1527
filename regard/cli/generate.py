"""regard generate: what a trained model writes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.streams import abandoned

HELP = """Continue a text with a model that `regard train` made.

RUN is the directory of a training (its newest checkpoint is taken) or of one checkpoint, step-N. Text goes to
stdout as it is written.

\b
Examples
  regard generate run --prompt "Of Man's first"            400 tokens, drawn at temperature 0.8
  regard generate run/step-000600 --temperature 0          the likeliest token each time
  regard generate run --prompt "And" --top-k 5 --seed 1    the same text each time
"""


def generate(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The directory of a training run, or of one of its checkpoints."),
    ],
    prompt: Annotated[
        str | None,
        typer.Option(help="How the text begins.", show_default="a new line, if the model knows one"),
    ] = None,
    tokens: Annotated[int, typer.Option(help="How many tokens to write.")] = 400,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw among the k likeliest.", show_default=False)] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw among the likeliest that make up this share.", show_default=False),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed: the same text each time.", show_default=False)
    ] = None,
) -> None:
    """Write tokens as they come."""
    import torch

    from regard.audits.own import inside
    from regard.errors import ArgumentError
    from regard.nn import Sampling, load
    from regard.nn.generation import steps
    from regard.supports import Window
    from regard.training.reading import alphabet_in, beginning, context_in, encode

    directory = inside(run)
    if not (directory / "config.json").is_file():
        raise ArgumentError(
            "RUN", f"{run} is not a training directory", "give the --out of regard train, or a step-N in it"
        )
    alphabet, model = alphabet_in(directory.parent), load(directory)
    prompt = beginning(alphabet) if prompt is None else prompt
    near = Window(
        context_in(directory.parent) - 1, 0
    )  # farther back than it was trained to look it would babble
    cache, ids = model.cache(), torch.tensor([encode(alphabet, "--prompt", prompt)])
    sampling, pending = Sampling(temperature, top_k, top_p), []  # type: Sampling, list[int]
    typer.echo(prompt, nl=False)
    for drawn in steps(
        lambda new: model(new, support=near, cache=cache), ids, tokens, sampling=sampling, seed=seed, end=None
    ):
        pending.append(int(drawn))
        text = alphabet.decode(pending)
        if (
            not text.endswith("\N{REPLACEMENT CHARACTER}") or len(pending) > 4
        ):  # a character of several bytes is shown when it is whole
            typer.echo(text, nl=False)
            pending = []
        if abandoned(sys.stdout):
            break
    typer.echo(alphabet.decode(pending))
