"""regard train: a small language model on any text, with the regularity of every head on the way."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console

    from regard.training import Milestone, Training

FAILED, STOPPED = 1, 130
"""Exit statuses: the training failed; it was interrupted."""
NAMED = 3
"""How many heads of one measurement are named on the screen."""

HELP = """Train a small language model on any text.

Tokens are characters, or bytes with --bytes. The last tenth of the text is held out. The model is a decoder
with rotary positions; AdamW, gradient clipping, a warm-up and a half-cosine decay. At each checkpoint: the
held-out loss, a sample of text, and the regularity of each layer (QK and OV norms, entropy, largest logit,
Jacobian norm); heads whose scores grow too fast are named as they do.

--promise L trains a model that keeps a Lipschitz constant from points to logits, token by token, at every
step: tokens in a ball, orthogonal matrices, sorting, averages in place of sums. Each checkpoint proves the
constant again from its weights. One head costs least: with h heads the certificate is divided by √h.

--out gets step-N/ (model, optimizer, state; the last two are kept) and history.jsonl (a line for each
checkpoint). Checkpoints are written whole or not at all, as safetensors and JSON. --resume continues bit for
bit on the same machine, also after a kill or a crash.

\b
Examples
  regard train --data my.txt                                             800,000 parameters, characters
  regard train --data my.txt --out run --width 64 --layers 2             a smaller one
  regard train --data any.file --bytes                                   bytes
  regard train --data my.txt --promise 10 --heads 1                      with a promise
  regard train --out run --resume                                        go on, with its options and text

\b
Exit status
  0 done   1 the training failed, its last checkpoint is whole   2 wrong arguments or files
  130 stopped by Ctrl-C, and saved
"""


def train(
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The text, in UTF-8.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="The directory for the training run.")] = Path("training"),
    steps: Annotated[int | None, typer.Option(help="Number of updates.", show_default="2000")] = None,
    width: Annotated[
        int | None, typer.Option(help="Width of a token inside the model.", show_default="128")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Blocks of attention and feed-forward.", show_default="4")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="Heads in each layer; they must divide the width.", show_default="4")
    ] = None,
    context: Annotated[int | None, typer.Option(help="Tokens in a window.", show_default="128")] = None,
    batch: Annotated[int | None, typer.Option(help="Windows per update.", show_default="16")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="The largest learning rate.", show_default="0.001")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Random seed of the weights and of the order of windows.", show_default="0"),
    ] = None,
    every: Annotated[
        int | None, typer.Option(help="Updates between checkpoints.", show_default="500")
    ] = None,
    bytes_: Annotated[
        bool | None, typer.Option("--bytes", help="Tokens are bytes: any file will do.", show_default=False)
    ] = None,
    promise: Annotated[
        float | None,
        typer.Option(
            metavar="L",
            help="Logits move at most L times as far as points of tokens, whatever is learned.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")] = False,
) -> None:
    """Check every argument before the work begins, then do it."""
    from regard.audits.terminal import messages, output, say
    from regard.training.checkpoint import alone
    from regard.training.loop import Diverged, Unwritten

    given = {
        "steps": steps, "width": width, "layers": layers, "heads": heads, "context": context, "batch": batch,
        "learning_rate": learning_rate, "seed": seed, "every": every, "bytes": bytes_,
        "promise": promise,
    }  # fmt: skip
    try:
        with alone(out):  # from before the directory is read: another training may be writing there
            stopped = _run(_training(data, out, given, resume), output(), messages())
    except (Diverged, Unwritten) as error:
        say(messages(), f"regard: {error}", "bold red")
        raise typer.Exit(FAILED) from None
    if stopped:
        raise typer.Exit(STOPPED)


def _training(data: Path | None, out: Path, given: dict[str, Any], resume: bool) -> Training:
    """A new training, or the one that the directory holds."""
    from regard.training import Recipe, Text, Training

    if resume:
        return Training.resume(out, given, data)
    if data is None:
        raise ArgumentError(
            "--data", "is missing", "give a file with text, or --resume to continue a training run"
        )
    recipe = Recipe(**{name: value for name, value in given.items() if value is not None})
    return Training.start(Text.read(data, recipe.bytes), recipe, out)


def _run(training: Training, console: Console, remarks: Console) -> bool:
    """All steps that are left; whether Ctrl-C came between."""
    from regard.audits.terminal import say
    from regard.training import Milestone, Warned

    _announce(training, console, remarks)
    with _interrupts() as asked, Bar(training, remarks) as bar:
        for event in training.events():
            if isinstance(event, Milestone):
                _show(event, console)
            elif isinstance(event, Warned):
                _warn(event.messages, remarks)
            else:
                bar.advance(event.loss)
                if asked and not training.finished:
                    kept = training.save()
                    say(
                        remarks,
                        f"stopped after step {event.step}; saved in {kept.path}; continue with: "
                        f"{_again(training)}",
                    )
                    return True
    say(
        console,
        f"done: the model is in {training.directory / f'step-{training.step:06d}' / 'model'}; "
        "regard.nn.load reads it",
    )
    return False


def _announce(training: Training, console: Console, remarks: Console) -> None:
    """What is trained on what; and what differs where it goes on."""
    from regard.audits.terminal import say

    size, symbols = (
        sum(parameter.numel() for parameter in training.model.parameters()),
        len(training.text.alphabet),
    )
    kind = "bytes" if training.recipe.bytes else "characters"
    tokens = (
        f"{len(training.text.tokens):,} {kind}, {symbols} different: a guess has loss {math.log(symbols):.4f}"
    )
    say(
        console,
        f"{training.text.path.name}: {tokens}; {size:,} parameters; step {training.step} of "
        f"{training.recipe.steps}",
    )
    for remark in training.remarks:
        say(remarks, remark, "yellow")


def _show(milestone: Milestone, console: Console) -> None:
    """A checkpoint: losses, the table of layers, and text of the model's own."""
    from regard.audits.terminal import say
    from regard.certificate import round_up

    entry = milestone.entry
    losses = f"training loss {entry['training_loss']:.4f}, held-out loss {entry['held_out_loss']:.4f}"
    say(console, f"\nstep {entry['step']}: {losses} ({milestone.checkpoint.path})", "bold")
    if entry["certificate"] is not None:
        proved = round_up(entry["certificate"])
        say(console, f"the promise is kept: the constant is proved to be at most {proved}")
    for line in milestone.table.splitlines()[1:]:
        say(console, line)
    for line in entry["sample"].splitlines():
        say(console, f"  │ {line}", "dim")


def _warn(messages: Sequence[str], console: Console) -> None:
    """The first heads of a measurement that grow too fast; the history has all."""
    from regard.audits.terminal import say
    from regard.nn.monitors import ADVICE

    for message in messages[:NAMED]:
        say(console, f"warning: {message}", "yellow")
    more = f"{len(messages) - NAMED} more in history.jsonl; " if len(messages) > NAMED else ""
    say(console, f"         {more}{ADVICE}", "yellow")


def _again(training: Training) -> str:
    return f"regard train --out {training.directory} --resume"


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A list that the first SIGINT or SIGTERM appends to, so that the step under way is finished; the
    second one interrupts at once.
    """
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {kind: signal.signal(kind, note) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


class Bar:
    """Progress with the loss, tokens in a second and the time that is left;
    silent where there is no terminal.
    """

    def __init__(self, training: Training, console: Console) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._tokens, self._made, self._began = (
            training.recipe.batch * training.recipe.context,
            0,
            time.monotonic(),
        )
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            redirect_stdout=sys.stdout.isatty(),  # what is piped elsewhere stays there
        )
        self._task = self._progress.add_task("loss", total=training.recipe.steps, completed=training.step)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def advance(self, loss: float) -> None:
        """One step further."""
        self._made += 1
        speed = self._made * self._tokens / max(time.monotonic() - self._began, 1e-9)
        self._progress.update(self._task, advance=1, description=f"loss {loss:.3f}, {speed:,.0f} tokens/s")
