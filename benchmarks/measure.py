"""Timing and memory: interleaved medians and minima,
and the peak of each contender in a process of its own.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

Contender = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender."""

    median: float
    minimum: float


def interleaved(
    contenders: dict[str, Contender], budget: float, least: int = 3, most: int = 15
) -> dict[str, Timing]:
    """Every contender in turn, again and again, until the budget (seconds) is spent:
    drift of the machine hits all alike.
    """
    for run in contenders.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    deadline = time.perf_counter() + budget
    shuffle = random.Random(0)
    while len(next(iter(times.values()))) < most:
        for name in shuffle.sample(
            sorted(contenders), len(contenders)
        ):  # nobody always follows the same contender
            start = time.perf_counter()
            contenders[name]()
            times[name].append(time.perf_counter() - start)
        if time.perf_counter() > deadline and len(next(iter(times.values()))) >= least:
            break
    return {name: Timing(statistics.median(seconds), min(seconds)) for name, seconds in times.items()}


def peak_mib(build: Callable[..., Contender], *arguments: Any) -> float:
    """Peak memory of one run beyond its inputs, in MiB, measured in a fresh process.

    `build` takes the stage first: warm-up or full.
    """
    pool = get_context("spawn").Pool(1)
    try:
        return pool.apply(_peak, (build, arguments))
    finally:  # let the process end by itself: a peer that writes its cache at exit must not be cut off
        pool.close()
        pool.join()


def _peak(build: Callable[..., Contender], arguments: tuple[Any, ...]) -> float:
    import torch

    torch.set_num_threads(1)
    build("warm-up", *arguments)()  # small inputs: libraries load and allocate what they keep
    run = build("full", *arguments)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _high_water()
    run()
    return (_high_water() - before) / 2**20


def _high_water() -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024
