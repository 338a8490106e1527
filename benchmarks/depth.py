"""python -m benchmarks.depth [--quick]: how long proofs about pre-norm blocks near a sequence take.

One thread, processor time, the least of several blocks of random weights: four tokens of width four, two
heads. The first question of a process is shown by itself; it must not wait for what is loaded on demand.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from regard import Attention, Dot, Linear, Neighborhood, certify, deviation
from regard.maps import Compose, Gelu, Heads, Normalize, feed_forward, pre_norm
from regard.norms import Frobenius, TokenMax

TARGET = 0.3
"""Seconds for one block."""
TOKENS, WIDTH, HEADS, RADIUS = 4, 4, 2, 0.01
console = Console(width=100)


def main() -> int:
    """Measure, print; exit status 1 where one block takes longer than it may."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.depth", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the short form: two blocks, one deep")
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    first = _seconds(certify, generator, 1, Frobenius())
    table = Table("question", "norm", *(f"depth {depth}" for depth in _depths(options.quick)))
    missed = first > TARGET
    for ask in (certify, deviation):
        for norm in (Frobenius(), TokenMax()):
            least = [
                min(_seconds(ask, generator, depth, norm) for _ in range(2 if options.quick else 5))
                for depth in _depths(options.quick)
            ]
            missed = missed or least[0] > TARGET
            table.add_row(ask.__name__, repr(norm), *(f"{seconds:.2f} s" for seconds in least))
    console.print(table)
    console.print(
        f"the first question of this process: {first:.2f} s; the target is {TARGET} s for one block"
    )
    return 1 if missed else 0


def _depths(quick: bool) -> tuple[int, ...]:
    return (1,) if quick else (1, 2, 3)


def _seconds(ask: Callable[..., Any], generator: torch.Generator, depth: int, norm: Any) -> float:
    """Processor time of one question about a new stack near a new sequence."""
    blocks = [_block(generator) for _ in range(depth)]
    map = blocks[0] if depth == 1 else Compose(tuple(blocks))
    points = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    started = time.process_time()
    ask(map, Neighborhood(points, RADIUS), norm)
    return time.process_time() - started


def _block(generator: torch.Generator) -> Compose:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-2] ** 0.5

    each = WIDTH // HEADS
    w_q, w_k, w_v = (drawn(HEADS, WIDTH, each) for _ in range(3))
    heads = Heads(Attention(Dot(w_q, w_k), Linear(w_v)), drawn(HEADS, each, WIDTH))
    first, second = (Normalize(1e-5, torch.ones(WIDTH, dtype=torch.float64)) for _ in range(2))
    hidden = feed_forward(Gelu(), drawn(WIDTH, 4 * WIDTH), drawn(4 * WIDTH, WIDTH))
    return pre_norm(heads, hidden, first, second)


if __name__ == "__main__":
    sys.exit(main())
