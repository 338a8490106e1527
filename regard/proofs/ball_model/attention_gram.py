"""The Gram matrix of attention's quadratic forms, without writing them out (M8)."""

from __future__ import annotations

import torch
from torch import Tensor

_sum = torch.einsum


def attention_gram(
    law: Tensor, apart: Tensor, slopes: Tensor, moves: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """G_icd = ⟨X_ic, X_id⟩ for the symmetric parts X_ic of

    Σ_j P_ij [y_ijc (Q_iᵀK_j + α_ijα_ijᵀ/2) + α_ij V_jcᵀ],

    from products of rows alone: ⟨sym(abᵀ), sym(cdᵀ)⟩ = ((a·c)(b·d) + (a·d)(b·c))/2.
    Heads may have a dimension of their own before all others.
    """
    q, k, v = moves
    kk, vv, kv = (_sum("...jak,...lbk->...jlab", a, b) for a, b in ((k, k), (v, v), (k, v)))
    kq, qv = _sum("...jak,...ibk->...ijab", k, q), _sum("...iak,...lck->...ilac", q, v)
    scores = _sum("...iab,...jlab->...ijl", q @ q.mT, kk)
    scores = 0.5 * (scores + kq.flatten(-2) @ kq.mT.flatten(-2).mT)
    by_query, by_key = slopes @ q.mT, _sum("...jak,...ilk->...ijla", k, slopes)  # (i, l, a) and (i, j, l, a)
    pairs, with_values = slopes @ slopes.mT, _sum("...ijk,...lck->...ijlc", slopes, v)
    turned = (by_query.unsqueeze(-3) * by_key).sum(-1)
    squares = scores + 0.5 * (turned + turned.mT) + 0.25 * pairs.square()
    cross = _sum("...ila,...jlac->...ijlc", by_query, kv) + _sum("...ilac,...ijla->...ijlc", qv, by_key)
    cross = 0.5 * (cross + pairs.unsqueeze(-1) * with_values)
    weighted = law.unsqueeze(-1) * apart
    both = weighted.mT @ _sum("...il,...ijld->...ijd", law, cross)
    by_law = law.unsqueeze(-1) * law.unsqueeze(-2)
    values = _sum("...ijl,...jlcd->...icd", by_law * pairs, vv)
    values = 0.5 * (values + _sum("...ijld,...iljc->...icd", by_law.unsqueeze(-1) * with_values, with_values))
    return weighted.mT @ squares @ weighted + both + both.mT + values
