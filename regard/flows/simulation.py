"""Simulation: particles on the sphere, looked at frame by frame, and kept so that a killed run goes on."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from regard._durations import spoken_time
from regard._progress import Bar
from regard._refused import Refused
from regard.audits.store import Store
from regard.compute.application import problem_of
from regard.compute.fourier.plan import PAIR, FourierPlan
from regard.dynamics import (
    BlowUpError,
    Clusters,
    EffectiveRank,
    Energy,
    MeanCosine,
    Observable,
    Sphere,
    Trajectory,
    flow,
    resume,
)
from regard.dynamics.merging import merge_within
from regard.engines import Fourier
from regard.flows.cells import DenseRegions
from regard.flows.columns import ATOMS, COSINE, column_of
from regard.flows.frames import DRAWN, camera_of
from regard.flows.recipe import Recipe
from regard.measure import Measure

MANY = 5000
"""Up to so many particles all pairs are summed; beyond, a Fourier series takes over where it can."""
PAIRED = 20000
"""Up to so many particles a number of all pairs is worth waiting for."""
CALL = 5e-4
"""Seconds of an evaluation, whatever the particles."""
LOOK = 3e-3
"""Seconds of a frame, which is computed and written."""
COORDINATE = 4e-10
"""Seconds of a coordinate of a pair, in addition."""
FEWER = 0.9
"""Particles are united where at most this share of them is left."""
STATE = "trajectory-"
PATIENCE = 4.0
"""A save waits for so many times as long as the last one took."""


class Simulation:
    """A recipe that runs. With a directory, every frame and the state are kept there until `finish`.

    Examples:
        >>> from regard.flows import Recipe, Simulation
        >>> simulation = Simulation(Recipe(particles=9, until=0.5, frames=2))
        >>> simulation.run()
        >>> len(simulation.report()["panels"][0]["frames"])  # the start, and two more
        3
    """

    def __init__(self, recipe: Recipe, directory: Path | None = None, *, resume: bool = False) -> None:
        self.recipe, self._directory = recipe, directory
        self.store = Store(directory, recipe.subject(), resume=resume)
        self._saved, self._ended = (0.0, 0.0), ""
        self._trajectories: dict[int, Trajectory] = {}
        self._begin = Measure(recipe.start())
        self._camera = camera_of(recipe.particles, recipe.dimension)

    @cached_property
    def plan(self) -> FourierPlan | Refused:
        """How a Fourier series would take the sums at the start, or why it does not."""
        return Fourier(self.recipe.tolerance).plan(problem_of(self.recipe.attention(), self._begin, None))

    @cached_property
    def engine(self) -> Fourier | None:
        """The Fourier series where particles are many and it pays; None for all pairs."""
        pays = not isinstance(self.plan, Refused) and self.plan.pays()
        return Fourier(self.recipe.tolerance) if self.recipe.particles > MANY and pays else None

    def seconds(self) -> float | None:
        """What the run is predicted to take on one core; None where the scheme chooses its steps."""
        count = self.recipe.evaluations()
        if count is None:
            return None
        looks = LOOK * self.recipe.frames
        if self.engine is not None and isinstance(self.plan, FourierPlan):
            return looks + count * self.plan.seconds()
        return looks + count * (CALL + self._pairs())

    def announcement(self) -> list[str]:
        """How sums are taken, to what tolerance, and how long that is predicted to take."""
        recipe, predicted = self.recipe, self.seconds()
        count = recipe.evaluations()
        often = "steps are chosen on the way" if count is None else f"{count:,} evaluations of attention"
        wait = "" if predicted is None else f", predicted to take {spoken_time(predicted)} on one core"
        found = [f"{recipe.particles:,} particles, {recipe.weights} with β = {recipe.beta:g}: {often}{wait}."]
        if self.engine is not None and isinstance(self.plan, FourierPlan):
            modes = "×".join([str(self.plan.series.count)] * recipe.dimension)
            found.append(
                f"Sums by a Fourier series, {modes} modes: every velocity is proved to be right to "
                f"{self.plan.bound:.1e} of the radius before it is computed (--tolerance "
                f"{recipe.tolerance:g}). All pairs would take "
                f"{spoken_time((count or 1) * self._pairs())}{'' if count else ' for each evaluation'}."
            )
        elif recipe.particles > MANY and isinstance(self.plan, Refused):
            found.append(f"All pairs are summed, because a Fourier series does not apply: {self.plan.why}")
        return found

    def run(self) -> None:
        """Every frame that is not in the store yet; a bar on a terminal shows the simulated time."""
        bar = _Shifted(0.0, self.recipe.until)
        with bar:
            try:
                self._unite_again(self._done())
                while (done := self._done()) < len(self.recipe.times()):
                    self._segment(done, bar)
            except BlowUpError as error:
                self._ended = f"It ended early: {error}."

    def _segment(self, done: int, bar: _Shifted) -> None:
        """The frames from here until particles are united, or until the end."""
        times = self.recipe.times()
        first, trajectory = self._trajectory(done)
        bar.begin = times[first]
        for t, measure in trajectory.walk([t - bar.begin for t in times[done:]], bar):
            self._look(done, bar.begin + t, measure)
            if done < len(times) - 1 and self._unite(done, measure):
                return
            self._save(trajectory, first)
            done += 1

    def _unite_again(self, done: int) -> None:
        """What was not done after the last frame, where a run was killed between the two."""
        times, index = self.recipe.times(), done - 1
        if self.recipe.merge == 0 or not 0 < done < len(times):
            return
        first, trajectory = self._trajectory(done)
        if first < index:
            _, measure = next(trajectory.walk([times[index] - times[first]]))
            self._unite(index, measure)

    def _unite(self, index: int, measure: Measure) -> bool:
        """Begin again with fewer and heavier particles, where a tenth of them can be spared."""
        if self.recipe.merge == 0:
            return False
        merged = merge_within(measure, self.recipe.merge, 0.5 * (index % 2))
        if merged.measure.size > FEWER * measure.size:
            return False
        trajectory = self._flow(merged.measure, index)
        trajectory.at(0.0)
        self._trajectories = {index: trajectory}
        self._save(trajectory, index, at_once=True)
        return True

    def report(self) -> dict[str, Any]:
        """Everything that was seen, as plain values."""
        frames = [self.store.get(_key(k)) for k in range(self._done())]
        columns, recipe = [column_of(one) for one in self._observables()], self.recipe
        return {
            "kind": "simulation",
            "recipe": {**asdict(recipe), "weights": recipe.weights},
            "times": [frame["t"] for frame in frames],
            "columns": [column.written() for column in [*columns, *([ATOMS] if recipe.merge else [])]],
            "panels": [
                {
                    "name": f"{recipe.weights}, β = {recipe.beta:g}",
                    **self._camera.written(),
                    "frames": [frame["drawn"] for frame in frames],
                    "values": {name: [frame["values"][name] for frame in frames] for name in _names(frames)},
                }
            ],
            "words": [*self.announcement()[1:], *self._seen(frames), *([self._ended] if self._ended else [])],
        }

    def finish(self, keep: Path | None = None) -> None:
        """Remove what was kept to go on; keep: where the last state is put first."""
        found = self._files()
        if keep is not None and found:
            found[max(found)].replace(keep)
        self.store.remove()

    def _seen(self, frames: list[dict[str, Any]]) -> list[str]:
        """What the numbers say, in words."""
        words = []
        for one in self._observables():
            seen = [frame["values"][column_of(one).name] for frame in frames]
            if isinstance(one, Energy):
                words.append(_course("The energy", [frame["t"] for frame in frames], seen))
            elif isinstance(one, (Clusters, DenseRegions)):
                words.append(f"{one.name.capitalize()}: {seen[0]:g} at the start, {seen[-1]:g} at the end.")
        return words

    def _observables(self) -> list[Observable]:
        """What can be had for so many particles."""
        recipe = self.recipe
        found: list[Observable] = []
        if recipe.beta != 0 and (recipe.particles <= PAIRED or self.engine is not None):
            found.append(Energy(recipe.beta))
        found += [MeanCosine(), EffectiveRank()]
        if recipe.particles <= DRAWN:
            found.append(Clusters(_closeness(recipe)))
        elif recipe.dimension in (2, 3):
            found.append(DenseRegions(max(8, min(720, recipe.particles // 50))))
        return found

    def _look(self, index: int, t: float, measure: Measure) -> None:
        values = {column_of(one).name: one.number(measure, self._begin) for one in self._observables()}
        if self.recipe.merge:
            values[ATOMS.name] = float(measure.size)
        self.store.put(_key(index), {"t": t, "values": values, "drawn": self._camera.frame(measure)})

    def _trajectory(self, done: int) -> tuple[int, Trajectory]:
        """What flows since particles were united last, and the frame at which that was."""
        found = self._files()
        if not self._trajectories and done and found:
            first = max(found)
            kept = resume(found[first], self.recipe.attention(), engine=self.engine)
            self._trajectories = {first: kept}
        elif not self._trajectories:
            self._trajectories = {0: self._flow(self._begin, 0)}
        return next(iter(self._trajectories.items()))

    def _flow(self, measure: Measure, first: int) -> Trajectory:
        recipe = self.recipe
        return flow(
            recipe.attention(),
            measure,
            recipe.steps(),
            recipe.until - recipe.times()[first],
            space=Sphere(),
            noise=recipe.noise,
            seed=recipe.seed + first,
            engine=self.engine,
        )

    def _save(self, trajectory: Trajectory, first: int, *, at_once: bool = False) -> None:
        """Keep the state, unless saving would take most of the time; what was before a merge goes."""
        last, took = self._saved
        now = time.monotonic()
        if self._directory is not None and (at_once or now - last >= PATIENCE * took):
            trajectory.save(self._directory / f"{STATE}{first}.safetensors")
            self._saved = (time.monotonic(), time.monotonic() - now)
            for index, path in self._files().items():
                if index != first:
                    path.unlink(missing_ok=True)

    def _files(self) -> dict[int, Path]:
        """The states that are kept, by the frame at which they begin."""
        if self._directory is None:
            return {}
        return {
            int(path.stem.removeprefix(STATE)): path
            for path in self._directory.glob(f"{STATE}[0-9]*.safetensors")
        }

    def _done(self) -> int:
        count = 0
        while _key(count) in self.store:
            count += 1
        return count

    def _pairs(self) -> float:
        return (PAIR + COORDINATE * self.recipe.dimension) * float(self.recipe.particles) ** 2


def _closeness(recipe: Recipe) -> float:
    """A cosine at which particles that are spread evenly are alone: its cap would hold half of one."""
    even = math.cos(math.pi / (2 * recipe.particles)) if recipe.dimension == 2 else 1 - 1 / recipe.particles
    return max(COSINE, even)


def _course(name: str, times: list[float], values: list[float]) -> str:
    """Whether a number rose from frame to frame, and where it did not."""
    falls = [k for k in range(1, len(values)) if values[k] < values[k - 1] * (1 - 1e-12)]
    if not falls:
        return f"{name} rises from {values[0]:.6g} to {values[-1]:.6g}, and never falls between frames."
    return (
        f"{name} goes from {values[0]:.6g} to {values[-1]:.6g}; it falls between {len(falls)} of "
        f"{len(values) - 1} frames, first before t = {times[falls[0]]:g}: with noise it may, without it the "
        "steps are too long."
    )


def _names(frames: list[dict[str, Any]]) -> list[str]:
    return list(frames[0]["values"]) if frames else []


class _Shifted(Bar):
    """A bar for several flows, one after the other: each begins at `begin`."""

    begin = 0.0

    def reached(self, t: float) -> None:
        super().reached(self.begin + t)


def _key(index: int) -> str:
    return f"frame-{index}"
