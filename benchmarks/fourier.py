"""python -m benchmarks.fourier [--quick]: Gaussian attention of a cloud of points by Fourier series.

Points are uniform in a box of 20 bandwidths in the plane (8 in space), values are the points, tolerance 1e-6
before the run. One thread, processor time of plan and run; the error is that of random rows against sums
over all keys in float64, relative to the radius of the points; memory is the peak beyond the inputs, in a
process of its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.measure import peak_mib
from regard import Attention, Gaussian
from regard.compute.application import problem_of
from regard.compute.fourier.nonuniform import has_finufft
from regard.compute.fourier.plan import FourierPlan
from regard.engines import Finufft, Fourier, Separable

BYTES = 60
"""A particle may take so many beyond the inputs and the grid, where there are a million or more."""
EVEN = 1.2
"""A particle may take so many times as long in a cloud that is ten times as large, or has clusters."""
console = Console(width=140)


@dataclass(frozen=True)
class Case:
    """A cloud, and the seconds that it may take, None where there is no target."""

    particles: int
    dimension: int
    box: float
    fast: bool
    clusters: bool = False
    target: float | None = None

    def __str__(self) -> str:
        shape = "20 tight clusters and 5 loners" if self.clusters else "uniform"
        return f"{self.particles:.0e} in d = {self.dimension}, box {self.box:g}, {shape}"


QUICK = (
    Case(100_000, 2, 20.0, True, target=0.3),
    Case(100_000, 2, 20.0, False, target=0.6),
    Case(100_000, 1, 30.0, False),
)
CASES = (
    *QUICK,
    Case(1_000_000, 2, 20.0, True, target=1.5),
    Case(1_000_000, 2, 20.0, False, target=3.0),
    Case(1_000_000, 2, 20.0, True, clusters=True, target=1.5),
    Case(1_000_000, 3, 8.0, True, target=8.0),
    Case(10_000_000, 2, 20.0, True, target=20.0),
)


def cloud(case: Case) -> Tensor:
    """The points, in bandwidths."""
    generator = torch.Generator().manual_seed(0)
    x = case.box * torch.rand(case.particles, case.dimension, generator=generator, dtype=torch.float64)
    if case.clusters:
        homes = x[torch.randint(20, (case.particles,), generator=generator)]
        moved = homes + 0.01 * torch.randn(x.shape, generator=generator, dtype=torch.float64)
        x[5:] = moved[5:].clamp(0, case.box)
    return x


def plan_of(case: Case, x: Tensor) -> FourierPlan:
    """What the engine decides."""
    transform = Finufft() if case.fast else Separable()
    engine = Fourier(1e-6, None if case.fast else transform)
    plan = engine.plan(problem_of(Attention(Gaussian(bandwidth=1.0)), x, None))
    assert isinstance(plan, FourierPlan), plan
    return plan


def errors(x: Tensor, outputs: Tensor, rows: Tensor) -> Tensor:
    """Distances of some outputs from sums over all keys."""
    found = []
    for row in rows.tolist():
        weights = torch.exp(-0.5 * (x - x[row]).square().sum(-1))
        exact = x[row] + (weights.unsqueeze(-1) * (x - x[row])).sum(-2) / weights.sum()
        found.append(torch.linalg.vector_norm(outputs[row] - exact))
    return torch.stack(found)


def run_of(stage: str, case: Case) -> Callable[[], object]:
    """Plan and run, for `peak_mib`."""
    x = cloud(case)
    x = x[:2000].clone() if stage == "warm-up" else x
    return lambda: plan_of(case, x).run()


def uneven(each: dict[Case, float]) -> int:
    """How often a particle takes more than 1.2 times as long in a larger cloud, or in one with clusters."""
    pairs = [
        (case, other)
        for case in each
        for other in each
        if (case.dimension, case.fast) == (other.dimension, other.fast) and case.particles >= 10**6
        if (other.particles, other.clusters) in ((10 * case.particles, False), (case.particles, True))
        if not case.clusters
    ]
    for case, other in pairs:
        ratio = each[other] / each[case]
        verdict = "[green]met[/]" if ratio <= EVEN else "[red]missed[/]"
        console.print(f"seconds a particle, {other} over {case}: {ratio:.2f} (at most {EVEN:g}, {verdict})")
    return sum(each[other] > EVEN * each[case] for case, other in pairs)


def main() -> int:
    """Measure and print; exit status 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fourier", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a hundred thousand particles")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="Fourier(1e-6), one thread", title_justify="left")
    columns = ("cloud", "transform", "modes", "seconds", "target", "a priori", "largest bound", "error found")
    for column in (*columns, "bytes a particle"):
        table.add_column(column, justify="right")
    missed, each = 0, {}
    for case in QUICK if options.quick else CASES:
        if case.fast and not has_finufft():
            console.print(f"{case}: finufft is not installed; pip install 'regard[fast]'")
            continue
        run_of("warm-up", case)()
        x = cloud(case)
        start = time.process_time()
        plan = plan_of(case, x)
        outputs = plan.run()
        seconds = time.process_time() - start
        each[case] = seconds / case.particles
        count = min(100, 10**8 // case.particles)
        rows = torch.randint(case.particles, (count,), generator=torch.Generator().manual_seed(1))
        radius = float(plan.facts.radius.max())
        found = float(errors(x, outputs, rows).max()) / radius
        largest = float(plan.certify(sample=10).bounds.max()) / radius
        held = peak_mib(run_of, case) * 2**20 - 16.0 * plan.series.count**case.dimension * 2**case.dimension
        late = (case.target is not None and seconds > case.target) or not found <= largest <= 1e-6
        large = case.particles >= 10**6 and held > BYTES * case.particles
        missed += late + large
        verdict = (
            "" if case.target is None else f"{case.target:g} [{'red]missed' if late else 'green]met'}[/]"
        )
        modes = "×".join([str(plan.series.count)] * case.dimension)
        table.add_row(
            str(case),
            type(plan.transform).__name__,
            modes,
            f"{seconds:.2f}",
            verdict,
            f"{plan.bound:.1e}",
            f"{largest:.1e}",
            f"{found:.1e}",
            f"{held / case.particles:.0f}{' [red]missed[/]' if large else ''}",
        )
    console.print(table)
    missed += uneven(each)
    console.print(f"{missed} of the targets missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
