"""The linear part of a move: how far rows go when token j moves by at most ρ_j."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.certify.near.heads import MARGIN, LocalHeads, matrix_norms


class LinearMove:
    """sup |Σ_j J_ij d_j| over |d_j| ≤ ρ_j for each row, within √(π/2): λ_max(Σ_j ρ_j² J_ij J_ijᵀ/λ_j)^{1/2}; any λ certifies."""

    def __init__(self, heads: LocalHeads, steps: int = 8) -> None:
        self._heads, self._steps = heads, steps
        self._unit: Tensor | None = None

    def __call__(self, moves: Tensor) -> Tensor:
        moving = (moves > 0).nonzero().flatten()
        if len(moving) == 0:
            return torch.zeros(self._heads.n, dtype=torch.float64)
        size = float(moves[moving[0]])
        if len(moving) == self._heads.n and bool((moves == size).all()):
            if self._unit is None:
                self._unit = self._norms(torch.ones_like(moves), moving)
            return self._unit * size * MARGIN + self._heads.jacobian_error(moves)
        return self._norms(moves, moving) + self._heads.jacobian_error(moves)

    def _norms(self, moves: Tensor, moving: Tensor) -> Tensor:
        blocks = self._heads.jacobian[:, moving] * moves[moving][None, :, None, None]
        if len(moving) == 1:
            return matrix_norms(blocks)[:, 0]
        share = shares(blocks, self._steps)
        rows, columns, wide, deep = blocks.shape
        scaled = (blocks / share.sqrt()[..., None, None]).transpose(1, 2).reshape(rows, wide, columns * deep)
        return matrix_norms(scaled)


def shares(blocks: Tensor, steps: int) -> Tensor:
    """λ (rows, columns): towards the square roots of ⟨S, J_ij J_ijᵀ⟩ with S the top of the sum; in float32, since any λ certifies."""
    unit = float(blocks.abs().amax()) or 1.0
    blocks = (blocks / unit).float()
    sizes = blocks.flatten(-2).norm(dim=-1).clamp_min(1e-12)
    share = sizes / sizes.sum(-1, keepdim=True)
    wide = blocks.shape[-2]
    flat = (blocks @ blocks.mT).flatten(-2)  # (rows, columns, e²)
    top: Tensor | None = None
    for step in range(steps):
        total = ((1 / share).unsqueeze(1) @ flat).reshape(len(flat), wide, wide)
        soft = total / _trace(total)
        for _ in range(5):
            soft = soft @ soft
            soft = soft / _trace(soft)
        top = soft if top is None else top + (soft - top) * max(0.3, 1 / (step + 1))
        found = (flat @ top.flatten(1).unsqueeze(-1)).squeeze(-1).clamp_min(0).sqrt() + 1e-6 * sizes
        share = (share * found).sqrt()
        share = share / share.sum(-1, keepdim=True)
    share = share.double()  # shares that add up to more than one would certify too little
    return share / (share.sum(-1, keepdim=True) * MARGIN)


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp_min(1e-30)
