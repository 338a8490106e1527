"""What theorems about Gibbs rows share: the balls that hold the tokens with the slopes of the scores on them."""

from __future__ import annotations

import math

from regard.certify.scores import BallFacts, Slopes, slopes
from regard.certify.setting import balls_of, pair_bias, width_of
from regard.certify.subject import Head
from regard.certify.theorem import Refusal
from regard.domains import Domain, Near


def gibbs_balls(head: Head, domain: Domain) -> list[tuple[BallFacts, Slopes]]:
    """Balls with slopes, for softmax rows of tokens in a bounded set; whatever else is refused with a sentence."""
    if not head.softmax:
        raise Refusal(f"rows of {type(head.normalizer).__name__} are not Gibbs laws")
    head.factors  # noqa: B018 (values without a theorem are refused here)
    found = bounded_balls(head, domain)
    if isinstance(domain, Near):
        pair_bias(head, domain)  # rows that see nothing are refused
    return found


def bounded_balls(head: Head, domain: Domain) -> list[tuple[BallFacts, Slopes]]:
    """The same for any normalizer."""
    balls = balls_of(domain, head.width(width_of(domain)))
    if all(math.isinf(ball.radius) for ball in balls):
        raise Refusal("tokens are not bounded; use Ball(radius), or put a norm layer first")
    return [(ball, slopes.one(head.potential, ball)) for ball in balls]
