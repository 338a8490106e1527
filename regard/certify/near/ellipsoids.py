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
    """A part of each row's move: |g·e| ≤ size (eᵀ shape e)^{1/2} + slack; `raw` ≥ size bounds the numbers that the shape was made of.

    The shape is frameᵀ core frame, with a core (1 or n, k, k) and a frame (k, e) of orthonormal rows; without a frame it is the core.
    """

    size: Tensor
    core: Tensor
    raw: Tensor
    slack: Tensor
    frame: Tensor | None = None

    @property
    def shape(self) -> Tensor:
        """As one matrix, (1 or n, e, e)."""
        return self.core if self.frame is None else self.frame.mT @ self.core @ self.frame


def gathered(parts: list[Ellipsoid]) -> Tensor:
    """At least the length of a sum of parts, for each row."""
    return enclosed(parts)[0]


def enclosed(parts: list[Ellipsoid]) -> tuple[Tensor, Tensor]:
    """The same, and the matrices D (n, e, e) of ellipsoids that hold the sum but for the slack of its parts."""
    sizes = torch.stack([part.size for part in parts])
    bad = ~torch.isfinite(sizes).all(0) | (sizes.amax(0) > 1e100)
    sizes = sizes.masked_fill(bad, 0.0)
    raws = torch.stack([part.raw for part in parts]).masked_fill(bad, 0.0)
    share = _shares(sizes, parts)
    total = _Shapes(parts, torch.float64).total(sizes.square() / share)
    blur = 64 * (total.shape[-1] + len(total) + 16) * EPS * (raws.square() / share).sum(0)
    slack = sum(part.slack for part in parts)
    found = ((largest_root(total).square() + blur) * MARGIN).sqrt() + slack
    return torch.where(bad, torch.full_like(found, torch.inf), found), total


def shaped(gram: Tensor, size: Tensor) -> Tensor:
    """gram/size², or the identity where squares of such small sizes vanish."""
    eye = torch.eye(gram.shape[-1], dtype=torch.float64).expand_as(gram)
    return torch.where((size > 1e-120)[..., None, None], gram / size.square().clamp_min(1e-240)[..., None, None], eye)


class _Shapes:
    """The shapes of parts. Those with one frame are added in it: the parts of a head are small matrices there."""

    def __init__(self, parts: list[Ellipsoid], dtype: torch.dtype) -> None:
        self._cores = [part.core.to(dtype) for part in parts]
        frames = {id(part.frame): part.frame.to(dtype) for part in parts if part.frame is not None}
        self._of = [None if part.frame is None else list(frames).index(id(part.frame)) for part in parts]
        self._frames = list(frames.values())
        self._all = torch.cat(self._frames) if frames else None

    def total(self, factors: Tensor) -> Tensor:
        """Σ_a c_a U_a for factors (parts, n), (n, e, e)."""
        scaled = [factor[:, None, None] * core for factor, core in zip(factors, self._cores, strict=True)]
        found = [one for one, frame in zip(scaled, self._of, strict=True) if frame is None]
        if self._all is not None:
            inner = [sum(one for one, own in zip(scaled, self._of, strict=True) if own == at) for at in range(len(self._frames))]
            found.append(self._all.mT @ torch.cat([core @ frame for core, frame in zip(inner, self._frames, strict=True)], -2))
        return sum(found[1:], found[0])

    def traces(self, weights: Tensor) -> Tensor:
        """tr(W U_a) for symmetric W (n, e, e), (parts, n)."""
        seen: list[Tensor] = []
        if self._all is not None:
            halves = (self._all @ weights).split([len(frame) for frame in self._frames], -2)
            seen = [half @ frame.mT for half, frame in zip(halves, self._frames, strict=True)]
        pairs = zip(self._cores, self._of, strict=True)
        return torch.stack([((weights if own is None else seen[own]) * core).sum((-2, -1)) for core, own in pairs])


def _shares(sizes: Tensor, parts: list[Ellipsoid]) -> Tensor:
    """λ (parts, rows): towards s_a (eᵀU_a e)^{1/2} with e the top of the sum; in float32, since any λ certifies."""
    scale = sizes.sum(0).clamp_min(1e-300)
    relative = (sizes / scale).float()
    shapes = _Shapes(parts, torch.float32)
    share = _floored(relative)
    soft: Tensor | None = None
    for step in range(STEPS):
        total = shapes.total(relative.square() / share)
        top = total / _trace(total)
        for _ in range(5):
            top = top @ top
            top = top / _trace(top)
        soft = top if soft is None else soft + (top - soft) * max(0.3, 1 / (step + 1))
        found = relative * shapes.traces(soft).clamp_min(0).sqrt()
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


class HeadShape:
    """What the values of one head are in the output."""

    def __init__(self, separate: LocalValues, folded: LocalValues, mixer: Tensor, mixing: float) -> None:
        self.separate, self.folded, self.mixer = separate, folded, mixer
        self.stretch = separate.w * mixing * MARGIN
        left, singular, basis = torch.linalg.svd(mixer, full_matrices=False)
        kept = singular > 1e-14 * singular.amax().clamp_min(1e-300) if len(singular) else singular > 0
        self.frame = basis[kept]
        self._inside = singular[kept, None] * left[:, kept].mT  # the mixer is its transpose times the frame
        product = separate.matrix @ self._inside.mT
        self._moved = shaped((product.mT @ product).unsqueeze(0), torch.tensor([folded.w], dtype=torch.float64))

    def move(self, sizes: Tensor) -> Ellipsoid:
        """Vᵀc with |c| at most `sizes`."""
        return Ellipsoid(self.folded.w * sizes, self._moved, self.stretch * sizes, torch.zeros_like(sizes), self.frame)

    def within(self, ball: Tensor, covariances: list[Covariances]) -> Ellipsoid:
        """Anything of this head that is at most `ball`, and covariances, with shares in proportion to their sizes."""
        local = self.folded.local
        total = sum((part.size * part.spread for part in covariances), ball)
        inner = torch.zeros(len(ball), len(self.mixer), len(self.mixer), dtype=torch.float64)
        round_part = ball / total.clamp_min(1e-300)
        for part in covariances:
            share = part.size * part.spread / total.clamp_min(1e-300)
            scaled = self.separate.z * part.law.clamp_min(0).sqrt().unsqueeze(-1)
            boxed = part.boxed & (part.spread > 1e-120)
            factor = torch.where(boxed, share / part.spread.square().clamp_min(1e-240), torch.zeros_like(share))
            inner += factor[:, None, None] * (scaled.mT @ scaled)
            round_part = round_part + torch.where(boxed, torch.zeros_like(share), share)
        core = self._inside @ inner @ self._inside.mT
        core.diagonal(dim1=-2, dim2=-1).add_(round_part.unsqueeze(-1))
        scores = sum((part.size for part in covariances), torch.zeros_like(total))
        return Ellipsoid(total, core, total + 2 * local.radius * self.stretch * scores, self.folded.w * local.shift * scores, self.frame)


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
