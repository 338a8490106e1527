"""python -m benchmarks.transfer [--seconds S] [--seed K] [--family F]: attacks that move mass.

What is proved of laws near a law (in balls, words and tubes), of compressed contexts, of tokens that come and
go and of misspecified inputs, against gradient ascent over places, shares of mass and queries. Values are by
the definition, in plain torch. Exit status 1 on a violation.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

import regard as r
from benchmarks.drawing import D, Draw
from regard.domains import NearbyLaws, Tube, Vocabulary, deleted, inserted, replaced
from regard.errors import RefusalError
from regard.proofs import misspecification

STEPS = 40
ROUNDING = 1e-9
"""What values by the definition may be off, relative to the size of the tokens' values."""

Found = tuple[str, float, float]
"""What was attacked, what was seen, and what is proved."""


@dataclass(frozen=True)
class Plain:
    """softmax(x A yᵀ) y W by the definition."""

    a: Tensor
    w: Tensor

    @property
    def declared(self) -> r.Attention:
        """The same as a declaration."""
        return r.Attention(r.Bilinear(self.a), r.Linear(self.w))

    def __call__(self, queries: Tensor, keys: Tensor, logs: Tensor) -> Tensor:
        return (queries @ self.a @ keys.mT + logs).softmax(-1) @ (keys @ self.w)


def _plain(draw: Draw, d: int, size: float) -> Plain:
    """Scores that are anything, tied, skew or minus the identity, with |A|R² up to 6."""
    a = draw.normal(d, d)
    kind = draw.pick(["any", "any", "tied", "skew", "minus", "zero"])
    a = {"tied": a @ a.mT, "skew": a - a.mT, "minus": -torch.eye(d, dtype=D), "zero": 0 * a}.get(kind, a)
    norm = float(torch.linalg.matrix_norm(a, 2))
    a = a * (draw.size(0.2, 6.0) / size**2 / norm if norm else 1.0)
    return Plain(a, draw.pick([torch.eye(d, dtype=D), draw.normal(d, d)]))


def _tokens(draw: Draw, n: int, d: int, size: float) -> Tensor:
    return size * draw.units(n, d) * torch.rand(n, 1, generator=draw.generator, dtype=D).pow(0.3)


# Laws near a law


@dataclass(frozen=True)
class Transfer:
    """Some of the mass of every atom goes to a place of the domain, at the cost of its radius."""

    domain: NearbyLaws
    center: Tensor
    targets: Tensor

    def law(self, away: Tensor, odds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Points, logarithms of masses, and which atom each comes from."""
        given, within = self.domain.measure, self.domain.within
        x, masses = given.points, given.masses()
        if isinstance(within, Vocabulary):
            place = within.points[self.targets % len(within.points)]
        else:
            offset = away * (within.radius / away.norm(dim=-1, keepdim=True).clamp_min(1e-30)).clamp(max=1.0)
            place = (x[self.targets % len(x)] if isinstance(within, Tube) else self.center) + offset
        share = odds.sigmoid()
        cost = (masses * share * (place - x).norm(dim=-1)).sum()
        share = share * (self.domain.radius / cost.clamp_min(1e-300)).clamp(max=1.0) * (1 - 1e-9)
        whole = torch.cat([masses * (1 - share), masses * share]).clamp_min(1e-300)
        return torch.cat([x, place]), whole.log(), torch.arange(len(x)).repeat(2)


def _within(draw: Draw, x: Tensor, size: float) -> r.Ball | Vocabulary | Tube:
    d = x.shape[-1]
    kind = draw.pick(["ball", "words", "tube", "own tube"])
    if kind == "words":
        return Vocabulary(_tokens(draw, draw.count(1, 5), d, size))
    if kind == "ball":
        return r.Ball(size, torch.zeros(d, dtype=D))
    return Tube(size * draw.size(0.02, 0.5), jumps=kind == "tube")


def nearby(seed: int) -> Iterator[Found]:
    """Rows, the law of the outputs, and the law after a residual connection."""
    draw = Draw(seed)
    n, d, size = draw.count(1, 5), draw.count(1, 4), draw.size(0.3, 3.0)
    plain, x = _plain(draw, d, size), _tokens(draw, n, d, size)
    given = r.Measure(x, draw.maybe(2 * draw.normal(n)))
    domain = NearbyLaws(given, size * draw.size(0.003, 0.5), _within(draw, x, size))
    name, declared = type(domain.within).__name__.lower(), plain.declared
    rows = r.deviation(declared, domain, r.TokenMax())
    laws = r.deviation(r.maps.Residual(declared), domain, r.Wasserstein(1.0))
    begin = plain(x, x, given.log_masses())
    for start in range(3):
        targets = torch.arange(n) if isinstance(domain.within, Tube) and not domain.within.jumps else (
            torch.randint(10**6, (n,), generator=draw.generator))  # fmt: skip
        transfer = Transfer(domain, torch.zeros(d, dtype=D), targets)

        def moved(
            away: Tensor, odds: Tensor, transfer: Transfer = transfer, whole: bool = start == 2
        ) -> Tensor:
            points, logs, origin = transfer.law(away, odds)
            if not whole:
                return (plain(x, points, logs) - begin).norm(dim=-1).amax()
            out = points + plain(points, points, logs) - (x + begin)[origin]
            return (logs.exp() * out.norm(dim=-1)).sum()

        reach = domain.within.radius if not isinstance(domain.within, Vocabulary) else size
        away, odds = _ascended(moved, reach * draw.normal(n, d), 2 * draw.normal(n), 0.1 * reach)
        with torch.no_grad():
            points, logs, _ = transfer.law(away, odds)
            seen = (plain(x, points, logs) - begin).norm(dim=-1).amax()
            for rung in (rows, *rows.others):
                yield f"rows, {name}: {rung.theorem.split(' (')[0]}", float(seen), rung.value
            images = (
                r.Measure(x + begin, given.log_weights),
                r.Measure(points + plain(points, points, logs), logs),
            )
            yield f"outputs, {name}", float(r.wasserstein(*images, 1.0)), laws.value


def _ascended(
    function: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor, rate: float
) -> tuple[Tensor, Tensor]:
    """Where a function of two tensors is large."""
    first, second = first.clone().requires_grad_(), second.clone().requires_grad_()
    climb = torch.optim.Adam([{"params": [first], "lr": rate}, {"params": [second], "lr": 0.3}])
    for _ in range(STEPS):
        climb.zero_grad()
        (-function(first, second)).backward()
        climb.step()
    return first.detach(), second.detach()


def between(seed: int) -> Iterator[Found]:
    """Two laws near a law: constants in a tube."""
    draw = Draw(seed)
    n, d, size = draw.count(1, 4), draw.count(1, 3), draw.size(0.3, 2.0)
    plain, x = _plain(draw, d, size), _tokens(draw, n, d, size)
    domain = NearbyLaws(x, size * draw.size(0.01, 0.3), Tube(size * draw.size(0.02, 0.3), draw.chance(0.5)))
    constant = r.certify(plain.declared, domain, r.Wasserstein(1.0))
    transfer = Transfer(domain, torch.zeros(d, dtype=D), torch.arange(n))
    for _ in range(12):
        away, odds = domain.within.radius * draw.normal(n, d), 2 * draw.normal(n)
        step, tilt = draw.size(1e-4, 1.0), draw.normal(n)
        pair = [transfer.law(away, odds), transfer.law(away + step * draw.normal(n, d), odds + step * tilt)]
        laws = [r.Measure(points, logs) for points, logs, _ in pair]
        images = [r.Measure(plain(points, points, logs), logs) for points, logs, _ in pair]
        apart, out = (float(r.wasserstein(*both, 1.0)) for both in (laws, images))
        for rung in (constant, *constant.others):
            name = "between laws" if "between" in rung.theorem else "constants of the ball"
            yield name, out, rung.value * apart + 1e-12


# Compressed contexts


def compressed(seed: int) -> Iterator[Found]:
    """Row bounds and the bound for every query of a ball, at queries that climb."""
    draw = Draw(seed)
    n, d, size = draw.count(2, 60), draw.count(1, 4), draw.size(0.3, 3.0)
    plain, keys = _plain(draw, d, size), _tokens(draw, n, d, size)
    if draw.chance(0.3):
        keys = keys[torch.randint(max(1, n // 3), (n,), generator=draw.generator)]  # copies
    keys = keys + draw.pick([0.0, size]) * draw.normal(d)
    weights = draw.maybe(2 * draw.normal(n), 0.3)
    radius, center = size * draw.size(0.1, 3.0), draw.pick([0.0, size]) * draw.normal(d)
    ball, context = r.Ball(radius, center), r.Measure(keys, weights)
    queries = draw.maybe(center + radius * draw.units(8, d) * draw.share(), 0.3)
    goal = {"size": draw.count(1, n)} if draw.chance(0.7) else {"tolerance": size * draw.size(1e-3, 1.0)}
    try:
        few = r.compress(context, plain.declared, domain=ball, queries=queries, **goal)  # type: ignore[arg-type]
    except RefusalError:
        return
    logs, atoms = context.log_masses(), few.measure

    def error(q: Tensor, _: Tensor) -> Tensor:
        at = center + (q - center) * (radius * (1 - 1e-12) / (q - center).norm(dim=-1, keepdim=True)).clamp(
            max=1.0
        )
        return (plain(at, keys, logs) - plain(at, atoms.points, atoms.log_masses())).norm(dim=-1)

    start = center + radius * draw.units(16, d)
    found, _ = _ascended(lambda q, z: error(q, z).sum(), start, torch.zeros(1, dtype=D), 0.1 * radius)
    at = torch.cat([start, found])
    at = center + (at - center) * (radius * (1 - 1e-12) / (at - center).norm(dim=-1, keepdim=True)).clamp(
        max=1.0
    )
    seen, rows = error(at, at), few.bounds(at)
    yield "compressed, every query of the ball", float(seen.amax()), few.certificate.value
    worst = int((seen / rows.clamp_min(1e-300)).argmax())
    yield "compressed, row by row", float(seen[worst]), float(rows[worst])


# Tokens that come and go, and misspecified inputs


def edited(seed: int) -> Iterator[Found]:
    """Deleted, inserted and replaced tokens."""
    draw = Draw(seed)
    n, d, size = draw.count(2, 6), draw.count(1, 4), draw.size(0.3, 3.0)
    plain, x = _plain(draw, d, size), _tokens(draw, n, d, size)
    words, count = _tokens(draw, draw.count(1, 6), d, size), draw.count(1, 3)
    at = draw.count(0, n - 1)
    place = draw.pick([Vocabulary(words), r.Ball(size, torch.zeros(d, dtype=D))])
    kind = draw.pick(["inserted", "deleted", "replaced"])
    kept = torch.cat([x[:at], x[at + 1 :]]) if kind != "inserted" else x
    domain = {
        "inserted": lambda: inserted(x, place, count=count),
        "deleted": lambda: deleted(x, at),
        "replaced": lambda: replaced(x, at, place, count=count),
    }[kind]()
    proved = r.deviation(plain.declared, domain, r.TokenMax())
    stays = [i for i in range(n) if kind == "inserted" or i != at]
    begin = plain(x, x, torch.zeros(n, dtype=D))[stays]

    def moved(new: Tensor, _: Tensor) -> Tensor:
        new = new * (size / new.norm(dim=-1, keepdim=True).clamp_min(1e-30)).clamp(max=1.0)
        now = kept if kind == "deleted" else torch.cat([kept, new])
        return (plain(kept, now, torch.zeros(len(now), dtype=D)) - begin).norm(dim=-1).amax()

    none = torch.zeros(1, dtype=D)
    if kind == "deleted":
        tries = [x[:0]]
    elif isinstance(place, Vocabulary):
        tries = [torch.stack(chosen) for chosen in itertools.product(words, repeat=count)]
    else:
        tries = [_ascended(moved, _tokens(draw, count, d, size), none, 0.1 * size)[0] for _ in range(3)]
    seen = max(float(moved(new, none)) for new in tries)
    yield f"{kind}, {type(place).__name__.lower() if kind != 'deleted' else 'exact'}", seen, proved.value


def misspecified(seed: int) -> Iterator[Found]:
    """Another input: noise, an edit, or any other."""
    draw = Draw(seed)
    n, d, size = draw.count(2, 5), draw.count(1, 3), draw.size(0.3, 3.0)
    plain, x = _plain(draw, d, size), _tokens(draw, n, d, size)
    kind = draw.pick(["noise", "edit", "other"])
    other = _tokens(draw, draw.count(1, 5), d, size)
    if kind == "noise":
        other = x + size * draw.size(1e-4, 0.3) * draw.normal(n, d)
    elif kind == "edit":
        other = torch.cat([x[:1], other[: draw.count(0, len(other))], x[draw.count(1, n - 1) :]])
    found = misspecification(plain.declared, x, other)
    images = [r.Measure(plain(one, one, torch.zeros(len(one), dtype=D))) for one in (x, other)]
    seen = float(r.wasserstein(*images, 1.0))
    for rung in (found.bound, *found.bound.others):
        yield f"misspecified: {rung.theorem}", seen, rung.value


FAMILIES: dict[str, Callable[[int], Iterator[Found]]] = {
    "nearby": nearby,
    "between": between,
    "compressed": compressed,
    "edited": edited,
    "misspecified": misspecified,
}


@dataclass
class Tally:
    """How often what was compared, the closest call, and violations."""

    cases: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    closest: dict[str, float] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def attack(self, family: str, seed: int) -> None:
        """One case."""
        self.cases += 1
        for name, seen, proved in FAMILIES[family](seed):
            ratio = 0.0 if seen == 0 else seen / proved if proved else math.inf
            self.counts[name] = self.counts.get(name, 0) + 1
            self.closest[name] = max(self.closest.get(name, 0.0), ratio if seen > 1e-12 else 0.0)
            if not seen <= proved * (1 + ROUNDING) + 1e-12:
                self.violations.append(
                    f"{name}: {proved:.9g} < {seen:.9g} seen; --family {family} --case {seed}"
                )

    def report(self) -> str:
        """The counts, the ratios and every violation."""
        order = sorted(self.closest.items(), key=lambda pair: -pair[1])
        lines = [f"{ratio:8.4f} {self.counts[name]:6d}  {name}" for name, ratio in order]
        found = [f"VIOLATION {line}" for line in self.violations] or ["no violation"]
        return "\n".join([f"{self.cases} cases; largest seen / proved, and how often:", *lines, *found])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, in seconds of the processor")
    parser.add_argument("--seed", type=int, default=0, help="the first case")
    parser.add_argument("--family", choices=["all", *FAMILIES], default="all", help="what is attacked")
    parser.add_argument("--case", type=int, help="one case alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tally, families = Tally(), list(FAMILIES) if options.family == "all" else [options.family]
    ends = time.process_time() + options.seconds
    for seed in [options.case] if options.case is not None else itertools.count(options.seed):
        for family in families:
            tally.attack(family, seed)
        if time.process_time() > ends:
            break
    sys.stdout.write(tally.report() + "\n")
    return int(bool(tally.violations))


if __name__ == "__main__":
    sys.exit(main())
