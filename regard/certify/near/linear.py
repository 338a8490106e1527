"""The linear part of a move: how far rows go when token j moves by at most ρ_j."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.certify.near.ellipsoids import Ellipsoid, shaped
from regard.certify.near.heads import LocalHeads
from regard.certify.near.matrix_norms import MARGIN, largest_root


class LinearMove:
    """sup |Σ_j J_ij d_j| over |d_j| ≤ ρ_j for each row, within √(π/2): λ_max(Σ_j ρ_j² J_ij J_ijᵀ/λ_j)^{1/2}; any λ certifies."""

    def __init__(self, heads: LocalHeads, steps: int = 8) -> None:
        self._heads, self._steps = heads, steps
        self._kept: dict[tuple[float, ...], tuple[Tensor, Tensor]] = {}

    def __call__(self, moves: Tensor) -> Tensor:
        return self.ellipsoid(moves).size

    def ellipsoid(self, moves: Tensor, rows: slice = slice(None)) -> Ellipsoid:
        """The same with its directions, for some rows; that of moves in the same proportions is kept."""
        size = float(moves.max())
        size = size if 0 < size < math.inf else 1.0
        unit = moves / size
        key = (*unit.tolist(), *torch.arange(self._heads.n)[rows].tolist())
        if key not in self._kept:
            self._kept = {key: self._scaled(unit, rows)}
        gram, root = self._kept[key]
        found, root = gram * size**2, root * size
        error = self._heads.jacobian_error(moves)[rows]
        total = root * MARGIN + error
        return Ellipsoid(total, shaped(found, total), total, error)

    def _scaled(self, moves: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Σ_j ρ_j² J_ij J_ijᵀ/λ_j of rows (rows, e, e), and at least the roots of their norms."""
        moving = (moves > 0).nonzero().flatten()
        blocks = self._heads.columns(moving, rows) * moves[moving][None, :, None, None]
        if len(moving) > 1:
            blocks = blocks / shares(blocks, self._steps).sqrt()[..., None, None]
        count, columns, wide, deep = blocks.shape
        flat = blocks.transpose(1, 2).reshape(count, wide, columns * deep)
        gram = flat @ flat.mT
        return gram, largest_root(gram, columns * deep)


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
