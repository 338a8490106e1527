"""The Gram matrix of attention's quadratic forms, without writing them out (M8)."""

from __future__ import annotations

import torch
from torch import Tensor

_sum = torch.einsum


def attention_gram(
    law: Tensor, apart: Tensor, slopes: Tensor, moves: tuple[Tensor, Tensor, Tensor], square: Tensor
) -> tuple[Tensor, Tensor]:
    """G_icd = ⟨X_ic, X_id⟩ and ⟨X_ic, M_i⟩ for the symmetric parts X_ic of

    Σ_j P_ij [y_ijc (Q_iᵀK_j + α_ijα_ijᵀ/2) + α_ij V_jcᵀ],

    from products of rows alone: ⟨sym(abᵀ), sym(cdᵀ)⟩ = ((a·c)(b·d) + (a·d)(b·c))/2.
    """
    q, k, v = moves
    kk, vv, kv = (_sum("jak,lbk->jlab", a, b) for a, b in ((k, k), (v, v), (k, v)))
    kq, qv = _sum("jak,ibk->ijab", k, q), _sum("iak,lck->ilac", q, v)
    n, width = law.shape[0], q.shape[1]
    scores = ((q @ q.mT).flatten(1) @ kk.reshape(n * n, width * width).mT).unflatten(-1, (n, n))
    scores = 0.5 * (scores + kq.flatten(2) @ kq.transpose(-2, -1).flatten(2).mT)
    by_query, by_key = slopes @ q.mT, _sum("jak,ilk->ijla", k, slopes)  # (i, l, a) and (i, j, l, a)
    pairs, with_values = slopes @ slopes.mT, _sum("ijk,lck->ijlc", slopes, v)
    turned = (by_query.unsqueeze(1) * by_key).sum(-1)
    squares = scores + 0.5 * (turned + turned.mT) + 0.25 * pairs.square()
    cross = _sum("ila,jlac->ijlc", by_query, kv) + _sum("ilac,ijla->ijlc", qv, by_key)
    cross = 0.5 * (cross + pairs.unsqueeze(-1) * with_values)
    weighted = law.unsqueeze(-1) * apart
    both = _sum("ijc,ijd->icd", weighted, _sum("il,ijld->ijd", law, cross))
    by_law = law.unsqueeze(-1) * law.unsqueeze(-2)
    values = ((by_law * pairs).flatten(1) @ vv.flatten(0, 1).flatten(1)).unflatten(-1, vv.shape[2:])
    values = 0.5 * (values + _sum("ijld,iljc->icd", by_law.unsqueeze(-1) * with_values, with_values))
    gram = weighted.mT @ squares @ weighted + both + both.mT + values
    return gram, _inner(law, weighted, slopes, moves, square)


def _inner(
    law: Tensor, weighted: Tensor, slopes: Tensor, moves: tuple[Tensor, Tensor, Tensor], square: Tensor
) -> Tensor:
    q, k, v = moves
    turned = slopes @ square
    along = _sum("iak,jak->ij", q @ square, k) + 0.5 * (turned * slopes).sum(-1)
    weights = law.unsqueeze(-1) * turned
    return _sum("ijc,ij->ic", weighted, along) + _sum("ijk,jck->ic", weights, v)
