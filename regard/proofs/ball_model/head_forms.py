"""The second order of heads: Σ_j P_ij [y_ij (S_ij + α_ijα_ijᵀ/2) + α_ij V_jᵀ], symmetric (M8)."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.proofs.ball_model.attention_gram import attention_gram
from regard.proofs.ball_model.ellipsoids import lift
from regard.proofs.ball_model.heads import HeadMoves
from regard.proofs.ball_model.quadratic import symmetric


def forms(head: HeadMoves) -> Tensor:
    """Written out, (n, e, d0, d0)."""
    d = head.first_width
    slopes, weighted = head.scores.slopes[..., :d], head.law.unsqueeze(-1) * head.apart
    squares = head.scores.products_of + 0.5 * slopes.unsqueeze(-1) * slopes.unsqueeze(-2)
    found = (weighted.mT @ squares.flatten(-2)).unflatten(-1, (d, d))
    values = head.values.moves[..., :d]
    moved = torch.einsum("...ijk,...jcl->...ickl", head.law.unsqueeze(-1) * slopes, values)
    return head.known(found + symmetric(moved))


def shape_of_forms(head: HeadMoves) -> Tensor:
    """The shape of their moves (n, e, e), without writing them out. Nothing is taken out of them, since next
    to nothing of them is like AᵀA.
    """
    d = head.first_width
    q, k, v = (side.moves[..., :d] for side in head.sides)
    gram = attention_gram(head.law, head.apart, head.scores.slopes[..., :d], (q, k, v))
    return head.known(lift(gram, 16 * head.form_unit * head.form_sizes.square()))


def curved(head: HeadMoves) -> Tensor:
    """What becomes of H, (n, e, d0, d0)."""
    assert head.state.curved is not None
    values = head.state.curved.through(head.values.w.mT).forms
    direct = torch.einsum("...ij,...jckl->...ickl", head.law, values)
    weighted = head.law.unsqueeze(-1) * head.apart
    along = weighted.mT @ head.scores.curved_scores.flatten(-2)
    return head.known(direct + along.unflatten(-1, head.scores.curved_scores.shape[-2:]))
