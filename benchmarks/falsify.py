"""python -m benchmarks.falsify [--seconds 60] [--seed 0] [--family all] [--ascended 50] [--case N]: random
cases against certificates.

A case is a declaration, a domain and a norm, all drawn from one seed of a family. Every rung of its ladders
is compared with exact Jacobian norms at points of the domain, with moves to its boundary, with pairs of laws
and, for some cases, with what gradient ascent finds. A rung below what was seen is a violation, and so is an
error; both are printed with the family and the number that draw the case again.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case, inside, other_law
from benchmarks.drawing import Draw
from benchmarks.families import FAMILIES
from regard.attention import Attention
from regard.certificate import Certificate
from regard.domains import Domain, Near
from regard.errors import ConvergenceWarning
from regard.maps import Heads
from regard.measure import Measure
from regard.normalizers import Softmax
from regard.norms import EntryMax, Frobenius, Norm, TokenMax, TokenSum, Wasserstein
from regard.proofs import THEOREMS, certify, deviation, falsify, falsify_deviation
from regard.proofs.near import ball
from regard.proofs.setting import moves_of
from regard.tilt import Tilt
from regard.transport import wasserstein

TOLERANCE = 1e-8
"""What float64 may lose in an exact norm at a point, relative to it."""
POINTS = 12
"""Points, and moves, for each case."""


# What is seen


def jacobian_norms(case: Case, points: Tensor) -> Tensor:
    """Norms of derivatives at points (b, n, d), exact for Frobenius and EntryMax,
    from below for the others.
    """
    blocks = _jacobians(case, points)  # (b, n, e, n, d)
    if isinstance(case.norm, Wasserstein) and case.norm.p not in (1.0, 2.0, math.inf):
        return _of_order(blocks, case.norm.p)
    norm = _matched(case.norm)
    if isinstance(norm, Frobenius):
        return torch.linalg.matrix_norm(blocks.flatten(3).flatten(1, 2), 2)
    if isinstance(norm, EntryMax):
        return blocks.abs().sum((-2, -1)).flatten(1).amax(-1)
    order = (
        (0, 1, 3, 4, 2) if isinstance(norm, TokenMax) else (0, 3, 1, 2, 4)
    )  # rows Σ_j |J_ijᵀe|, or columns Σ_i |J_ij e|
    return _alternated(blocks.permute(order).flatten(0, 1)).unflatten(0, (len(points), -1)).amax(-1)


def _jacobians(case: Case, points: Tensor) -> Tensor:
    derivative = torch.func.jacrev(case.function)
    rows = case.map.normalizer if isinstance(case.map, Attention) else None
    if isinstance(rows, Softmax):
        return torch.func.vmap(derivative)(points)
    return torch.stack([derivative(x) for x in points])


def _alternated(blocks: Tensor) -> Tensor:
    """max over unit e of Σ_b |M_b e| for each first index (a, b, c, e), from below, from several starts."""
    best = torch.zeros(len(blocks), dtype=torch.float64)
    for start in torch.eye(blocks.shape[-1], dtype=torch.float64):
        e = start.expand(len(blocks), -1)
        for _ in range(6):
            moved = torch.einsum("abce,ae->abc", blocks, e)
            best = torch.maximum(best, moved.norm(dim=-1).sum(-1))
            pulled = torch.einsum(
                "abce,abc->ae", blocks, moved / moved.norm(dim=-1, keepdim=True).clamp_min(1e-300)
            )
            e = pulled / pulled.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return best


def _of_order(blocks: Tensor, p: float) -> Tensor:
    """How far the derivative carries some moves in (Σ_i |d_i|^p)^{1/p}: singular vectors, and single
    coordinates.
    """
    matrix = blocks.flatten(3).flatten(1, 2)  # outputs times inputs
    singular = torch.linalg.svd(matrix).Vh.mT
    moves = torch.cat([singular, torch.eye(matrix.shape[-1], dtype=matrix.dtype).expand_as(singular)], -1)
    after = (matrix @ moves).unflatten(1, blocks.shape[1:3]).norm(dim=2)
    before = moves.unflatten(1, blocks.shape[3:]).norm(dim=2)
    return (after.pow(p).sum(1) / before.pow(p).sum(1)).pow(1 / p).amax(-1)


def _matched(norm: Norm) -> Norm:
    """What a Wasserstein distance of order 1, 2 or ∞ is for small moves of tokens that differ."""
    if isinstance(norm, Wasserstein):
        return TokenMax() if math.isinf(norm.p) else Frobenius() if norm.p == 2 else TokenSum()
    return norm


def stretch(case: Case, draw: Draw) -> float:
    """The largest norm of the derivative that points show."""
    norms = jacobian_norms(case, torch.stack([inside(draw, case) for _ in range(POINTS)]))
    return float(norms.detach().nan_to_num(0.0, 0.0, 0.0).max())


def movement(case: Case, draw: Draw) -> float:
    """The largest distance of a value from that at the center;
    what rounding of a value may add is taken off.
    """
    assert isinstance(case.domain, Near)
    here = case.function(case.domain.measure.points).detach()
    norm: Any = case.norm
    rounding = 1e-11 * len(here) * float(here.abs().max() + case.domain.measure.points.abs().max())
    return max(
        0.0,
        max(float(norm.of(case.function(inside(draw, case)).detach() - here)) for _ in range(POINTS))
        - rounding,
    )


def contrast(case: Case, draw: Draw) -> float:
    """How far laws with different numbers of atoms are apart after the map, over how far before;
    rounding is taken off.
    """
    assert isinstance(case.norm, Wasserstein)
    found = [0.0]
    for _ in range(POINTS):
        x = inside(draw, case)
        first, second = _weighted(draw, x), _weighted(draw, other_law(draw, case, x))
        values = case.law(first), case.law(second)
        apart = float(wasserstein(first, second, case.norm.p))
        rounding = 1e-12 * float(values[0].points.abs().max() + first.points.abs().max())
        if apart > 1e-6 * float(first.points.abs().max()):
            found.append((float(wasserstein(*values, case.norm.p)) - rounding) / (apart + rounding))
    return max(found)


def _weighted(draw: Draw, points: Tensor) -> Measure:
    return Measure(points, draw.normal(len(points)).log_softmax(-1)) if draw.chance(0.4) else Measure(points)


# The sweep


@dataclass
class Tally:
    """What was compared, the closest call of each theorem, and the violations."""

    cases: int = 0
    points: int = 0
    ascended: int = 0
    infinite: int = 0
    closest: dict[str, float] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def compare(self, case: Case, certificate: Certificate, seen: float) -> None:
        """Every rung of the ladder is a claim of its own."""
        for rung in (certificate, *certificate.others):
            name = f"{_theorem(rung)} ({rung.quantity})"
            ratio = 0.0 if seen == 0 else seen / rung.value if rung.value else math.inf
            self.closest[name] = max(self.closest.get(name, 0.0), ratio)
            if not seen <= rung.value * (1 + TOLERANCE):
                self.violations.append(f"{name}: {rung.value:.9g} < {seen:.9g} seen; {case}")
        self.infinite += math.isinf(certificate.value)

    def report(self, seconds: float) -> str:
        """The counts, the ratios and every violation."""
        counts = (
            f"{self.cases} cases, {self.points} points, {self.ascended} ascended, {self.infinite} "
            f"infinite, {seconds:.1f} s"
        )
        ratios = [
            f"{ratio:10.4f}  {name}"
            for name, ratio in sorted(self.closest.items(), key=lambda pair: -pair[1])
        ]
        found = [f"VIOLATION {line}" for line in self.violations] or ["no violation"]
        return "\n".join([counts, "largest seen / certified:", *ratios, *found])


def _theorem(rung: Certificate) -> str:
    known = (name for name, theorem in THEOREMS.items() if f"{rung.theorem}:".startswith(f"{theorem.cited}:"))
    return next(known, rung.theorem)


def attack(case: Case, tally: Tally, ascend: bool) -> None:
    """One case: constants, and moves where the domain is a neighborhood."""
    draw = Draw(case.seed + 10**9)
    try:
        constant = certify(case.map, case.domain, case.norm)
        moved = _compare(case, tally, constant, draw)
        if (
            ascend
            and _worth_it(constant, moved)
            and _attackable(case)
            and not isinstance(case.map, Tilt)
            and _has_room(case.domain)
        ):
            _ascend(case, tally, constant, moved)
    except Exception as error:  # an error of any kind is a finding
        tally.violations.append(f"{type(error).__name__}: {str(error)[:120]}; {case}")
    tally.cases += 1
    tally.points += POINTS * (1 + isinstance(case.domain, Near))


def _compare(case: Case, tally: Tally, constant: Certificate, draw: Draw) -> Certificate | None:
    """The constant against derivatives and pairs of laws; the deviation against moves, and back with it."""
    tally.compare(case, constant, _stretched(case, draw) if math.isfinite(constant.value) else 0.0)
    if not isinstance(case.domain, Near):
        return None
    moved = deviation(case.map, case.domain, case.norm)
    tally.compare(case, moved, movement(case, draw) if math.isfinite(moved.value) else 0.0)
    return moved


def _stretched(case: Case, draw: Draw) -> float:
    tokens = 0.0 if isinstance(case.map, Tilt) else stretch(case, draw)
    return tokens if case.other is None else max(tokens, contrast(case, draw))


def _worth_it(*certificates: Certificate | None) -> bool:
    return any(certificate is not None and math.isfinite(certificate.value) for certificate in certificates)


def _attackable(case: Case) -> bool:
    """Weights and marks are for attacks on attention alone;
    a gradient through hundreds of balancing steps takes too long.
    """
    attention = getattr(case.map, "attention", getattr(case.map, "map", case.map))
    balanced = isinstance(attention, Attention) and not attention.normalizer.rowwise
    return not balanced and (case.bare or isinstance(case.map, (Attention, Heads)))


def _has_room(domain: Domain) -> bool:
    return not isinstance(domain, Near) or float(moves_of(domain).max()) > 0


def _ascend(case: Case, tally: Tally, constant: Certificate, moved: Certificate | None) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    sizes: dict[str, Any] = {"tokens": case.tokens, "width": case.width, "generator": generator}
    found = falsify(case.map, case.domain, case.norm, steps=10, restarts=2, **sizes).value
    tally.compare(case, constant, found * (1 - 1e-6))  # a difference of values close together has few digits
    if moved is not None and isinstance(case.domain, Near):
        found = falsify_deviation(
            case.map, case.domain, case.norm, steps=15, restarts=2, generator=generator
        ).value
        tally.compare(case, moved, max(0.0, found * (1 - 1e-9) - 1e-11))
    tally.ascended += 1


def sweep(cases: Iterator[Case], seconds: float, ascended: int) -> Tally:
    """Cases until the time is over; of these, `ascended` are spread over the time."""
    tally, started = Tally(), time.monotonic()
    for case in cases:
        spent = (time.monotonic() - started) / seconds if seconds > 0 else 0.0
        if spent >= 1:
            break
        attack(case, tally, ascend=tally.ascended < ascended * min(1.0, spent + 0.02))
    return tally


def attack_all(cases: Iterable[Case], ascended: int) -> Tally:
    """Every case, however long it takes; the first `ascended` that can be are attacked by gradient ascent
    as well.
    """
    tally = Tally()
    for case in cases:
        attack(case, tally, ascend=tally.ascended < ascended)
    return tally


def cases_of(families: list[str], seeds: Iterator[int]) -> Iterator[Case]:
    """The cases of these families, in turn."""
    return (FAMILIES[family](seed) for seed in seeds for family in families)


def main() -> int:
    """Sweep, print, and exit with status 1 on a violation."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.falsify", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long")
    parser.add_argument("--seed", type=int, default=0, help="the first case")
    parser.add_argument("--family", choices=["all", *FAMILIES], default="all", help="what is drawn")
    parser.add_argument(
        "--ascended", type=int, default=50, help="how many cases are attacked by gradient ascent as well"
    )
    parser.add_argument("--case", type=int, help="one case alone, attacked in every way")
    parser.add_argument(
        "--randomized",
        action="store_true",
        help="norms near an input from random starts",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    ball.DENSE = 0 if options.randomized else ball.DENSE
    warnings.simplefilter("error", ConvergenceWarning)  # a finite bound says that rows are balanced
    started = time.monotonic()
    seeds = itertools.count(options.seed) if options.case is None else iter([options.case])
    cases = cases_of(list(FAMILIES) if options.family == "all" else [options.family], seeds)
    tally = sweep(cases, options.seconds, options.ascended if options.case is None else 10**6)
    sys.stdout.write(tally.report(time.monotonic() - started) + "\n")
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
