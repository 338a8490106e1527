"""Whole networks near an input, with remainders that keep their directions: what decisions rest on."""

from __future__ import annotations

import math

from torch import Tensor

from regard._enclosed import computed_lengths, spectral_norms
from regard._upper import Upper
from regard.certificate import Hypothesis
from regard.domains import Hull, Near
from regard.errors import ArgumentError
from regard.maps import Compose, Map
from regard.norms import EntryMax, Frobenius, SequenceNorm, TokenMax, TokenSum
from regard.proofs.ball_model.beginning import at_rest, begin, by_orders
from regard.proofs.ball_model.network import through
from regard.proofs.ball_model.state import State
from regard.proofs.locating import in_double, one_sequence
from regard.proofs.question import asked_for, once
from regard.proofs.theorem import Bound, Refusal, Theorem, assumed

THEOREM = Theorem(
    name="ball_model",
    title="the ball model of a network",
    statement=r"""
For every input of a neighborhood, parametrized by $|u| \le 1$, the tokens after each map are
$$ x_i = c_i + A_iu + u^\top H_iu + \sum_g B_{ig}w_g + e_i,\qquad |w_g| \le 1,\quad |a\cdot e_i| \le
(a^\top Q_ia)^{1/2}\ \forall a, $$
where a map acts on $A$, $H$, $B$ by its exact derivatives at the center and adds its remainder to $Q$: sets
of moves are added by $Q = (\sum s_k)(\sum Q_k/s_k)$; a quadratic move $u^\top H_cu$ by the Gram matrix
$\langle H_c, H_d\rangle$ after its part along $A_i^\top A_i$ is taken out; neurons together by
$\lambda_{\max}[(b_k\cdot b_l)^2]$; norm layers by homogeneity; softmax rows by $-\mathrm{down} \le E_j \le
\mathrm{up}$. Before attention the ellipsoids become groups, which tokens share. A functional is at least
$$ a\cdot c + \min_{|u|\le1}\bigl(A^\top a\cdot u + u^\top(a\cdot H)u\bigr) - \sum_g|B_g^\top a| -
(a^\top Qa)^{1/2}. $$
""",
    hypotheses=(
        "a neighborhood of one sequence: tokens in balls or boxes, all in one ball, one token in the hull of "
        "embeddings",
        "attention with softmax rows of Dot, Bilinear or Rotary scores, norm layers, feed-forward layers "
        "plain and gated, affine maps, sums",
    ),
    proof=r"""
By induction over maps: the identities of docs/ball-model.md for each of them, Taylor's formula with what
the state before it reaches, and the triangle inequality for sums of sets. What rounding changes in $c$, $A$,
$H$, $B$ is a remainder of its own.
""",
)


@THEOREM.deviation(Compose, Near, SequenceNorm)
def ball_model(map: Map, domain: Near, norm: SequenceNorm) -> list[Bound]:
    """The norm of the moves of all tokens, to the first order and, where that is small, to the second."""
    if any(isinstance(whole, Compose) for whole in asked_for()[:-1]):
        raise Refusal("the ball model is made of the whole network, beside what is proved about its parts")
    network = once(("ball model in double", id(map)), map, lambda: in_double(map))
    one_sequence(network)
    center = _at_rest(map, network, domain.measure.points)
    begins = not isinstance(domain, Hull)
    found = by_orders(start(domain), lambda state: _deviation(run(network, state), center, norm, begins))
    return [Bound(value, (arithmetic(),)) for value in found]


def _at_rest(map: Map, network: Map, points: Tensor) -> State:
    """The value at the given sequence, the same for every radius."""
    key = ("ball model at rest", id(map), points.shape, tuple(points.detach().flatten().tolist()))
    return once(key, map, lambda: run(network, at_rest(points)))


def start(domain: Near) -> State:
    """The neighborhood as a state."""
    measure = domain.measure
    if measure.log_weights is not None or measure.marks is not None:
        raise Refusal("weights and marks of the points have no ball model; give the points without them")
    state: State = begin.one(domain)
    return state


def run(network: Map, state: State) -> State:
    """A network on a state; what leaves the range of numbers is refused."""
    try:
        after: State = through.one(network, state)
    except ArgumentError as error:
        raise Refusal(f"the value at the given sequence is not a number: {error}") from None
    if not all(bool(part.isfinite().all()) for part in (after.center, after.linear, after.shape)):
        raise Refusal("its remainders leave the range of numbers on this domain; use a smaller radius")
    return after


def _deviation(state: State, still: State, norm: SequenceNorm, begins: bool = False) -> Upper:
    """At least how far values are from that of the given sequence, which is near the center of `still`; and,
    where that sequence is u = 0 of the state, as near the center of the state as its remainders say.
    """
    shift = computed_lengths(state.center - still.center) * (1 + Upper(2.0**-50)) + still.longest_rest
    rest = state.longest_rest
    each = spectral_norms(state.linear) + rest + (shift.minimum(rest) if begins else shift)
    if not math.isfinite(float(each.amax())):
        raise Refusal("its remainders leave the range of numbers on this domain; use a smaller radius")
    if isinstance(norm, (TokenMax, EntryMax)):
        return each.amax()
    if isinstance(norm, TokenSum):
        return each.sum()
    assert isinstance(norm, Frobenius)
    joint, moved = state.joint_rest(), shift.norm()
    moved = moved.minimum(joint) if begins else moved
    return each.norm().minimum(moved + spectral_norms(state.linear.flatten(0, 1)) + joint)


def arithmetic() -> Hypothesis:
    """What is taken on trust of the machine."""
    return assumed(
        "float64 rounds to nearest, exponentials are right to eight units, eigenvalues and Cholesky factors "
        "are backward stable"
    )
