"""Attention: heads one by one, each row by (M7), in the coordinates of their values until they are mixed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import Upper, exact, relative_error, total
from regard.proofs.ball_model.batches import head_moves
from regard.proofs.ball_model.ellipsoids import Sum, lifted, no_shape, pushed, trace_roots
from regard.proofs.ball_model.groups import Groups, no_groups
from regard.proofs.ball_model.head_forms import curved, forms, shape_of_forms
from regard.proofs.ball_model.heads import HeadMoves
from regard.proofs.ball_model.joint import Joint, full
from regard.proofs.ball_model.passage import Passage, parts_of
from regard.proofs.ball_model.quadratic import Grams, Quadratic, form_norms, split
from regard.proofs.ball_model.score_moves import is_written_out
from regard.proofs.ball_model.squares import with_forms, with_quadratic
from regard.proofs.ball_model.state import State, added
from regard.proofs.ball_model.updates import each
from regard.proofs.subject import MultiHead


def attend(state: State, subject: MultiHead, residual: bool = False) -> State:
    """The state after attention, and x more with a residual connection, as an ellipsoid of all tokens needs
    it.
    """
    assert residual or not isinstance(state.groups, Joint)
    heads = head_moves(state, subject)
    mixer = torch.cat([head.mixer.flatten(0, -2) for head in heads])
    explicit = state.curved is not None or _is_small(state, len(mixer))
    rest, lost, center, derivatives, carried, written, passing = [], [], [], [], [], [], []
    for head in heads:
        hidden = head.lost if explicit else head.lost + head.quadratic_lost
        lost.append(_over_heads(head, head.stretch.unsqueeze(-1) * hidden))
        center.append(head.side_by_side(head.value))
        derivatives.append(head.derivative)
        moves = head.rest if explicit else head.rest.shape(shape_of_forms(head))
        rest.append(_anywhere(head, moves).parts)
        if explicit:
            written.append(head.side_by_side(forms(head)))
        if state.curved is not None:
            carried.append(head.side_by_side(curved(head)))
        if state.has_shape or state.groups.beside is not None:
            passing += parts_of(head)
        if not isinstance(state.groups, Joint):
            head.forget()
    value = torch.cat(center, -1) @ mixer
    value = value if subject.b_o is None else value + subject.b_o
    inner, first = _side_by_side(derivatives), state.linear.shape[-1]
    groups: Groups | Joint
    if isinstance(state.groups, Joint):
        linear, groups = each(mixer.mT, inner[..., :first]), conjugated(heads, mixer, inner[..., first:])
    else:
        columns = each(mixer.mT, inner)
        linear, groups = columns[..., :first].contiguous(), state.groups.replaced(columns[..., first:])
    after = replace(
        state,
        center=value,
        linear=linear,
        groups=groups,
        shape=no_shape(*value.shape),
        curved=None if state.curved is None else Quadratic(torch.cat(carried, 1)).through(mixer.mT),
    )
    count = sum(head.count for head in heads)
    rounding = relative_error(count + 8) * (computed_lengths(value) + _sizes_of(heads, subject.b_o))
    found = _mixed(rest, heads, mixer).ball(total(lost) + rounding)
    after = _with_forms(state, after, heads, written, found) if explicit else after.with_rest(found)
    after = _with_tokens(state, after) if residual else after
    return _passed(state, after, Passage(passing, mixer), residual) if passing else after


def _with_tokens(state: State, after: State) -> State:
    """x more, for a residual connection: J of `conjugated` has it already, and so has a `Passage`."""
    tokens = state.nothing_left()
    if not isinstance(after.groups, Joint):
        return added(tokens, after)
    bare = replace(after, groups=no_groups(*after.center.shape))
    return replace(added(tokens, bare), groups=after.groups)


def conjugated(heads: list[HeadMoves], mixer: Tensor, inner: Tensor) -> Joint:
    """JGJᵀ for the map J = 1 + M (Σ_j P_ij (W_v + y_ij α_ij)) of all tokens, whose part in brackets O makes
    `inner` of G: JG, and J of its transpose, (JGJᵀ)ᵀ.

    As numbers J is exact: what it is off by is counted where it moves tokens. OX is off by γ ô|X|_F, ô the
    sizes that O is made of, and JX = X + Mᵀ(OX) by e(X) = |M|₂ γ ô|X|_F + γ(|M|_F |OX|_F + |JX|_F). The whole
    is off by |J|₂ e(G) + e(JG), |J|₂ ≤ 1 + |M|₂ô, and once more where it is the transpose of its other half.
    """
    state = heads[0].state
    assert isinstance(state.groups, Joint)
    n, width, size = state.groups.shape
    once = torch.empty_like(state.groups.columns)
    for one, x, out in zip(state.groups.columns, inner, once, strict=True):
        torch.addmm(one, mixer.mT, x, out=out)
    back = once.flatten(0, 1).mT.unflatten(0, (n, width))  # (JG)ᵀ
    again = _side_by_side([head.times(back) for head in heads])
    found = once.new_empty(size, size)
    for i in range(n):
        rows, columns = slice(i * width, (i + 1) * width), slice((i + 1) * width)
        found[rows, columns] = torch.addmm(back[i, :, columns], mixer.mT, again[i, :, columns])
    made_of = total([_over_heads(head, head.passing_sizes.square()) for head in heads]).sum().sqrt()
    steep, thick = form_norms(mixer), computed_lengths(mixer.flatten())
    brackets, mixing = relative_error(width + 4 * n + 32), relative_error(len(mixer) + 8)
    sides = [computed_lengths(one).norm().norm() for one in (inner, again)]  # |OG|_F, |O(JG)ᵀ|_F
    before = [state.groups.size, state.groups.size + steep * sides[0]]  # |G|_F, |JG|_F
    first, second = (
        steep * brackets * made_of * x + mixing * (thick * inside + x + steep * inside)
        for x, inside in zip(before, sides, strict=True)
    )
    own = torch.stack([found[i : i + width, i : i + width] for i in range(0, size, width)])
    return full(found, own, 2 * ((1 + steep * made_of) * first + second))


def _side_by_side(parts: list[Tensor]) -> Tensor:
    """What all heads make of columns, (n, Σe, k)."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _over_heads(head: HeadMoves, rows: Upper) -> Upper:
    """The sum over heads, (h, n) to (n,)."""
    return rows if head.mixer.ndim == 2 else rows.sum(0)


def _passed(state: State, after: State, passage: Passage, residual: bool) -> State:
    """With ellipsoids of single tokens."""
    if state.groups.beside is not None:
        beside = passage.moves(state.groups.beside, residual).done()
        after = replace(after, groups=replace(after.columned, beside=beside))
    return after.with_rest(passage.moves(state.shape, residual)) if state.has_shape else after


def _anywhere(head: HeadMoves, found: Sum) -> Sum:
    """Rows of which nothing is known (M10): o_i + Σ_j λ_j (y_ij + v_j' - v_j), a mean of what they see by any
    law λ. |a·Σλ_jz_j| ≤ max_j |a·z_j| ≤ (Σ_j (a·z_j)²)^{1/2}.
    """
    if not bool(head.astray.any()):
        return found
    times, seen = exact(head.astray.double()), head.scores.seen.double()
    first = head.values.moves[..., : head.first_width]
    found.gram((seen.unsqueeze(-1) * head.apart).mT, times)
    for shapes, terms in ((first @ first.mT, head.first_width), (head.values.around, 1)):
        size = Upper(seen) @ trace_roots(shapes).square().unsqueeze(-1)
        off = relative_error(terms + seen.shape[-1] + 16) * size.map(lambda value: value.squeeze(-1))
        found.shape(lifted(torch.einsum("...ij,...jab->...iab", seen, shapes), off), times)
    return found.ball(times * head.apart_error)


def _mixed(parts: list[tuple[Tensor, Tensor, Upper]], heads: list[HeadMoves], mixer: Tensor) -> Sum:
    """The moves of values, mixed: Σ_h M_hᵀ Q_h M_h, with weights that are lengths after it."""
    n, wide = len(parts[0][1]) if heads[0].mixer.ndim == 2 else parts[0][1].shape[1], mixer.shape[-1]
    weight, error, turned = [], [], []
    for head, (s, matrix, off) in zip(heads, parts, strict=True):
        turned.append(head.side_by_side(matrix @ head.mixer.unsqueeze(-3)))
        weight.append(_over_heads(head, Upper(s)))
        unit = relative_error(len(mixer) + 2 * head.mixer.shape[-2] + 8)
        far = head.mixing.square().unsqueeze(-1) * (unit * computed_lengths(matrix.flatten(-2)) + off)
        error.append(_over_heads(head, far))
    return Sum(n, wide).add(total(weight).bound, mixer.mT @ torch.cat(turned, 1), total(error))


def _is_small(state: State, values: int) -> bool:
    return is_written_out(state.tokens, max(values, state.tokens), state.linear.shape[-1])


def _sizes_of(heads: list[HeadMoves], bias: Tensor | None) -> Upper:
    found = exact(0.0) if bias is None else computed_lengths(bias)
    for head in heads:
        far = (head.mixing * head.value_sizes.amax(-1)).unsqueeze(-1)
        found = found + _over_heads(head, far)
    return found


def _with_forms(
    state: State, after: State, heads: list[HeadMoves], written: list[Tensor], rest: Sum
) -> State:
    """The quadratic part of all heads together."""
    if not state.linear.shape[-1]:
        return after.with_rest(rest)
    mixer = torch.cat([head.mixer.flatten(0, -2) for head in heads])
    second = Quadratic(torch.cat(written, 1))
    size = total([_over_heads(head, head.mixing.unsqueeze(-1) * head.form_sizes) for head in heads])
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
