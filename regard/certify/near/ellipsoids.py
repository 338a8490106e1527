"""Parts of a move that lie in ellipsoids, added with their directions: heads, and the linear part with what is beyond it.

If |g_a·e| ≤ s_a (eᵀU_a e)^{1/2} for every e, then |Σ_a g_a| ≤ λ_max(Σ_a s_a² U_a/λ_a)^{1/2} for any shares λ_a > 0 with sum one, by
Cauchy–Schwarz. λ_a in proportion to s_a with U_a ≤ I gives Σ_a s_a, so good shares only help. Rows are (n,), shapes U_a (1 or n, e, e).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard._round import EPS
from regard.certify.near.heads import LocalHeads, LocalValues
from regard.certify.near.matrix_norms import MARGIN, largest_root

STEPS = 3
LEAST = 1e-4
"""The least share of a part, relative to the largest."""


@dataclass(frozen=True)
class Ellipsoid:
    """A part of each row's move: |g·e| ≤ size (eᵀ shape e)^{1/2} + slack; `raw` ≥ size bounds the numbers that the shape was made of."""

    size: Tensor
    shape: Tensor
    raw: Tensor
    slack: Tensor


def gathered(parts: list[Ellipsoid]) -> Tensor:
    """At least the length of a sum of parts, for each row."""
    sizes = torch.stack([part.size for part in parts])
    bad = ~torch.isfinite(sizes).all(0) | (sizes.amax(0) > 1e100)
    sizes = sizes.masked_fill(bad, 0.0)
    raws = torch.stack([part.raw for part in parts]).masked_fill(bad, 0.0)
    share = _shares(sizes, [part.shape for part in parts])
    total = sum((s.square() / h)[:, None, None] * part.shape for s, h, part in zip(sizes, share, parts, strict=True))
    assert isinstance(total, Tensor)
    blur = 64 * (total.shape[-1] + len(total) + 16) * EPS * (raws.square() / share).sum(0)
    slack = sum(part.slack for part in parts)
    found = ((largest_root(total).square() + blur) * MARGIN).sqrt() + slack
    return torch.where(bad, torch.full_like(found, torch.inf), found)


def shaped(gram: Tensor, size: Tensor) -> Tensor:
    """gram/size², or the identity where squares of such small sizes vanish."""
    eye = torch.eye(gram.shape[-1], dtype=torch.float64).expand_as(gram)
    return torch.where((size > 1e-120)[..., None, None], gram / size.square().clamp_min(1e-240)[..., None, None], eye)


def spanned(parts: list[Ellipsoid]) -> Tensor:
    """The matrix D of an ellipsoid that holds the sum of parts of one row, (e, e); √λ_max(D) is at most `gathered`."""
    sizes = torch.stack([part.size for part in parts])
    share = _shares(sizes, [part.shape for part in parts])
    return sum((s.square() / h)[:, None, None] * part.shape for s, h, part in zip(sizes, share, parts, strict=True))[0]


def _shares(sizes: Tensor, shapes: list[Tensor]) -> Tensor:
    """λ (parts, rows): towards s_a (eᵀU_a e)^{1/2} with e the top of the sum; in float32, since any λ certifies."""
    scale = sizes.sum(0).clamp_min(1e-300)
    relative = (sizes / scale).float()
    thin = [shape.float() for shape in shapes]
    share = _floored(relative)
    soft: Tensor | None = None
    for step in range(STEPS):
        total = sum((s.square() / h)[:, None, None] * shape for s, h, shape in zip(relative, share, thin, strict=True))
        assert isinstance(total, Tensor)
        top = total / _trace(total)
        for _ in range(5):
            top = top @ top
            top = top / _trace(top)
        soft = top if soft is None else soft + (top - soft) * max(0.3, 1 / (step + 1))
        found = torch.stack([s * (soft * shape).sum((-2, -1)).clamp_min(0).sqrt() for s, shape in zip(relative, thin, strict=True)])
        share = _floored((share * found).sqrt())
    share = share.double()
    return share / (share.sum(0) * MARGIN)


def _floored(share: Tensor) -> Tensor:
    share = share + LEAST * share.amax(0).clamp_min(1e-20)
    return share / share.sum(0)


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp_min(1e-30)


@dataclass(frozen=True)
class Covariances:
    """Cov(z, f) with sd f ≤ size under laws P' ≤ law, where sd z ≤ spread in any direction; `boxed`: where the spread is |[√law z]|."""

    law: Tensor
    size: Tensor
    spread: Tensor
    boxed: Tensor

    def of(self, rows: slice) -> Covariances:
        """Those of some rows."""
        return Covariances(self.law[rows], self.size[rows], self.spread[rows], self.boxed[rows])


class HeadShape:
    """What the values of one head are in the output."""

    def __init__(self, separate: LocalValues, folded: LocalValues, mixer: Tensor, mixing: float) -> None:
        self.separate, self.folded, self.mixer = separate, folded, mixer
        self.stretch = separate.w * mixing * MARGIN
        product = separate.matrix @ mixer
        self.moved = shaped((product.mT @ product).unsqueeze(0), torch.tensor([folded.w], dtype=torch.float64))
        _, singular, basis = torch.linalg.svd(mixer, full_matrices=False)
        basis = basis[singular > 1e-14 * singular.amax().clamp_min(1e-300)] if len(singular) else basis
        self.span = (basis.mT @ basis).unsqueeze(0)

    def move(self, sizes: Tensor) -> Ellipsoid:
        """Vᵀc with |c| at most `sizes`."""
        return Ellipsoid(self.folded.w * sizes, self.moved, self.stretch * sizes, torch.zeros_like(sizes))

    def within(self, ball: Tensor, covariances: list[Covariances], rows: slice) -> Ellipsoid:
        """Anything of this head that is at most `ball`, and covariances, with shares in proportion to their sizes; for some rows."""
        local, ball = self.folded.local, ball[rows]
        covariances = [part.of(rows) for part in covariances]
        total = sum((part.size * part.spread for part in covariances), ball)
        inner = torch.zeros(len(ball), len(self.mixer), len(self.mixer), dtype=torch.float64)
        round_part = ball / total.clamp_min(1e-300)
        for part in covariances:
            share = part.size * part.spread / total.clamp_min(1e-300)
            scaled = self.separate.z[rows] * part.law.clamp_min(0).sqrt().unsqueeze(-1)
            boxed = part.boxed & (part.spread > 1e-120)
            factor = torch.where(boxed, share / part.spread.square().clamp_min(1e-240), torch.zeros_like(share))
            inner += factor[:, None, None] * (scaled.mT @ scaled)
            round_part = round_part + torch.where(boxed, torch.zeros_like(share), share)
        shape = self.mixer.mT @ inner @ self.mixer + round_part[:, None, None] * self.span
        scores = sum((part.size for part in covariances), torch.zeros_like(total))
        return Ellipsoid(total, shape, total + 2 * local.radius * self.stretch * scores, self.folded.w * local.shift * scores)


def head_shapes(heads: LocalHeads) -> list[HeadShape]:
    """One for each head; heads that are not mixed are side by side."""
    kept = heads.__dict__.get("_shapes")
    if kept is None:
        folded = heads.separate if heads.folded is None else heads.folded
        trios = zip(heads.separate, folded, _mixers(heads), strict=True)
        kept = heads.__dict__["_shapes"] = [HeadShape(one, other, mixer, heads.subject.mixing) for one, other, mixer in trios]
    return kept


def _mixers(heads: LocalHeads) -> list[Tensor]:
    if heads.subject.w_o is not None:
        return list(heads.subject.w_o)
    widths = [values.matrix.shape[-1] for values in heads.separate]
    return list(torch.eye(sum(widths), dtype=torch.float64).split(widths))


def ball(sizes: Tensor, width: int) -> Ellipsoid:
    """A part of which only the size is known."""
    return Ellipsoid(sizes, torch.eye(width, dtype=torch.float64).unsqueeze(0), sizes, torch.zeros_like(sizes))
