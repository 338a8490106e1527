"""Trajectory: where particles are at each time, computed when somebody asks."""

from __future__ import annotations

import itertools
import math
import os
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard._progress import Bar
from regard.dynamics.blow_up import BlowUpError
from regard.dynamics.motion import Flow, Motion, Node
from regard.dynamics.observables import Observable
from regard.dynamics.observations import Observations
from regard.dynamics.showing import as_html
from regard.errors import ArgumentError
from regard.measure import Measure

KEPT = 1 << 24
"""How many numbers of states are kept that nobody asked for."""
CLOSE = 1e-12
"""Times this close, relative to the whole, are the same."""


class Trajectory:
    """t ↦ x(t) on [0, until], made by `flow` and `iterate`. Nothing is computed before it is asked for, and
    what was computed is kept.

    Gradients flow through it by unrolled steps: memory grows with their number, and the steps that
    DormandPrince chooses count as constants. Backpropagate once, through a sum, or with retain_graph=True.

    Examples:
        >>> from regard.dynamics import Euler, Sphere
        >>> path = regard.flow(regard.Attention(regard.Dot()), torch.eye(2), Euler(0.5), 1.0, space=Sphere())
        >>> path.until, path.at(0.5).norm(dim=-1).round(decimals=4).tolist()
        (1.0, [1.0, 1.0])
    """

    def __init__(self, motion: Motion, nodes: Sequence[Node] = (), asked: Collection[int] = ()) -> None:
        self._motion = motion
        self._nodes: dict[bool, list[Node]] = {False: list(nodes), True: []}
        self._asked = set(asked)
        self._file: tuple[Path, int] | None = None
        self._bar: Bar | None = None
        tensors = (leaf for leaf in pytree.tree_leaves(motion) if isinstance(leaf, Tensor))
        self._differentiable = any(tensor.requires_grad for tensor in tensors)

    @property
    def until(self) -> float:
        """The last time."""
        return self._motion.until

    @property
    def seed(self) -> int | None:
        """What the noise is drawn from; None where there is none."""
        return self._motion.seed if isinstance(self._motion, Flow) and self._motion.noise > 0 else None

    def at(self, t: float) -> Tensor:
        """The points (..., n, d) at time t: those of the space, e.g. z = e^{-tV}x in Rescaled(v)."""
        node = self._before(t)
        if t - node.time <= CLOSE * self.until:
            self._asked.add(node.index)
            return node.points
        return self._motion.between(node, t)

    def measure(self, t: float) -> Measure:
        """The measure at time t: the weights and marks of the start at the points of that time."""
        return Measure(self.at(t), self._motion.source.log_weights, self._motion.source.marks)

    def steps(self) -> list[float]:
        """The times of all steps; where they are chosen on the way, the trajectory is computed to its end."""
        known = self._motion.grid()
        if known is not None:
            return known
        self._before(self.until)
        kept, times = {node.index: node for node in self._list()}, [0.0]
        node = kept[0]
        while node.time < self.until:
            node = kept[node.index + 1] if node.index + 1 in kept else self._motion.advance(node)
            times.append(node.time)
        return times

    def observe(self, *observables: Observable, times: int | Sequence[float] = 10) -> Observations:
        """A table of numbers over time: one row for each of `times`, or for that many equal parts of the
        whole. Where the flow blows up the table ends, and says so.
        """
        for observable in observables:
            if not isinstance(observable, Observable):
                raise ArgumentError(
                    "observables",
                    f"has a {type(observable).__name__}",
                    "give values like Energy(beta), Clusters(), Radius()",
                )
        if not observables:
            raise ArgumentError("observables", "are none", "give one or more, e.g. Radius()")
        if self._motion.source.batch_shape:
            shape = list(self._motion.source.batch_shape)
            raise ArgumentError("x", f"has batch shape {shape}", "observe the flow of one sequence")
        rows: list[tuple[float, ...]] = []
        note = ""
        with torch.no_grad(), self._progress(self.until):
            try:
                begin = self.measure(0.0)
                for t in self._times(times):
                    now = self.measure(t)
                    rows.append((t, *(one.number(now, begin) for one in observables)))
            except BlowUpError as error:
                note = str(error)
        names = tuple(one.name for one in observables)
        return Observations(names, tuple(rows), note)

    def walk(
        self, times: int | Sequence[float] = 10, bar: Bar | None = None
    ) -> Iterator[tuple[float, Measure]]:
        """Each of these times, in order, with its measure, for long runs: a state that was passed is
        forgotten, and nothing carries a graph. A bar that is given is told the time in place of a new one.
        """
        wanted = self._times(times)
        if any(later < sooner for sooner, later in itertools.pairwise(wanted)):
            raise ArgumentError("times", "are not in order", "give times that never decrease")
        with self._progress(self.until, bar):
            for t in wanted:
                with torch.no_grad():
                    node = self._before(t)
                    here = t - node.time <= CLOSE * self.until
                    points = node.points if here else self._motion.between(node, t)
                    source = self._motion.source
                    found = Measure(points.detach(), source.log_weights, source.marks)
                    nodes = self._list()
                    nodes[:] = [n for n in nodes if n.index >= node.index or n.index in self._asked]
                yield t, found

    def save(self, path: str | os.PathLike[str], every: int | None = None) -> None:
        """Write how far it is to a file, whole or not at all; again after each `every` steps.

        `regard.dynamics.resume(path, map)` goes on from there, bit for bit, also after a kill. No graph is
        written: gradients do not reach back beyond a file.
        """
        from regard.dynamics.saving import write

        if every is not None and not (isinstance(every, int) and every >= 1):
            raise ArgumentError("every", f"is {every!r}", "give a number of steps of at least one")
        nodes = self._list()
        last = {node.index for node in nodes[-2:]}  # the last may lie beyond the time that was asked for
        kept = [node for node in nodes if node.index in self._asked | last]
        write(Path(path), self._motion, kept, self._asked)
        self._file = None if every is None else (Path(path), every)

    def __repr__(self) -> str:
        points = self._motion.source.points
        reached = max((nodes[-1].time for nodes in self._nodes.values() if nodes), default=0.0)
        count = "1 particle" if points.shape[-2] == 1 else f"{points.shape[-2]} particles"
        how = f"{self._motion.scheme!r}, {self._motion.space!r}" if isinstance(self._motion, Flow) else ""
        kind = f"Trajectory({count} in dimension {points.shape[-1]}, until {self.until:g}"
        return f"{kind}, computed until {reached:.6g}{', ' + how if how else ''})"

    def _repr_html_(self) -> str:
        """The same with a picture of what is computed, for notebooks."""
        return as_html(self._motion, [node for nodes in self._nodes.values() for node in nodes])

    def _times(self, times: int | Sequence[float]) -> list[float]:
        if not isinstance(times, int):
            return [float(t) for t in times]
        if times < 1:
            raise ArgumentError("times", f"is {times}", "give a number of parts of at least one")
        wanted = [self.until * k / times for k in range(times + 1)]
        if isinstance(self._motion, Flow) and self._motion.noise == 0:
            return wanted
        steps = self.steps()
        return sorted({min(steps, key=lambda s: abs(s - t)) for t in wanted})

    def _mode(self) -> bool:
        """Whether states must carry a graph; those that do not are kept apart from those that do."""
        return self._differentiable and torch.is_grad_enabled()

    def _list(self) -> list[Node]:
        nodes = self._nodes[self._mode()]
        if not nodes:
            nodes.append(self._motion.start())
            self._asked.add(0)
        return nodes

    def _before(self, t: float) -> Node:
        """The last node that is not after t."""
        if isinstance(t, bool) or not isinstance(t, (int, float)) or not math.isfinite(t):
            raise ArgumentError("t", f"is {t!r}", "give a finite number")
        slack = CLOSE * self.until
        if not -slack <= t <= self.until + slack:
            raise ArgumentError("t", f"is {t:g}", f"give a time between 0 and {self.until:g}")
        nodes = self._list()
        place = bisect_right([node.time for node in nodes], t + slack)
        node = nodes[max(place, 1) - 1]
        if place < len(nodes) and nodes[place].index == node.index + 1:
            return node
        with self._progress(t) as bar:
            while node.time < self.until - slack and t - node.time > slack:
                following = self._motion.advance(node)
                self._keep(following)
                if following.time > t + slack:
                    break
                node = following
                bar.reached(node.time)
        return node

    @contextmanager
    def _progress(self, until: float, bar: Bar | None = None) -> Iterator[Bar]:
        """One bar for all that one question asks."""
        if self._bar is not None:
            yield self._bar
            return
        try:
            with nullcontext(bar) if bar is not None else Bar(0.0, until) as self._bar:
                yield self._bar
        finally:
            self._bar = None

    def _keep(self, node: Node) -> None:
        nodes = self._list()
        if node.index > nodes[-1].index:
            nodes.append(node)
        else:
            place = bisect_right([other.index for other in nodes], node.index)
            if nodes[place - 1].index != node.index:
                nodes.insert(place, node)
        if len(nodes) > 8 and len(nodes) * node.points.numel() > KEPT:
            nodes[:] = [n for n in nodes if n.index in self._asked or n is nodes[-1] or n is node]
        if self._file is not None and node.index % self._file[1] == 0 and node is nodes[-1]:
            self.save(*self._file)
