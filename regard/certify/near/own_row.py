"""The row of a token that moves alone: its second derivative exactly, all heads together, and what is of third order.

Token j moves by δ. Row j moves beyond its linear part by T(δ, δ) and terms of third order,
T(δ, δ) = P_j (own_j·δ) Vᵀδ + P_j z_j δᵀAδ + Σ_k P_k z_k (own_k·δ)²/2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard._round import EPS
from regard.certify.near.exponential import exponential_tail
from regard.certify.near.heads import LocalHeads, LocalValues
from regard.certify.near.matrix_norms import MARGIN, largest_root
from regard.certify.near.moves import cubic_part
from regard.certify.near.score_moves import ScoreMoves
from regard.certify.scores import bilinear


def own_remainder(heads: LocalHeads, token: int, radius: float) -> float:
    """At least |F_j(x') - F_j(x) - DF_j[δ]| over |δ| ≤ r."""
    moves = torch.zeros(heads.n, dtype=torch.float64)
    moves[token] = radius
    scores = [ScoreMoves(local, moves) for local in heads.heads]
    chosen = heads.separate if heads.folded is None else heads.folded
    rounding = sum(_rounding(heads, h, values, token) for h, values in enumerate(chosen))
    separate, folded = ([_third_order(v, s, token) for v, s in zip(kind, scores, strict=True)] for kind in (heads.separate, chosen))
    beyond = heads.combined(separate, None if heads.folded is None else folded)
    return float((radius**2 * (_largest(_second(heads, token)) + rounding) + beyond) * MARGIN)


def _second(heads: LocalHeads, token: int) -> Tensor:
    """T (e, d, d), symmetric in its arguments; heads that are not mixed are side by side in e."""
    kept = heads.__dict__.setdefault("_second", {})
    if token not in kept:
        chosen = heads.subject.separate if heads.subject.folded is None else heads.subject.folded
        parts = (_second_of(heads, h, token, head.matrix(heads.d)) for h, head in enumerate(chosen))
        kept[token] = torch.cat(list(parts)) if heads.subject.folded is None else sum(parts)
    return kept[token]


def _second_of(heads: LocalHeads, h: int, token: int, output: Tensor) -> Tensor:
    local = heads.heads[h]
    p, own, values = local.p[token], local.own[token], local.y[token] @ output
    bent = torch.einsum("kc,ka,kb->cab", values * p.unsqueeze(-1) / 2, own, own)
    turned = p[token] * output.mT.unsqueeze(1) * own[token][None, :, None]
    form = bilinear.one(heads.subject.separate[h].potential, heads.d)
    if form is not None:
        turned = turned + p[token] * values[token][:, None, None] * form.a
    return bent + (turned + turned.mT) / 2


def _largest(form: Tensor) -> Tensor:
    """At least |T(e, e)| over unit e: the norm of T as a map of matrices to vectors, or of vectors to matrices."""
    flat, tall = form.flatten(1), form.flatten(0, 1)
    return torch.minimum(largest_root(flat @ flat.mT), largest_root(tall.mT @ tall)) + 64 * len(tall) * EPS * form.norm()


def _rounding(heads: LocalHeads, h: int, values: LocalValues, token: int) -> Tensor:
    """What rounding may hide of T, and its part with A where that is not known."""
    local = values.local
    p, own, size, w = local.p[token], local.own_size[token], values.size[token], values.w
    slack = local.a * local.shift + 4 * local.tilt
    lost = (p * (size * (2 * own * slack + slack**2) + w * local.shift * own.square())).sum()
    lost = lost + 2 * p[token] * w * (slack + local.a * local.shift)
    whole = (p * size * own.square()).sum() + p[token] * (own[token] * w + size[token] * local.a)
    form = bilinear.one(heads.subject.separate[h].potential, heads.d)
    return lost + 4 * local.error * whole + (local.a if form is None else form.error) * p[token] * size[token]


def _third_order(values: LocalValues, scores: ScoreMoves, token: int) -> Tensor:
    """(E' - E)[Vᵀδ] beyond P_j (own_j·δ) Vᵀδ, E[z ζ²] beyond its part in own, 1/Z beside one, and φ₃."""
    local, radius, eps = values.local, scores.moves[token], scores.excess[token]
    p, reach = local.p[token], scores.reach[token]
    own = scores.by_own[token]
    rest = (reach - own).clamp_min(0.0)
    tail = exponential_tail(reach[token], 2) + eps * (1 + reach[token]) + rest[token]
    shifted = values.w * radius * torch.minimum(p[token] * tail, scores.change[token, token] + p[token] * own[token])
    mixed = (p * values.size[token] * (2 * own * rest + rest.square())).sum() / 2
    square = (p * values.size[token] * reach.square()).sum() / 2
    return (shifted + mixed + eps * square + cubic_part(values, scores)[token]) * MARGIN
