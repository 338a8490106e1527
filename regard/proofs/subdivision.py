"""Branch and bound: a neighborhood that one bound does not decide is cut, and its parts are asked again.

What is cut are hulls of embeddings, which have few dimensions: the longest edge [p, q] is halved at m, and
hull(p, q, …) = hull(p, m, …) ∪ hull(m, q, …). A ball of many dimensions gains little by cuts along a few of
them (`python -m benchmarks.subdivision`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import Upper, relative_error
from regard.domains import Hull, Near
from regard.errors import ArgumentError
from regard.proofs.ball_model.ellipsoids import Sum
from regard.proofs.ball_model.state import State
from regard.proofs.theorem import Refusal
from regard.proofs.theorems.ball_model import start

Lead = tuple[float, int]
"""At most the least lead of a label, and the class that comes nearest."""


@dataclass(frozen=True)
class Piece:
    """A hull of corners (k, d) at one token; every point of the part that it stands for is within `off` of
    one of it, which is what rounding did to halves of edges.
    """

    domain: Hull
    corners: Tensor
    off: Upper

    @property
    def state(self) -> State:
        """Where the ball model begins."""
        points = self.domain.measure.points.clone()
        points[self.domain.token] = self.corners[0]
        state = start(Hull(points, self.domain.token, self.corners[1:]))
        away = torch.zeros(len(points), dtype=torch.float64)
        away[self.domain.token] = self.off.bound
        return state.with_rest(Sum(*points.shape).ball(Upper(away)))

    def halves(self) -> tuple[Piece, Piece]:
        """The longest edge cut in its middle."""
        first, second = _longest_edge(self.corners)
        ends = self.corners[[first, second]]
        off = self.off + relative_error(4) * computed_lengths(ends).sum()
        return self._with(first, ends.mean(0), off), self._with(second, ends.mean(0), off)

    def _with(self, place: int, corner: Tensor, off: Upper) -> Piece:
        corners = self.corners.clone()
        corners[place] = corner
        return replace(self, corners=corners, off=off)


def _longest_edge(corners: Tensor) -> tuple[int, int]:
    away = torch.cdist(corners, corners)
    return divmod(int(away.argmax()), len(corners))


def check_pieces(pieces: int, domain: Near) -> None:
    """A number of parts, and a domain that can be cut into them."""
    if isinstance(pieces, bool) or not isinstance(pieces, int) or pieces < 1:
        raise ArgumentError("pieces", f"is {pieces!r}", "give a whole number of at least 1")
    if pieces > 1 and not isinstance(domain, Hull):
        found = f"is {pieces}, and the domain is a {type(domain).__name__}"
        raise ArgumentError("pieces", found, "only a Hull of embeddings is cut into parts")


def least_lead(domain: Near, ask: Callable[[State], Lead], pieces: int) -> tuple[Lead, int]:
    """At most the least lead over a domain, with the class that comes nearest, and of how many bounds: parts
    that are not decided are cut until `pieces` bounds are used up. A part that is not asked about has what
    was found of the one it was cut from.
    """
    if pieces == 1 or not isinstance(domain, Hull):
        return ask(start(domain)), 1
    waiting = [(Piece(domain, domain.corners, Upper(0.0)), (-math.inf, -1))]
    count, found, refusal = 0, list[Lead](), None
    while waiting and count < pieces:
        piece, known = waiting.pop()
        count += 1
        try:
            known = max(known, ask(piece.state), key=lambda lead: lead[0])
        except Refusal as said:
            refusal = refusal or said
        if known[0] > 0:
            found.append(known)
        else:
            waiting += [(half, known) for half in piece.halves()]
    lowest = min([*found, *(known for _, known in waiting)], key=lambda lead: lead[0])
    if lowest[1] < 0:
        assert refusal is not None
        raise refusal
    return lowest, count
