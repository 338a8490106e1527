"""Certified bounds of each head: what is proved on the ball that the tokens fill, and at the point."""

from __future__ import annotations

from typing import Any

from regard.audit.checks.base import HEAD, PROVED, Check, Column, Result, Scene, register
from regard.audit.site import Site
from regard.certificate import Certificate
from regard.certify import certify
from regard.domains import Ball, Neighborhood
from regard.errors import ArgumentError
from regard.norms import Frobenius

AT_INPUTS = 1
"""At how many inputs all theorems are asked; the bound on the ball is for every one."""

LONGEST = 64
"""Up to how many tokens: bounds at a point are sums over pairs of tokens in the width of a token."""


def ladder(scene: Scene, site: Site) -> Result:
    """The smallest bound of each head for all inputs of the observed size, and at this input; and all rungs below it."""
    if site.context is not None:
        raise ArgumentError("site", "is cross-attention", "its constants are in the column of the layer")
    ball = observed_ball(site)
    everywhere = [certify(head, ball, Frobenius()) for head in site.singles]
    if scene.index >= AT_INPUTS or len(site.points) > LONGEST:
        return Result({"ball_bound": [c.value for c in everywhere]})
    here = [certify(head, Neighborhood(site.source, 0.0), Frobenius()) for head in site.singles]
    numbers = {"ball_bound": [c.value for c in everywhere], "point_bound": [c.value for c in here]}
    rungs = [{"ball": _rungs(a), "point": _rungs(b)} for a, b in zip(everywhere, here, strict=True)]
    return Result(numbers, {"radius": ball.radius, "heads": rungs})


def observed_ball(site: Site) -> Ball:
    """The ball about the mean of the tokens that holds them, for as many tokens."""
    center = site.points.mean(0)
    radius = float((site.points - center).norm(dim=-1).max()) * (1 + 1e-12)
    return Ball(radius, center, len(site.points))


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
                "A certificate: no pair of inputs whose tokens lie in the ball that the tokens of this input fill is amplified by more. "
                "It holds for every such input, and is loose.",
                PROVED,
                HEAD,
                None,
                "largest",
            ),
            Column(
                "point_bound",
                "proved at the input",
                "A certificate of the local constant of the head at this input, beside the exact value: the smallest of all theorems.",
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
