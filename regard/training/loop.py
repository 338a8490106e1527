"""Training: steps and checkpoints one after the other, as a stream of events that a caller shows."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regard._files import write_whole, writing
from regard._written import plain
from regard.errors import ArgumentError, RegardError
from regard.nn import LanguageModel, Sampling, load, save
from regard.nn.monitors import Monitor, RegularityWarning, monitor
from regard.nn.saving import read_tensors, write_tensors
from regard.training import checkpoint as saved
from regard.training.batches import Batch, batch_at, held_out_batches
from regard.training.building import build
from regard.training.checkpoint import Checkpoint
from regard.training.optimizer import LONGEST_GRADIENT, optimizer_of, restore, tensors_of
from regard.training.recipe import Recipe
from regard.training.text import Text

HISTORY, MODEL, OPTIMIZER = "history.jsonl", "model", "optimizer.safetensors"
WINDOW = 10
"""How many measurements the monitor looks back at."""
SAMPLED = 160
"""How many tokens of its own a model shows at a checkpoint."""
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Stepped:
    """An update was made.

    Examples:
        >>> regard.training.Stepped(step=7, loss=1.5).loss
        1.5
    """

    step: int
    loss: float


@dataclass(frozen=True)
class Warned:
    """The monitor names heads whose scores grow.

    Examples:
        >>> regard.training.Warned(("layer 0, head 1: its scores grow",)).messages
        ('layer 0, head 1: its scores grow',)
    """

    messages: tuple[str, ...]


@dataclass(frozen=True)
class Milestone:
    """A checkpoint was written; entry: the line of the history; table: the regularity of each layer.

    Examples:
        >>> import pathlib
        >>> from regard.training import Checkpoint, Milestone
        >>> reached = Milestone(Checkpoint(pathlib.Path("run")), {"step": 500, "loss": 1.25}, "")
        >>> reached.entry["loss"]
        1.25
    """

    checkpoint: Checkpoint
    entry: dict[str, Any]
    table: str


Event = Stepped | Warned | Milestone


class Diverged(RegardError):
    """A loss or a gradient is not finite: names the head whose scores grew, and the last good checkpoint.

    Examples:
        >>> issubclass(regard.training.Diverged, regard.errors.RegardError)  # the loss is not finite
        True
    """


class Unwritten(RegardError):
    """A checkpoint could not be written; says which one is whole."""


class Training:
    """A training under way in a directory. `start` begins one, `resume` continues it; `events` does the work.

    Both set torch's random numbers: to the seed, or to what they were.

    Examples:
        >>> import pathlib, tempfile
        >>> from regard.training import Checkpoint, Milestone, Recipe, Text, Training
        >>> recipe = Recipe(steps=2, width=8, layers=1, heads=2, context=8, batch=2, every=2)
        >>> with tempfile.TemporaryDirectory() as place:
        ...     path = pathlib.Path(place, "text.txt")
        ...     _ = path.write_text("to be or not to be " * 20)
        ...     events = list(Training.start(Text.read(path), recipe, pathlib.Path(place, "out")).events())
        >>> kept = [event.checkpoint for event in events if isinstance(event, Milestone)]
        >>> [checkpoint.step for checkpoint in kept], isinstance(kept[0], Checkpoint)
        ([0, 2], True)
    """

    def __init__(self, text: Text, recipe: Recipe, directory: Path, model: nn.Module) -> None:
        self.text, self.recipe, self.directory, self.model = text, recipe, directory, model
        self.optimizer = optimizer_of(model, recipe)
        self.step = 0
        self.remarks: list[str] = []
        self._own, self._held_out = text.split(recipe.context)
        self._losses: list[float] = []
        self._warned: list[str] = []
        self._entry: dict[str, Any] | None = None
        self._newest: int | None = None  # the last checkpoint that this training knows
        self._measured: list[dict[str, Any]] = []

    @classmethod
    def start(cls, text: Text, recipe: Recipe, directory: Path) -> Training:
        """A new training; the directory must not hold another."""
        text.split(recipe.context)
        kept = saved.checkpoints(directory)
        if kept:
            found = f"{directory} holds a training at step {kept[-1].step}"
            raise ArgumentError("--out", found, "add --resume to continue it, or give another directory")
        torch.manual_seed(recipe.seed)
        return cls(text, recipe, directory, build(recipe, len(text.alphabet)))

    @classmethod
    def resume(cls, directory: Path, given: dict[str, Any], data: Path | None = None) -> Training:
        """Go on from the newest checkpoint; options and data that are given must be those it was made
        with.
        """
        kept = saved.checkpoints(directory)
        if not kept:
            raise ArgumentError(
                "--resume", f"{directory} holds no checkpoint", "leave it out to start a training there"
            )
        state = kept[-1].state()
        recipe = Recipe(**state["recipe"])
        recipe.agrees(given)
        text = _same_text(state, recipe, data)
        made = cls(text, recipe, directory, _load(kept[-1]))
        made._restore(kept[-1], state)
        return made

    @property
    def finished(self) -> bool:
        """Whether all steps are made."""
        return self.step >= self.recipe.steps

    def events(self) -> Iterator[Event]:
        """Make every step that is left. Stopped between two events, a training can be saved and resumed."""
        self._prepare()
        with monitor(self.model, window=WINDOW, history=self._measured) as watch:
            watch.count, self._measured = self.step, watch.history
            if self.step == 0 and not saved.checkpoints(self.directory):
                self._first_look(watch)
                yield self._milestone(watch)
            while not self.finished:
                yield from self._advance(watch)

    def save(self) -> Checkpoint:
        """A checkpoint of this moment, whole or not at all."""
        known = [kept for kept in saved.checkpoints(self.directory) if kept.step == self.step]
        if known:
            return known[0]
        try:
            made = saved.write(self.directory, self.step, self._fill, self._state())
        except OSError as error:
            raise Unwritten(self._write_failure(error)) from error
        self._newest = made.step
        return made

    def held_out_loss(self) -> float:
        """The mean loss on held-out windows, in nats for each token."""
        self.model.eval()
        with torch.no_grad():
            found = [
                (float(self._loss(batch)), batch[0].numel())
                for batch in held_out_batches(self._held_out, self.recipe)
            ]
        self.model.train()
        return math.fsum(loss * count for loss, count in found) / sum(count for _, count in found)

    def sample(self) -> str:
        """Text of the model's own, from the first held-out token on; the same for the same weights."""
        model: Any = self.model.eval()
        found = self._held_out[:1].unsqueeze(0)
        while (
            found.shape[-1] <= SAMPLED
        ):  # no longer than the windows it knows: each part goes on from the end of the last
            start = found[:, -max(1, self.recipe.context // 2) :]
            new = model.generate(
                start,
                self._room(start),
                sampling=Sampling(temperature=TEMPERATURE),
                seed=self.recipe.seed + found.shape[-1],
            )
            found = torch.cat([found, new[:, start.shape[-1] :]], -1)
        self.model.train()
        return self.text.alphabet.decode(found[0, : SAMPLED + 1])

    def _room(self, start: Tensor) -> int:
        """How many tokens fit behind these."""
        return max(1, self.recipe.context - start.shape[-1])

    def _prepare(self) -> None:
        """Bring the directory back to the state at the step that comes next, just before the first event."""
        kept = saved.checkpoints(self.directory)
        if self._newest != (kept[-1].step if kept else None):
            found = f"{self.directory} was changed by another training since this one was made"
            raise ArgumentError("--out", found, "give another directory, or resume what is there")
        with writing(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            saved.sweep(self.directory)
            _rewind(self.directory / HISTORY, self._entry)

    def _advance(self, watch: Monitor) -> Iterator[Event]:
        batch = batch_at(self._own, self.recipe, self.step)
        if self.recipe.due(self.step + 1):
            watch.look()
        loss = self._update(watch, batch)
        self.step += 1
        self._losses.append(loss)
        warned = _quietly(watch, loss)
        self._warned += warned
        if warned:
            yield Warned(tuple(warned))
        if self.recipe.due(self.step):
            yield self._milestone(watch)
        yield Stepped(self.step, loss)

    def _update(self, watch: Monitor, batch: Batch) -> float:
        """One update of the weights; refuses one that would spoil them."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(batch)
        loss.backward()
        length = nn.utils.clip_grad_norm_(self.model.parameters(), LONGEST_GRADIENT)
        if not (math.isfinite(float(loss.detach())) and math.isfinite(float(length))):
            raise Diverged(self._divergence_report(watch, batch, float(loss.detach())))
        self.optimizer.step()
        return float(loss.detach())

    def _loss(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        return cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

    def _first_look(self, watch: Monitor) -> None:
        """The regularity of the model before any step."""
        watch.look()
        self._losses = [float(self._loss(batch_at(self._own, self.recipe, 0)).detach())]
        _quietly(watch, self._losses[0], counts=False)

    def _milestone(self, watch: Monitor) -> Milestone:
        held_out = self.held_out_loss()
        if not math.isfinite(held_out):  # the last update spoiled the weights: they are not worth keeping
            raise Diverged(
                self._divergence_report(watch, batch_at(self._own, self.recipe, self.step), held_out)
            )
        watch.jacobians()
        entry = plain(
            {
                "step": self.step,
                "training_loss": math.fsum(self._losses) / max(1, len(self._losses)),
                "held_out_loss": held_out,
                "certificate": self._proved(),
                "learning_rate": self.recipe.rate(max(0, self.step - 1)),
                "tokens": self.step * self.recipe.batch * self.recipe.context,
                "layers": watch.history[-1]["layers"],
                "warnings": self._warned,
                "sample": self.sample(),
            }
        )
        self._losses, self._warned, self._entry = [], [], entry
        kept = self.save()
        try:
            _append(self.directory / HISTORY, entry)
        except OSError as error:  # the checkpoint has the line too
            raise Unwritten(self._write_failure(error)) from error
        return Milestone(kept, entry, watch.table())

    def _proved(self) -> float | None:
        """The constant that the weights prove, where the recipe has a promise."""
        model, promise = self.model, self.recipe.promise
        if promise is None:
            return None
        assert isinstance(model, LanguageModel)
        try:
            return model.keep().value
        except ArgumentError as error:
            last = saved.checkpoints(self.directory)[-1:]
            where = f"; the last good checkpoint is {last[0].path}" if last else ""
            raise Diverged(f"the promise {promise:g} is broken: {error}{where}") from error

    def _fill(self, made: Path) -> None:
        save(self.model, made / MODEL)
        write_tensors(made / OPTIMIZER, tensors_of(self.model, self.optimizer), {})

    def _state(self) -> dict[str, Any]:
        """All that is not a tensor, as plain values."""
        return {
            "step": self.step,
            "recipe": self.recipe.written(),
            "data": {"path": str(self.text.path), "sha256": self.text.fingerprint},
            "characters": self.text.alphabet.characters,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "losses": self._losses,
            "warned": self._warned,
            "entry": self._entry,
            "measured": self._measured[-WINDOW - 1 :],
        }

    def _restore(self, kept: Checkpoint, state: dict[str, Any]) -> None:
        restore(self.model, self.optimizer, read_tensors(kept.path / OPTIMIZER)[0])
        self.step, self._losses, self._warned = state["step"], state["losses"], state["warned"]
        self._entry, self._measured, self._newest = state["entry"], state["measured"], kept.step
        self.remarks = [*_differences(state), *_unreadable(self.directory / HISTORY)]

    def _divergence_report(self, watch: Monitor, batch: Batch, loss: float) -> str:
        """What is known: where scores grew, on the batch itself, and where to go on from."""
        watch.look()
        self._loss(batch)
        watch.count += 1  # the step that was not made
        _quietly(watch, loss, counts=False)
        grown = watch.suspect()
        where = "no head stands out" if grown is None else str(grown)
        last = saved.checkpoints(self.directory)[-1].path
        return (
            f"the loss or its gradient is not finite at step {watch.count} (loss {loss:.4g}); {where}; the "
            f"last good checkpoint is {last}; "
            "start another training with a lower --learning-rate"
        )

    def _write_failure(self, error: OSError) -> str:
        kept = saved.checkpoints(self.directory)
        whole = (
            f"of step {kept[-1].step} is whole, and --resume continues from it"
            if kept
            else "of the start is missing: begin again"
        )
        why = error.strerror or str(error)
        return (
            f"step {self.step} cannot be written to {self.directory} ({why}); the "
            f"checkpoint {whole}; make room first"
        )


def _quietly(watch: Monitor, loss: float, counts: bool = True) -> list[str]:
    """A step of the monitor; its warnings as sentences, because a bar is on the screen."""
    before = len(watch.warnings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RegularityWarning)
        if counts:
            watch.step(loss=loss)
        else:
            watch.measure(loss=loss)
    return [str(warning.growth) for warning in watch.warnings[before:]]


def _same_text(state: dict[str, Any], recipe: Recipe, data: Path | None) -> Text:
    """The text of a checkpoint, which must not have changed."""
    text = Text.read(Path(state["data"]["path"]) if data is None else data, recipe.bytes)
    if text.fingerprint != state["data"]["sha256"]:
        found = f"{text.path} is not the text of this training, or was changed"
        raise ArgumentError(
            "--data",
            found,
            f"give that text ({state['data']['path']}), or start another training with another --out",
        )
    return text


def _load(kept: Checkpoint) -> nn.Module:
    model: nn.Module = load(kept.path / MODEL)
    return model.train()


def _differences(state: dict[str, Any]) -> Iterator[str]:
    """What keeps a resumed training from being the same bit for bit."""
    for what, now in (("threads", torch.get_num_threads()), ("torch", torch.__version__)):
        if state[what] != now:
            yield (
                f"not bit for bit: {what}: {state[what]} before, {now} now: sums in another order differ "
                "in their last digits"
            )


def _append(path: Path, entry: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _unreadable(path: Path) -> Iterator[str]:
    """Lines of the history that were whole once; the last may have been cut off by the end of a process."""
    count = sum(_step(line) is None for line in _lines(path)[:-1])
    if count:
        yield f"{path}: {count} of its lines cannot be read, and are left out"


def _lines(path: Path) -> list[bytes]:
    """The lines of the history, and what follows the last; text has other ends of lines,
    which a sample may hold.
    """
    with writing(path.parent):
        return path.read_bytes().split(b"\n") if path.is_file() else []


def _rewind(path: Path, last: dict[str, Any] | None) -> None:
    """The history up to the last entry of a checkpoint: a killed process may have written more, or less."""
    end = -1 if last is None else last["step"]
    kept = [line for line in _lines(path) if (step := _step(line)) is not None and step < end]
    whole = [*kept, *([] if last is None else [json.dumps(last, ensure_ascii=False).encode()])]
    write_whole(path, b"".join(line + b"\n" for line in whole))


def _step(line: bytes) -> int | None:
    """The step of a line of the history; None where it was cut off or is no text."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
