"""Heads of an attention near a sequence, those of one shape together."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._enclosed import computed_lengths, spectral_norms
from regard._upper import Upper, exact, stack
from regard.domains import Neighborhood
from regard.proofs.ball_model.heads import HeadMoves
from regard.proofs.ball_model.score_moves import ScoreMoves
from regard.proofs.ball_model.scores import Projection, no_scores, products
from regard.proofs.ball_model.sides import Side, directions, group_slopes, sides
from regard.proofs.ball_model.state import State
from regard.proofs.near.head import value_matrix
from regard.proofs.setting import pair_bias
from regard.proofs.subject import Head, MultiHead
from regard.proofs.theorem import Refusal

TOGETHER = 8_000_000
"""How many slopes of scores heads may have that are taken together."""


def head_moves(state: State, subject: MultiHead) -> list[HeadMoves]:
    """All heads near a sequence."""
    single = [_Single.of(state, subject, number) for number in range(len(subject.separate))]
    return [
        one for _, same in itertools.groupby(single, _Single.shapes) for one in _batches(state, list(same))
    ]


@dataclass(frozen=True)
class _Single:
    """What is known of one head whatever moves; see `HeadMoves`."""

    projections: tuple[Projection, ...]
    mixer: Tensor
    mixing: Upper
    blurred: Upper
    bias: Tensor | None

    @staticmethod
    def of(state: State, subject: MultiHead, number: int) -> _Single:
        head: Head = subject.separate[number]
        if not head.softmax:
            raise Refusal(
                f"rows of {type(head.normalizer).__name__} are not Gibbs laws; the ball model is for Softmax"
            )
        matrix = value_matrix(head, state.width)
        width = matrix.center.shape[-1]
        bias = (
            torch.zeros(width, dtype=torch.float64) if head.value_bias is None else head.value_bias.double()
        )
        values = Projection(matrix.center.unsqueeze(0), bias.unsqueeze(0), 0)
        pair = products.one(head.potential, state.width, torch.arange(state.tokens))
        plain = torch.eye(width, dtype=torch.float64)
        mixer = plain if subject.w_o is None else subject.w_o[number]
        return _Single(
            (*(pair if pair is not None else no_scores(state.width)), values),
            mixer,
            exact(1.0) if subject.w_o is None else computed_lengths(mixer.flatten()),
            matrix.error,
            pair_bias(head, Neighborhood(state.center, 0.0)),
        )

    def shapes(self) -> tuple[object, ...]:
        """What heads that are taken together have in common."""
        widths = [(one.w.shape, one.b.shape, one.roundings) for one in self.projections]
        return *widths, self.mixer.shape, self.bias is None


def _batches(state: State, single: list[_Single]) -> list[HeadMoves]:
    """Heads of one shape, as many at a time as there is room for."""
    made = [sides(state, [one.projections[side] for one in single], by_groups=side == 2) for side in range(3)]
    stretch = spectral_norms(torch.stack([one.mixer for one in single]))
    query, key = made[:2]
    along = directions(query, key), directions(key, query)
    slopes = group_slopes(state.groups.columns, *along)
    room = state.tokens**2 * (state.linear.shape[-1] + state.groups.shape[-1])
    size = max(1, TOGETHER // max(1, room))
    return [
        _batch(state, single, made, stretch, (*along, slopes), begin, size)
        for begin in range(0, len(single), size)
    ]


def _batch(
    state: State,
    single: list[_Single],
    made: list[Side],
    stretch: Upper,
    along: tuple[Tensor, ...],
    begin: int,
    size: int,
) -> HeadMoves:
    """`size` of the heads at most; one alone has no dimension of heads."""
    facts = single[begin : begin + size]
    several = len(facts) > 1
    some = slice(begin, begin + size) if several else begin
    biases = [one.bias for one in facts if one.bias is not None]
    query, key, values = (side[some] for side in made)
    scores = ScoreMoves(
        state,
        (torch.stack(biases) if several else biases[0]) if biases else None,
        facts[0].projections[0].roundings + facts[0].projections[1].roundings,
        query,
        key,
        *(one[some] for one in along),
    )
    return HeadMoves(
        state,
        torch.stack([one.mixer for one in facts]) if several else facts[0].mixer,
        stack([one.mixing for one in facts]) if several else facts[0].mixing,
        stretch[some],
        stack([one.blurred for one in facts]) if several else facts[0].blurred,
        scores,
        values,
    )
