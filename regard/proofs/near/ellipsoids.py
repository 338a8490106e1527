"""Parts of a move that lie in ellipsoids, added with their directions: heads, and the linear part with what
is beyond it.

If |g_a·e| ≤ s_a (eᵀU_a e)^{1/2} for every unit e, then for any shares λ_a > 0 with Σ λ_a ≤ 1, by
Cauchy–Schwarz,

    |Σ_a g_a| ≤ λ_max(Σ_a s_a² U_a/λ_a)^{1/2}.                                                           (N17)

λ_a in proportion to s_a with U_a ≤ I gives Σ_a s_a, so good shares only help. Rows are (n,), shapes U_a (1 or
n, e, e).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._enclosed import computed_lengths, largest_roots
from regard._upper import Lower, Upper, exact, relative_error, root, stack, total
from regard.proofs.near.head import LocalValues

STEPS = 3
LEAST = 1e-4
"""The least share of a part, relative to the largest."""


@dataclass(frozen=True)
class Ellipsoid:
    """A part of each row's move: |g·e| ≤ size (eᵀUe)^{1/2} + slack for unit e, with U within `blur` of frameᵀ
    core frame.

    The core is (1 or n, k, k) and the frame (k, e); without a frame U is near the core itself.
    """

    size: Upper
    core: Tensor
    blur: Upper
    slack: Upper
    frame: Tensor | None = None

    def length(self) -> Upper:
        """At least |g|, where U ≤ I."""
        return self.size + self.slack


@dataclass(frozen=True)
class Enclosing:
    """A sum of ellipsoids: `length` at least that of the sum, and D (n, e, e) of an ellipsoid that holds it
    but for the slack.

    |g·e|² ≤ eᵀDe + blur for unit e.
    """

    length: Upper
    matrices: Tensor
    blur: Upper


def enclose(parts: list[Ellipsoid]) -> Enclosing:
    """The sum of parts, by (N17)."""
    sizes = stack([part.size for part in parts])
    values = sizes.value
    bad = ~torch.isfinite(values).all(0) | (values.amax(0) > 1e100)
    sizes = sizes.where(~bad)
    share = _shares(sizes.value, parts)
    factors = (sizes.square() / Lower(share)).firm()
    matrices = _Shapes(parts, torch.float64).total(factors.value)
    blurs = [_rounding(part, len(parts) * (matrices.shape[-1] + len(part.core[0]))) for part in parts]
    blur = total([factor * one for factor, one in zip(factors, blurs, strict=True)])
    slack = total([part.slack for part in parts])
    found = largest_roots(matrices, error=blur) + slack
    return Enclosing(found.map(lambda value: torch.where(bad, torch.inf, value)), matrices, blur)


def length_of_sum(parts: list[Ellipsoid]) -> Upper:
    """At least |Σ g_a|, for each row."""
    return enclose(parts).length


def _rounding(part: Ellipsoid, terms: int) -> Upper:
    """How far U may be from what is added for it, in spectral norm: its blur,
    and the rounding of frameᵀ core frame and of the sum.
    """
    wide = part.core.shape[-1] if part.frame is None else sum(part.frame.shape)
    size = computed_lengths(part.core.flatten(-2))
    if part.frame is not None:
        size = size * computed_lengths(part.frame.flatten()).square()
    return part.blur + relative_error(2 * wide + terms + 8) * size


def normalize(gram: Tensor, size: Upper, error: Upper) -> tuple[Tensor, Upper]:
    """U = gram/size² and its blur, for a Gram matrix within `error` and size² ≥ its norm; the identity
    where squares of sizes vanish.
    """
    eye = torch.eye(gram.shape[-1], dtype=torch.float64).expand_as(gram)
    large, least = size.value > 1e-120, Lower(size.value.clamp_min(1e-120).square(), 2)
    core = torch.where(large[..., None, None], gram / least.value[..., None, None], eye)
    rounding = relative_error(4) * computed_lengths(core.flatten(-2))
    return core, (error / least).where(large) + rounding


class _Shapes:
    """The shapes of parts.

    Those with one frame are added in it: the parts of a head are small matrices there.
    """

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
            inner = [
                sum(one for one, own in zip(scaled, self._of, strict=True) if own == at)
                for at in range(len(self._frames))
            ]
            found.append(
                self._all.mT
                @ torch.cat([core @ frame for core, frame in zip(inner, self._frames, strict=True)], -2)
            )
        return sum(found[1:], found[0])

    def traces(self, weights: Tensor) -> Tensor:
        """tr(W U_a) for symmetric W (n, e, e), (parts, n)."""
        seen: list[Tensor] = []
        if self._all is not None:
            halves = (self._all @ weights).split([len(frame) for frame in self._frames], -2)
            seen = [half @ frame.mT for half, frame in zip(halves, self._frames, strict=True)]
        pairs = zip(self._cores, self._of, strict=True)
        return torch.stack(
            [((weights if own is None else seen[own]) * core).sum((-2, -1)) for core, own in pairs]
        )


def _shares(sizes: Tensor, parts: list[Ellipsoid]) -> Tensor:
    """λ (parts, rows): towards s_a (eᵀU_a e)^{1/2} with e the top of the sum; in float32,
    since any λ certifies.
    """
    scale = sizes.sum(0).clamp_min(1e-300)
    relative = (sizes / scale).float()
    shapes = _Shapes(parts, torch.float32)
    share = _with_floor(relative)
    soft: Tensor | None = None
    for step in range(STEPS):
        top = sharpen(shapes.total(relative.square() / share))
        soft = top if soft is None else soft + (top - soft) * max(0.3, 1 / (step + 1))
        found = relative * shapes.traces(soft).clamp_min(0).sqrt()
        share = _with_floor((share * found).sqrt())
    return sum_to_less_than_one(share.double(), 0)


def sum_to_less_than_one(share: Tensor, dim: int) -> Tensor:
    """Shares in float64 whose true sum is at most one:
    the margin is far more than the rounding of a sum and a quotient.
    """
    return share / (share.sum(dim, keepdim=True) * (1 + 1e-12))


def sharpen(matrices: Tensor) -> Tensor:
    """A symmetric positive matrix to the power 32, over its trace: nearly the projection on its top."""
    found = matrices / _trace(matrices)
    for _ in range(5):
        found = found @ found
        found = found / _trace(found)
    return found


def _with_floor(share: Tensor) -> Tensor:
    """Shares of which none is nearly zero; their sum does not count."""
    return share + LEAST * share.amax(0).clamp_min(1e-20)


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp_min(1e-30)


@dataclass(frozen=True)
class Covariances:
    """Cov(z, f) with sd f ≤ size under laws P' ≤ law, where sd(z·e) ≤ spread; `boxed`:
    where the spread is |[√law z]|.
    """

    law: Upper
    size: Upper
    spread: Upper
    boxed: Tensor


class HeadShape:
    """What the values of one head are in the output: z = mixerᵀ(values before mixing).

    The mixer is within `lost` of insideᵀ frame, so that its directions are the few of the frame.
    """

    def __init__(self, separate: LocalValues, folded: LocalValues, mixer: Tensor, mixing: Upper) -> None:
        self.separate, self.folded, self.mixer, self.mixing = separate, folded, mixer, mixing
        self.thickness = computed_lengths(mixer.flatten())
        left, singular, basis = torch.linalg.svd(mixer, full_matrices=False)
        kept = singular > 1e-14 * singular.amax() if len(singular) else singular > 0
        self.frame = basis[kept]
        self._inside = singular[kept, None] * left[:, kept].mT
        self._thickness = computed_lengths(self._inside.flatten())
        made = self._inside.mT @ self.frame
        rounding = (
            relative_error(len(self.frame) + 2) * self._thickness * computed_lengths(self.frame.flatten())
        )
        self._lost = computed_lengths((mixer - made).flatten()) + rounding
        self._still = self._moving_values()

    def with_rows(self, separate: LocalValues, folded: LocalValues) -> HeadShape:
        """The same head with some of its rows."""
        part = copy.copy(self)
        part.separate, part.folded = separate, folded
        return part

    def _moving_values(self) -> tuple[Tensor, Upper]:
        """VᵀV over |V|², in the frame."""
        product = self.separate.matrix.center @ self._inside.mT
        thick = self.separate.matrix.length * self._thickness
        error = relative_error(2 * sum(product.shape) + len(self.mixer) + 8) * thick.square()
        core, blur = normalize(
            (product.mT @ product).unsqueeze(0), self.folded.w.unsqueeze(0), error.unsqueeze(0)
        )
        return core, blur

    def move(self, moved: Upper) -> Ellipsoid:
        """Vᵀc with |c| at most `moved`."""
        core, blur = self._still
        outside = self.separate.w * self._lost + self.separate.matrix.error * self.mixing
        return Ellipsoid(self.folded.w * moved, core, blur, moved * outside, self.frame)

    def within(self, ball: Upper, weight: Upper, covariances: list[Covariances]) -> Ellipsoid:
        """Σ_k c_k z_k of length at most `ball` with Σ|c_k| ≤ weight, and covariances, with shares in
        proportion to their sizes.

        What is not in the frame is slack: at most `lost` times what the values are before mixing.
        """
        z = self.separate.z
        parts = [part.size * part.spread for part in covariances]
        whole = total([ball, *parts])
        scale = whole.value.clamp_min(1e-300)
        inner = torch.zeros(len(scale), len(self.mixer), len(self.mixer), dtype=torch.float64)
        round_part, mass = ball.value / scale, exact(torch.zeros_like(scale))
        for part, size in zip(covariances, parts, strict=True):
            share = size.value / scale
            scaled = z.center * part.law.value.sqrt().unsqueeze(-1)
            boxed = part.boxed & (part.spread.value > 1e-120)
            factor = torch.where(boxed, share / part.spread.value.square(), 0.0)
            inner += factor[:, None, None] * (scaled.mT @ scaled)
            mass = mass + Upper(factor) * (part.law * self.separate.size.square()).sum(-1)
            round_part = round_part + torch.where(boxed, 0.0, share)
        core = self._inside @ inner @ self._inside.mT
        core.diagonal(dim1=-2, dim2=-1).add_(round_part.unsqueeze(-1))
        terms = self.separate.local.n + 2 * sum(self.mixer.shape) + 64
        blur = relative_error(terms) * (
            mass * self._thickness.square() + root(len(core[0])) * Upper(round_part)
        )
        missed = z.error * self.mixing + self._lost * self.separate.largest
        slack = total([weight, *(part.size for part in covariances)]) * missed
        roundings = (
            max([whole.roundings, *(part.law.roundings + 2 * part.spread.roundings for part in covariances)])
            + 16
        )
        return Ellipsoid(Upper(whole.value, roundings), core, blur, slack, self.frame)


def ball(moved: Upper, width: int) -> Ellipsoid:
    """A part of which only the size is known."""
    eye = torch.eye(width, dtype=torch.float64).unsqueeze(0)
    none = exact(torch.zeros_like(moved.value))
    return Ellipsoid(moved, eye, none, none)
