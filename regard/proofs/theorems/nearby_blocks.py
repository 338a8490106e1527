"""Laws near a given one, through blocks: attention, residual connections, norm layers and token-wise maps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from regard._upper import Upper, exact, total
from regard.attention import Attention
from regard.domains import Ball, NearbyLaws, Tube
from regard.maps import Added, Compose, Heads, Map, Residual
from regard.measure import Measure
from regard.norms import TokenMax, Wasserstein
from regard.proofs.certification import certify, deviation
from regard.proofs.imaging import imaging
from regard.proofs.law_rows import ball_around
from regard.proofs.locating import locate, margin_after, one_sequence, slip, summands, tokenwise
from regard.proofs.setting import finite_ball
from regard.proofs.theorem import Bound, Refusal, Theorem, finite
from regard.proofs.theorems.measure_deviation import CHECKED
from regard.proofs.theorems.transported import refuse_larger

THEOREM = Theorem(
    name="nearby_blocks",
    title="a law carried through blocks, near a given one",
    statement=r"""
$f = f_k\circ\dots\circ f_1$ acts on laws of tokens, each $f_i$ attention, a map of tokens, a sum of such
maps, or such a map with a residual connection. Along every coupling $(X, Y)$ of $\mu$ and a law $\nu$ near
it, with $\rho_i$ a bound of $\|Y_i - X_i\|_{L^p}$ before $f_i$ and $B_i$ a ball that holds all tokens
there: attention moves by at most $\delta_i$ of `transported` for laws within $\rho_i$ of the law of $X_i$
on $B_i$; a map of tokens with the constant $L_i$ on $B_i$ by at most $L_i\rho_i$; sums by the sum of these,
and a residual connection adds $\rho_i$. That is $\rho_{i+1}$, or twice the radius of $B_{i+1}$, and
$W_p(f_\#\mu, f_\#\nu) \le \rho_{k+1}$. In a tube without jumps the same for $p = \infty$ says in which tube
the tokens are before $f_i$.
""",
    hypotheses=("as in `transported`, for every attention", "a constant of every map of tokens on a ball"),
    source="(vuckovic2021)",
    proof=r"""
All bounds hold for every coupling with $\|Y_i - X_i\|_{L^p} \le \rho_i$, so along the same one from map to
map, and Minkowski's inequality adds them. The values of $\mu$ are computed, so the law of $X_i$ is known up
to a margin: laws near it are near the computed one, by as much more, and the attention of both differs by
how far a value slips when its tokens are known up to the margin.
""",
)


@dataclass(frozen=True)
class _Carried:
    """μ as computed, how far its tokens are from the exact ones at the most, a ball that holds every token of
    laws near it, at least ‖Y - X‖ in L^p, and in L^∞ where laws stay in a tube.
    """

    measure: Measure
    margin: Upper
    ball: Ball
    p: float
    apart: Upper
    tube: Upper | None

    def nearby(self, p: float) -> NearbyLaws:
        """The laws as near, about the computed one."""
        near = self.apart if p == self.p or self.tube is None else self.tube
        radius = float(near + self.margin)
        if self.tube is None:
            more = finite_ball(exact(self.ball.radius) + self.margin, self.ball.center, None)
            return NearbyLaws(self.measure, radius, more, p)
        return NearbyLaws(self.measure, radius, Tube(float(self.tube + self.margin), jumps=False), p)


def _in_parts(map: Map, domain: NearbyLaws, norm: Wasserstein) -> bool:
    """What `transported` is not about."""
    return not (isinstance(map, Residual) and isinstance(map.map, (Attention, Heads)))


@THEOREM.deviation(Map, NearbyLaws, Wasserstein, about=_in_parts)
def nearby_blocks(map: Map, domain: NearbyLaws, norm: Wasserstein) -> Bound:
    """ρ after the last map."""
    refuse_larger(domain, norm)
    tube, radius = domain.within, exact(domain.radius)
    own = exact(tube.radius) if isinstance(tube, Tube) and not tube.jumps else None
    start = _Carried(domain.measure, exact(0.0), ball_around(domain), norm.p, radius, own)
    return Bound(_moved(map, start, norm.p), CHECKED)


def _moved(map: Any, state: _Carried, p: float) -> Upper:
    """At least ‖f(Y) - f(X)‖ in L^p."""
    one_sequence(map)
    if tokenwise(map):
        slope = finite(certify(map, state.ball.replace(tokens=1), TokenMax()), type(map).__name__)
        near = state.apart if p == state.p or state.tube is None else state.tube
        return Upper(slope.value) * near
    if isinstance(map, (Attention, Heads)):
        part = finite(deviation(map, state.nearby(p), Wasserstein(p)), type(map).__name__)
        return Upper(part.value) + slip(map, state.measure, state.margin)
    if isinstance(map, Residual):
        near = state.apart if p == state.p or state.tube is None else state.tube
        return near + _moved(map.map, state, p)
    if isinstance(map, Added):
        return total([_moved(part, state, p) for part in summands(map)])
    if isinstance(map, Compose):
        for inner in map.maps[:-1]:
            state = _after(inner, state)
        return _moved(map.maps[-1], state, p)
    raise Refusal(f"{type(map).__name__} is not a map of laws that is followed; use blocks of attention")


def _after(map: Any, state: _Carried) -> _Carried:
    """What is known after a map."""
    held = imaging.one(map, state.ball)
    if not isinstance(held, Ball):
        raise Refusal(f"tokens may be anywhere after {type(map).__name__}; put a norm layer first")
    margin = margin_after(map, state.measure, state.margin)
    if not math.isfinite(margin):
        raise Refusal(f"the value of {type(map).__name__} is not located")
    widest = 2 * exact(held.radius)
    tube = None if state.tube is None else _moved(map, state, math.inf).minimum(widest)
    return replace(
        state,
        measure=_plain(locate.one(map, state.measure)[0]),
        margin=margin,
        ball=held,
        apart=_moved(map, state, state.p).minimum(widest),
        tube=tube,
    )


def _plain(measure: Measure) -> Measure:
    return Measure(measure.points, measure.log_weights)
