"""Exact reductions: which scores are a dot product plus a bias on the key, up to a constant in each row.

    a(x_i, y_j) = scale · q_i·k_j + key_bias_j + row_bias_i + Σ residue(i, j)

A softmax row does not see row_bias, so any fused dot-product kernel computes such a potential. The residue is
what depends on positions only and has no such form (a table of relative biases, a symmetric distance of
positions).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from regard import _check
from regard._object import Object
from regard._refused import Refused
from regard._transforms import is_only_run
from regard._types import Features, Scalar, over_rows, over_scores
from regard._verb import Verb
from regard.potentials.base import Potential, Scaled, Sum
from regard.potentials.distance import Gaussian
from regard.potentials.dot import Bilinear, Cosine, Dot
from regard.potentials.normed import NormedDot
from regard.potentials.positions import Alibi, PositionPotential, Rotary

reduce = Verb("reduce")
"""reduce.one(potential, queries, keys, causal) -> Reduction,
or Refused where the scores have no such form.
"""


@dataclass(frozen=True, eq=False, repr=False)
class Residue(Object):
    """A position potential that stays a bias on pairs, with its features."""

    potential: Potential
    queries: Features
    keys: Features

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """The bias of some queries on some keys."""
        return self.potential.pair(self.queries[..., rows, :], self.keys[..., columns, :])


@dataclass(frozen=True, eq=False, repr=False)
class Reduction(Object):
    """scale · q·k + key_bias + row_bias() + residues; the row bias is computed where it is asked for.

    What is decided here: which part of a score is a product that a kernel can take, and which part is a bias
    on keys, on queries or on pairs. amplitude: how large the terms of a score are that cancel.
    """

    queries: Tensor
    keys: Tensor
    scale: Scalar = 1.0
    key_bias: Tensor | None = None
    row_bias: Callable[[], Any] | None = None
    residues: tuple[Residue, ...] = ()
    amplitude: Scalar | None = None

    def folded(self) -> Reduction:
        """The same scores with scale 1; the queries take it."""
        if isinstance(self.scale, float) and self.scale == 1.0:
            return self
        return self.replace(queries=self.queries * over_scores(self.scale), scale=1.0)

    def shared(self) -> Reduction:
        """The same scores with scale 1; queries and keys take its square root each, the queries its sign."""
        if not isinstance(self.scale, Tensor):
            if self.scale == 1.0:
                return self
            root = math.sqrt(abs(self.scale))
            return self.replace(
                queries=self.queries * math.copysign(root, self.scale), keys=self.keys * root, scale=1.0
            )
        scale = self.scale.to(self.queries.dtype)
        roots = over_scores(scale.abs().sqrt())
        return self.replace(
            queries=self.queries * (over_scores(scale.sign()) * roots), keys=self.keys * roots, scale=1.0
        )


@reduce.rule(Potential)
def _none(potential: Potential, queries: Features, keys: Features, causal: bool) -> Refused:
    return Refused(f"{type(potential).__name__} scores are not a dot product plus a key bias.")


@reduce.rule(Dot)
@reduce.rule(NormedDot)
def _dot(potential: Dot | NormedDot, queries: Tensor, keys: Tensor, causal: bool) -> Reduction:
    return Reduction(queries, keys, potential.factor(queries.shape[-1]))


@reduce.rule(Bilinear)
def _bilinear(potential: Bilinear, queries: Tensor, keys: Tensor, causal: bool) -> Reduction:
    return Reduction(queries, keys)


@reduce.rule(Cosine)
def _cosine(potential: Cosine, queries: Tensor, keys: Tensor, causal: bool) -> Reduction:
    return Reduction(queries, keys, potential.scale)


@reduce.rule(Gaussian)
def _gaussian(potential: Gaussian, queries: Tensor, keys: Tensor, causal: bool) -> Reduction:
    """-|q-k|²/2b² = (q-c)·(k-c)/b² - |k-c|²/2b² - |q-c|²/2b²;
    the center c keeps the digits that an offset would cost, and is the origin where that costs none.
    """
    if queries.dtype.itemsize < 4:
        queries, keys = queries.float(), keys.float()
    bandwidth = potential.bandwidth_at(queries.shape[-1])
    if not isinstance(bandwidth, Tensor) and is_only_run(queries, keys):
        found = calm_gaussian(queries, keys, 1 / bandwidth**2)
        if found is not None:
            return found
    precision = 1 / (over_rows(bandwidth) ** 2)
    squares = _squares(keys)
    reach = _amplitude(queries, squares, precision)
    if keys.shape[-2] and not _check.holds(reach * torch.finfo(torch.float32).eps <= CALM):
        center = keys.detach().mean(-2, keepdim=True)
        queries, keys = queries - center, keys - center
        squares = keys.square().sum(-1)
        reach = _amplitude(queries, squares, precision)
    return Reduction(
        queries,
        keys,
        1 / (bandwidth**2),
        key_bias=(-0.5 * precision) * squares,
        row_bias=lambda: -0.5 * precision * queries.square().sum(-1),
        amplitude=reach,
    )


CALM = 2e-6
"""Where float32 scores of a Gaussian about the origin are off by less than this, its points stay there."""


def is_calm(square: float, precision: float) -> bool:
    """Whether points of at most this squared length stay at the origin."""
    return square * precision * _EPS <= CALM


def calm_gaussian(queries: Tensor, keys: Tensor, precision: float) -> Reduction | None:
    """The same in the fewest passes, where points stay at the origin and nobody takes a derivative."""
    if not queries.is_cpu or is_fake(keys) or 0 in (queries.numel(), keys.numel()):
        return None
    lengths = torch.linalg.vector_norm(keys, dim=-1)
    longest = torch.linalg.vector_norm(queries, dim=-1).amax()
    most = max(lengths.amax().item(), longest.item())
    square = most * most  # infinite where it leaves the range, and no error
    if not is_calm(square, precision):
        return None
    return Reduction(
        queries,
        keys,
        precision,
        key_bias=lengths.square_().mul_(-0.5 * precision),
        row_bias=lambda: -0.5 * precision * queries.square().sum(-1),
        amplitude=square * precision,
    )


_EPS = torch.finfo(torch.float32).eps


def _squares(points: Tensor) -> Tensor:
    """|z|² of each row; in one pass where no derivative is asked for."""
    if not is_only_run(points):
        return points.square().sum(-1)
    return torch.linalg.vector_norm(points, dim=-1).square_()


def _amplitude(queries: Tensor, squares: Tensor, precision: Scalar) -> Tensor:
    """The largest |z|² over bandwidth², of queries and of keys with these squares."""
    largest = [z.amax() for z in (_squares(queries.detach()), squares.detach()) if z.numel()]
    reach = torch.maximum(largest[0], largest[-1]) if largest else squares.new_zeros(())
    return reach * (precision.detach().amax() if isinstance(precision, Tensor) else precision)


@reduce.rule(PositionPotential)
def _position(potential: PositionPotential, queries: Tensor, keys: Tensor, causal: bool) -> Reduction:
    return _only_residue(potential, queries, keys)


@reduce.rule(Alibi)
def _alibi(potential: Alibi, queries: Tensor, keys: Tensor, causal: bool) -> Reduction:
    """With a causal support -m(s - t) = m (t - c) - m (s - c) is a key bias; only while m·n leaves the digits
    that near keys need. A place c among the keys and near the queries keeps those of log-sum-exps and of m's
    gradient.
    """
    slope, nothing = over_rows(potential.slope), (queries[..., :0], keys[..., :0])
    if queries.shape[-2] == 1:  # one row of biases is a bias on keys, whatever it is
        return Reduction(*nothing, 1.0, key_bias=-slope * (queries - keys.mT).abs().squeeze(-2))
    if not causal or _is_steep(potential.slope, keys):
        return _only_residue(potential, queries, keys)
    center = _near(queries.detach(), keys.detach())
    return Reduction(
        *nothing,
        1.0,
        key_bias=_product(slope, keys.squeeze(-1) - center),
        row_bias=lambda: _product(slope, center - queries.squeeze(-1)),
    )


def _near(queries: Tensor, keys: Tensor) -> Tensor:
    """The place (..., 1) nearest to the mean query among those from the first key to the last."""
    if not queries.shape[-2] or not keys.shape[-2]:
        return keys.new_zeros(1)
    return queries.mean(-2).round().clamp(keys.amin(-2), keys.amax(-2))


def _product(slope: Scalar, distance: Tensor) -> Tensor:
    """slope · distance; where the slope is learned its gradient, a sum over all tokens, is added in
    float64.
    """
    if not isinstance(slope, Tensor) or not slope.requires_grad or slope.device.type == "mps":
        return slope * distance
    kind = torch.promote_types(slope.dtype, distance.dtype)
    return (slope.double() * distance.double()).to(kind)


def _is_steep(slope: Scalar, keys: Tensor) -> bool:
    """Whether slope · position, rounded, would show in scores of near keys; not where it cannot be read."""
    most = slope.detach().abs().max() if isinstance(slope, Tensor) else torch.tensor(abs(slope))
    reach = keys.detach().abs().amax() if keys.numel() else 1.0
    return _check.holds(most * (reach * torch.finfo(keys.dtype).eps) < 1e-6) is False


@reduce.rule(Rotary)
def _rotary(potential: Rotary, queries: Tensor, keys: Tensor, causal: bool) -> Reduction | Refused:
    """The features are rotated already."""
    return reduce.one(potential.potential, queries, keys, causal)


@reduce.rule(Scaled)
def _scaled(potential: Scaled, queries: Features, keys: Features, causal: bool) -> Reduction | Refused:
    inner = reduce.one(potential.potential, queries, keys, causal)
    if isinstance(inner, Refused):
        return inner
    factor = potential.factor
    bias_factor = over_rows(factor)
    return Reduction(
        inner.queries,
        inner.keys,
        inner.scale * factor,
        None if inner.key_bias is None else bias_factor * inner.key_bias,
        None if inner.row_bias is None else lambda: bias_factor * inner.row_bias(),
        tuple(Residue(Scaled(r.potential, factor), r.queries, r.keys) for r in inner.residues),
        None if inner.amplitude is None else inner.amplitude * torch.as_tensor(factor).detach().abs().amax(),
    )


@reduce.rule(Sum)
def _sum(potential: Sum, queries: Features, keys: Features, causal: bool) -> Reduction | Refused:
    parts = [
        reduce.one(term, q, k, causal) for term, q, k in zip(potential.terms, queries, keys, strict=True)
    ]
    for part in parts:
        if isinstance(part, Refused):
            return part
    wide = [part for part in parts if part.queries.shape[-1]]
    if len(wide) == 1:  # products of one term alone keep their scale
        folded, scale = parts, wide[0].scale
    else:
        folded = [part.folded() if isinstance(part.scale, Tensor) else part.shared() for part in parts]
        scale = 1.0
    return Reduction(
        _beside([part.queries for part in folded]),
        _beside([part.keys for part in folded]),
        scale,
        _total([part.key_bias for part in folded]),
        None
        if all(part.row_bias is None for part in folded)
        else lambda: _total([part.row_bias and part.row_bias() for part in folded]),
        tuple(residue for part in folded for residue in part.residues),
        _total([part.amplitude for part in folded]),
    )


def _only_residue(potential: PositionPotential, queries: Tensor, keys: Tensor) -> Reduction:
    return Reduction(queries[..., :0], keys[..., :0], residues=(Residue(potential, queries, keys),))


def _beside(features: list[Tensor]) -> Tensor:
    """Features of all terms side by side, (..., n, Σ c)."""
    some = [f for f in features if f.shape[-1]]
    if len(some) == 1 and all(_adds_no_batch(f, some[0]) for f in features):
        return some[0]
    batch = torch.broadcast_shapes(*(f.shape[:-2] for f in features))
    kind = features[0].dtype
    for f in features[1:]:
        kind = torch.promote_types(kind, f.dtype)
    return torch.cat([f.to(kind).expand(*batch, -1, -1) for f in features], -1)


def _adds_no_batch(empty: Tensor, features: Tensor) -> bool:
    """Whether features without columns change neither the batch shape nor the dtype of others."""
    known = empty.ndim == 2 or empty.shape[:-2] == features.shape[:-2]
    return known and empty.dtype == features.dtype


def _total(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return None if not present else present[0] if len(present) == 1 else sum(present[1:], present[0])
