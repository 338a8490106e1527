"""What theorems about Gibbs rows share: the balls that hold the tokens with the slopes of the scores on
them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from regard._upper import exact
from regard.domains import Domain, Near
from regard.normalizers import SinkSoftmax
from regard.proofs.question import once
from regard.proofs.scores import BallFacts, Slopes, bilinear, slopes
from regard.proofs.setting import balls_of, moves_of, pair_bias, width_of
from regard.proofs.subject import Head
from regard.proofs.theorem import Refusal


def gibbs_balls(head: Head, domain: Domain, slot: bool = False) -> list[tuple[BallFacts, Slopes]]:
    """Balls with slopes, for softmax rows of tokens in a bounded set; whatever else is refused with a
    sentence.

    slot: whether the theorem allows one more key with the value zero and a fixed score.
    """
    if not head.softmax and not (slot and isinstance(head.normalizer, SinkSoftmax)):
        raise Refusal(f"rows of {type(head.normalizer).__name__} are not Gibbs laws; use Softmax()")
    head.factors  # noqa: B018 (values without a theorem are refused here)
    found = once(("balls", id(head), domain), head, lambda: bounded_balls(head, domain))
    if isinstance(head.normalizer, SinkSoftmax):
        found = _with_slot(head, found)
    if isinstance(domain, Near):
        pair_bias(head, domain)  # rows that see nothing are refused
    return found


def derivative_balls(head: Head, domain: Domain) -> list[tuple[BallFacts, Slopes]]:
    """The same, with slopes that hold at the sequences of the domain alone, and not for every token of a
    ball: for theorems that bound the derivative at each of them, and use slopes nowhere else.
    """
    found = gibbs_balls(head, domain, slot=True)
    if not isinstance(domain, Near) or not head.softmax:
        return found
    points, moves = domain.measure.points, exact(moves_of(domain))
    balls = [replace(ball, places=points, moves=moves) for ball, _ in found]
    return [(ball, slopes.one(head.potential, ball)) for ball in balls]


def _with_slot(head: Head, balls: list[tuple[BallFacts, Slopes]]) -> list[tuple[BallFacts, Slopes]]:
    """The sink of SinkSoftmax as one more key with value zero and a constant score: the ball must hold zero,
    and the ball of slopes must hold the slope zero.

    It only makes other weights smaller, so bounds of weights stay valid.
    """
    if head.value_bias is not None and bool((head.value_bias != 0).any()):
        raise Refusal(
            "values with a bias: the slot's value is zero, not the bias; fold the bias into a constant "
            "coordinate of the tokens"
        )
    found = []
    for ball, slope in balls:
        origin = BallFacts(torch.zeros_like(ball.center), ball.reach, ball.reach)
        steep = slopes.one(head.potential, origin)
        nu = (
            steep.alpha.halved()
            if bilinear.one(head.potential, len(ball.center)) is not None
            else steep.alpha
        )
        found.append((origin, replace(steep, nu=nu, kappa=slope.reach.minimum(steep.reach))))
    return found


def bounded_balls(head: Head, domain: Domain) -> list[tuple[BallFacts, Slopes]]:
    """The same for any normalizer."""
    balls = balls_of(domain, head.width(width_of(domain)))
    if all(math.isinf(ball.radius) for ball in balls):
        raise Refusal("tokens are not bounded; use Ball(radius), or put a norm layer first")
    return [(ball, slopes.one(head.potential, ball)) for ball in balls]
