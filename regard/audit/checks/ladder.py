"""Certified bounds of each head: what is proved on the ball that the tokens fill, and at the point."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from regard._object import Object
from regard.attention import Attention
from regard.audit.checks.base import HEAD, PROVED, Check, Column, Result, Scene, register
from regard.audit.site import Site
from regard.certificate import Certificate
from regard.certify import certify
from regard.domains import Ball, Neighborhood
from regard.errors import ArgumentError
from regard.measure import Measure
from regard.norms import Frobenius

AT_INPUTS = 1
"""At how many inputs all theorems are asked."""

PROJECTIONS = ("w_q", "w_k", "w_v")
LONGEST = 64
"""Up to how many tokens: bounds at a point are sums over pairs of tokens in the width of a token."""


def ladder(scene: Scene, site: Site) -> Result:
    """The smallest bound of each head on the ball its tokens fill, and at this input; and all rungs below them."""
    if scene.index >= AT_INPUTS:
        return Result()
    if site.context is not None:
        raise ArgumentError("site", "is cross-attention", "its constants are in the column of the layer")
    if site.blind:
        raise ArgumentError("inputs", f"{scene.index + 1} has tokens that see no key", "give the text without padding")
    everywhere, here, radii = [], [], []
    for head in site.singles:
        attention, points = narrowed(head, site.source)
        ball = observed_ball(points)
        radii.append(ball.radius)
        everywhere.append(certify(attention, ball, Frobenius()))
        if len(site.points) <= LONGEST:
            here.append(certify(attention, Neighborhood(points, 0.0), Frobenius()))
    numbers = {"ball_bound": [c.value for c in everywhere]}
    if not here:
        return Result(numbers)
    rungs = [{"radius": r, "ball": _rungs(a), "point": _rungs(b)} for r, a, b in zip(radii, everywhere, here, strict=True)]
    return Result({**numbers, "point_bound": [c.value for c in here]}, {"heads": rungs})


def narrowed(head: Attention, source: Measure | Tensor) -> tuple[Attention, Measure | Tensor]:
    """The same head on tokens in an orthonormal basis of what its projections read: as many coordinates as these have columns.

    Nothing else of a token reaches the head, so constants are the same, and balls are those of what it sees.
    """
    matrices = [leaf for leaf in _projections(head) if leaf.ndim == 2]
    points = source.points if isinstance(source, Measure) else source
    if not matrices or sum(m.shape[-1] for m in matrices) >= points.shape[-1] or any(len(m) != points.shape[-1] for m in matrices):
        return head, source
    basis = torch.linalg.qr(torch.cat(matrices, -1))[0]
    seen = points @ basis
    return _in_basis(head, basis), source.replace(points=seen) if isinstance(source, Measure) else seen


def _projections(value: Any) -> list[Tensor]:
    """Every w_q, w_k and w_v of a declaration."""
    own = [getattr(value, f.name) for f in dataclasses.fields(value) if f.name in PROJECTIONS]
    inner = [part for f in dataclasses.fields(value) for part in _parts(getattr(value, f.name))]
    return [tensor for tensor in own if tensor is not None] + [tensor for part in inner for tensor in _projections(part)]


def _parts(value: Any) -> list[Object]:
    return [part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, Object)]


def _in_basis(value: Any, basis: Tensor) -> Any:
    """A declaration whose projections read coordinates in a basis."""

    def turned(name: str, part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(turned(name, item) for item in part)
        if isinstance(part, Object):
            return _in_basis(part, basis)
        return basis.mT @ part if name in PROJECTIONS and part is not None else part

    return value.replace(**{f.name: turned(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)})


def observed_ball(source: Measure | Tensor) -> Ball:
    """The ball about the mean of the tokens that holds them, for as many tokens."""
    points = source.points if isinstance(source, Measure) else source
    center = points.mean(0)
    radius = float((points - center).norm(dim=-1).max()) * (1 + 1e-12)
    return Ball(radius, center, len(points))


def _rungs(certificate: Certificate) -> list[list[Any]]:
    """Theorem, value, and the probability that it holds over the randomness of its own proof."""
    every = sorted((certificate, *certificate.others), key=lambda rung: rung.value)
    return [[rung.theorem, rung.value, rung.probability] for rung in every]


register(
    Check(
        "bounds",
        "What can be proved about each head?",
        (
            Column(
                "ball_bound",
                "proved on the observed ball",
                "A certificate: no pair of inputs is amplified by more whose tokens, as far as the head reads them, lie in the ball that "
                "those of the first input fill. It holds for every such input, and is loose.",
                PROVED,
                HEAD,
                None,
                "largest",
            ),
            Column(
                "point_bound",
                "proved at the input",
                "A certificate of the local constant of the head at the first input, beside the exact value: the smallest of all theorems.",
                PROVED,
                HEAD,
                None,
                "largest",
            ),
        ),
        of_site=ladder,
        order=40,
    )
)
