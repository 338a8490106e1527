"""A trajectory in a notebook: what flows, how far it is computed, and a small picture of it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import torch
from torch import Tensor

from regard.dynamics.motion import Flow, Motion, Node

DRAWN = 400
"""Particles that are drawn at most."""
SIDE = 160


def as_html(motion: Motion, nodes: Sequence[Node]) -> str:
    """A table of facts beside the first two coordinates: rings where particles began, dots where they are."""
    last = max(nodes, key=lambda node: node.index, default=None)
    facts = _facts(motion, 0.0 if last is None else last.time)
    rows = "".join(f"<tr>{_cell('th', name)}{_cell('td', text)}</tr>" for name, text in facts.items())
    picture = _picture(motion.source.points, motion.source.points if last is None else last.points)
    return f'<div style="display:flex;gap:1em;align-items:center">{picture}<table>{rows}</table></div>'


def _cell(kind: str, text: str) -> str:
    return f'<{kind} style="text-align:left">{escape(text)}</{kind}>'


def _facts(motion: Motion, reached: float) -> dict[str, str]:
    points = motion.source.points
    facts = {
        "particles": f"{points.shape[-2]:,} in dimension {points.shape[-1]}",
        "time": f"computed until {reached:.6g} of {motion.until:g}",
    }
    if isinstance(motion, Flow):
        facts |= {"scheme": repr(motion.scheme), "space": repr(motion.space)}
    if isinstance(motion, Flow) and motion.noise > 0:
        facts |= {"noise": f"{motion.noise:g}, seed {motion.seed}"}
    return facts


def _picture(begin: Tensor, now: Tensor) -> str:
    if begin.ndim > 2:
        return ""
    both = torch.stack([_plane(begin), _plane(now)])
    low, high = both.amin((0, 1)), both.amax((0, 1))
    scale = float((high - low).max().clamp_min(1e-12))
    shown = ((both - (low + high) / 2) / scale * (SIDE - 16)).tolist()
    dots = [
        f'<circle cx="{x:.1f}" cy="{-y:.1f}" r="{size}" {style}/>'
        for group, size, style in zip(
            shown, (2, 2.5), ('fill="none" stroke="#888"', 'fill="#a63c08" fill-opacity=".6"'), strict=True
        )
        for x, y in group
    ]
    box = f"{-SIDE / 2} {-SIDE / 2} {SIDE} {SIDE}"
    label = "particles at the start (rings) and where they are computed (dots)"
    size = f'width="{SIDE}" height="{SIDE}" viewBox="{box}"'
    return f'<svg {size} role="img" aria-label="{label}">{"".join(dots)}</svg>'


def _plane(points: Tensor) -> Tensor:
    """The first two coordinates of some of the particles, (k, 2)."""
    every = -(-points.shape[-2] // DRAWN)
    some = points.detach()[::every, :2].double().cpu()
    return torch.nn.functional.pad(some, (0, 2 - some.shape[-1]))
