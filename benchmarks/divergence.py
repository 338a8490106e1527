"""python -m benchmarks.divergence [--quick] [--float32] [--heads N]: does the head that is named end the run?

Small language models learn with a rate that is too large, and their attention multiplies queries and keys in
float16, as mixed precision without a fused kernel does (Ding et al. 2021, Zeng et al. 2023): products grow
until one is above 65,504, and the loss is not a number. A rule names a head at a checkpoint
(`regard.audits.series.runaway`, which is what `regard track A B C --text ...` says); how large a logit it
waits for is tuned on some seeds and tested on others. Whether that head does it is asked by going on from
that checkpoint on the same texts with its queries and keys held, and once more with those of another held.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import dataclass

import torch
from rich.console import Console

from benchmarks.small_decoders import LAYERS, Decoders, Snapshot, texts
from regard.audits.series import LARGE, Track, runaway, series

STEPS, EVERY, WARM = 600, 10, 20
"""Steps of a run, steps between checkpoints, and steps in which the rate grows to what it is."""
HEALTHY, TOO_LARGE = 0.02, (0.07, 0.05)
LIMITS, DEFAULT = (2048.0, 3072.0, LARGE, 5500.0), 2
"""Among these is the logit that the rule waits for in heads of width 64, and which of them regard has."""
TUNE, TEST = tuple(range(4)), tuple(range(200, 210))
"""Seeds. Those of the test were first run when the rule and both rates had been settled."""
AHEAD, LONGER = 0.1, 0.1
"""How much of the run an alarm must be ahead, and how much longer a run must live to be saved by a hold."""
NEEDED = 8
console = Console(width=120)


@dataclass(frozen=True)
class Run:
    """What a training did: when it ended, its losses, which heads had a product that float16 does not hold,
    and at each checkpoint the largest logit and the QK norm of every head.
    """

    seed: int
    heads: int
    ended: int | None
    losses: list[float]
    over: list[int]
    logits: list[list[float]]
    norms: list[list[float]]
    kept: list[Snapshot]

    def tracks(self, numbers: list[list[float]], column: str) -> list[Track]:
        """A number of every head along the checkpoints, as a series has it."""
        return [
            Track(
                column, f"layers.{head // self.heads}", head // self.heads, head % self.heads, tuple(values)
            )
            for head, values in enumerate(zip(*numbers, strict=True))
        ]

    def alarm(self, limit: float) -> tuple[int, int] | None:
        """The step at which the rule names a head, and which one."""
        found = runaway(self.tracks(self.logits, "largest_logit"), limit)
        return None if found is None else (found[0] * EVERY, found[1].layer * self.heads + found[1].head)

    def ahead(self, limit: float) -> float:
        """How much of the run the alarm comes before its end; minus one where none does."""
        found = self.alarm(limit)
        return -1.0 if self.ended is None or found is None else 1 - found[0] / self.ended

    def right(self, limit: float) -> bool:
        """Whether the head named early enough is the one whose product was too large."""
        found = self.alarm(limit)
        return self.ahead(limit) >= AHEAD and found is not None and found[1] in self.over


def trained(seeds: list[int], rate: float, half: bool, heads: int) -> list[Run]:
    """One run for each seed, all at once."""
    models = Decoders.new(seeds, half, heads)
    fixed = texts([0], -1).expand(len(seeds), -1, -1)
    losses, logits, norms, kept = [], [], [], []
    over: list[list[int]] = [[] for _ in seeds]
    ended: list[int | None] = [None] * len(seeds)
    for step in range(STEPS):
        if step % EVERY == 0:
            logits.append(models.largest_logits(fixed).tolist())
            norms.append(models.qk_norms().tolist())
            kept.append(models.snapshot())
        loss, products = models.step(texts(seeds, step), rate * min(1.0, (step + 1) / WARM))
        losses.append(loss.tolist())
        for place in range(len(seeds)):
            if ended[place] is None and not bool(torch.isfinite(loss[place])):
                ended[place] = step
                over[place] = [head for head, one in enumerate(products[place]) if not one <= 65504]
        if all(end is not None for end in ended):
            break
    return [
        Run(
            seed,
            heads,
            ended[place],
            [row[place] for row in losses[: ended[place]]],
            _first_layer(over[place], heads),
            [row[place] for row in logits[: _count(ended[place])]],
            [row[place] for row in norms[: _count(ended[place])]],
            [row.one(place) for row in kept[: _count(ended[place])]],
        )
        for place, seed in enumerate(seeds)
    ]


def _count(ended: int | None) -> int | None:
    """How many checkpoints there are before a run ends."""
    return None if ended is None else (ended - 1) // EVERY + 1


def _first_layer(over: list[int], heads: int) -> list[int]:
    """Those of the first layer that has any: what comes after it has no numbers left."""
    return [head for head in over if head // heads == min(over) // heads]


def lives(run: Run, start: int, holds: list[list[int]], rate: float) -> list[bool]:
    """Whether a run goes on beyond its end when it is taken up at a checkpoint with the queries and keys of
    some heads held.
    """
    assert run.ended is not None
    models = run.kept[start // EVERY].copies(holds)
    alive = torch.ones(len(holds), dtype=torch.bool)
    for step in range(start, int(run.ended * (1 + LONGER)) + 1):
        x = texts([run.seed], step).expand(len(holds), -1, -1)
        loss, _ = models.step(x, rate * min(1.0, (step + 1) / WARM))
        alive &= torch.isfinite(loss)
    return alive.tolist()


def same_by_audit(run: Run, limit: float) -> bool:
    """Whether `regard audit` of the same checkpoints names the same head."""
    import regard as r
    from regard.audits.checks import checks

    asked = [check for check in checks() if check.name in ("weights", "rows")]
    found = run.alarm(limit)
    assert found is not None
    last = found[0] // EVERY
    reports = [
        r.audit(
            run.kept[place].llama(), [{"input_ids": row[None]} for row in texts([0], -1)[0]], checks=asked
        )
        for place in range(last - 2, last + 1)
    ]
    again = runaway(series(reports, ["a", "b", "c"]).ranked("largest_logit"), limit)
    return again is not None and again[1].layer * run.heads + again[1].head == found[1]


def main() -> int:
    """Tune on some seeds, test on others, print all rates."""
    options = _options()
    tune, test = (TUNE[:2], TEST[:2]) if options.quick else (TUNE, TEST)
    torch.set_num_threads(1)
    started, half = time.process_time(), not options.float32
    wild = {rate: trained([*tune, *test], rate, half, options.heads) for rate in options.rate}
    for rate, runs in wild.items():
        _learned("too large", rate, runs[len(tune) :])
    if options.float32:
        return 0
    calm = trained([*tune, *test], HEALTHY, half, options.heads)
    _learned("healthy", HEALTHY, calm[len(tune) :])
    first = wild[min(wild)][: len(tune)]  # the harder case
    limits = [
        limit * math.sqrt(options.heads) for limit in LIMITS
    ]  # products are larger by the root of a width
    limit = max(limits, key=lambda limit: (_score(first, calm[: len(tune)], limit), limit == limits[DEFAULT]))
    console.print(
        f"the rule waits for a logit of {limit:g}: tuned on {len(tune)} seeds, tested on {len(test)} others"
    )
    hits = [_tested(rate, runs[len(tune) :], limit) for rate, runs in wild.items()]
    false = sum(run.alarm(limit) is not None for run in calm[len(tune) :])
    console.print(f"false alarms in healthy runs: {false} of {len(test)}")
    console.print(f"{time.process_time() - started:.0f} CPU seconds")
    return 0 if hits[0] >= NEEDED * len(test) / 10 and false <= 1 else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.divergence", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two seeds to tune on and two to test")
    parser.add_argument("--float32", action="store_true", help="the same runs with products in float32")
    parser.add_argument("--rate", type=float, nargs="+", default=TOO_LARGE, help="rates that are too large")
    parser.add_argument("--heads", type=int, default=1, choices=[1, 2, 4], help="heads of a layer")
    return parser.parse_args()


def _score(wild: list[Run], calm: list[Run], limit: float) -> int:
    return sum(run.right(limit) for run in wild) - sum(run.alarm(limit) is not None for run in calm)


def _learned(name: str, rate: float, runs: list[Run]) -> None:
    first, best = (statistics.median(pick(run.losses) for run in runs) for pick in (lambda x: x[0], min))
    ends = [run.ended for run in runs if run.ended is not None]
    console.print(
        f"{name}, rate {rate}: {len(ends)} of {len(runs)} runs end in numbers that are none"
        + (f", at steps {min(ends)} to {max(ends)}" if ends else "")
        + f"; their loss goes from {first:.2f} to {best:.2f} at best (medians)"
    )


def _tested(rate: float, runs: list[Run], limit: float) -> int:
    """What the rule is worth on runs that end; how many of them it names rightly."""
    ended = [run for run in runs if run.ended is not None]
    named = [run for run in ended if run.ahead(limit) >= AHEAD]
    right = [run for run in named if run.right(limit)]
    saved, others, same = 0, 0, 0
    for run in named:
        found = run.alarm(limit)
        assert found is not None
        drawn = torch.randint(
            0, LAYERS * run.heads - 1, (), generator=torch.Generator().manual_seed(run.seed)
        )
        other = int(drawn) + (int(drawn) >= found[1])
        own, instead = lives(run, found[0], [[found[1]], [other]], rate)
        saved, others = saved + own, others + instead
    if right:
        same = same_by_audit(right[0], limit)
    by_norm = sum(_by_norm(run, limit) for run in named)
    ahead = [run.ahead(limit) for run in named] or [0.0]
    console.print(
        f"rate {rate}, runs that end: {len(ended)}; an alarm a tenth of the run ahead or more: {len(named)}"
    )
    console.print(
        f"ahead by {min(ahead):.0%} to {max(ahead):.0%} of the run, median {statistics.median(ahead):.0%}"
    )
    console.print(f"and the head named is the one whose product is too large in the end: {len(right)}")
    console.print(f"with its queries and keys held from the alarm on, the run lives a tenth longer: {saved}")
    console.print(f"with those of another head, drawn at random, held: {others}")
    console.print(f"the head with the largest QK norm at the alarm is the one: {by_norm}")
    console.print(f"`regard.audit` of three checkpoints of such a run names the same head: {bool(same)}")
    return len(right)


def _by_norm(run: Run, limit: float) -> bool:
    found = run.alarm(limit)
    assert found is not None
    norms = run.norms[found[0] // EVERY]
    return max(range(len(norms)), key=norms.__getitem__) in run.over


if __name__ == "__main__":
    sys.exit(main())
