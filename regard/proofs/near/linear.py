"""The linear part of a move: how far rows go when token j moves by at most ρ_j."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._enclosed import computed_lengths, largest_roots
from regard._upper import Upper, exact, relative_error
from regard.proofs.near.ellipsoids import Ellipsoid, normalize, sharpen, sum_to_less_than_one
from regard.proofs.near.heads import LocalHeads


class LinearMove:
    """sup |Σ_j J_ij d_j| over |d_j| ≤ ρ_j for each row, within √(π/2) of it (N18).

    By Cauchy–Schwarz on Σ_j ρ_j |J_ijᵀe| it is at most λ_max(Σ_j ρ_j² J_ij J_ijᵀ/λ_j)^{1/2} for any λ_j > 0
    with Σ λ_j ≤ 1.
    """

    def __init__(self, heads: LocalHeads, steps: int = 8) -> None:
        self._heads, self._steps = heads, steps
        self._kept: dict[tuple[float, ...], tuple[Tensor, Upper]] = {}

    def __call__(self, moves: Tensor) -> Upper:
        return self.ellipsoid(moves).length()

    def ellipsoid(self, moves: Tensor, rows: slice = slice(None)) -> Ellipsoid:
        """The same with its directions, for some rows; that of moves in the same proportions is kept."""
        size = _power_of_two(float(moves.max()))  # so that nothing is rounded
        unit = moves / size
        key = (*unit.tolist(), *torch.arange(self._heads.n)[rows].tolist())
        if key not in self._kept:
            self._kept = {key: self._unit_ellipsoid(unit, rows)}
        gram, length = self._kept[key]
        error = relative_error(gram.shape[-1] * (self._heads.n * self._heads.d + 8)) * length.square()
        core, blur = normalize(gram, length, error)
        return Ellipsoid(length * exact(size), core, blur, self._heads.jacobian_error(moves)[rows])

    def _unit_ellipsoid(self, moves: Tensor, rows: slice) -> tuple[Tensor, Upper]:
        """Σ_j ρ_j² J_ij J_ijᵀ/λ_j of rows (rows, e, e), and at least the roots of their norms."""
        moving = (moves > 0).nonzero().flatten()
        blocks = self._heads.columns(moving, rows) * moves[moving][None, :, None, None]
        if len(moving) > 1:
            blocks = blocks / shares(blocks, self._steps).sqrt()[..., None, None]
        count, columns, wide, deep = blocks.shape
        flat = blocks.transpose(1, 2).reshape(count, wide, columns * deep)
        gram = flat @ flat.mT
        found = largest_roots(gram, columns * deep)
        return gram, Upper(found.value, found.roundings + 4)  # ρ J/√λ is rounded three times


def _power_of_two(size: float) -> float:
    return 2.0 ** math.floor(math.log2(size)) if 0 < size < math.inf else 1.0


def shares(blocks: Tensor, steps: int) -> Tensor:
    """λ (rows, columns): towards the square roots of ⟨S, J_ij J_ijᵀ⟩ with S the top of the sum; in
    float32, since any λ certifies.
    """
    unit = float(blocks.abs().amax()) or 1.0
    blocks = (blocks / unit).float()
    sizes = blocks.flatten(-2).norm(dim=-1).clamp_min(1e-12)
    share = sizes / sizes.sum(-1, keepdim=True)
    wide = blocks.shape[-2]
    flat = (blocks @ blocks.mT).flatten(-2)  # (rows, columns, e²)
    top: Tensor | None = None
    for step in range(steps):
        soft = sharpen(((1 / share).unsqueeze(1) @ flat).reshape(len(flat), wide, wide))
        top = soft if top is None else top + (soft - top) * max(0.3, 1 / (step + 1))
        found = (flat @ top.flatten(1).unsqueeze(-1)).squeeze(-1).clamp_min(0).sqrt() + 1e-6 * sizes
        share = (share * found).sqrt()
        share = share / share.sum(-1, keepdim=True)
    return sum_to_less_than_one(share.double(), -1)


def column_reach(blocks: Tensor, radii: Upper, steps: int = 0) -> Upper:
    """At least |Σ_j B_ij d_j| over |d_j| ≤ ρ_j for blocks (n, m, e, d) as they are: (N18), with λ in
    proportion to ρ_j |B_ij|_F, or better.
    """
    scaled = blocks * radii.value[None, :, None, None]
    sizes = computed_lengths(scaled.flatten(-2))
    share = shares(scaled, steps) if steps else sum_to_less_than_one(sizes.value.clamp_min(1e-300), -1)
    wide = (scaled / share.sqrt()[..., None, None]).transpose(1, 2).flatten(-2)
    gram = wide @ wide.mT if wide.shape[-2] <= wide.shape[-1] else wide.mT @ wide
    found = largest_roots(gram, max(wide.shape[-2:])).minimum(sizes.sum(-1))
    return Upper(found.value, found.roundings + radii.roundings + 4)
