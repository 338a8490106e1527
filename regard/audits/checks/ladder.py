"""Certified bounds of each head: what is proved on the ball that the tokens fill, and at the point."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard._round import EPS
from regard.audits.checks.base import (
    HEAD,
    PROVED,
    Check,
    Column,
    Cost,
    Limit,
    Measurable,
    Result,
    Scene,
    provable,
    register,
    too_long,
)
from regard.audits.narrowing import Narrowed, narrow_head
from regard.domains import Ball, Domain, Neighborhood
from regard.norms import Frobenius
from regard.proofs import certify

AT_INPUTS = 1
"""At how many inputs all theorems are asked."""

LONGEST = Limit(64, 512, Cost("for a head of width 32", 512, 10.0, 0.1))
"""Up to how many tokens: bounds at a point are sums over pairs of tokens in the width of a token."""


def ladder(scene: Scene, place: Measurable) -> Result:
    """The smallest bound of each head on the ball its tokens fill, and at this input;
    and all rungs below them.
    """
    site = provable(scene, place, AT_INPUTS)
    if site is None:
        return Result()
    heads = [narrow_head(head, site.source) for head in site.singles]
    balls = [observed_ball(head.points) for head in heads]
    everywhere = [_rungs(head, ball) for head, ball in zip(heads, balls, strict=True)]
    numbers = {"ball_bound": [rungs[0][1] for rungs in everywhere]}
    reason = too_long(scene, len(site.points), LONGEST, "nothing is proved at the point")
    if reason:
        return Result(numbers, reason=reason)
    here = [_rungs(head, Neighborhood(head.source, 0.0)) for head in heads]
    trios = zip(balls, everywhere, here, strict=True)
    table = {"heads": [{"radius": ball.radius, "ball": wide, "point": near} for ball, wide, near in trios]}
    return Result({**numbers, "point_bound": [rungs[0][1] for rungs in here]}, table)


def observed_ball(points: Tensor) -> Ball:
    """The ball about the mean of the tokens that holds them, and what rounding moves them by,
    for as many tokens.
    """
    center = points.mean(0)
    rounding = 16 * points.shape[-1] * EPS * float(points.abs().max())
    radius = (float((points - center).norm(dim=-1).max()) + rounding) * (1 + 1e-12)
    return Ball(radius, center, len(points))


def _rungs(head: Narrowed, domain: Domain) -> list[list[Any]]:
    """Theorem, value, and the probability that it holds over the randomness of its own proof;
    the smallest first.
    """
    smallest = certify(head.head, domain, Frobenius())
    every = sorted((smallest, *smallest.others), key=lambda rung: rung.value)
    return [[rung.theorem, head.margin * rung.value, rung.probability] for rung in every]


register(
    Check(
        "bounds",
        "What can be proved about each head?",
        (
            Column(
                "ball_bound",
                "proved on the observed ball",
                "A certificate: no two inputs whose tokens, as the head reads them, lie in the ball "
                "filled by those of the first input "
                "are amplified by more. It holds for every such input, and is loose.",
                PROVED,
                HEAD,
                None,
                "median",
                "head_constant",
            ),
            Column(
                "point_bound",
                "proved at the input",
                "A certificate of the local constant of the head at the first input, beside the measured "
                "one: the smallest of all theorems. "
                "Where tokens times width, as the head reads them, are more than 1536, its proof may have "
                "a random start: it then holds "
                "with probability 1 - 1e-6 for each head, and the ladder of the head says so. "
                f"For inputs of at most {LONGEST}.",
                PROVED,
                HEAD,
                None,
                "median",
                "head_constant",
            ),
        ),
        of_site=ladder,
        order=40,
    )
)
