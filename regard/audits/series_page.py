"""The page of a series: the head to look at and why, a map of the heads at every checkpoint, and growth on a
common scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from regard._pages import content_hash, environment, markup
from regard.audits.checks.base import Column
from regard.audits.series import CURVES, HOLDS, Series, Track
from regard.audits.words import Sentence, say

TEMPLATES = Path(__file__).parent / "templates"
WIDTH, HEIGHT = 640, 260
"""Of the picture of growth, in its own units; the page scales it."""
MARGIN = 44


@dataclass(frozen=True)
class Scale:
    """A logarithmic scale of all positive numbers of a column, the same for every checkpoint and head."""

    low: float
    high: float

    @classmethod
    def of(cls, tracks: Sequence[Track]) -> Scale:
        """The scale of some tracks."""
        known = [value for track in tracks for value in track.values if math.isfinite(value) and value > 0]
        return cls(min(known, default=1.0), max(known, default=1.0))

    def share(self, value: float) -> float:
        """Where a number is, from zero to one."""
        if not value > 0 or not self.high > self.low:
            return 0.0
        return min(1.0, max(0.0, math.log(value / self.low) / math.log(self.high / self.low)))


@dataclass(frozen=True)
class Panel:
    """What the page shows of one column."""

    column: Column
    found: Series

    @cached_property
    def tracks(self) -> list[Track]:
        """Its heads, those that grow most first."""
        return self.found.ranked(self.column.name)

    @cached_property
    def scale(self) -> Scale:
        """The scale of its numbers."""
        return Scale.of(self.tracks)

    @property
    def leaders(self) -> list[Track]:
        """The heads whose curves are drawn."""
        return self.tracks[:CURVES]

    @property
    def marked(self) -> list[Track]:
        """The heads that ran ahead of the others."""
        return [track for track in self.tracks if track.fast]

    @property
    def sites(self) -> list[str]:
        """The attention modules, in the order of the model."""
        return list(dict.fromkeys(track.site for track in sorted(self.tracks, key=lambda t: t.layer)))

    def at(self, site: str, checkpoint: int) -> list[tuple[Track, float, float]]:
        """The heads of a module at a checkpoint: track, number, shade."""
        own = sorted((t for t in self.tracks if t.site == site), key=lambda t: t.head)
        return [(t, t.values[checkpoint], self.scale.share(t.values[checkpoint])) for t in own]

    def curve(self, values: Sequence[float]) -> str:
        """The points of a polyline; numbers that are not positive are left out."""
        steps = max(len(self.found.names) - 1, 1)
        known = [(i, v) for i, v in enumerate(values) if math.isfinite(v) and v > 0]
        width, height = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
        return " ".join(
            f"{MARGIN + i / steps * width:.1f},{HEIGHT - MARGIN - self.scale.share(v) * height:.1f}"
            for i, v in known
        )

    @property
    def typical(self) -> tuple[float, ...]:
        """The median head at every checkpoint."""
        from statistics import median

        return tuple(median(t.values[i] for t in self.tracks) for i in range(len(self.found.names)))


def verdict(found: Series) -> Sentence:
    """The head to look at, and why; or that none runs ahead."""
    away = runaway_in_words(found)
    if away is not None:
        return away
    panels = [Panel(column, found) for column in found.columns]
    marked = [(panel, track) for panel in panels for track in panel.marked]
    if not any(panel.tracks for panel in panels):
        return say("No head is known in all checkpoints, so nothing was compared.")
    if not marked:
        return say("No head runs ahead of the others.")
    panel, track = max(marked, key=lambda pair: max(_finite(step) for step in pair[1].ahead))
    step = max(range(len(track.ahead)), key=lambda i: _finite(track.ahead[i]))
    return say(
        "Look at {place}: its {column} went from {before} to {after} on the way to {checkpoint}, and so grew "
        "{times} times as much as that of the median head. " + _outlook(track),
        place=track.label,
        column=panel.column.title,
        before=track.values[step],
        after=track.values[step + 1],
        checkpoint=found.names[step + 1],
        times=math.exp(min(700.0, track.ahead[step])),
        next=track.values[-1] * math.exp(min(700.0, _finite(track.steps[-1]))),
        reason=REASONS.get(track.column, ""),
    )


def runaway_in_words(found: Series) -> Sentence | None:
    """The head whose largest logit runs away, by the rule that benchmarks/divergence.py tests."""
    away = found.runaway()
    if away is None:
        return None
    place, track = away
    later = "; it is {last} at {end}" if place < len(found.names) - 1 else ""
    return say(
        "Look at {place}: its {column} went from {before} to {after} on the way to {checkpoint}, the largest "
        "of all heads there" + later + ". It leads for now, and another may overtake it. A product of query "
        "and key is larger still, by the root of the head's width where scores are scaled later, and float16 "
        "ends at {holds}: where it is used, lower the learning rate, normalize queries and keys, or multiply "
        "them in float32.",
        place=track.label,
        column="largest logit",
        before=track.values[place - 1],
        after=track.values[place],
        checkpoint=found.names[place],
        last=track.values[-1],
        end=found.names[-1],
        holds=HOLDS,
    )


REASONS = {
    "qk_norm": "scores grow with this norm until each row looks at one token, and training that diverges "
    "often begins in such a head",
    "ov_norm": "whatever this head reads is written that much louder into the stream, and what follows has "
    "to outshout it",
}
"""Why growth of a column is a bad sign."""


def _outlook(track: Track) -> str:
    """Where the head is heading, if it still grows, and why that matters."""
    if not track.ahead or not _finite(track.ahead[-1]) > 0 or not math.isfinite(track.steps[-1]):
        return "It no longer runs ahead at the last checkpoint."
    pace = "At the pace of the last step, it would be about {next} at the next checkpoint"
    return pace + ("; {reason}." if track.column in REASONS else ".")


def _finite(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def _basis(found: Series) -> str:
    if "largest_logit" in [column.name for column in found.columns]:
        return "Norms come from the weights, logits from the same texts at every checkpoint."
    return "Numbers come from the weights alone: with --text, logits are compared too."


def html(found: Series) -> str:
    """The whole page as text: one file that runs nothing."""
    style = (TEMPLATES / "series.css").read_text(encoding="utf-8")
    return str(
        environment(TEMPLATES)
        .get_template("series.html.j2")
        .render(
            series=found,
            panels=[Panel(column, found) for column in found.columns],
            verdict=verdict(found).text,
            basis=_basis(found),
            width=WIDTH,
            height=HEIGHT,
            margin=MARGIN,
            style=markup(style),
            style_hash=content_hash(style),
        )
    )
