"""python -m benchmarks.fleet [--quick]: one audit by one process and by two, each with one thread: seconds of
the clock and of the processor, memory, and whether the reports are the same.

The audited model is all-MiniLM-L6-v2 on the included sentences. Seconds of the clock mean something on a
machine with two idle cores; those of the processor say what a second process costs.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

FILES = ("report.json", "report.html", "card.md")
FASTER, DEARER = 1.6, 1.35
"""At least so much faster by the clock, at most so much dearer for the processor."""
QUICK = ("--checks", "weights,rows,constants", "--no-twin")
console = Console(width=120)


@dataclass(frozen=True)
class Run:
    """What an audit took: seconds, and the MiB of its largest process; and what it wrote."""

    clock: float
    processor: float
    memory: float
    written: list[bytes]


def audit(processes: int, options: tuple[str, ...]) -> Run:
    """An audit by so many processes."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "regard", "audit", "--out", out, *options]
        many = ["--processes", str(processes)] if processes > 1 else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        start, before = time.perf_counter(), _processor()
        subprocess.run([*command, *many], check=True, capture_output=True, env=environment)
        took = time.perf_counter() - start
        most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        written = [Path(out, name).read_bytes() for name in FILES]
        return Run(took, _processor() - before, most, written)


def _processor() -> float:
    """Seconds of the processor that children and theirs have taken so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def mark(met: bool) -> str:
    return "[green]met[/]" if met else "[red]missed[/]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three checks")
    options = QUICK if parser.parse_args().quick else ()
    one, two = audit(1, options), audit(2, options)
    table = Table("processes", "seconds", "of the processor", "MiB of the largest process")
    for count, run in ((1, one), (2, two)):
        table.add_row(str(count), f"{run.clock:.1f}", f"{run.processor:.1f}", f"{run.memory:.0f}")
    console.print(table)
    idle = os.getloadavg()[0] < (os.cpu_count() or 1) + 0.5
    faster, dearer = one.clock / two.clock, two.processor / one.processor
    verdicts = {
        f"the reports are {'the same' if one.written == two.written else 'not the same'} to the last byte": (
            one.written == two.written
        ),
    }
    if options:
        console.print(
            f"dearer for the processor: {dearer:.2f} (not judged: loading is most of a short audit)"
        )
    else:
        verdicts[f"dearer for the processor: {dearer:.2f} (at most {DEARER})"] = dearer <= DEARER
    if idle and (os.cpu_count() or 1) > 1:
        verdicts[f"faster by the clock: {faster:.2f} (at least {FASTER})"] = faster >= FASTER
    else:
        console.print(f"faster by the clock: {faster:.2f} (not judged: the machine is busy, or has one core)")
    for sentence, met in verdicts.items():
        console.print(f"{sentence}: {mark(met)}")
    sys.exit(not all(verdicts.values()))


if __name__ == "__main__":
    main()
