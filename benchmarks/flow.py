"""python -m benchmarks.flow [--quick]: particles on the circle under self-attention (beta = 4).

A million particles make a hundred Euler steps with Fourier(1e-6), and their energy is taken at every step: it
may never fall. Then peers on the same problem with fewer particles and steps, where each of them can run it:
pairs by regard's own engine, KeOps (pairs, compiled before it is timed), and torchdiffeq with attention in
plain torch (pairs, held at once). One thread, processor time.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.suite import keops_lazy
from regard import Attention, Dot, flow
from regard.dynamics import Energy, Euler, Sphere
from regard.engines import Fourier, Sdpa
from regard.measure import Measure

BETA, STEP, STEPS = 4.0, 0.1, 100
SECONDS = 180.0
"""What a million particles may take for a hundred steps, energies included."""
PEERS = 10
"""Steps in which peers are compared."""
console = Console(width=140)
attention = Attention(Dot(scale=BETA))


def circle(count: int) -> Tensor:
    """Points on the circle, with one crowd denser than the rest."""
    generator = torch.Generator().manual_seed(0)
    angles = 2 * math.pi * torch.rand(count, generator=generator, dtype=torch.float64)
    angles = angles + 0.5 * angles.sin()
    return torch.stack([angles.cos(), angles.sin()], -1)


def million(count: int) -> bool:
    """Run, print, and say whether both targets are met."""
    x, seconds, energies, longest = circle(count), 0.0, [], 0.0
    run = flow(attention, x, Euler(STEP), STEP * STEPS, space=Sphere(), engine=Fourier(1e-6))
    for k in range(STEPS + 1):
        start = time.process_time()
        now = run.at(k * STEP) if k < STEPS else run.at(STEP * STEPS)
        energies.append(Energy(BETA).number(Measure(now), Measure(x)))
        spent = time.process_time() - start
        seconds, longest = seconds + spent, max(longest, spent)
    rises = torch.tensor(energies, dtype=torch.float64).diff()
    apart = float((torch.linalg.vector_norm(now, dim=-1) - 1).abs().max())
    target, falls = SECONDS * count / 1e6, int((rises <= 0).sum())
    late = seconds > target
    console.print(
        f"{count:.0e} particles, {STEPS} steps of {STEP}: {seconds:.1f} s (target {target:g} s, "
        f"{'[red]missed[/]' if late else '[green]met[/]'}), longest step {longest:.2f} s, "
        f"energy {energies[0]:.6f} to {energies[-1]:.6f}, "
        f"falls at {falls} steps ({'[red]missed[/]' if falls else '[green]met[/]'}), "
        f"least rise {float(rises.min()):.1e}, | |x| - 1 | ≤ {apart:.0e}"
    )
    return not late and not falls


def regard_flow(x: Tensor, engine: Fourier | Sdpa) -> Tensor:
    """Euler steps by regard."""
    return flow(attention, x, Euler(STEP), STEP * PEERS, space=Sphere(), engine=engine).at(STEP * PEERS)


def keops_flow(x: Tensor) -> Tensor:
    """The same steps with KeOps."""
    lazy = keops_lazy()
    for _ in range(PEERS):
        scores = BETA * (lazy(x[:, None, :]) * lazy(x[None, :, :])).sum(-1)
        mean = scores.sumsoftmaxweight(lazy(x[None, :, :]), axis=1)
        x = torch.nn.functional.normalize(x + STEP * tangent(x, mean), dim=-1)
    return x


def torchdiffeq_flow(x: Tensor) -> Tensor:
    """The same field with torchdiffeq. It cannot return to the sphere after a step, so the field divides by
    the length instead, which is the same to the order of the step.
    """
    from torchdiffeq import odeint

    def field(t: Tensor, z: Tensor) -> Tensor:
        unit = torch.nn.functional.normalize(z, dim=-1)
        return tangent(unit, (BETA * unit @ unit.mT).softmax(-1) @ unit)

    times = torch.linspace(0, STEP * PEERS, PEERS + 1, dtype=x.dtype)
    return torch.nn.functional.normalize(odeint(field, x, times, method="euler")[-1], dim=-1)


def tangent(x: Tensor, velocity: Tensor) -> Tensor:
    """The part of a velocity along the sphere."""
    return velocity - (velocity * x).sum(-1, keepdim=True) * x


def peers(counts: tuple[int, ...]) -> None:
    """A table of seconds; a peer that cannot run a size is told so."""
    table = Table(title=f"{PEERS} Euler steps, one thread, seconds", title_justify="left")
    for column in (
        "particles",
        "Fourier(1e-6)",
        "pairs (Sdpa)",
        "KeOps",
        "torchdiffeq",
        "largest difference",
    ):
        table.add_column(column, justify="right")
    runs: dict[str, Callable[[Tensor], Tensor]] = {
        "series": lambda x: regard_flow(x, Fourier(1e-6)),
        "pairs": lambda x: regard_flow(x, Sdpa()),
        "keops": keops_flow,
        "torchdiffeq": torchdiffeq_flow,
    }
    for count in counts:
        x, ends, cells = circle(count), [], []
        for name, run in runs.items():
            if name == "torchdiffeq" and count > 8000:
                cells.append("holds all pairs")
                continue
            with contextlib.suppress(ImportError):
                run(x[:100])
                start = time.process_time()
                end = run(x)
                cells.append(f"{time.process_time() - start:.2f}")
                ends += [end] if name != "torchdiffeq" else []
                continue
            cells.append("not installed")
        apart = max(float((end - ends[1]).abs().max()) for end in ends)
        table.add_row(f"{count:,}", *cells, f"{apart:.1e}")
    console.print(table)


def main() -> int:
    """Measure and print; exit status 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flow", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fifty thousand particles")
    options = parser.parse_args()
    torch.set_num_threads(1)
    met = million(50_000 if options.quick else 1_000_000)
    peers((2000,) if options.quick else (2000, 8000, 20000))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
