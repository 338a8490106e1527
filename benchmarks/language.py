"""python -m benchmarks.language [--quick] [--steps 300]: what a promise costs a language model, and buys.

Trains the same character model on Paradise Lost without a promise and under 50, 10 and 2, by `regard train`,
and prints for each: the certificate (token-max, from points to logits), bits for each held-out character,
accuracy, mean entropy of attention, and what swapping two neighboring letters does: how far logits move over
how far the points moved (found: the largest over all swaps of some windows; certified: no swap can do more),
and how many predictions stay (certified: they cannot change; found: they did not).
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from examples.plot import Line, chart
from regard import TokenMax, Whole, certify
from regard.nn import LanguageModel
from regard.training import Milestone, Recipe, Text, Training

DATA = Path(__file__).resolve().parents[1] / "examples" / "data" / "paradise_lost.txt"
PROMISES = (None, 50.0, 10.0, 2.0)
FREE_RATE, RATE = 8e-3, 2e-2
"""Learning rates: the best of 2e-3, 4e-3, 8e-3, 2e-2 without a promise, of 4e-3, 1e-2, 2e-2 under 2."""
COST = 0.6
"""How many bits a character the promise of 2 may cost."""
WINDOWS = 8


@dataclass(frozen=True)
class Swaps:
    """What swapping neighbors does: the largest move of logits over that of points, and the shares of
    predictions that stayed, and that are proved to stay.
    """

    largest: float
    stayed: float
    proved: float


@dataclass(frozen=True)
class Row:
    """What is kept of a line: the certificate, bits for each held-out character, and swaps."""

    certified: float
    bits: float
    swaps: Swaps


def main() -> int:
    """Train, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.language", description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="updates of each training")
    parser.add_argument("--pictures", type=Path, help="a directory for language.svg and language_loss.svg")
    parser.add_argument("--quick", action="store_true", help="fewer updates, no target")
    options = parser.parse_args()
    steps = 60 if options.quick else options.steps
    _say(f"{'promise':>8} {'certified':>10} {'bits':>6} {'accuracy':>8} {'entropy':>8} "
         f"{'swap found':>10} {'stay':>6} {'proved':>7} {'weights':>8}")  # fmt: skip
    rows = {promise: _row(promise, steps) for promise in PROMISES}
    if options.pictures is not None:
        options.pictures.mkdir(parents=True, exist_ok=True)
        for name, draw in (("language", picture), ("language_loss", curve)):
            (options.pictures / f"{name}.svg").write_text(draw(rows), encoding="utf-8")
    cost = rows[2.0].bits - rows[None].bits
    missed = not options.quick and cost > COST
    _say(f"the promise of 2 costs {cost:.2f} bits a character (at most {COST}){': MISSED' if missed else ''}")
    return int(missed)


def picture(rows: dict[float | None, Row]) -> str:
    """How far logits move when letters are swapped: what is proved, and what was found."""
    promises = sorted(promise for promise in rows if promise is not None)
    lines = [
        Line("certified", [(promise, rows[promise].certified) for promise in promises]),
        Line(
            "found by swapping letters",
            [(promise, rows[promise].swaps.largest) for promise in promises],
            "seen",
        ),
        Line(
            "found in the free model",
            [(promise, rows[None].swaps.largest) for promise in (promises[0], promises[-1])],
            "other",
        ),
    ]
    return chart("Logits move, over points", "promised constant", lines, above="times as far")


def curve(rows: dict[float | None, Row]) -> str:
    """Bits for each held-out character over the promise, and those of the free model."""
    promises = sorted(promise for promise in rows if promise is not None)
    ends = promises[0], promises[-1]
    lines = [
        Line("under a promise", [(promise, rows[promise].bits) for promise in promises], "seen"),
        Line("free", [(promise, rows[None].bits) for promise in ends], "other"),
    ]
    return chart(
        "What a promise costs",
        "promised constant",
        lines,
        above="bits a character",
        logarithmic=(True, False),
    )


def _row(promise: float | None, steps: int) -> Row:
    """Train one model and print its line."""
    text = Text.read(DATA, False)
    rate = FREE_RATE if promise is None else RATE
    recipe = Recipe(
        steps=steps, width=64, layers=2, heads=1, context=48, learning_rate=rate, every=steps, promise=promise
    )
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = Training.start(text, recipe, Path(place) / "run")
        last = [event for event in training.events() if isinstance(event, Milestone)][-1].entry
    model = training.model.eval()
    assert isinstance(model, LanguageModel)
    constant = certificate(model)
    held_out = text.split(recipe.context)[1]
    windows = held_out[: WINDOWS * recipe.context].reshape(WINDOWS, recipe.context)
    swaps, bits = swap_all(model, windows, constant), last["held_out_loss"] / math.log(2)
    entropies = [value for layer in last["layers"].values() for value in layer["entropy"]]
    size = sum(parameter.numel() for parameter in model.parameters())
    _say(f"{'free' if promise is None else f'{promise:g}':>8} {constant:>10.4g} {bits:>6.3f} "
         f"{_accuracy(model, held_out, recipe.context):>8.3f} {sum(entropies) / len(entropies):>8.3f} "
         f"{swaps.largest:>10.3f} {swaps.stayed:>6.3f} {swaps.proved:>7.3f} {size:>8,}")  # fmt: skip
    return Row(constant, bits, swaps)


def certificate(model: LanguageModel) -> float:
    """The constant from points to logits, token by token."""
    if model.design.promise is not None:
        return model.certificate().value
    return certify(model.declare_logits(), Whole(), TokenMax()).value


@torch.no_grad()
def swap_all(model: LanguageModel, windows: Tensor, constant: float) -> Swaps:
    """Swap every pair of different neighbors of every window, one at a time."""
    largest, stayed, proved, count = 0.0, 0, 0, 0
    for ids in windows:
        places = [k for k in range(len(ids) - 1) if ids[k] != ids[k + 1]]
        swapped = ids.repeat(len(places), 1)
        for row, k in enumerate(places):
            swapped[row, [k, k + 1]] = ids[[k + 1, k]]
        before, after = model(ids.unsqueeze(0)), model(swapped)
        moved = (model.embedding(swapped) - model.embedding(ids.unsqueeze(0))).norm(dim=-1).amax(-1)
        largest = max(largest, float(((after - before).norm(dim=-1).amax(-1) / moved).max()))
        top = before.topk(2, -1).values
        safe = (top[..., 0] - top[..., 1]) > math.sqrt(2) * constant * moved.unsqueeze(-1)
        same = after.argmax(-1) == before.argmax(-1)
        later = torch.arange(len(ids)) >= torch.tensor(places).unsqueeze(-1)  # earlier tokens do not see it
        if bool((safe & ~same).any()) or not bool(same[~later].all()):
            raise AssertionError("a prediction changed that was proved to stay")
        stayed, proved = stayed + int((same & later).sum()), proved + int((safe & later).sum())
        count += int(later.sum())
    if largest > constant * (1 + 1e-4):
        raise AssertionError(f"a swap moves logits {largest:g} times, and {constant:g} was proved")
    return Swaps(largest, stayed / count, proved / count)


@torch.no_grad()
def _accuracy(model: LanguageModel, held_out: Tensor, context: int) -> float:
    count = (len(held_out) - 1) // context
    inputs = held_out[: count * context].reshape(count, context)
    targets = held_out[1 : count * context + 1].reshape(count, context)
    right = [
        (model(one).argmax(-1) == other).float().mean()
        for one, other in zip(inputs.split(64), targets.split(64), strict=True)
    ]
    return float(torch.stack(right).mean())


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
