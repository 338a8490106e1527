"""Gaussian softmax attention of points on a line, in a plane or in space, in O(m + n), with a proved error.

With D(x) = Σ_j w_j e^{-|x - y_j|²/2s²} the mean of the keys is x + s² ∇log D(x), a score; the mean of any
values is a quotient of two such sums. A Fourier series of the kernel takes them in linear time
(kernel/fourier.py). Let κ bound the error of a sum for strengths of total size one, W = Σ_j w_j, and c any
center of the values v_j. Then

    |out - out^| ≤ κ W (max_j |v_j - c| + |out^ - c|) / (D^ - κ W) ,

because N^ - N and D^ - D are at most κ W max_j |v_j - c| and κ W. Where D ≥ share · W is known before, as it
is for a query that is one of the keys, the error is at most 2κ/(share - κ) times the radius of the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from regard import _check
from regard._refused import Refused
from regard._transforms import moves
from regard.compute.engine import Engine, Marks, count_pairs, register
from regard.compute.engines.ring import Ring
from regard.compute.fourier.facts import Facts, look
from regard.compute.fourier.form import Form, form_of
from regard.compute.fourier.nonuniform import NUFFT_FLOOR, Finufft, has_finufft
from regard.compute.fourier.plan import FourierPlan
from regard.compute.fourier.processes import OneProcess, Processes, Summed
from regard.compute.fourier.rowwise import RowwisePlan
from regard.compute.fourier.separable import Separable
from regard.compute.fourier.series import Series
from regard.compute.fourier.transforms import Transform
from regard.compute.problem import Problem
from regard.errors import ArgumentError
from regard.normalizers import Softmax
from regard.supports import Full

MODES = 1 << 25
"""Coefficients of the series that are held at most, over all sums: 256 MiB."""
WIDEST_GAP = 13.0
"""Bandwidths to the next image: beyond, e^{-gap²/2} is far below rounding."""
FINE = 8.0
"""The gap of a series that loses no more than rounding does."""
FEW = 1 << 22
"""Pairs that are summed before a series has begun."""
Size = tuple[int, int, int, int]
"""Batch, the most queries and keys of one process, and sums for each of them."""


@register
@dataclass(frozen=True, eq=False, repr=False)
class Fourier(Engine):
    """Gaussian scores of at most three features, and dot products that are Gaussian, by Fourier series.

    The error of every output, before it is rounded to its dtype, is at most `tolerance` times the radius of
    the values, proved before it runs; that radius is half of the diagonal of their box. `transform` is how
    sums are taken: `Separable()`, `Finufft()`, or None for the one that is predicted to be faster.
    `ring`: the processes that the points lie over; each sums its own into a grid, and the grids are added.

    Examples:
        >>> from regard.engines import Fourier
        >>> layer, x = regard.Attention(regard.Gaussian()), torch.rand(500, 2, dtype=torch.float64)
        >>> series = regard.apply(layer, x, engine=Fourier(tolerance=1e-6))
        >>> bool((series - layer(x)).abs().max() < 1e-6)
        True
    """

    tolerance: float = 1e-6
    transform: Transform | None = None
    ring: Ring | None = None
    name: ClassVar[str] = "fourier"
    rank: ClassVar[int] = 7
    tolerant: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.tolerance, bool):
            raise ArgumentError("tolerance", f"is {self.tolerance}", "give a number between 0 and 1")
        _check.between("tolerance", self.tolerance, 0.0, 1.0)
        if self.transform is not None and not isinstance(self.transform, Transform):
            raise ArgumentError(
                "transform", f"is {self.transform!r}", "give Separable(), Finufft(), or None for the faster"
            )

        if self.ring is not None and not isinstance(self.ring, Ring):
            raise ArgumentError("ring", f"is {self.ring!r}", "give Ring() of regard.engines, or None")

    @property
    def over_processes(self) -> bool:
        return self.ring is not None

    @contextmanager
    def posing(self, queries: Tensor, keys: Tensor) -> Iterator[Marks]:
        """As on the ring, where there is one."""
        with nullcontext((None, None)) if self.ring is None else self.ring.posing(queries, keys) as marks:
            yield marks

    def largest(self, value: float) -> float:
        """The largest of the numbers that the ranks give."""
        return value if self.ring is None else self.ring.largest(value)

    def instead(self) -> Engine | None:
        """Pairs over the same processes."""
        return self.ring

    def plan(self, problem: Problem) -> FourierPlan | Refused:
        """The series, with what it is proved to lose, or the number that is too large."""
        read = self._read(problem)
        if isinstance(read, Refused):
            return read
        form, facts, processes = read
        size = _size(problem, facts)
        needed = max(NUFFT_FLOOR, self.tolerance * facts.share / 64)
        transforms = self._transforms(problem, needed, processes)
        fitted = [self._shorten(one, facts, size) for one in transforms]
        found = [one for one in fitted if not isinstance(one, Refused)]
        if not found:
            return next(one for one in fitted if isinstance(one, Refused))
        series, transform, bound = min(found, key=lambda one: one[1].seconds(one[0], *size[1:], facts.drift))
        return FourierPlan(self, problem, form, facts, series, transform, bound, processes)

    def offer(self, problem: Problem) -> RowwisePlan | Refused:
        """Unasked, it runs where every row is proved to have the digits of its dtype, or is summed again."""
        unwanted = _unwanted(problem)
        read = unwanted or self._read(problem)
        if isinstance(read, Refused):
            return read
        form, facts, alone = read
        size, series = _size(problem, facts), Series.of(FINE, facts.reach, facts.dimension)
        if _held(series, size) > MODES:
            return _too_many(series, facts, size)
        fine = self._transforms(problem, 10 * NUFFT_FLOOR, alone)
        transform = min(fine, key=lambda one: one.seconds(series, *size[1:], facts.drift))
        bound = facts.bound(series, transform, problem.key_count)
        plan = FourierPlan(self, problem, form, facts, series, transform, bound)
        return RowwisePlan(self, problem, plan) if plan.pays() else Refused(plan.slow())

    def _read(self, problem: Problem) -> tuple[Form, Facts, Processes] | Refused:
        """Scores as Gaussians, what the data say of them, and who holds them."""
        form = self._form(problem)
        processes = self._gather(problem, form if isinstance(form, Refused) else None)
        if isinstance(form, Refused):
            return form
        if isinstance(processes, Refused):
            return processes
        form = form.over(processes)
        facts = look(problem, form, processes)
        return facts if isinstance(facts, Refused) else (form, facts, processes)

    def _gather(self, problem: Problem, refused: Refused | None) -> Processes | Refused:
        """Who holds the points, after all of them pose the same problem."""
        if self.ring is None:
            return OneProcess()
        how = "the faster" if self.transform is None else type(self.transform).__name__
        return self.ring.gather(problem, refused, series=f"{self.tolerance:g}, {how}")

    def _form(self, problem: Problem) -> Form | Refused:
        """Scores as Gaussians."""
        if not isinstance(problem.normalizer, Softmax):
            return Refused(
                f"sums of Gaussians give softmax rows, not those of {type(problem.normalizer).__name__}."
            )
        if not isinstance(problem.support, Full):
            return Refused(
                f"{type(problem.support).__name__} masks pairs, so sums over keys differ from query to query."
            )
        if 0 in (problem.query_count, problem.key_count, *problem.batch_shape):
            return Refused("there is nothing to sum.")
        if problem.device.type == "mps":
            return Refused("there is no float64 on this device, and a series needs it.")
        if isinstance(self.transform, Finufft) and not (has_finufft() and problem.device.type == "cpu"):
            return Refused(
                "finufft runs on a CPU where it is installed: pip install 'regard[fast]', or Separable()."
            )
        return form_of(problem)

    def _transforms(self, problem: Problem, needed: float, processes: Processes) -> list[Transform]:
        """The one that was asked for, or those that are at hand; finufft with the digits that are needed."""
        found: list[Transform] = [Separable()] if self.transform is None else [self.transform]
        if self.transform is None and processes.every(problem.device.type == "cpu" and has_finufft()):
            found.append(Finufft(needed))
        return found if self.ring is None else [Summed(one, processes) for one in found]

    def _shorten(
        self, transform: Transform, facts: Facts, size: Size
    ) -> tuple[Series, Transform, float] | Refused:
        """The first series of growing length whose bound is below the tolerance."""
        aim = max(self.tolerance * facts.share / 4, 1e-30)
        gap = max(2.0, math.sqrt(2 * math.log(1 / aim)) - 1)
        best = math.inf
        while gap <= WIDEST_GAP:
            series = Series.of(gap, facts.reach, facts.dimension)
            if _held(series, size) > MODES:
                return _too_many(series, facts, size)
            bound = facts.bound(series, transform, facts.keys)
            if bound <= self.tolerance:
                return series, transform, bound
            best, gap = min(best, bound), gap + 0.1
        return Refused(
            f"rounding alone may be {best:.1e} of the radius of the values, above the tolerance "
            f"{self.tolerance:.1e}: some query is only known to see {facts.share:.1e} of "
            "the mass of the keys; give a larger tolerance or another engine."
        )


def _unwanted(problem: Problem) -> Refused | None:
    """Why nobody would want it who has not asked for it."""
    if torch.compiler.is_compiling() or problem.device.type != "cpu":
        return Refused(
            "unasked it runs on a CPU, in eager mode, where it is known what pairs take; "
            "ask for it with engine=Fourier(tolerance)."
        )
    if problem.dtype == torch.float64:
        return Refused(
            "sums of many terms keep fewer digits than float64 has; where fewer are enough, "
            "ask for engine=Fourier(tolerance)."
        )
    if count_pairs(problem) < FEW:
        return Refused(f"{count_pairs(problem):.3g} pairs are summed as fast as a series.")
    tensors = (leaf for leaf in tree_leaves(problem) if isinstance(leaf, Tensor))
    if any(moves(tensor) for tensor in tensors):
        return Refused(
            "its bounds are of values and not of gradients; ask for it with engine=Fourier(tolerance)."
        )
    return None


def _size(problem: Problem, facts: Facts) -> Size:
    columns = facts.dimension + 1 if facts.drift else problem.values.shape[-1] + 1
    return problem.batch_shape.numel(), facts.queries, facts.own_keys, columns


def _held(series: Series, size: Size) -> float:
    """Coefficients that are held at once."""
    return size[0] * size[3] * float(series.count) ** series.dimension


def _too_many(series: Series, facts: Facts, size: Size) -> Refused:
    return Refused(
        f"a box of {facts.reach:.3g} bandwidths needs {series.count}^{facts.dimension} modes for "
        f"{size[3]} sums, more than the {MODES:.2g} that are held at most; "
        "take a larger bandwidth or another engine."
    )
