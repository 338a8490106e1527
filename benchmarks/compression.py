"""A million particles as few atoms: how many, what is proved of every query, what really happens, and the
time beside exact rows.

python -m benchmarks.compression [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from regard import Attention, Ball, Dot, compress

RADIUS, TOLERANCE = 5.0, 5e-3
FEWER, LOOSE, ROWS = 700, 6.0, 20.0
"""Targets: times fewer atoms, proved over true, time in exact rows, a hundred of them at a time."""


def particles(count: int, width: int = 2) -> Tensor:
    """In the unit ball, half of them in a cluster."""
    gen = torch.Generator().manual_seed(0)
    away = torch.randn(count, width, generator=gen, dtype=torch.float64)
    away = away / away.norm(dim=-1, keepdim=True)
    away = away * torch.rand(count, 1, generator=gen, dtype=torch.float64) ** (1 / width)
    away[: count // 2] = 0.15 * away[: count // 2] + 0.5
    return away / away.norm(dim=-1, keepdim=True).clamp_min(1)


def seconds(function) -> tuple[float, object]:  # type: ignore[no-untyped-def]
    """The processor's time of the second of two runs, and the result."""
    function()
    begin = time.process_time()
    found = function()
    return time.process_time() - begin, found


def main() -> int:
    """Print the table; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the particles")
    torch.set_num_threads(1)
    count = 100_000 if parser.parse_args().quick else 1_000_000
    keys, attention = particles(count), Attention(Dot(scale=1.0))
    away = torch.randn(100, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    queries = RADIUS * away / away.norm(dim=-1, keepdim=True)
    row, exactly = seconds(lambda: attention(queries, keys))
    ten, _ = seconds(lambda: attention(queries[:10], keys))
    row, ten = row / len(queries), ten / 10
    table = Table(
        "error wanted",
        "atoms",
        "times fewer",
        "proved, every query",
        "proved, these",
        "true",
        "proved / true",
        "time in rows, 10 at a time",
        "100 at a time",
        title=f"{count} particles in the plane, |q| ≤ {RADIUS:g}",
    )
    missed = False
    for tolerance in (4 * TOLERANCE, TOLERANCE, TOLERANCE / 5):
        spent, found = seconds(
            lambda wanted=tolerance: compress(keys, attention, tolerance=wanted, domain=Ball(RADIUS))
        )
        true = float((exactly - attention(queries, found.measure)).norm(dim=-1).max())
        proved = found.certificate.value
        cells = [f"{tolerance:g}", f"{found.size}", f"{count / found.size:.0f}", f"{proved:.2e}"]
        cells += [f"{float(found.bounds(queries).max()):.2e}", f"{true:.2e}", f"{proved / true:.1f}"]
        table.add_row(*cells, f"{spent / ten:.0f}", f"{spent / row:.0f}")
        broken = proved < true
        if tolerance == TOLERANCE and count == 1_000_000:
            broken |= count < FEWER * found.size or proved > LOOSE * true or spent > ROWS * row
        missed |= broken
    console = Console(width=140)
    console.print(table)
    console.print("missed" if missed else "all targets met", style="red" if missed else "green")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
