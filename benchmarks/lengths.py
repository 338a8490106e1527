"""python -m benchmarks.lengths [--quick | --model TOKENS]: what constants and proofs cost as inputs grow.

One thread, processor time, and memory beyond what was there before, each case in a process of its own. A
layer with the sizes of all-MiniLM-L6-v2 (width 384, twelve heads) and random weights; a question about a head
is about one of them. The exponents of n are fitted to all lengths. From them a table of what an audit
of larger models would take: extrapolated, not run, and marked so.

--model: bounds at a point of every head of all-MiniLM-L6-v2 on so many tokens of Paradise Lost, beside their
exact constants (512 tokens: 13 minutes of a processor).
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from regard import Attention, Dot, Linear, Neighborhood, audit, certify, deviation, linearize
from regard.domains import one_token
from regard.maps import Heads
from regard.norms import Frobenius

WIDTH, HEADS = 384, 12
LENGTHS = (64, 128, 256, 512)
LONG = {"exact constant of a head": (512, 2048, 8192), "audit, what is exact": (512, 2048, 8192)}
"""What is exact is measured on longer inputs; of a small model all of it."""
EXACT = ["weights", "rows", "constants", "geometry"]
TIME, ROOM = 2.0, 0.35
"""The exponent of n in time that is asked for, with the room that two measurements need."""
MEMORY = {"exact constant of a head": 1.0, "audit, what is exact": 1.0}
"""That in memory; proofs keep the law of every row, which is n²."""
LEAST = {"seconds": 0.05, "megabytes": 64.0}
"""Below this nothing is told apart from what Python takes."""
MODELS = (("1B", 16, 32, 2048), ("7B", 32, 32, 4096), ("70B", 80, 64, 8192))
"""A name, layers, heads of a layer, width."""
console = Console(width=110)


def _layer(tokens: int) -> tuple[Heads, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-2] ** 0.5

    each = WIDTH // HEADS
    inner = Attention(
        Dot(drawn(HEADS, WIDTH, each), drawn(HEADS, WIDTH, each)), Linear(drawn(HEADS, WIDTH, each))
    )
    points = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)
    return Heads(inner, drawn(HEADS, each, WIDTH)), points


def _first_head(layer: Heads) -> Attention:
    scores, values = layer.attention.potential, layer.attention.lookup
    assert isinstance(scores, Dot)
    assert isinstance(values, Linear)
    assert scores.w_q is not None
    assert scores.w_k is not None
    return Attention(Dot(scores.w_q[0], scores.w_k[0]), Linear(values.w_v[0]))


def exact_norm(layer: Heads, points: torch.Tensor) -> Any:
    """The exact constant of one head, by bidiagonalization."""
    return linearize(_first_head(layer), points).norm()


def at_a_point(layer: Heads, points: torch.Tensor) -> Any:
    """A proof of it, in as many dimensions as the head reads."""
    head = _first_head(layer)
    narrow = 2 * WIDTH // HEADS
    turned = torch.linalg.qr(torch.cat([head.potential.w_q, head.potential.w_k], -1))[0][:, :narrow]
    small = Attention(
        Dot(turned.mT @ head.potential.w_q, turned.mT @ head.potential.w_k),
        Linear(turned.mT @ head.lookup.w_v),
    )
    return certify(small, Neighborhood(points @ turned, 0.0), Frobenius()).value


def one_word(layer: Heads, points: torch.Tensor) -> Any:
    """A proof of how far all heads together move when one word does."""
    token = len(points) // 2
    radius = 0.01 * float(points[token].norm())
    return deviation(layer, one_token(points, token, radius), Frobenius()).value


def audited(layer: Heads, points: torch.Tensor) -> Any:
    """All exact columns of a small decoder on as many tokens."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaModel(LlamaConfig(**sizes, **heads, max_position_embeddings=1 << 14)).eval()
    ids = torch.randint(512, (1, len(points)), generator=torch.Generator().manual_seed(1))
    report = audit(model, [{"input_ids": ids}], checks=EXACT)
    if report.skipped:
        raise RuntimeError(report.skipped[0].reason)
    return report


QUESTIONS: dict[str, Callable[[Heads, torch.Tensor], Any]] = {
    "exact constant of a head": exact_norm,
    "proved at a point, a head": at_a_point,
    "one word moves, a layer": one_word,
    "audit, what is exact": audited,
}


def main() -> int:
    """Measure, print; exit status 1 where something grows faster than it may."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lengths", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the short form: up to 256 tokens")
    parser.add_argument("--model", type=int, metavar="TOKENS", help="bounds of all heads of a trained model")
    parser.add_argument("--one", nargs=2, metavar=("QUESTION", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_measured(options.one[0], int(options.one[1]))))
        return 0
    if options.model:
        return _whole_model(options.model)
    table = Table("question", "tokens, CPU seconds, megabytes", "time", "memory", "")
    found, missed = {}, 0
    for name in QUESTIONS:
        lengths = LENGTHS if options.quick else LONG.get(name, LENGTHS)
        lengths = lengths[:-1] if options.quick else lengths
        rows = [_apart(name, length) for length in lengths]
        exponents = [_exponent(rows, key, lengths) for key in LEAST]
        met = exponents[0] <= TIME + ROOM and exponents[1] <= MEMORY.get(name, 2.0) + ROOM
        missed += not met
        found[name] = rows[-1]["seconds"] * (lengths[-1] / 512) ** -exponents[0]
        pairs = zip(lengths, rows, strict=True)
        cell = "; ".join(f"{n:,}: {row['seconds']:.1f} s, {row['megabytes']:.0f} MB" for n, row in pairs)
        table.add_row(name, cell, *(f"n^{e:.1f}" for e in exponents), "met" if met else "missed")
    console.print(table)
    _extrapolate(found)
    return 1 if missed else 0


def _whole_model(tokens: int) -> int:
    """Bounds at a point of every head of a trained model; exit status 1 where one is below what it bounds."""
    from regard.audits.load import load

    torch.set_num_threads(1)
    model, tokenizer, name, *_ = load(None)
    text = Path(__file__).parents[1].joinpath("examples", "data", "paradise_lost.txt").read_text()
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=tokens)["input_ids"]
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    report = audit(model, [{"input_ids": ids}], checks=["constants", "bounds"], thorough=True)
    taken = time.process_time() - started
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    console.print(
        f"{name}, {ids.shape[-1]} tokens, {len(report.heads)} heads: {taken:.0f} CPU s, "
        f"{(after - before) / 1024:.0f} MB beyond the model"
    )
    exact, point, ball = (
        torch.tensor([row.values[column] for row in report.heads])
        for column in ("head_constant", "point_bound", "ball_bound")
    )
    table = Table("", "smallest", "median", "largest")
    rows = {
        "measured": exact,
        "proved at the input, over measured": point / exact,
        "on the ball": ball / exact,
    }
    for what, numbers in rows.items():
        table.add_row(what, *(f"{float(f(numbers)):.4g}" for f in (torch.min, torch.median, torch.max)))
    console.print(table)
    return int(bool((point < exact).any()))


def _measured(name: str, tokens: int) -> dict[str, float]:
    torch.set_num_threads(1)
    QUESTIONS[name](*_layer(16))  # what is loaded on demand
    layer, points = _layer(tokens)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    QUESTIONS[name](layer, points)
    taken = time.process_time() - started
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": taken, "megabytes": (after - before) / 1024}


def _apart(name: str, tokens: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.lengths", "--one", name, str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _exponent(rows: list[dict[str, float]], key: str, lengths: tuple[int, ...]) -> float:
    """Of n, fitted to all lengths."""
    logs = [math.log(max(row[key], LEAST[key])) for row in rows]
    places = [math.log(length) for length in lengths]
    middle, mean = sum(places) / len(places), sum(logs) / len(logs)
    across = sum((x - middle) * (y - mean) for x, y in zip(places, logs, strict=True))
    return across / sum((x - middle) ** 2 for x in places)


def _extrapolate(seconds: dict[str, float]) -> None:
    """One input of 512 tokens: a head's cost grows with the width that it reads, a layer's with its
    square.
    """
    head, proof, word = (seconds[name] for name in list(QUESTIONS)[:3])
    table = Table("model", "exact constants", "proofs at a point", "one word", title="extrapolated, not run")
    for name, layers, heads, width in MODELS:
        wide = width / heads / (WIDTH / HEADS)
        hours = [
            layers * heads * head * width / WIDTH / 3600,
            layers * heads * proof * wide / 3600,
            layers * word * (heads / HEADS) * (width / WIDTH) ** 2 / 3600,
        ]
        table.add_row(name, *(f"{hour:.1f} h" for hour in hours))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
