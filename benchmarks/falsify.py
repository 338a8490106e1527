"""python -m benchmarks.falsify [--seconds 60] [--seed 0] [--ascended 50] [--case N]: random declarations against their certificates.

A case is a declaration, a domain and a norm, all drawn from one seed. Every rung of its ladders is compared with exact Jacobian norms at
points of the domain, with moves to its boundary and, for some cases, with what gradient ascent finds. A rung below what was seen is a
violation, and so is an error; both are printed with the number that draws the case again.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import regard as r
from regard.attention import log_counts
from regard.certificate import Certificate
from regard.certify import THEOREMS, certify, deviation, falsify, falsify_deviation
from regard.certify.setting import moves_of
from regard.domains import Ball, Domain, Near, Neighborhood, Radii
from regard.errors import ArgumentError
from regard.maps import Compose, Gelu, Heads, Map, Normalize, Residual, feed_forward
from regard.measure import Measure
from regard.normalizers import Reference
from regard.norms import EntryMax, Frobenius, Norm, TokenMax, TokenSum, Wasserstein

D = torch.float64
TOLERANCE = 1e-8
"""What float64 may lose in an exact norm at a point, relative to it."""
POINTS = 12
"""Points, and moves, for each case."""


class Draw:
    """Random numbers of one case."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(*shape, generator=self.generator, dtype=D)

    def share(self) -> float:
        """Uniform on [0, 1)."""
        return float(torch.rand((), generator=self.generator, dtype=D))

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.share() < probability

    def count(self, low: int, high: int) -> int:
        """A whole number between both ends."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def size(self, low: float, high: float) -> float:
        """A positive number whose logarithm is uniform."""
        return low * (high / low) ** self.share()

    def pick(self, choices: Any) -> Any:
        """One of several."""
        return list(choices)[self.count(0, len(choices) - 1)]

    def maybe(self, value: Any, probability: float = 0.5) -> Any:
        """The value, or None."""
        return value if self.chance(probability) else None

    def units(self, n: int, d: int) -> Tensor:
        """n vectors of length one."""
        z = self.normal(n, d)
        return z / z.norm(dim=-1, keepdim=True).clamp_min(1e-300)


@dataclass(frozen=True)
class Case:
    """What a seed stands for; `measure` has the weights and marks that stay, where there are any."""

    seed: int
    map: Any
    domain: Domain
    norm: Norm
    tokens: int
    width: int

    def __str__(self) -> str:
        sizes = f"{self.tokens} tokens of width {self.width}"
        return f"--case {self.seed}: {_kind(self.map)}, {_where(self.domain)}, {self.norm!r}, {sizes}"

    def function(self, x: Tensor) -> Tensor:
        """The value at bare points, by the definition; heads side by side."""
        value = _value(self.map, x, self.domain.measure if isinstance(self.domain, Near) else None)
        return value if value.ndim == 2 else value.transpose(0, 1).flatten(1)


def _value(map: Any, x: Tensor, measure: Measure | None) -> Tensor:
    if isinstance(map, r.Attention):
        return _defined(map, x, measure)
    if isinstance(map, Heads):
        return (_defined(map.attention, x, measure) @ map.w_o).sum(-3)
    if isinstance(map, Residual):
        return x + _value(map.map, x, measure)
    for inner in map.maps if isinstance(map, Compose) else ():
        x = _value(inner, x, measure)
    return x if isinstance(map, Compose) else map(x)


def _defined(attention: r.Attention, x: Tensor, measure: Measure | None) -> Tensor:
    """Weights times values, which shares nothing with the engines."""
    marks = torch.arange(len(x)) if measure is None else measure.positions()
    counts = None if measure is None else log_counts(measure)
    reference = Reference(counts, attention.support.allows(marks, marks))
    weights = attention.normalizer.weights(attention.potential.scores(x, x, marks, marks), reference)
    values = attention.lookup.values(x, marks)
    if weights.ndim == values.ndim == 3 and len(weights) > len(values):
        values = values.repeat_interleave(len(weights) // len(values), 0)
    return weights @ values


def _kind(map: Any) -> str:
    if isinstance(map, r.Attention):
        parts = (map.potential, map.lookup, map.normalizer, map.support)
        return " ".join(type(part).__name__ for part in parts)
    inner = [getattr(map, name) for name in ("map", "attention") if hasattr(map, name)] or list(getattr(map, "maps", ()))
    return f"{type(map).__name__}({', '.join(_kind(part) for part in inner)})"


def _where(domain: Any) -> str:
    size = f"{float(domain.radii.max()):.2g}" if isinstance(domain, Radii) else f"{domain.radius:.2g}"
    return f"{type(domain).__name__} {size}"


# Declarations


def potentials(draw: Draw, d: int, heads: tuple[int, ...], groups: tuple[int, ...]) -> dict[str, Callable[[], Any]]:
    """One maker for each kind of score. heads and groups are () without heads, (h,) and (g,) with them."""
    c = 2 * draw.count(1, 2)
    size = draw.size(0.05, 4.0)
    w_q, w_k = size * draw.normal(*heads, d, c), draw.normal(*groups, d, c)
    b_q, b_k = (draw.maybe(size * draw.normal(*heads, c if draw.chance(0.8) else 1)) for _ in range(2))
    b_k = b_k if heads == groups else None
    slope = torch.rand(heads, generator=draw.generator, dtype=D) if heads else draw.share()
    table = r.RelativeBias(draw.normal(*heads, 7), r.Clipped(3))
    dot, one = r.Dot(w_q, w_k, None, b_q, b_k), draw.normal(*heads, d, c)
    rank_one = draw.normal(*heads, d, 1) * draw.normal(*heads, 1, d)
    return {
        "dot": lambda: dot,
        "bare dot": lambda: r.Dot(scale=size),
        "bilinear": lambda: r.Bilinear(size * draw.normal(*heads, d, d)),
        "rank one": lambda: r.Bilinear(size * rank_one),
        "zero": lambda: r.Bilinear(torch.zeros(*heads, d, d, dtype=D)),
        "cosine": lambda: r.Cosine(3 * size, 0.1, w_q, w_k),
        "gaussian": lambda: r.Gaussian(bandwidth=draw.size(0.3, 3.0)),
        "gaussian tied": lambda: r.Gaussian(one, one, draw.size(0.3, 3.0)),
        "gaussian untied": lambda: r.Gaussian(w_q, w_k, draw.size(0.5, 3.0), b_q, b_k),
        "gaussian away": lambda: -r.Gaussian(bandwidth=draw.size(1.0, 3.0)),
        "laplace": lambda: r.Laplace(draw.size(0.5, 3.0)),
        "student": lambda: r.StudentT(draw.size(0.5, 5.0), draw.size(0.5, 3.0)),
        "additive": lambda: r.Additive(w_q, w_k, 2 * draw.normal(c)),
        "alibi": lambda: dot + r.Alibi(slope),
        "positions alone": lambda: r.Alibi(slope),
        "relative": lambda: dot + table,
        "rotary": lambda: r.Rotary(dot, base=draw.size(2.0, 100.0), interleaved=draw.chance(0.5)),
        "rotary partial": lambda: r.Rotary(dot, frequencies=draw.normal(1)) + r.Alibi(slope),
        "softcap": lambda: r.SoftCap(dot, draw.size(0.5, 5.0)),
        "sum": lambda: dot + r.Gaussian(bandwidth=2.0) + r.Alibi(slope),
        "scaled": lambda: 0.5 * r.Laplace(1.0) - dot,
    }


def lookups(draw: Draw, d: int, lead: tuple[int, ...]) -> Any:
    """Values of any width, with or without a bias."""
    e = draw.count(1, 4)
    w = draw.size(0.1, 3.0) * draw.normal(*lead, d, e)
    linear = r.Linear(w, draw.maybe(draw.normal(*lead, e)))
    narrow = r.Factored(draw.normal(*lead, d, 2), draw.normal(*lead, 2, e))
    return draw.pick([r.Identity(), linear, linear, narrow] if not lead else [linear, linear, narrow])


def supports(draw: Draw, n: int) -> Any:
    """Every query sees a key."""
    seen = (torch.rand(n, n, generator=draw.generator) > 0.5) | torch.eye(n, dtype=torch.bool)
    documents = r.Document(torch.tensor([i * 2 // n for i in range(n)]))
    return draw.pick([r.Full(), r.Full(), r.Causal(), r.Window(1, 1), r.Window(2, 0), documents, r.Where(seen)])


def attentions(draw: Draw, n: int, d: int) -> r.Attention:
    """Any potential, support, temperature and number of heads; one in eight has rows that are not softmax."""
    heads, groups = draw.pick([((), ()), ((), ()), ((2,), (2,)), ((4,), (2,))])
    potential = draw.pick(potentials(draw, d, heads, groups).items())[1]()
    softmax = r.Softmax(draw.pick([1.0, 1.0, draw.size(0.2, 4.0)]))
    normalizer = draw.pick([r.Sparsemax(), r.Entmax(1.5), r.Sigmoid()]) if draw.chance(0.125) else softmax
    return r.Attention(potential, lookups(draw, d, groups), normalizer, supports(draw, n))


def maps_around(draw: Draw, attention: r.Attention, n: int, d: int) -> Any:
    """The attention alone, mixed, with a residual, or in a block with norm layers."""
    value = attention(draw.normal(n, d))
    if value.ndim == 2:
        return Residual(attention) if value.shape[-1] == d and draw.chance(0.5) else attention
    if draw.chance(0.3):
        return attention
    mixed = Heads(attention, draw.size(0.2, 2.0) * draw.normal(value.shape[0], value.shape[-1], d))
    norm = Normalize(1e-2, 1 + 0.2 * draw.normal(d), centered=draw.chance(0.5))
    hidden = feed_forward(Gelu(), draw.normal(d, 3), draw.normal(3, d))
    block = Compose((Residual(Compose((norm, mixed))), Residual(hidden)))
    return draw.pick([mixed, mixed, Residual(mixed), Compose((norm, mixed)), block])


# Domains and their points


def domains(draw: Draw, n: int, d: int, plain: bool) -> Domain:
    """Balls about any center, and neighborhoods of sequences with equal tokens, weights, and tokens that stay."""
    size = draw.pick([1.0, draw.size(0.03, 10.0), draw.size(1e-6, 1e4)])
    if draw.chance(0.4):
        return Ball(size, draw.maybe(size * draw.normal(d)), n)
    x = size * draw.normal(n, d)
    x = x[torch.randint(0, n, (n,), generator=draw.generator)] if draw.chance(0.2) else x
    points = x if plain or draw.chance(0.7) else Measure(x, 2 * draw.normal(n))
    radius = draw.pick([0.0, draw.size(1e-4, 3.0), draw.size(1e-4, 3.0), draw.size(1e-2, 1.0)]) * size
    radii = radius * torch.rand(n, generator=draw.generator, dtype=D) * (torch.rand(n, generator=draw.generator) > 0.4)
    alone = radius * torch.nn.functional.one_hot(torch.tensor(draw.count(0, n - 1)), n).to(D)
    choices = [Neighborhood(points, radius), Neighborhood(points, radius, TokenMax()), Radii(points, radii), Radii(points, alone)]
    return draw.pick(choices)


def inside(draw: Draw, case: Case) -> Tensor:
    """A point of the domain, often on its boundary."""
    n, d, domain = case.tokens, case.width, case.domain
    length = 1 - 1e-12 if draw.chance(0.6) else draw.share()
    if isinstance(domain, Ball):
        x = draw.units(n, d)
        if draw.chance(0.5):  # a hub, and the rest close together elsewhere
            x = torch.where(torch.arange(n).unsqueeze(-1) < draw.count(1, n), x[:1] + 0.1 * x, draw.pick([-1.0, 1.0]) * x[-1:])
            x = x / x.norm(dim=-1, keepdim=True).clamp_min(1.0)
        return x * length * domain.radius + (0.0 if domain.center is None else domain.center)
    assert isinstance(domain, Near)
    step = draw.units(n, d) * (torch.rand(n, 1, generator=draw.generator) > draw.pick([0.0, 0.5])).to(D)
    if isinstance(domain, Radii):
        return domain.measure.points + length * step * domain.radii.unsqueeze(-1)
    assert isinstance(domain, Neighborhood)
    step = step if isinstance(domain.norm, TokenMax) else step * draw.normal(n, 1)
    step = step if isinstance(domain.norm, TokenMax) else step / step.norm().clamp_min(1e-300)
    return domain.measure.points + length * domain.radius * step


def drawn(seed: int) -> Case:
    """The case of a seed."""
    draw = Draw(seed)
    n, d = draw.count(1, 6), draw.count(1, 4)
    map = _first_valid(lambda: maps_around(draw, attentions(draw, n, d), n, d))
    domain = domains(draw, n, d, plain=isinstance(map, Map) and not isinstance(map, Heads))
    ordered = [Frobenius(), Frobenius(), TokenMax(), TokenMax(), TokenSum(), EntryMax()]
    measures = [Wasserstein(1.0), Wasserstein(2.0), Wasserstein(math.inf)]
    return Case(seed, map, domain, draw.pick(ordered + measures if isinstance(domain, Ball) else ordered), n, d)


def _first_valid(make: Callable[[], Any]) -> Any:
    """Groups of values need as many heads of queries; what has none is not a declaration, and is drawn again."""
    while True:
        try:
            return make()
        except ArgumentError:
            continue


# What is seen


def jacobian_norms(case: Case, points: Tensor) -> Tensor:
    """Norms of derivatives at points (b, n, d), exact for Frobenius and EntryMax, from below for the others."""
    blocks = _jacobians(case, points)  # (b, n, e, n, d)
    norm = _matched(case.norm)
    if isinstance(norm, Frobenius):
        return torch.linalg.matrix_norm(blocks.flatten(3).flatten(1, 2), 2)
    if isinstance(norm, EntryMax):
        return blocks.abs().sum((-2, -1)).flatten(1).amax(-1)
    order = (0, 1, 3, 4, 2) if isinstance(norm, TokenMax) else (0, 3, 1, 2, 4)  # rows Σ_j |J_ijᵀe|, or columns Σ_i |J_ij e|
    return _alternated(blocks.permute(order).flatten(0, 1)).unflatten(0, (len(points), -1)).amax(-1)


def _jacobians(case: Case, points: Tensor) -> Tensor:
    derivative = torch.func.jacrev(case.function)
    rows = case.map.normalizer if isinstance(case.map, r.Attention) else None
    if isinstance(rows, r.Softmax):
        return torch.func.vmap(derivative)(points)
    return torch.stack([derivative(x) for x in points])


def _alternated(blocks: Tensor) -> Tensor:
    """max over unit e of Σ_b |M_b e| for each first index (a, b, c, e), from below, from several starts."""
    best = torch.zeros(len(blocks), dtype=D)
    for start in torch.eye(blocks.shape[-1], dtype=D):
        e = start.expand(len(blocks), -1)
        for _ in range(6):
            moved = torch.einsum("abce,ae->abc", blocks, e)
            best = torch.maximum(best, moved.norm(dim=-1).sum(-1))
            pulled = torch.einsum("abce,abc->ae", blocks, moved / moved.norm(dim=-1, keepdim=True).clamp_min(1e-300))
            e = pulled / pulled.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return best


def _matched(norm: Norm) -> Norm:
    """What a Wasserstein distance is for small moves of tokens that differ."""
    if isinstance(norm, Wasserstein):
        return TokenMax() if math.isinf(norm.p) else Frobenius() if norm.p == 2 else TokenSum()
    return norm


def stretch(case: Case, draw: Draw) -> float:
    """The largest norm of the derivative that points show."""
    norms = jacobian_norms(case, torch.stack([inside(draw, case) for _ in range(POINTS)]))
    return float(norms.nan_to_num(0.0, 0.0, 0.0).max())


def movement(case: Case, draw: Draw) -> float:
    """The largest distance of a value from that at the center; what rounding of a value may add is taken off."""
    assert isinstance(case.domain, Near)
    here = case.function(case.domain.measure.points)
    norm: Any = case.norm
    rounding = 1e-11 * len(here) * float(here.abs().max() + case.domain.measure.points.abs().max())
    return max(0.0, max(float(norm.of(case.function(inside(draw, case)) - here)) for _ in range(POINTS)) - rounding)


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
        counts = f"{self.cases} cases, {self.points} points, {self.ascended} ascended, {self.infinite} infinite, {seconds:.1f} s"
        ratios = [f"{ratio:10.4f}  {name}" for name, ratio in sorted(self.closest.items(), key=lambda pair: -pair[1])]
        found = [f"VIOLATION {line}" for line in self.violations] or ["no violation"]
        return "\n".join([counts, "largest seen / certified:", *ratios, *found])


def _theorem(rung: Certificate) -> str:
    known = (name for name, theorem in THEOREMS.items() if f"{rung.theorem}:".startswith(f"{theorem.cited}:"))
    return next(known, rung.theorem)


def attack(case: Case, tally: Tally, ascend: bool) -> None:
    """One case: constants, and moves where the domain is a neighborhood."""
    draw = Draw(case.seed + 10**9)
    near = isinstance(case.domain, Near)
    moved: Certificate | None = None
    try:
        constant = certify(case.map, case.domain, case.norm)
        tally.compare(case, constant, stretch(case, draw))
        if isinstance(case.domain, Near):
            moved = deviation(case.map, case.domain, case.norm)
            tally.compare(case, moved, movement(case, draw))
        if ascend and _has_room(case.domain):
            _ascend(case, tally, constant, moved)
    except Exception as error:  # an error of any kind is a finding
        tally.violations.append(f"{type(error).__name__}: {str(error)[:120]}; {case}")
    tally.cases += 1
    tally.points += POINTS * (1 + near)


def _has_room(domain: Domain) -> bool:
    return not isinstance(domain, Near) or float(moves_of(domain).max()) > 0


def _ascend(case: Case, tally: Tally, constant: Certificate, moved: Certificate | None) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    sizes: dict[str, Any] = {"tokens": case.tokens, "width": case.width, "generator": generator}
    found = falsify(case.map, case.domain, case.norm, steps=10, restarts=2, **sizes).value
    tally.compare(case, constant, found * (1 - 1e-6))  # a difference of values close together has few digits
    if moved is not None and isinstance(case.domain, Near):
        found = falsify_deviation(case.map, case.domain, case.norm, steps=15, restarts=2, generator=generator).value
        tally.compare(case, moved, max(0.0, found * (1 - 1e-9) - 1e-11))
    tally.ascended += 1


def sweep(seeds: Iterator[int], seconds: float, ascended: int) -> Tally:
    """Cases until the time is over; of these, `ascended` are spread over the time."""
    tally, started = Tally(), time.monotonic()
    for seed in seeds:
        spent = (time.monotonic() - started) / seconds if seconds > 0 else 0.0
        if spent >= 1:
            break
        attack(drawn(seed), tally, ascend=tally.ascended < ascended * min(1.0, spent + 0.02))
    return tally


def main() -> int:
    """Sweep, print, and exit with status 1 on a violation."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.falsify", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long")
    parser.add_argument("--seed", type=int, default=0, help="the first case")
    parser.add_argument("--ascended", type=int, default=50, help="how many cases are attacked by gradient ascent as well")
    parser.add_argument("--case", type=int, help="one case alone, attacked in every way")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    seeds = itertools.count(options.seed) if options.case is None else iter([options.case])
    tally = sweep(seeds, options.seconds, options.ascended if options.case is None else 100)
    sys.stdout.write(tally.report(time.monotonic() - started) + "\n")
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
