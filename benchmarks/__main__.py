"""python -m benchmarks [--quick] [--threads N] [--out FILE]: a table of ratios, and the same as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Timing, interleaved, peak_mib
from benchmarks.memory import DECLARATIONS, run_of
from benchmarks.suite import CASES, SHAPES, Case, contender_of

console = Console(width=160)
COMPILED = ("FlexAttention Gaussian",)
"""Contenders whose compiler takes more memory than they do: theirs is not measured."""


def main() -> int:
    """Measure, print, save; exit status 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="the short form: first shape, short lengths, no memory of peers"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads (one gives the steadiest ratios)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/latest.json"), help="where the JSON goes"
    )
    parser.add_argument("--only", help="cases whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    started = time.time()
    chosen = [case for case in CASES if options.only is None or options.only in case.name]
    planned = [
        (case, shape) for case in chosen for shape in (case.shapes[:1] if options.quick else case.shapes)
    ]
    rows = [row for case, shape in planned for row in measure_case(case, shape, options.quick)]
    lengths = (2048, 8192) if options.quick else (2048, 8192, 32768)
    memory = [measure_memory(name, lengths) for name in DECLARATIONS] if options.only is None else []
    missed = [row for row in rows if row["met"] is False] + [row for row in memory if not row["linear"]]
    report = {
        "machine": machine(options.threads),
        "seconds": round(time.time() - started, 1),
        "times": rows,
        "memory": memory,
    }
    save(report, options.out)
    console.print(f"{len(missed)} of the targets missed; {report['seconds']} s; saved to {options.out}")
    return 1 if missed else 0


def measure_case(case: Case, shape: str, quick: bool) -> list[dict[str, object]]:
    """Time one case and print its table."""
    timings = interleaved(case.build(SHAPES[shape]), case.seconds / (3 if quick else 1), 2 if quick else 3)
    yardstick = next(iter(timings))
    table = Table(title=f"{case.name}, {shape}", title_justify="left")
    for column in (
        "contender",
        "median ms",
        "minimum ms",
        f"median / {yardstick}",
        f"minimum / {yardstick}",
        "peak MiB",
        "target",
    ):
        table.add_column(column, justify="left" if column in ("contender", "target") else "right")
    rows = []
    for name, timing in timings.items():
        goals = [
            (t, _ratio(timings, t.contender, t.versus))
            for t in case.targets
            if t.ours == name and t.shape in (None, shape)
        ]
        limits = [limit for limit in case.limits if (limit.contender, limit.shape) == (name, shape)]
        base = timings[yardstick]
        numbers = (
            timing.median * 1e3,
            timing.minimum * 1e3,
            timing.median / base.median,
            timing.minimum / base.minimum,
        )
        skipped = name in COMPILED or (
            quick and not name.startswith(("attend", "sdpa", "linearize", "jvp(attend)"))
        )
        peak = None if skipped else peak_mib(contender_of, case.name, shape, name)
        kept = [t.holds(ratio) for t, ratio in goals] + [limit.holds(timing.median, peak) for limit in limits]
        met = all(kept) if kept else None
        words = "; ".join([t.words(ratio) for t, ratio in goals] + [limit.words() for limit in limits])
        verdict = "" if met is None else " [green]met[/]" if met else " [red]missed[/]"
        table.add_row(
            name, *(f"{x:.2f}" for x in numbers), "-" if peak is None else f"{peak:.0f}", words + verdict
        )
        rows.append(
            {
                "case": case.name,
                "shape": shape,
                "contender": name,
                "median_ms": numbers[0],
                "minimum_ms": numbers[1],
                "ratio_median": numbers[2],
                "ratio_minimum": numbers[3],
                "peak_mib": peak,
                "target": words,
                "met": met,
            }
        )
    console.print(table)
    return rows


def _ratio(timings: dict[str, Timing], contender: str, versus: str) -> float:
    return timings[contender].median / timings[versus].median


def measure_memory(name: str, lengths: tuple[int, ...]) -> dict[str, object]:
    """Peak memory at growing lengths; linear means: not more than twice as fast as the length,
    with a floor for noise.
    """
    peaks = {length: peak_mib(run_of, name, length) for length in lengths}
    first, last = lengths[0], lengths[-1]
    linear = peaks[last] <= 2 * (last / first) * max(peaks[first], 8.0)
    console.print(
        f"memory beyond inputs, {name}: "
        + ", ".join(f"n={n}: {mib:.0f} MiB" for n, mib in peaks.items())
        + (" — linear" if linear else " — [red]not linear[/]")
    )
    return {"declaration": name, "peak_mib": {str(n): mib for n, mib in peaks.items()}, "linear": linear}


def machine(threads: int) -> dict[str, object]:
    """What the numbers were measured on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "cores": os.cpu_count(),
    }


def save(report: dict[str, object], path: Path) -> None:
    """Write the JSON atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1))
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
