"""python -m benchmarks.implicit [--quick]: inverses, log-determinants and infinite depth, against what is
needed and what is exact.

Attention with scores of size g on the unit ball, and values scaled to a given constant in TokenMax norm.
"""

from __future__ import annotations

import argparse
import math
import sys

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import regard as r
from regard.nn import Anderson, BlockTriangular, Declared, Deep, Dense, Invertible, Picard, Roulette, Series
from regard.nonexpansive import IntoBall

D = torch.float64
BALL = r.Ball(1.0)
console = Console(width=120)


def drawn(*shape: int, seed: int) -> Tensor:
    """Normal numbers that are the same every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def attention(
    constant: float, g: float, width: int, support: r.supports.Support = r.Full(), learned: bool = False
) -> r.Attention:
    """w(√(1 + g²) + g) is the given constant."""
    w = constant / (math.sqrt(1 + g * g) + g) * torch.linalg.qr(drawn(width, width, seed=0))[0]
    return r.Attention(r.Dot(scale=g), r.Linear(nn.Parameter(w) if learned else w), support=support)


def inverses() -> int:
    """Iterations to 1e-6: predicted, taken, truly needed. Returns how many targets are missed."""
    table = Table(title="inverse of x + f(x) to 1e-6, 16 tokens, g = 0.5", title_justify="left")
    for column in ("L", "a priori", "stop rule", "Anderson(5)", "needed", "stop/needed (≤ 1.5)", "error"):
        table.add_column(column, justify="right")
    missed, x = 0, IntoBall(1.0)(drawn(16, 6, seed=1))
    for constant in (0.5, 0.9, 0.99):
        map = attention(constant, 0.5, 6)
        flow = Invertible(map, domain=BALL)
        y = flow(x)[0]
        found = flow.solve(y)
        fast = Invertible(map, domain=BALL, accelerate=Anderson(5)).solve(y)
        z, needed = y, 0
        while float((z - x).norm(dim=-1).max()) >= 1e-6:
            z, needed = IntoBall(1.0)(y - map(z)), needed + 1
        ratio = found.evaluations / needed
        missed += ratio > 1.5
        error = float((found.value - x).norm(dim=-1).max())
        numbers = (flow.iterations(y), found.evaluations, fast.evaluations, needed)
        table.add_row(f"{constant:g}", *map_text(numbers), f"{ratio:.2f}", f"{error:.1e}")
    console.print(table)
    return missed


def map_text(numbers: tuple[int, ...]) -> list[str]:
    return [str(number) for number in numbers]


def determinants(probes: int) -> int:
    """Exact ones against slogdet, and what the control variate saves. Returns how many targets are missed."""
    map = attention(0.8, 0.5, 4, r.Causal())
    x = IntoBall(1.0)(drawn(32, 4, seed=2))
    exact, blocks = (
        float(Invertible(map, domain=BALL, log_determinant=way)(x)[1]) for way in (Dense(), BlockTriangular())
    )
    console.print(
        f"causal log-determinant, 32 tokens: blocks - slogdet = {blocks - exact:.1e} (target 1e-10)"
    )
    missed = int(abs(blocks - exact) > 1e-10)
    table = Table(title=f"log-determinant by series, {probes} probes", title_justify="left")
    for column in ("n", "d", "g", "exact", "plain", "controlled", "probes saved (≥ 3)"):
        table.add_column(column, justify="right")
    for tokens, width, g, constant in ((16, 6, 0.5, 0.9), (32, 4, 0.25, 0.96), (16, 6, 0.1, 0.9)):
        map = attention(constant, g, width)
        x = IntoBall(0.99)(drawn(tokens, width, seed=3))
        value = float(Invertible(map, domain=BALL)(x)[1])
        ways = [Series(probes, Roulette(5, 0.5), control=control, seed=1) for control in (False, True)]
        found = [Invertible(map, domain=BALL, log_determinant=way).measure(x) for way in ways]
        errors = [float(one.standard_error) for one in found if one.standard_error is not None]
        saved = (errors[0] / errors[1]) ** 2
        missed += saved < 3 or any(
            abs(float(one.log_det) - value) > 4 * e for one, e in zip(found, errors, strict=True)
        )
        shown = [f"{float(one.log_det):.3f} ± {error:.3f}" for one, error in zip(found, errors, strict=True)]
        table.add_row(str(tokens), str(width), f"{g:g}", f"{value:.3f}", *shown, f"{saved:.1f}")
    console.print(table)
    return missed


def depth(layers: int) -> int:
    """Evaluations, gradients and memory of infinite depth. Returns how many targets are missed."""
    table = Table(
        title=f"infinite depth, 24 tokens, to 1e-9; gradients against {layers} layers", title_justify="left"
    )
    for column in (
        "L",
        "a priori",
        "Picard",
        "Anderson(5)",
        "gradient of u",
        "of weights",
        "bytes kept",
        "unrolled",
    ):
        table.add_column(column, justify="right")
    missed, g = 0, 0.4
    for constant in (0.5, 0.9):
        map = Declared(attention(constant, g, 6, learned=True))
        w = constant / (math.sqrt(1 + g * g) + g)
        u, v = 0.99 * (1 - w) * IntoBall(1.0)(drawn(24, 6, seed=4)), drawn(24, 6, seed=5)
        plain, fast = (Deep(map, 1e-9, way, domain=BALL) for way in (Picard(), Anderson(5)))
        numbers = (plain.iterations(u), plain.solve(u).evaluations, fast.solve(u).evaluations)
        weight = next(map.parameters())
        u.requires_grad_()
        held: list[list[int]] = [[], []]

        def keep(t: Tensor, kept: list[int]) -> Tensor:
            kept.append(t.numel() * t.element_size())
            return t

        with torch.autograd.graph.saved_tensors_hooks(lambda t: keep(t, held[0]), lambda t: t):  # noqa: B023
            z = Deep(map, 1e-11, domain=BALL)(u)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: keep(t, held[1]), lambda t: t):  # noqa: B023
            unrolled = u
            for _ in range(layers):
                unrolled = map(unrolled) + u
        grads = [torch.autograd.grad((value * v).sum(), (u, weight)) for value in (z, unrolled)]
        gaps = [float((one - other).abs().max()) for one, other in zip(*grads, strict=True)]
        missed += max(gaps) > 1e-8 or (constant == 0.9 and numbers[2] > 35)
        kept = [f"{sum(bytes_) / 1e3:.1f} kB" for bytes_ in held]
        table.add_row(f"{constant:g}", *map_text(numbers), *(f"{gap:.1e}" for gap in gaps), *kept)
    console.print(table)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    missed = inverses() + determinants(100 if quick else 400) + depth(400)
    console.print("all targets are met" if not missed else f"{missed} targets are missed")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
