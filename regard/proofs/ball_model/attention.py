"""Attention: heads one by one, each row by (M7), in the coordinates of their values until they are mixed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import Upper, exact, relative_error, total
from regard.proofs.ball_model.ellipsoids import Sum, lifted, no_shape, pushed, trace_roots
from regard.proofs.ball_model.heads import HeadMoves, head_moves, is_written_out
from regard.proofs.ball_model.passage import Passage, part_of
from regard.proofs.ball_model.quadratic import Grams, Quadratic, split
from regard.proofs.ball_model.squares import with_forms, with_quadratic
from regard.proofs.ball_model.state import State, added
from regard.proofs.ball_model.updates import each
from regard.proofs.subject import MultiHead


def attend(state: State, subject: MultiHead, residual: bool = False) -> State:
    """The state after attention, and x more with a residual connection."""
    heads = head_moves(state, subject)
    mixer = torch.cat([head.mixer for head in heads])
    explicit = state.curved is not None or _is_small(state, heads)
    rest, lost, center, derivatives, curved, forms, passing = [], [], [], [], [], [], []
    for head in heads:
        lost.append(head.stretch * (head.lost if explicit else head.lost + head.quadratic_lost))
        center.append(head.value if explicit else head.value + head.quadratic_center)
        derivatives.append(head.derivative)
        rest.append(_anywhere(head, head.rest(quadratic=not explicit)).parts)
        if explicit:
            forms.append(head.forms)
        if state.curved is not None:
            curved.append(head.curved)
        if state.has_shape or state.groups.beside is not None:
            passing.append(part_of(head))
        head.forget()
    value = torch.cat(center, -1) @ mixer
    value = value if subject.b_o is None else value + subject.b_o
    moves = each(mixer.mT, torch.cat(derivatives, 1))
    first = state.linear.shape[-1]
    after = replace(
        state,
        center=value,
        linear=moves[..., :first].contiguous(),
        groups=state.groups.replaced(moves[..., first:]),
        shape=no_shape(*value.shape),
        curved=None if state.curved is None else Quadratic(torch.cat(curved, 1)).through(mixer.mT),
    )
    rounding = relative_error(len(heads) + 8) * (computed_lengths(value) + _sizes_of(heads, subject.b_o))
    found = _mixed(rest, heads, mixer).ball(total(lost) + rounding)
    after = _with_forms(state, after, heads, forms, found) if explicit else after.with_rest(found)
    if residual:
        after = added(state.nothing_left(), after)
    return _passed(state, after, Passage(passing, mixer), residual) if passing else after


def _passed(state: State, after: State, passage: Passage, residual: bool) -> State:
    """With ellipsoids of single tokens."""
    if state.groups.beside is not None:
        beside = passage.moves(state.groups.beside, residual).done()
        after = replace(after, groups=replace(after.groups, beside=beside))
    return after.with_rest(passage.moves(state.shape, residual)) if state.has_shape else after


def _anywhere(head: HeadMoves, found: Sum) -> Sum:
    """Rows of which nothing is known (M10): o_i + Σ_j λ_j (y_ij + v_j' - v_j), a mean of what they see by any
    law λ. |a·Σλ_jz_j| ≤ max_j |a·z_j| ≤ (Σ_j (a·z_j)²)^{1/2}.
    """
    if not bool(head.astray.any()):
        return found
    times, seen = exact(head.astray.double()), head.seen.double()
    first = head.values.moves[..., : head.first_width]
    found.gram((seen.unsqueeze(-1) * head.apart).mT, times)
    for shapes, terms in ((first @ first.mT, head.first_width), (head.values.around, 1)):
        size = Upper(seen) @ trace_roots(shapes).square().unsqueeze(-1)
        off = relative_error(terms + len(seen) + 16) * size.map(lambda value: value.squeeze(-1))
        found.shape(lifted(torch.einsum("ij,jab->iab", seen, shapes), off), times)
    return found.ball(times * head.apart_error)


def _mixed(parts: list[tuple[Tensor, Tensor, Upper]], heads: list[HeadMoves], mixer: Tensor) -> Sum:
    """The moves of values, mixed: Σ_h M_hᵀ Q_h M_h, with weights that are lengths after it."""
    weights, matrices, errors = zip(*parts, strict=True)
    n, wide = len(weights[0]), mixer.shape[-1]
    turned = [matrix @ head.mixer for matrix, head in zip(matrices, heads, strict=True)]
    matrix = mixer.mT @ torch.cat(turned, 1)
    error = exact(torch.zeros(n, dtype=torch.float64))
    for head, part, off in zip(heads, matrices, errors, strict=True):
        unit = relative_error(len(mixer) + 2 * len(head.mixer) + 8)
        error = error + head.mixing.square() * (unit * computed_lengths(part.flatten(1)) + off)
    return Sum(n, wide).add(total([Upper(weight) for weight in weights]).bound, matrix, error)


def _is_small(state: State, heads: list[HeadMoves]) -> bool:
    width = state.linear.shape[-1]
    values = sum(len(head.mixer) for head in heads)
    return is_written_out(state.tokens, max(values, state.tokens), width)


def _sizes_of(heads: list[HeadMoves], bias: Tensor | None) -> Upper:
    found = exact(0.0) if bias is None else computed_lengths(bias)
    for head in heads:
        found = found + head.mixing * head.value_sizes.amax()
    return found


def _with_forms(state: State, after: State, heads: list[HeadMoves], forms: list[Tensor], rest: Sum) -> State:
    """The quadratic part of all heads together."""
    if not state.linear.shape[-1]:
        return after.with_rest(rest)
    mixer = torch.cat([head.mixer for head in heads])
    second = Quadratic(torch.cat(forms, 1))
    size = exact(0.0)
    for head in heads:
        size = size + head.mixing * head.form_sizes
    unit = relative_error(state.width + 2 * state.tokens + len(mixer) + 64)
    if after.curved is not None:
        lost = unit * (size + computed_lengths(mixer.flatten()) * second.size)
        return with_forms(after, second.through(mixer.mT), rest.ball(lost))
    plain = second.grams(state.own)
    whole = computed_lengths(mixer.flatten())
    gram = pushed(mixer.mT, plain.gram)
    error = plain.gram_error * whole.square() + unit * size.square()
    inner = plain.inner @ mixer
    missed = whole * plain.inner_error + unit * size * computed_lengths(state.own.square.flatten(1))
    offset, around = split(Grams(gram, error, inner, missed), state.own)
    return with_quadratic(after, torch.arange(state.tokens), offset, around, rest.ball(unit * size))
