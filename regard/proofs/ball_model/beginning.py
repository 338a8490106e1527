"""Where the ball model begins: a neighborhood of a sequence as a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import Upper, exact, exact_lower, relative_error
from regard._verb import Verb
from regard.domains import Box, Domain, Hull, Neighborhood, Radii
from regard.norms import Frobenius
from regard.proofs.ball_model.ellipsoids import Sum, no_shape
from regard.proofs.ball_model.groups import no_groups
from regard.proofs.ball_model.inputs import BallPart, BoxPart, Inputs, Part, SimplexPart, shares_of, stretched
from regard.proofs.ball_model.quadratic import Quadratic
from regard.proofs.ball_model.state import State
from regard.proofs.theorem import Refusal

LARGEST = 60_000_000
"""How many numbers a derivative may hold."""
CURVED = 24_000_000
"""Up to how many numbers, in layers four times as wide as a token, second derivatives are carried."""

begin = Verb("begin")
"""begin.one(domain) -> State of the first order."""


@begin.rule(Domain)
def _unknown(domain: Domain) -> State:
    raise Refusal(f"a {type(domain).__name__} has no ball model; give Radii, Box, Hull or a Neighborhood")


@begin.rule(Radii)
def _radii(domain: Radii) -> State:
    return _tokens(domain.measure.points, domain.radii.double(), BallPart)


@begin.rule(Box)
def _box(domain: Box) -> State:
    return _tokens(domain.measure.points, domain.radii.double(), BoxPart)


@begin.rule(Neighborhood)
def _neighborhood(domain: Neighborhood) -> State:
    """All tokens move: together in one ball, or each in its own."""
    points = domain.measure.points
    n, d = points.shape
    if not isinstance(domain.norm, Frobenius):
        return _tokens(points, torch.full((n,), float(domain.radius), dtype=torch.float64), BallPart)
    if not domain.radius:
        return at_rest(points)
    _check_size(n * d, n * d)
    linear = float(domain.radius) * torch.eye(n * d, dtype=torch.float64).unflatten(0, (n, d))
    return _state(points, Inputs((BallPart(n * d),), (1.0,)), linear)


@begin.rule(Hull)
def _hull(domain: Hull) -> State:
    """Σ_k λ_k p_k = c + (1 - 1/K)^{1/2} [p_k - c]_k u about the mean c of the corners."""
    points, corners = domain.measure.points.clone(), domain.corners
    count = len(corners)
    mean = corners.mean(0)
    points[domain.token] = mean
    _check_size(points.numel(), count)
    shrink = (exact_lower(float(count - 1)) / exact(float(count))).sqrt()
    linear = torch.zeros(*points.shape, count, dtype=torch.float64)
    linear[domain.token] = float(shrink.value) * (corners - mean).mT
    off = torch.zeros(len(points), dtype=torch.float64)
    size = computed_lengths(corners).amax() + computed_lengths(mean)
    off[domain.token] = (relative_error(4 * count + 32) * size * count).bound
    state = _state(points, Inputs((SimplexPart(count),), (1.0,)), linear)
    return state.with_rest(Sum(*points.shape).ball(Upper(off)))


def at_rest(points: Tensor) -> State:
    """Nothing moves: an enclosure of a value, with the rounding of its computation alone."""
    n, d = points.shape
    return _state(points, Inputs((), ()), torch.zeros(n, d, 0, dtype=torch.float64))


def _tokens(points: Tensor, radii: Tensor, kind: type[BallPart] | type[BoxPart]) -> State:
    """Some tokens move, each in a set of its own."""
    n, d = points.shape
    moving = [int(i) for i in (radii > 0).nonzero().flatten()]
    if not moving:
        return at_rest(points)
    _check_size(n * d, len(moving) * d)
    shares = shares_of([float(radii[i]) for i in moving])
    linear = torch.zeros(n, d, len(moving) * d, dtype=torch.float64)
    wide = None if kind is BallPart else d
    for k, (i, share) in enumerate(zip(moving, shares, strict=True)):
        length = stretched(float(radii[i]), share, wide)
        linear[i, :, k * d : (k + 1) * d] = length * torch.eye(d, dtype=torch.float64)
    parts: tuple[Part, ...] = tuple(kind(d) for _ in moving)
    return _state(points, Inputs(parts, shares), linear)


def _check_size(numbers: int, moving: int) -> None:
    if numbers * moving > LARGEST:
        raise Refusal(
            f"its derivative has {numbers * moving} numbers, more than {LARGEST}; "
            "let fewer tokens move, or give a Hull"
        )


def _state(points: Tensor, inputs: Inputs, linear: Tensor) -> State:
    n, d = points.shape
    return State(inputs, points, linear, None, no_groups(n, d), no_shape(n, d))


def is_small(state: State) -> bool:
    """Whether second derivatives can be carried."""
    n, d, k = state.linear.shape
    return 0 < n * 4 * d * k * k <= CURVED


def second_order(state: State) -> State:
    """The same with second derivatives, which are zero at the beginning."""
    n, d, k = state.linear.shape
    forms = torch.zeros(n, d, k, k, dtype=torch.float64)
    return State(state.inputs, state.center, state.linear, Quadratic(forms), state.groups, state.shape)


Found = TypeVar("Found")


def by_orders(state: State, ask: Callable[[State], Found]) -> Iterator[Found]:
    """What is found to the first order and, where second derivatives can be carried, to the second: it
    reaches farther, so one may speak where the other refuses. Where both refuse, the first refusal.
    """
    refusals, count = [], 0
    for make in (_as_it_is, second_order) if is_small(state) else (_as_it_is,):
        try:
            found = ask(make(state))
        except Refusal as refusal:
            refusals.append(refusal)
            continue
        count += 1
        yield found
    if not count:
        raise refusals[0]


def _as_it_is(state: State) -> State:
    return state
