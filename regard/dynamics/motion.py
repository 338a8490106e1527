"""Motion: what a trajectory is the trajectory of, step by step. Steps depend on the state alone, so a
trajectory is the same whatever it was asked and wherever it was interrupted.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard import _check
from regard._object import Object
from regard.compute import Engine, Fourier
from regard.dynamics.blow_up import BlowUpError
from regard.dynamics.drifts import drift, moved
from regard.dynamics.schemes import DormandPrince, Scheme, Velocity
from regard.dynamics.spaces import Space
from regard.errors import ArgumentError
from regard.maps import Mapping
from regard.measure import Measure

SNAP = 1e-9
"""A step that would end this close to a node, relative to its length, ends at it."""
MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Node:
    """The state after `index` steps: the points, the layer that moves them next, how many steps it has
    made, and the step to try next.
    """

    index: int
    layer: int
    count: int
    time: float
    step: float
    points: Tensor


class Overflow(Exception):
    """A stage left the numbers."""


@dataclass(frozen=True, eq=False, repr=False)
class Motion(Object):
    """Where it starts, what moves it, and until when. Abstract."""

    maps: tuple[Mapping, ...]
    source: Measure
    until: float
    engine: Engine | None

    @abstractmethod
    def start(self) -> Node:
        """The state at time 0."""

    @abstractmethod
    def advance(self, node: Node) -> Node:
        """The state one step later."""

    @abstractmethod
    def between(self, node: Node, t: float) -> Tensor:
        """The points at a time after this node and before the next."""

    def grid(self) -> list[float] | None:
        """The times of all steps, where they are known before any is taken."""
        return None

    def chosen(self, points: Tensor) -> Engine | None:
        """The engine for a step from these points."""
        return self.engine

    def value(self, layer: int, points: Tensor) -> Tensor:
        """The map of a layer at these points, with the weights and marks of the source."""
        if self._overflows(points):
            raise Overflow
        found = drift(self.maps[layer % len(self.maps)], moved(self.source, points), self.chosen(points))
        if found.shape != points.shape:
            raise ArgumentError(
                "map",
                f"takes points {list(points.shape)} to {list(found.shape)}",
                "a flow needs one velocity for each particle; heads are mixed by regard.maps.Heads",
            )
        if self._overflows(found):
            raise Overflow
        return found

    def _overflows(self, points: Tensor) -> bool:
        """Whether some points left the numbers, on any of the processes that compute together."""
        return self._largest(float(_check.holds(torch.isfinite(points).all()) is False)) > 0

    def _largest(self, value: float) -> float:
        return value if self.engine is None else self.engine.largest(value)


@dataclass(frozen=True, eq=False, repr=False)
class Flow(Motion):
    """x' = map(x) in a space; with several maps, map k acts on [k T/K, (k+1) T/K), and steps end there."""

    scheme: Scheme
    space: Space
    noise: float
    seed: int

    def chosen(self, points: Tensor) -> Engine | None:
        """A scheme with a tolerance lets values err by a part of what a step may: it estimates errors beside
        tolerance · (1 + |x|), and an engine errs by its tolerance times the radius of all values.
        """
        if self.engine is not None or not isinstance(self.scheme, DormandPrince):
            return self.engine
        size = 1 + float(points.detach().abs().amax()) if points.numel() else 1.0
        return Fourier(min(0.5, self.scheme.tolerance / (16 * size)))

    def start(self) -> Node:
        points = self.space.enter(self.source.points)
        try:
            step = self.scheme.first_step(self._velocity(0), 0.0, points, self._end(0))
        except Overflow:
            raise BlowUpError(0.0, 0.0) from None
        return Node(0, 0, 0, 0.0, -self._largest(-step), points)

    def advance(self, node: Node) -> Node:
        moved_to = self._adaptive(node) if isinstance(self.scheme, DormandPrince) else self._fixed(node)
        if self._overflows(moved_to.points):
            raise BlowUpError(node.time, moved_to.time)
        if moved_to.time < self._end(node.layer):
            return moved_to
        return replace(moved_to, layer=node.layer + 1, count=0)

    def between(self, node: Node, t: float) -> Tensor:
        if self.noise > 0:
            raise ArgumentError(
                "t",
                f"is {t:g}, between two steps",
                f"with noise a trajectory is known at its steps only, e.g. at {node.time:.12g}",
            )
        return self._step(node, t)

    def _end(self, layer: int) -> float:
        return self.until * (layer + 1) / len(self.maps)

    def _velocity(self, layer: int) -> Velocity:
        return lambda t, z: self.space.velocity(lambda x: self.value(layer, x), t, z)

    def grid(self) -> list[float] | None:
        if isinstance(self.scheme, DormandPrince):
            return None
        times, points = [0.0], self.source.points
        step = self.scheme.first_step(self._velocity(0), 0.0, points, self.until)
        for layer in range(len(self.maps)):
            count = 0
            while times[-1] < self._end(layer):
                times.append(self._after(layer, count, step))
                count += 1
        return times

    def _after(self, layer: int, count: int, step: float) -> float:
        """Where step `count` of a layer ends."""
        end = self._end(layer)
        time = self.until * layer / len(self.maps) + (count + 1) * step
        return end if time > end - SNAP * step else time

    def _fixed(self, node: Node) -> Node:
        time = self._after(node.layer, node.count, node.step)
        return Node(node.index + 1, node.layer, node.count + 1, time, node.step, self._step(node, time))

    def _step(self, node: Node, time: float) -> Tensor:
        step = time - node.time
        try:
            points = self.scheme.advance(self._velocity(node.layer), node.time, node.points, step)
        except Overflow:
            raise BlowUpError(node.time, time) from None
        if self.noise > 0:
            noise = self.noise * step**0.5 * self._normal(node)
            points = points + self.space.spread(node.time, node.points, noise)
        return self.space.retract(points)

    def _normal(self, node: Node) -> Tensor:
        """Normal numbers of their own for every step, so that a resumed flow draws the same."""
        generator = torch.Generator().manual_seed(_mix(self.seed, node.index))
        like = node.points
        return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)

    def _adaptive(self, node: Node) -> Node:
        assert isinstance(self.scheme, DormandPrince)
        end, wanted = self._end(node.layer), node.step
        while True:
            time = node.time + wanted
            if time > end - SNAP * wanted:
                time = end
            step = time - node.time
            if not wanted > 1e-12 * self.until:
                raise BlowUpError(node.time, node.time + wanted)
            try:
                points, accepted, better = self.scheme.attempt(
                    self._velocity(node.layer), node.time, node.points, step
                )
            except Overflow:
                accepted, better = False, step / 5
            accepted, better = self._largest(float(not accepted)) == 0, -self._largest(-better)
            if accepted:
                following = max(better, wanted) if time == end else better
                return Node(
                    node.index + 1,
                    node.layer,
                    node.count + 1,
                    time,
                    following,
                    self.space.retract(points),
                )
            wanted = better


@dataclass(frozen=True, eq=False, repr=False)
class Transport(Motion):
    """x ↦ map(x), again and again; with several maps one after the other, and from the first again."""

    def start(self) -> Node:
        return Node(0, 0, 0, 0.0, 1.0, self.source.points)

    def grid(self) -> list[float] | None:
        return [float(k) for k in range(round(self.until) + 1)]

    def advance(self, node: Node) -> Node:
        time = node.time + 1.0
        try:
            points = self.value(node.layer, node.points)
        except Overflow:
            raise BlowUpError(node.time, time) from None
        return Node(node.index + 1, node.layer + 1, 0, time, 1.0, points)

    def between(self, node: Node, t: float) -> Tensor:
        raise ArgumentError("t", f"is {t:g}", "an iteration is known after whole steps: 0, 1, 2, ...")


def _mix(seed: int, index: int) -> int:
    """A seed for each step: the finalizer of splitmix64."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) >> 1
