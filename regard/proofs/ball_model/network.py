"""The ball model through a network, map by map."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from regard import maps
from regard._enclosed import computed_lengths
from regard._upper import Upper, exact, relative_error
from regard._verb import Verb
from regard.attention import Attention
from regard.nonexpansive import Center, MixTokens, Pool, Reflected
from regard.proofs.ball_model.attention import attend
from regard.proofs.ball_model.ellipsoids import Sum, no_shape
from regard.proofs.ball_model.joint import Joint, joint_of
from regard.proofs.ball_model.neurons import feed_forward, gated, mixed
from regard.proofs.ball_model.norms import normalize
from regard.proofs.ball_model.opening import closed, gathered, opened
from regard.proofs.ball_model.quadratic import Quadratic
from regard.proofs.ball_model.state import State, added
from regard.proofs.locating import summands
from regard.proofs.near.stages import FeedForward, group_feed_forward
from regard.proofs.question import once
from regard.proofs.rewriting import as_residual
from regard.proofs.subject import MultiHead, subject_of
from regard.proofs.theorem import Refusal

OPEN, KEPT = 36_000_000, 18_000_000
"""How many numbers groups may hold in attention and after it; the shortest columns go on as ellipsoids of
single tokens.
"""
APART, WIDEST = 1_200_000_000, 4_096
"""From how many products on, of columns with the coordinates of all tokens and of one, groups become one,
where all tokens together have at most so many coordinates.
"""
NEGLIGIBLE = 1e-18
"""What is left of ellipsoids in comparison with groups, in squares, that is not opened again."""

through = Verb("through")
"""through.one(map, state) -> State: what a map makes of a state."""


def shared(state: State, together: bool = False) -> State:
    """The state with its ellipsoids opened, so that remainders know each other in all that follows; with
    `together` nothing else refers to its groups, and where they hold many numbers they become one. Where
    nothing moves but by rounding, that is not followed so far.
    """
    state = state.with_columns()
    trace = float(state.shape.diagonal(dim1=-2, dim2=-1).sum())
    if not state.inputs.width or trace <= NEGLIGIBLE * state.groups.whole_energy:
        return state
    if together and (one := _in_one_ball(state)) is not None:
        return one
    if state.groups.beside is not None:
        return state
    groups, left = opened(state.columned, state.shape, OPEN // (state.tokens * state.width))
    return replace(state, groups=groups, shape=left)


def _in_one_ball(state: State) -> State | None:
    n, width, columns = state.groups.shape
    size, parts = n * width, (state.columned, state.shape)
    if not _is_much(columns, size, width) and state.groups.beside is None:
        return None
    alone = size > WIDEST or state.groups.beside is not None
    groups = gathered(*parts) if alone else joint_of(*parts).factored()
    return None if groups is None else replace(state, groups=groups, shape=no_shape(n, width))


def _is_much(columns: int, size: int, width: int) -> bool:
    """Whether so many columns, and those of ellipsoids of all tokens, are too much work."""
    return (columns + size) * size * width > APART


def _jointly(state: State) -> State | None:
    """With groups and ellipsoids as one ellipsoid of all tokens, where they hold many numbers, for an
    attention with nothing but a residual connection around it. Where its own columns would not be too many
    again, it is better to have them: what is added then stays apart for some layers.
    """
    n, width, columns = state.groups.shape
    size = n * width
    if not state.inputs.width or not (columns or state.has_shape) or not _is_much(size, size, width):
        return None
    if isinstance(state.groups, Joint):
        groups = state.groups.joined(state.shape)
    elif state.groups.beside is None and size <= WIDEST and _is_much(columns, size, width):
        groups = joint_of(state.groups, state.shape)
    else:
        return None
    return replace(state, groups=groups, shape=no_shape(n, width))


@through.rule(object)
def _unknown(map: object, state: State) -> State:
    raise Refusal(f"{type(map).__name__} has no ball model")


@through.rule(maps.Compose)
def _compose(map: maps.Compose, state: State) -> State:
    for inner in group_feed_forward(map.maps):
        state = through.one(inner, state)
    return state


@through.rule(FeedForward)
def _feed_forward(map: FeedForward, state: State) -> State:
    return feed_forward(state, map.first, map.activation, map.second, residual=False)


@through.rule(maps.Pointwise)
def _pointwise(map: maps.Pointwise, state: State) -> State:
    """A feed-forward layer that mixes nothing."""
    same = maps.Affine(torch.eye(state.width, dtype=torch.float64))
    return feed_forward(state, same, map.activation, same, residual=False)


@through.rule(maps.Gated)
def _gated(map: maps.Gated, state: State) -> State:
    return gated(state, map, residual=False)


@through.rule(maps.Normalize)
def _normalize(map: maps.Normalize, state: State) -> State:
    return normalize(state, map)


@through.rule(maps.Affine)
def _affine(map: maps.Affine, state: State) -> State:
    matrix, value = map.w.mT.unsqueeze(0), state.center @ map.w
    off = exact(0.0)
    after, lost = mixed(state, matrix, off, value, map.b, residual=False)
    size = computed_lengths(map.w.flatten()) * computed_lengths(state.center)
    return after.with_rest(Sum(*after.center.shape).ball(lost + relative_error(state.width + 4) * size))


@through.rule(Center)
def _center(map: Center, state: State) -> State:
    matrix = torch.eye(state.width, dtype=torch.float64) - 1 / state.width
    return through.one(maps.Affine(matrix), state)


@through.rule(maps.Heads)
@through.rule(Attention)
def _attention(map: Attention | maps.Heads, state: State) -> State:
    return attend(shared(state), _heads_of(map))


def _heads_of(map: Attention | maps.Heads) -> MultiHead:
    subject = once(("heads of the ball model", id(map)), map, lambda: subject_of(map))
    if len(subject.separate) > 1 and subject.w_o is None:
        raise Refusal(
            "an attention with several heads gives a sequence for each; mix them with Heads(attention, w_o)"
        )
    return subject


@through.rule(maps.Residual)
def _residual(map: maps.Residual, state: State) -> State:
    inner = map.map
    parts = group_feed_forward(inner.maps) if isinstance(inner, maps.Compose) else [inner]
    if len(parts) == 1 and isinstance(parts[0], FeedForward):
        layer = parts[0]
        return feed_forward(state, layer.first, layer.activation, layer.second, residual=True)
    if isinstance(inner, maps.Gated):
        return gated(state, inner, residual=True)
    if isinstance(inner, (Attention, maps.Heads)):
        one = _jointly(state)
        if one is not None:
            return attend(one, _heads_of(inner), residual=True)
        return _narrowed(attend(shared(state, together=True), _heads_of(inner), residual=True))
    state = shared(state, together=True)
    return _narrowed(added(state, through.one(inner, state)))


def _narrowed(state: State) -> State:
    """The state with fewer columns."""
    groups, shape = closed(state.columned, state.shape, KEPT // (state.tokens * state.width))
    return replace(state, groups=groups, shape=shape)


@through.rule(maps.Added)
def _add(map: maps.Added, state: State) -> State:
    state = shared(state)
    first, *others = (through.one(part, state) for part in summands(map))
    for other in others:
        first = added(first, other)
    return first


@through.rule(Reflected)
def _reflected(map: Reflected, state: State) -> State:
    return through.one(as_residual(map, state.width), state)


@through.rule(MixTokens)
def _mix_tokens(map: MixTokens, state: State) -> State:
    return mix_tokens(state, map.w.detach().double())


@through.rule(Pool)
def _pool(map: Pool, state: State) -> State:
    weights = torch.full((1, state.tokens), 1 / math.sqrt(state.tokens), dtype=torch.float64)
    return mix_tokens(state, weights, relative_error(4))


def mix_tokens(state: State, w: Tensor, error: Upper | None = None) -> State:
    """x ↦ w x for weights (m, n) of tokens, which may be off by `error` of their size."""
    if w.shape[-1] != state.tokens:
        raise Refusal(f"{w.shape[-1]} tokens are mixed and the sequence has {state.tokens}")
    rows, state = len(w), shared(state)
    curved, beside = state.curved, state.groups.beside
    after = replace(
        state,
        center=w @ state.center,
        linear=_over_tokens(w, state.linear),
        curved=None if curved is None else Quadratic(_over_tokens(w, curved.forms)),
        groups=state.columned.replaced(_over_tokens(w, state.groups.columns)),
        shape=no_shape(rows, state.width),
    )
    size = computed_lengths(state.center) + state.reach
    unit = relative_error(state.tokens + 4) if error is None else relative_error(state.tokens + 4) + error
    rest = Sum(rows, state.width).ball(unit * (Upper(w.abs()) * size).sum(-1))
    if beside is not None:
        alone = _shapes_over_tokens(Sum(rows, state.width), w, beside).done()
        after = replace(after, groups=replace(after.columned, beside=alone))
    return after.with_rest(_shapes_over_tokens(rest, w, state.shape))


def _shapes_over_tokens(found: Sum, w: Tensor, shapes: Tensor) -> Sum:
    """Σ_j w_ij e_j for e_j in ellipsoids (n, d, d)."""
    for j, shape in enumerate(shapes):
        found.shape(shape.expand(len(w), -1, -1), Upper(w[:, j].abs()))
    return found


def _over_tokens(w: Tensor, tensors: Tensor) -> Tensor:
    return (w @ tensors.flatten(1)).unflatten(-1, tensors.shape[1:])
