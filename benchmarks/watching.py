"""python -m benchmarks.watching [--steps N]: what a monitor adds to a training step, on one thread.

Three trainings from the same weights take turns in one process, in an order that is drawn anew for each step:
unwatched, measured at every tenth step, measured at every step. Times are of the processor, so that others on
the machine do not count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from regard.nn.monitors import Monitor, monitor
from regard.training import Recipe
from regard.training.building import build, weight_count
from regard.training.optimizer import LONGEST_GRADIENT, optimizer_of

SYMBOLS = 75
RECIPES = (Recipe(width=64, layers=2, context=64, batch=32), Recipe())
EVERY = {"unwatched": None, "every=10": 10, "every=1": 1}
WARM = 10
"""Steps before the clock runs, a whole round of every=10: libraries load,
and the first step is always measured.
"""


def step_of(
    recipe: Recipe, watch_every: int | None, stack: ExitStack
) -> tuple[Callable[[], None], Monitor | None]:
    """A training step on random tokens, and the monitor that counts it."""
    torch.manual_seed(0)
    model = build(recipe, SYMBOLS)
    optimizer = optimizer_of(model, recipe)
    watch = None if watch_every is None else stack.enter_context(monitor(model, every=watch_every))
    tokens = torch.randint(SYMBOLS, (recipe.batch, recipe.context + 1))

    def step() -> None:
        loss = _loss(model(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LONGEST_GRADIENT)
        optimizer.step()
        if watch is not None:
            watch.step(loss=loss)

    return step, watch


def seconds(call: Callable[[], object]) -> float:
    """How long the processor works on a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def times(recipe: Recipe, steps: int) -> dict[str, list[float]]:
    """Seconds of each step of each training, and of Jacobian norms."""
    with ExitStack() as stack:
        made = {name: step_of(recipe, every, stack) for name, every in EVERY.items()}
        found: dict[str, list[float]] = {name: [] for name in made}
        shuffle = random.Random(0)
        for _ in range(WARM + steps):
            for name in shuffle.sample(sorted(made), len(made)):
                found[name].append(seconds(made[name][0]))
        watch = made["every=1"][1]
        assert watch is not None
        assert not watch.not_covered
        return {name: values[WARM:] for name, values in found.items()} | {
            "jacobians()": [seconds(watch.jacobians) for _ in range(5)]
        }


def told(recipe: Recipe, found: dict[str, list[float]]) -> str:
    """Medians where all steps are alike; means where one in ten is measured."""
    plain, measured, jacobians = (
        statistics.median(found[name]) for name in ("unwatched", "every=1", "jacobians()")
    )
    tenth = statistics.fmean(found["every=10"]) / statistics.fmean(found["unwatched"]) - 1
    return (
        f"{weight_count(recipe, SYMBOLS):,} parameters, {len(found['unwatched'])} steps of each: a step "
        f"{1e3 * plain:.0f} ms; "
        f"a measurement {measured / plain - 1:+.1%} of a step; every=10 {tenth:+.1%}; jacobians() "
        f"{jacobians / plain:.1f} steps"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watching", description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="of each training, a multiple of ten")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for recipe in RECIPES:
        print(told(recipe, times(recipe, options.steps)), flush=True)


def _loss(scores: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    main()
