"""Columns of linear layers: which of them, head by head, give tensors that were seen, as they are, turned by
positions, or behind a norm layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.audits.adapters.inner_norms import InnerNorm
from regard.audits.adapters.turnings import Way
from regard.normed import Normed

Layer = tuple[str, Tensor, Tensor | None]
"""The name of a linear layer, its matrix (d, width) and its bias (width,), in float64."""
CLOSE = 1e-4
"""How far what columns give may be from what was seen, relative."""


@dataclass(frozen=True)
class Side:
    """How queries, keys or values are made of tokens: a projection with its heads, weight (g, d, e) and bias
    (g, e); behind a norm also one that they share, weight (d, r) and bias (r,), and what comes after it.
    """

    weight: Tensor
    bias: Tensor | None
    norm: Normed | None = None

    def times(self, factor: float) -> Side:
        """The same with a factor on what it gives."""
        if factor == 1.0:
            return self
        if self.norm is None:
            return Side(factor * self.weight, None if self.bias is None else factor * self.bias)
        gain, shift = self.norm.gain, self.norm.shift
        width = self.weight.new_ones(self.weight.shape[-1])
        scaled = factor * (width if gain is None else gain)
        return replace(
            self,
            norm=Normed(self.norm.eps, scaled, self.norm.u, shift if shift is None else factor * shift),
        )

    def ordered(self, order: Tensor | None) -> Side:
        """The same with the coordinates of what it gives in another order."""
        if order is None:
            return self
        if self.norm is None:
            return Side(self.weight[..., order], None if self.bias is None else self.bias[..., order])
        width = self.norm.width(self.weight.shape[-1])
        u = torch.eye(width, dtype=self.weight.dtype) if self.norm.u is None else self.norm.u
        shift = None if self.norm.shift is None else self.norm.shift[..., order]
        return replace(self, norm=Normed(self.norm.eps, self.norm.gain, u[..., order], shift))


@dataclass(frozen=True)
class Turned:
    """A side, and how positions turn what it gives; frequencies None: not at all."""

    side: Side
    frequencies: Tensor | None
    interleaved: bool


@dataclass(frozen=True)
class Source:
    """The tokens (n, d) that a module was given, with all inside it that may act on them."""

    points: Tensor
    layers: Sequence[Layer]
    norms: Sequence[InnerNorm]

    def sides(self, wanted: Tensor) -> Iterator[tuple[Side, Tensor]]:
        """Whatever may give a tensor (h, n, e), with what it gives, (g, n, e): linear, with a norm in each
        head, linear after a norm that all heads share.
        """
        yield from _candidates(self.layers, self.points, wanted)
        groups, _, width = _distinct(wanted).shape
        for norm in self.norms:
            if norm.fits(groups, width):
                for side, given in _candidates(self.layers, self.points, wanted):
                    yield _behind(side, norm), norm(given)
        for latent, points in self._latents():
            width = points.shape[-1]
            whole: Layer = ("", torch.eye(width, dtype=points.dtype), None)
            for last, given in _candidates([whole, *self.layers], points, wanted):
                yield _after(latent, last), given

    def _latents(self) -> Iterator[tuple[Side, Tensor]]:
        """Projections under a norm that acts on all heads at once, or on a narrow token before the heads."""
        for norm in self.norms:
            for _, weight, bias in self.layers if norm.gain is not None and norm.gain.ndim == 1 else ():
                width = len(norm.gain) if norm.gain is not None else 0
                if len(weight) == self.points.shape[-1] and weight.shape[-1] >= width:
                    first = Side(weight[:, :width], None if bias is None else bias[:width])
                    given = self.points @ first.weight
                    yield _behind(first, norm), norm(given if first.bias is None else given + first.bias)


def _behind(side: Side, norm: InnerNorm) -> Side:
    weight = norm.centering(side.weight)
    assert weight is not None
    return Side(weight, norm.centering(side.bias), norm.normed())


def _after(latent: Side, last: Side) -> Side:
    """A projection of what a shared norm gives."""
    assert latent.norm is not None
    shift = last.bias
    if latent.norm.shift is not None:
        moved = latent.norm.shift @ last.weight
        shift = moved if shift is None else shift + moved
    return replace(latent, norm=Normed(latent.norm.eps, latent.norm.gain, last.weight, shift))


def linear_layers(module: nn.Module) -> list[Layer]:
    """Every linear layer inside a module whose matrix can be read."""
    found: list[Layer] = []
    for name, child in module.named_modules():
        own: Any = child
        transposed = type(child).__name__ == "Conv1D"
        if (isinstance(child, nn.Linear) or transposed) and own.weight.dtype.is_floating_point:
            weight = own.weight.detach().double().cpu()
            bias = None if own.bias is None else own.bias.detach().double().cpu()
            found.append((name, weight if transposed else weight.mT, bias))
    fused: Any = module
    if isinstance(module, nn.MultiheadAttention) and fused.in_proj_weight is not None:
        bias = fused.in_proj_bias
        found.append(
            (
                "in_proj",
                fused.in_proj_weight.detach().double().mT,
                None if bias is None else bias.detach().double(),
            )
        )
    return found


def find_side(source: Source, wanted: Tensor) -> Side | None:
    """What gives wanted (h, n, e) from the tokens; heads that are equal share theirs."""
    target = _distinct(wanted)
    return next((side for side, given in source.sides(wanted) if _equal(given, target)), None)


def find_turned(source: Source, wanted: Tensor, ways: Sequence[Way]) -> Turned | None:
    """The same up to a factor, and turned by positions in one of these ways."""
    target = _distinct(wanted)
    for side, given in source.sides(wanted):
        for way in ways:
            turned = way.turn(given)
            size = float(turned.square().sum())
            factor = float((turned * target).sum()) / size if size > 0 else 0.0
            if factor and _equal(factor * turned, target):
                factor = 1.0 if abs(factor - 1) < CLOSE / 10 else factor
                found = side.times(factor).ordered(way.order(given.shape[-1]))
                return Turned(found, way.frequencies, way.interleaved)
    return None


def _candidates(layers: Sequence[Layer], source: Tensor, wanted: Tensor) -> Iterator[tuple[Side, Tensor]]:
    """Projections that may give a tensor, with what they give, (g, n, e)."""
    target = _distinct(wanted)
    groups, tokens, width = target.shape
    if len(source) != tokens:
        return
    for _, weight, bias in layers:
        if len(weight) != source.shape[-1] or weight.shape[-1] < groups * width:
            continue
        given = source @ weight if bias is None else source @ weight + bias
        for starts in _layouts(weight.shape[-1], len(wanted), groups, width):
            places = starts.unsqueeze(-1) + torch.arange(width)
            side = Side(weight[:, places].movedim(0, 1), None if bias is None else bias[places])
            yield side, given[:, places].transpose(0, 1)


def _layouts(total: int, heads: int, groups: int, width: int) -> Iterator[Tensor]:
    """Where the columns of each head may begin: one after the other from some place on, or with those of
    queries, keys and values side by side for each head or each group, or first or last in what a head has.
    """
    order = torch.arange(groups)
    for start in range(0, total - groups * width + 1, width):
        yield start + order * width
    slots = total // (groups * width)
    if slots > 1 and total == slots * groups * width:
        for slot in range(slots):
            yield (order * slots + slot) * width
    for members in range(2, groups + 1):  # queries of a group, then its key and its value
        if groups % members == 0 and total == (groups // members) * (members + 2) * width:
            yield ((order // members) * (members + 2) + order % members) * width
    if total % groups == 0 and total > groups * width:
        for start in (0, total // groups - width):
            yield order * (total // groups) + start


def _distinct(wanted: Tensor) -> Tensor:
    """Heads without those that only repeat the one before, as grouped keys and values do."""
    heads = len(wanted)
    for members in sorted((m for m in range(2, heads + 1) if heads % m == 0), reverse=True):
        grouped = wanted.unflatten(0, (-1, members))
        if bool((grouped == grouped[:, :1]).all()):
            return grouped[:, 0]
    return wanted


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and float((first - second).norm()) <= CLOSE * float(second.norm())
