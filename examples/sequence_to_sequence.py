"""An encoder and a decoder learn to rewrite: digits backwards, digits in order, dates in many forms as
1994-03-03.

python examples/sequence_to_sequence.py [--tasks reverse sort dates] [--steps N] [--seed 0] [--out
docs/pictures/cross_attention.svg]

What is held out is never seen in training: a string of digits, or a date in any of its forms. The picture
shows where the decoder looks while it writes: the weights of its cross-attention, read off the declaration of
the trained model.
"""

from __future__ import annotations

import argparse
import datetime
import html
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from regard import Padding
from regard.maps import Added, Compose, Relu, Residual, ToContext
from regard.nn import Design, SequenceToSequence, Sinusoidal, Xavier

START, END = 0, 1
FIRST, LAST = (
    datetime.date(1950, 1, 1),
    datetime.date(2049, 12, 31),
)  # one hundred years, so that two digits name one of them
CELL, LABEL, TOP, GAP = 20, 34, 54, 16

Pair = tuple[str, str]


class Task(ABC):
    """Something to rewrite: how a thing is drawn, and how it is written before and after. Abstract."""

    name: str
    characters: str
    steps: int
    shown: tuple[Any, str]
    """A thing that is always held out, and how it is written in the picture."""

    @abstractmethod
    def draw(self, dice: random.Random) -> Hashable:
        """A thing, as training and test tell things apart."""

    @abstractmethod
    def write(self, thing: Any, dice: random.Random) -> Pair:
        """A source and its target."""


@dataclass(frozen=True)
class Digits(Task):
    """Strings of four digits or more, rearranged."""

    name: str
    rearranged: Callable[[str], str]
    steps: int
    longest: int = 10
    characters: str = "0123456789"
    shown: tuple[Any, str] = ("3141592653", "3141592653")

    def draw(self, dice: random.Random) -> str:
        return "".join(dice.choices(self.characters, k=dice.randint(4, self.longest)))

    def write(self, thing: str, dice: random.Random) -> Pair:
        return thing, self.rearranged(thing)


@dataclass(frozen=True)
class Dates(Task):
    """Dates of a hundred years in one of FORMS, as ISO 8601 writes them."""

    name: str = "dates"
    steps: int = 800
    characters: str = " ,-./0123456789ADFJMNOSTWabcdefghilmnoprstuvy"
    shown: tuple[Any, str] = (datetime.date(1994, 3, 3), "Thursday, 3 March 1994")

    def draw(self, dice: random.Random) -> datetime.date:
        return FIRST + datetime.timedelta(days=dice.randint(0, (LAST - FIRST).days))

    def write(self, thing: datetime.date, dice: random.Random) -> Pair:
        return dice.choice(FORMS)(thing), thing.isoformat()


def ordinal(day: int) -> str:
    """1st, 2nd, 3rd, 4th, ..., 31st."""
    return f"{day}{'th' if 10 < day < 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(day % 10, 'th')}"


# A date has one meaning in each form: with dots and dashes the day comes first, with slashes the month, and
# four digits lead with the year.
FORMS: tuple[Callable[[datetime.date], str], ...] = (
    lambda date: f"{date:%B} {date.day}, {date.year}",
    lambda date: f"{date.day} {date:%B} {date.year}",
    lambda date: f"{date:%A}, {date.day} {date:%B} {date.year}",
    lambda date: f"{date:%A}, {date:%B} {ordinal(date.day)}, {date.year}",
    lambda date: f"{ordinal(date.day)} of {date:%B} {date.year}",
    lambda date: f"{date:%b} {date.day} {date.year}",
    lambda date: f"{date.day}-{date:%b}-{date.year}",
    lambda date: f"{date.day}.{date.month}.{date.year}",
    lambda date: f"{date.day}.{date.month}.{date:%y}",
    lambda date: f"{date.month}/{date.day}/{date.year}",
    lambda date: f"{date:%Y/%m/%d}",
)

TASKS: dict[str, Task] = {
    "reverse": Digits("reverse", lambda text: text[::-1], 300),
    "sort": Digits("sort", lambda text: "".join(sorted(text)), 300),
    "dates": Dates(),
}


@dataclass(frozen=True)
class Batch:
    """Sources (batch, m), how many of each row are real, and targets (batch,
    n) that begin with START and are filled up with END.
    """

    source: Tensor
    lengths: Tensor
    target: Tensor

    @property
    def support(self) -> Padding:
        """What may be seen of the sources, in every head."""
        return Padding(self.lengths.unsqueeze(-1))


def encode(task: Task, pairs: list[Pair]) -> Batch:
    """Characters as numbers from 2 on."""
    sources, targets = (
        [[task.characters.index(c) + 2 for c in text] for text in texts] for texts in zip(*pairs, strict=True)
    )
    lengths = torch.tensor([len(row) for row in sources])
    return Batch(_filled(sources), lengths, _filled([[START, *row, END] for row in targets]))


def _filled(rows: list[list[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [END] * (longest - len(row)) for row in rows])


def decode(task: Task, ids: Tensor) -> str:
    """The characters up to END; what is no character is a question mark."""
    row = ids.tolist()
    return "".join(
        task.characters[i - 2] if i > 1 else "?" for i in (row[: row.index(END)] if END in row else row)
    )


def held_out(task: Task, count: int, seed: int) -> set[Hashable]:
    """Different things that training may not see."""
    dice, kept = random.Random(f"{task.name} {seed}"), {task.shown[0]}
    while len(kept) < count:
        kept.add(task.draw(dice))
    return kept


def training_pairs(task: Task, kept: set[Hashable], seed: int) -> Iterator[Pair]:
    """Pairs without end, none of them of a thing that is held out."""
    dice = random.Random(seed)
    while True:
        if (thing := task.draw(dice)) not in kept:
            yield task.write(thing, dice)


def test_pairs(task: Task, kept: set[Hashable]) -> list[Pair]:
    """One pair for each thing that is held out."""
    dice = random.Random(0)
    return [task.write(thing, dice) for thing in sorted(kept)]  # type: ignore[type-var]


def build(task: Task, width: int = 64, layers: int = 2) -> SequenceToSequence:
    """A small model: positions are waves, so that every place has a name of its own."""
    design = Design(
        width, heads=4, hidden=2 * width, positions=Sinusoidal(), activation=Relu(), initialization=Xavier()
    )
    return SequenceToSequence(design, len(task.characters) + 2, len(task.characters) + 2, layers)


def train(
    task: Task,
    model: SequenceToSequence,
    pairs: Iterator[Pair],
    steps: int,
    batch: int = 64,
    rate: float = 3e-3,
) -> None:
    """Adam on the cross-entropy of the next character; the rate goes up and down once."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.2)
    for _ in track(range(steps), f"{task.name:8}", console=Console(stderr=True)):
        loss = cross_entropy(model, encode(task, [next(pairs) for _ in range(batch)]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def cross_entropy(model: SequenceToSequence, batch: Batch) -> Tensor:
    """Of every next character, and of the first END after them."""
    given, wanted = batch.target[:, :-1], batch.target[:, 1:]
    logits = model(batch.source, given, source_support=batch.support)
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), wanted.masked_fill(given == END, -100).flatten()
    )


def rewrite(model: SequenceToSequence, batch: Batch, room: int = 11) -> Tensor:
    """What the model writes after START, always the most likely token; with a cache,
    so that each step costs one token.
    """
    start = torch.full((len(batch.source), 1), START)
    return model.generate(batch.source, start, room, end=END, source_support=batch.support)


def predict(task: Task, model: SequenceToSequence, pairs: list[Pair]) -> list[str]:
    """The same as text."""
    return [decode(task, row[1:]) for row in rewrite(model, encode(task, pairs))]


@torch.no_grad()
def cross_weights(model: SequenceToSequence, source: Tensor, target: Tensor) -> Tensor:
    """The weights (layers, heads, n, m) with which the decoder looks at one source (1, m) while it reads one
    target (1, n).

    The decoder is taken as a declaration. Its maps run one after the other, and each attention to the source
    is asked for its weights.
    """
    x, found = model.embedding(target)[0].double(), []
    for step in model.decoder.declare(model.encode(source)[0]).maps:
        if (heads := _looks(step)) is not None:
            norm, crossings = heads
            found.append(torch.stack([one.attention.weights(norm(x), one.context) for one in crossings]))
        x = step(x)
    return torch.stack(found)


def _looks(step: Any) -> tuple[Any, list[ToContext]] | None:
    """The norm before an attention to the source, and its heads; None for other steps of a layer."""
    inner = step.map if isinstance(step, Residual) else None
    if not isinstance(inner, Compose) or not isinstance(added := inner.maps[-1], Added):
        return None
    return inner.maps[0], [
        one
        for head in added.maps
        if isinstance(head, Compose)
        for one in head.maps
        if isinstance(one, ToContext)
    ]


@dataclass(frozen=True)
class Panel:
    """A map to draw: weights (n, m), what is written in each row, and the source."""

    title: str
    weights: Tensor
    written: list[str]
    source: str


def panel(task: Task, model: SequenceToSequence) -> Panel:
    """Where the decoder looks in the layer that looks at fewest places, heads averaged."""
    source = encode(task, [(task.shown[1], "")])
    target = rewrite(model, source)
    written = decode(task, target[0, 1:])
    weights = cross_weights(model, source.source, target[:, : len(written) + 1]).mean(1)
    layer = int(torch.special.entr(weights).sum((-2, -1)).argmin())
    return Panel(f"{task.name}, layer {layer + 1}", weights[layer], [*written, "end"], task.shown[1])


STYLE = """<style>
.page { fill: #ffffff } .cell { fill: #1f6feb } .frame { fill: none; stroke: #d8dee4 }
text { fill: #24292f; font: 12px monospace } .title { font: bold 13px sans-serif }
@media (prefers-color-scheme: dark) { .page { fill: #0d1117 } .cell { fill: #58a6ff }
  .frame { stroke: #30363d } text { fill: #e6edf3 } }
</style>"""


def picture(panels: list[Panel]) -> str:
    """All maps side by side: a row for each character that is written, a column for each of the source;
    darker is more.
    """
    wide = [LABEL + CELL * len(one.source) + GAP for one in panels]
    size = f'width="{sum(wide) + GAP}" height="{TOP + CELL * max(len(one.written) for one in panels) + GAP}"'
    parts = [drawn(one, sum(wide[:number]) + GAP) for number, one in enumerate(panels)]
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return (
        "\n".join([frame, STYLE, '<rect class="page" width="100%" height="100%"/>', *parts, "</svg>"]) + "\n"
    )


def drawn(one: Panel, left: int) -> str:
    """One map, with its title above and its characters around it."""
    start, size = left + LABEL, f'width="{CELL}" height="{CELL}"'
    parts = [f'<text class="title" x="{start}" y="20">{html.escape(one.title)}</text>']
    for j, read in enumerate(one.source):
        parts.append(
            f'<text x="{start + CELL * (j + 0.5)}" y="{TOP - 7}" '
            f'text-anchor="middle">{html.escape(visible(read))}</text>'
        )
    for i, written in enumerate(one.written):
        parts.append(
            f'<text x="{start - 7}" y="{TOP + CELL * (i + 0.7):.0f}" text-anchor="end">{written}</text>'
        )
        for j, read in enumerate(one.source):
            told = (
                f"<title>{written} looks at {html.escape(visible(read))}: "
                f"{float(one.weights[i, j]):.3f}</title>"
            )
            place = f'x="{start + CELL * j}" y="{TOP + CELL * i}"'
            parts.append(
                f'<rect class="cell" {place} {size} '
                f'fill-opacity="{float(one.weights[i, j]):.3f}">{told}</rect>'
            )
    box = f'x="{start}" y="{TOP}" width="{CELL * len(one.source)}" height="{CELL * len(one.written)}"'
    return "\n".join([*parts, f'<rect class="frame" {box}/>'])


def visible(character: str) -> str:
    """A space that can be seen."""
    return "␣" if character == " " else character


def learn(task: Task, steps: int, seed: int) -> SequenceToSequence:
    """Train a model, say how often it is right on what it never saw, and show what it wrote."""
    torch.manual_seed(seed)
    kept, model = held_out(task, 2000, seed), build(task)
    start = time.perf_counter()
    train(task, model, training_pairs(task, kept, seed), steps)
    model.eval()
    pairs = test_pairs(task, kept)
    found = predict(task, model, pairs)
    right = sum(mine == target for mine, (_, target) in zip(found, pairs, strict=True))
    print(
        f"{task.name}: {right} of {len(pairs)} exact ({right / len(pairs):.2%}), {steps} steps in "
        f"{time.perf_counter() - start:.0f} s"
    )
    wrong = [number for number, (_, target) in enumerate(pairs) if found[number] != target]
    for number in dict.fromkeys([*range(0, len(pairs), len(pairs) // 4), *wrong[:2]]):
        source, target = pairs[number]
        print(f"  {source:32} {found[number]}{'' if found[number] == target else f'   wrong: {target}'}")
    return model


def main() -> None:
    """Learn each task in turn, then draw where the decoders look."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--steps", type=int, help="of training; enough for each task if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/cross_attention.svg"))
    options = parser.parse_args()
    if options.steps is not None and options.steps < 2:
        parser.error(f"--steps: is {options.steps}; give two or more")
    tasks = [TASKS[name] for name in options.tasks]
    panels = [panel(task, learn(task, options.steps or task.steps, options.seed)) for task in tasks]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(picture(panels), encoding="utf-8")
    print(f"saved to {options.out}")


if __name__ == "__main__":
    main()
