"""compress: a context with few atoms, and what attention to it gets wrong, proved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard import _check
from regard._enclosed import computed_lengths
from regard._groups import columns_of
from regard._kinds import names_wrong_kinds
from regard._upper import Upper, exact
from regard.attention import Attention, as_measure
from regard.certificate import Certificate
from regard.compression.compressed import Compressed, assembled, certified, joined, over_ball
from regard.compression.expectation import clustered
from regard.compression.partitions import Partition, Widths
from regard.domains import Ball, Neighborhood
from regard.errors import ArgumentError, RefusalError
from regard.measure import Measure
from regard.proofs.atoms import Atoms
from regard.proofs.cells import Cells
from regard.proofs.key_form import KeyForm, key_form
from regard.proofs.subject import Head, single_heads
from regard.proofs.theorem import Refusal
from regard.proofs.theorems import tangent_atoms

ROUNDS = 6
"""How often thresholds are tightened where rounding, or a cruder width, was in the way."""


@names_wrong_kinds
def compress(
    context: Measure | Tensor | Compressed,
    attention: Attention,
    *,
    size: int | None = None,
    tolerance: float | None = None,
    queries: Tensor | None = None,
    domain: Ball | None = None,
) -> Compressed:
    """The context with few atoms, each tangent to a group of keys: as many as `size` says, or as few as reach
    an output error of `tolerance`.

    domain: the ball of queries for which the error is proved; without it and without queries, one around the
    keys, as in self-attention. queries (m, d): groups follow what these look at, and the error is that of
    these queries, measured and rounded up; with both, the certificate is that of the ball.

    Examples:
        >>> keys = torch.rand(500, 2, dtype=torch.float64)
        >>> layer, domain = regard.Attention(regard.Dot()), regard.Ball(1.0)
        >>> few = regard.compress(keys, layer, tolerance=0.05, domain=domain)
        >>> few.size < 250 and few.certificate.value <= 0.05
        True
    """
    if isinstance(context, Compressed):
        return _further(context, attention, size=size, tolerance=tolerance, queries=queries, domain=domain)
    task = _Task.of(as_measure("context", context), size, tolerance, queries, domain)
    try:
        heads = [Head(head) for head in single_heads(attention)]
        forms = [key_form(head, task.keys.dimension, task.where) for head in heads]
        for form in forms:
            task.check_width(form.a.shape[0], form.a.shape[1])
        found = [_compressed(head, form, task, len(heads)) for head, form in zip(heads, forms, strict=True)]
    except Refusal as refusal:
        raise RefusalError("compress", [f"{refusal}."]) from None
    atoms, masses, labels = zip(*found, strict=True)
    mass, groups = torch.stack(masses), torch.stack([task.spread(one) for one in labels])
    if len(heads) == 1:
        mass, groups = mass[0], groups[0]
    certificate = task.certificate(heads, atoms)
    if tolerance is not None and certificate.value > tolerance:
        raise RefusalError("tolerance", [task.in_the_way(atoms, certificate.value)])
    return assembled(atoms, mass, groups, certificate, task.dtype)


@dataclass(frozen=True)
class _Task:
    """What is asked, with keys in float64 that all have mass."""

    keys: Measure
    massive: Tensor | None
    dtype: torch.dtype
    size: int | None
    tolerance: float | None
    queries: Tensor | None
    ball: Ball | None

    @staticmethod
    def of(
        context: Measure,
        size: int | None,
        tolerance: float | None,
        queries: Tensor | None,
        domain: Ball | None,
    ) -> _Task:
        if context.batch_shape or not context.size:
            raise ArgumentError(
                "context", f"has shape {list(context.points.shape)}", "give one context (n, d)"
            )
        if context.marks is not None:
            raise ArgumentError("context", "has marks", "marks tell keys apart; compress what has none")
        massive, keys = _with_mass(context)
        _check_goal(size, tolerance, keys.size)
        _check_ball(domain)
        queries = None if queries is None else _check_queries(queries)
        ball = _around(keys.points) if domain is None and queries is None else domain
        return _Task(keys, massive, context.points.dtype, size, tolerance, queries, ball)

    @cached_property
    def columns(self) -> Tensor:
        """The keys (d, n)."""
        return columns_of(self.keys.points)

    @property
    def where(self) -> Ball | Neighborhood:
        """Where the error is bounded."""
        if self.ball is not None:
            return self.ball
        assert self.queries is not None
        return Neighborhood(self.queries, 0.0)

    def check_width(self, wide: int, keys: int) -> None:
        """Widths that do not fit are said by name."""
        if keys != self.keys.dimension:
            raise ArgumentError(
                "context", f"has tokens of width {self.keys.dimension}", f"the attention reads width {keys}"
            )
        if self.queries is not None and self.queries.shape[-1] != wide:
            raise ArgumentError("queries", f"have width {self.queries.shape[-1]}", f"give width {wide}")
        if self.ball is not None and self.ball.center is not None and len(self.ball.center) != wide:
            raise ArgumentError("domain", f"has a center of {len(self.ball.center)}", f"give width {wide}")

    def spread(self, labels: Tensor) -> Tensor:
        """Labels of all keys, -1 of those without mass."""
        if self.massive is None:
            return labels
        found = torch.full(self.massive.shape, -1)
        found[self.massive] = labels
        return found

    def center(self, wide: int) -> Tensor:
        """The middle of the ball."""
        assert self.ball is not None
        center = self.ball.center
        return torch.zeros(wide, dtype=torch.float64) if center is None else center.detach().double()

    def certificate(self, heads: list[Head], atoms: tuple[Atoms, ...]) -> Certificate:
        """That of the ball; without one, that of the queries."""
        found = []
        if self.ball is not None:
            found.append(certified(over_ball(atoms, self.ball), self.ball))
        if self.queries is not None:
            at = Neighborhood(self.queries, 0.0)
            found.append(certified(self._measured(heads, atoms), at, "measured at the given queries"))
            rows = joined([tangent_atoms.row_bounds(one, self.queries) for one in atoms])
            found.append(certified(rows.amax(), at, "at the given queries, one by one"))
        first, *others = found
        return Certificate(
            first.value,
            first.domain,
            first.norm,
            first.theorem,
            first.hypotheses,
            others=tuple(others),
            quantity=first.quantity,
        )

    def _measured(self, heads: list[Head], atoms: tuple[Atoms, ...]) -> Upper:
        """The largest error at the queries: both outputs, in float64, and their rounding."""
        assert self.queries is not None
        parts = []
        for head, one in zip(heads, atoms, strict=True):
            exactly = head.attention(self.queries, self.keys)
            nearly = head.attention(self.queries, Measure(one.points, one.log_weights))
            reach = computed_lengths(self.queries).amax()
            rounding = one.rounding(reach, one.given.count) + one.rounding(reach, len(one.points))
            parts.append(computed_lengths(exactly - nearly) + rounding)
        return joined(parts).amax()

    def in_the_way(self, atoms: tuple[Atoms, ...], value: float) -> str:
        """Why a tolerance is out of reach."""
        count, worst = max(len(one.points) for one in atoms), max(float(self._reach(one)) for one in atoms)
        assert self.tolerance is not None
        needed = worst * math.sqrt(self.tolerance / value)  # errors are of second order
        far = f": a group reaches {worst:.2g} in logits, and about {needed:.2g} is needed" if worst else ""
        return (
            f"{count} atoms for {self.keys.size} keys are proved to {value:.3g}, not to {self.tolerance:.3g}"
            f"{far}; give a smaller ball or a larger tolerance, or take size=."
        )

    def _reach(self, atoms: Atoms) -> Upper:
        if self.ball is None:
            return exact(0.0)
        away = exact(float(self.ball.radius)) + computed_lengths(
            atoms.anchors - self.center(atoms.anchors.shape[-1])
        )
        return (away * atoms.groups.reaches).amax()


Found = tuple[Atoms, Tensor, Tensor]
"""Atoms, the logarithm of their mass, and labels."""


def _compressed(head: Head, form: KeyForm, task: _Task, heads: int) -> Found:
    """One head."""
    if task.queries is not None:
        return _for_queries(head, form, task, heads)
    center = task.center(form.a.shape[0])
    assert task.ball is not None
    radius = float(task.ball.radius)
    partition = _partition(head, form, task, center, radius)
    if task.size is not None:
        goal = _Goal(partition, radius, math.inf)
        partition.cut_into(goal.blame, task.size)
        return _atoms(head, form, task, partition.compact(), center.unsqueeze(0))
    assert task.tolerance is not None
    wanted = task.tolerance / math.sqrt(heads)
    goal = _Goal(partition, radius, wanted)
    if form.a.shape[0] <= 3:
        partition.on_grid(goal.side)
    most = max(1, task.keys.size // 2)
    for _ in range(ROUNDS):
        partition.cut_until(goal.blame, 1.0, most)
        found = _atoms(head, form, task, partition.compact(), center.unsqueeze(0))
        bound = float(tangent_atoms.ball_bound(found[0], center, radius))
        if bound <= wanted or partition.count > most:
            break
        goal = goal.tighter(bound)
    return found


def _partition(head: Head, form: KeyForm, task: _Task, center: Tensor, radius: float) -> Partition:
    keys, columns = task.keys, task.columns
    tilt, bias = form.tilts(center.unsqueeze(0))[0], form.bias(keys.points)
    logs = tilt @ columns if bool(tilt.any()) else None
    for more in (bias, keys.log_weights):
        logs = more if logs is None else logs if more is None else logs + more
    factor = form.multiple
    logits = (radius * factor) * columns if factor is not None else radius * (form.a @ columns)
    if factor and radius and not head.factors:
        return Partition(logits, None, logs, 1 / abs(radius * factor))
    values = head.matrix(keys.dimension).mT @ columns if head.factors else columns
    return Partition(logits, values, logs)


class _Goal:
    """Thresholds of mass and value, so that 2 tanh(D/4) R + E is the tolerance, in the proportion in which
    small cells have them: D = s²/2 and E = s σ.
    """

    def __init__(
        self, partition: Partition, radius: float, tolerance: float, aim: float | None = None
    ) -> None:
        self.partition, self.radius, self.tolerance = partition, radius, tolerance
        self.aim = tolerance if aim is None else aim
        self.values, self.ratio = partition.proportions()
        self.mass = 2 * self.aim / (self.values + 4 * self.ratio + 1e-300)
        self.value = (
            self.aim - 2 * math.tanh(min(self.mass, 1e6) / 4) * self.values if self.aim < math.inf else 0.0
        )

    @property
    def side(self) -> float:
        """The side of a cell of a grid, evenly filled, that is within the thresholds, and a little less."""
        sides = torch.logspace(-6, 1, 400, dtype=torch.float64)
        spread, reach = sides / math.sqrt(12), sides * math.sqrt(len(self.partition.logits)) / 2
        blame = self.blame(Widths(reach, spread, self.ratio * reach, self.ratio * spread))
        return 0.95 * float(sides[blame <= 1].amax()) if bool((blame <= 1).any()) else float(sides[0])

    def tighter(self, bound: float) -> _Goal:
        """The next thresholds, where these gave this bound."""
        return _Goal(self.partition, self.radius, self.tolerance, 0.97 * self.aim * self.tolerance / bound)

    def blame(self, widths: Widths) -> Tensor:
        """At most one where a cell is within both thresholds; the error of a cell where there are none."""
        mass, value = widths.gaps()
        if self.aim == math.inf:
            return 2 * torch.tanh(mass / 4) * self.values + value
        return torch.maximum(mass / max(self.mass, 1e-300), value / max(self.value, 1e-300))


def _for_queries(head: Head, form: KeyForm, task: _Task, heads: int) -> Found:
    """Clusters that follow what the queries look at; more of them until a tolerance is reached."""
    assert task.queries is not None
    size = task.size or max(1, task.keys.size // 64)
    while True:
        labels, anchors = clustered(head, form, task.keys, task.queries, size)
        found = _atoms(head, form, task, labels, anchors)
        if task.tolerance is None or 2 * size > task.keys.size:
            return found
        if float(task._measured([head], (found[0],))) <= task.tolerance / math.sqrt(heads):
            return found
        size = 2 * size


def _atoms(head: Head, form: KeyForm, task: _Task, labels: Tensor, anchors: Tensor) -> Found:
    cells = Cells(head, form, task.keys, labels, anchors, task.dtype, task.columns)
    total = math.log(task.keys.size) if task.keys.log_weights is None else 0.0
    return cells.atoms(), cells.log_mass - total, labels


def _further(context: Compressed, attention: Attention, **goal: object) -> Compressed:
    """What was compressed, compressed again: masses multiply, groups follow, errors add up."""
    if context.measure.batch_shape:
        raise ArgumentError("context", "has heads with atoms of their own", "compress the context again")
    if goal["domain"] is None and goal["queries"] is None and isinstance(context.certificate.domain, Ball):
        goal["domain"] = context.certificate.domain
    again = compress(context.measure, attention, **goal)  # type: ignore[arg-type]
    groups = torch.where(context.groups >= 0, again.groups[context.groups.clamp_min(0)], -1)
    value = exact(context.certificate.value) + exact(again.certificate.value)
    if str(again.certificate.domain) != str(context.certificate.domain):
        value = Upper(math.inf)
    whole = certified(value, again.certificate.domain, "twice")
    return Compressed(again.measure, context.log_mass + again.log_mass, groups, whole, again.atoms)


def _with_mass(context: Measure) -> tuple[Tensor | None, Measure]:
    """Which keys have mass, None where all have, and these in float64."""
    points, weights = context.points.detach().double(), context.log_weights
    if weights is None:
        return None, context if points is context.points else Measure(points)
    massive = weights.detach() > -math.inf
    return massive, Measure(points[massive], weights.detach().double()[massive])


# Arguments


def _check_goal(size: int | None, tolerance: float | None, keys: int) -> None:
    if (size is None) == (tolerance is None):
        found = "are both given" if size is not None else "are both missing"
        raise ArgumentError("size and tolerance", found, "give a number of atoms or an error, one of the two")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= keys):
        raise ArgumentError("size", f"is {size!r}", f"give a number of atoms from 1 to {keys}")
    if tolerance is not None:
        _check.positive("tolerance", tolerance)


def _check_ball(domain: object) -> None:
    if domain is None:
        return
    if not isinstance(domain, Ball) or not math.isfinite(domain.radius):
        raise ArgumentError("domain", f"is {domain!r}", "give Ball(radius) with a finite radius: the queries")


def _check_queries(queries: object) -> Tensor:
    if not isinstance(queries, Tensor) or queries.ndim != 2 or not len(queries):
        found = f"has shape {list(queries.shape)}" if isinstance(queries, Tensor) else f"is {queries!r}"
        raise ArgumentError("queries", found, "give tokens (m, d) with at least one row")
    _check.finite("queries", queries)
    return queries.detach().double()


def _around(points: Tensor) -> Ball:
    """A ball that holds the keys."""
    center = 0.5 * (points.amax(0) + points.amin(0))
    return Ball(float(computed_lengths(points - center).amax()) * (1 + 1e-12), center)
