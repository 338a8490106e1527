"""Baselines for decisions: multi-norm zonotopes and intervals, on the same declarations as the ball model.

Zonotopes after Bonaert et al., "Fast and precise certification of transformers" (PLDI 2021): x = c + A u +
X ε with |u|₂ ≤ 1 for the input and one symbol |ε_k| ≤ 1 for every scalar that was changed nonlinearly.
Written fairly: a norm layer's x^{-1/2} is one convex step with its best chord, a softmax row is a sum of
exponentials of differences of scores, each with its best chord, and as many symbols as `SYMBOLS` are kept. In
their favor: rounding is not counted, and chords of GELU are measured on a grid, which is no proof.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard import maps
from regard.proofs.locating import in_double
from regard.proofs.near.stages import FeedForward, group_feed_forward

SYMBOLS = 6000
GRID = 41
STEEPEST = 60.0


class Lost(Exception):
    """Nothing finite can be said."""


@dataclass(frozen=True)
class Zonotope:
    """c (..., d), A (..., d, d0) and X (..., d, k)."""

    center: Tensor
    linear: Tensor
    symbols: Tensor

    def reach(self) -> Tensor:
        return self.linear.norm(dim=-1) + self.symbols.abs().sum(-1)

    def through(self, w: Tensor, b: Tensor | None = None) -> Zonotope:
        """x ↦ wᵀx + b."""
        center = self.center @ w
        return Zonotope(center if b is None else center + b, w.mT @ self.linear, w.mT @ self.symbols)

    def times(self, factor: Tensor) -> Zonotope:
        wide = factor.unsqueeze(-1)
        return Zonotope(factor * self.center, wide * self.linear, wide * self.symbols)

    def plus(self, other: Zonotope) -> Zonotope:
        """Symbols of one number are the same."""
        most = max(self.symbols.shape[-1], other.symbols.shape[-1])
        return Zonotope(
            self.center + other.center,
            self.linear + other.linear,
            _padded(self.symbols, most) + _padded(other.symbols, most),
        )

    def fresh(self, error: Tensor) -> Zonotope:
        """One more symbol for every scalar, of this half width."""
        kept = (error.flatten() > 0).nonzero().flatten()
        new = torch.zeros(error.numel(), len(kept), dtype=torch.float64)
        new[kept, torch.arange(len(kept))] = error.flatten()[kept]
        return replace(self, symbols=torch.cat([self.symbols, new.unflatten(0, error.shape)], -1))

    def reduced(self) -> Zonotope:
        """The largest symbols; all others become boxes."""
        if self.symbols.shape[-1] <= SYMBOLS:
            return self
        score = self.symbols.abs().sum((0, 1))
        kept = score.topk(SYMBOLS - self.center.numel()).indices
        away = torch.ones(len(score), dtype=torch.bool)
        away[kept] = False
        rest = self.symbols[..., away].abs().sum(-1)
        return replace(self, symbols=self.symbols[..., kept]).fresh(rest)


def _padded(symbols: Tensor, most: int) -> Tensor:
    none = torch.zeros(*symbols.shape[:-1], most - symbols.shape[-1], dtype=torch.float64)
    return torch.cat([symbols, none], -1)


def zonotope_margin(network: maps.Map, x: Tensor, token: int, radius: float, direction: Tensor) -> float:
    """At most the least value of direction · (first token) over a ball around one token; -∞ where lost."""
    n, d = x.shape
    linear = torch.zeros(n, d, d, dtype=torch.float64)
    linear[token] = radius * torch.eye(d, dtype=torch.float64)
    try:
        state = _through(in_double(network), Zonotope(x, linear, torch.zeros(n, d, 0, dtype=torch.float64)))
    except Lost:
        return -math.inf
    first = Zonotope(*(part[:1] for part in (state.center, state.linear, state.symbols)))
    value = first.through(direction.unsqueeze(-1))
    found = float(value.center - value.reach())
    return found if math.isfinite(found) else -math.inf


def _through(map: maps.Map | FeedForward, state: Zonotope) -> Zonotope:
    if isinstance(map, maps.Compose):
        for inner in group_feed_forward(map.maps):
            state = _through(inner, state)
        return state
    if isinstance(map, maps.Residual):
        return state.plus(_through(map.map, state))
    if isinstance(map, maps.Normalize):
        return _normalize(map, state)
    if isinstance(map, FeedForward):
        hidden = _activated(map.activation, state.through(map.first.w, map.first.b))
        return hidden.through(map.second.w, map.second.b)
    if isinstance(map, maps.Heads):
        return _attend(map, state.reduced())
    raise TypeError(f"the baseline does not know {type(map).__name__}")


def _normalize(map: maps.Normalize, state: Zonotope) -> Zonotope:
    """|g + t|²/d + ε = w + 2 g·t/d + |t|²/d, its root inverted by a chord, times g + t."""
    d = state.center.shape[-1]
    state = state.through(torch.eye(d, dtype=torch.float64) - 1 / d)
    g, reach = state.center, state.reach()
    w = g.square().mean(-1) + float(map.eps)
    linear, symbols = (2 / d * (g.unsqueeze(-2) @ part).squeeze(-2) for part in (state.linear, state.symbols))
    along = linear.norm(dim=-1) + symbols.abs().sum(-1)
    square = reach.square().sum(-1) / d
    low, high = w - along, w + along + square
    if not bool((low > 1e-9).all()):
        raise Lost
    slope, upper, lower = _chord(low, high)
    error = (upper - lower) / 2 + slope.abs() * square / 2
    scale = slope * (w + square / 2) + (upper + lower) / 2
    moved = Zonotope(scale, slope.unsqueeze(-1) * linear, slope.unsqueeze(-1) * symbols)
    scaled = state.times(scale.unsqueeze(-1))
    found = Zonotope(
        scaled.center,
        scaled.linear + g.unsqueeze(-1) * moved.linear.unsqueeze(-2),
        scaled.symbols + g.unsqueeze(-1) * moved.symbols.unsqueeze(-2),
    )
    along_g = torch.diag_embed(error).unsqueeze(1) * g.unsqueeze(-1)  # one symbol a token
    found = replace(found, symbols=torch.cat([found.symbols, along_g], -1))
    found = found.fresh(reach * (slope.abs() * along + error).unsqueeze(-1))
    gamma = torch.ones(d, dtype=torch.float64) if map.weight is None else map.weight
    found = found.times(gamma.expand_as(found.center))
    return found if map.bias is None else replace(found, center=found.center + map.bias)


def _chord(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The chord of x^{-1/2} and the offsets of the lines above and below."""
    slope = (high.rsqrt() - low.rsqrt()) / (high - low).clamp_min(1e-300)
    slope = torch.where(high - low > 1e-12, slope, -0.5 * low**-1.5)
    touch = (-0.5 / slope) ** (2 / 3)
    upper, lower = low.rsqrt() - slope * low, touch.rsqrt() - slope * touch
    return slope, torch.maximum(upper, lower), torch.minimum(upper, lower)


def _activated(activation: maps.Activation, state: Zonotope) -> Zonotope:
    """Each neuron by its chord, and how far the function is from it, on a grid."""
    reach = state.reach()
    low, high = state.center - reach, state.center + reach
    grid = low.unsqueeze(-1) + (high - low).unsqueeze(-1) * torch.linspace(0, 1, GRID, dtype=torch.float64)
    values = activation(grid)
    slope = (values[..., -1] - values[..., 0]) / (high - low).clamp_min(1e-12)
    apart = values - slope.unsqueeze(-1) * grid
    upper, lower = apart.amax(-1), apart.amin(-1)
    found = state.times(slope)
    return replace(found, center=found.center + (upper + lower) / 2).fresh((upper - lower) / 2)


def _attend(map: maps.Heads, state: Zonotope) -> Zonotope:
    dot, values, old = map.attention.potential, map.attention.lookup, state.symbols.shape[-1]
    found: Zonotope | None = None
    for h in range(len(map.w_o)):
        q = state.through(dot.w_q[h], None if dot.b_q is None else dot.b_q[h])
        k = state.through(dot.w_k[h], None if dot.b_k is None else dot.b_k[h])
        v = state.through(values.w_v[h], None if values.b_v is None else values.b_v[h])
        head = _head(q, k, v, float(dot.factor(q.center.shape[-1]))).through(map.w_o[h])
        found = head if found is None else _beside(found, head, old)
    assert found is not None
    return found if map.b_o is None else replace(found, center=found.center + map.b_o)


def _beside(first: Zonotope, second: Zonotope, old: int) -> Zonotope:
    """A sum in which only the first `old` symbols are shared."""
    shared = first.symbols[..., :old] + second.symbols[..., :old]
    symbols = torch.cat([shared, first.symbols[..., old:], second.symbols[..., old:]], -1)
    return Zonotope(first.center + second.center, first.linear + second.linear, symbols)


def _pairs(q: Zonotope, k: Zonotope, part: str) -> Tensor:
    mine, other = getattr(q, part), getattr(k, part)
    return torch.einsum("jc,ick->ijk", k.center, mine) + torch.einsum("ic,jck->ijk", q.center, other)


def _head(q: Zonotope, k: Zonotope, v: Zonotope, factor: float) -> Zonotope:
    scores = Zonotope(
        factor * (q.center @ k.center.mT),
        factor * _pairs(q, k, "linear"),
        factor * _pairs(q, k, "symbols"),
    ).fresh(abs(factor) * q.reach() @ k.reach().mT)
    law = _rows(scores)
    v = replace(v, symbols=_padded(v.symbols, law.symbols.shape[-1]))
    found = Zonotope(
        law.center @ v.center,
        torch.einsum("ij,jdk->idk", law.center, v.linear) + torch.einsum("ijk,jd->idk", law.linear, v.center),
        torch.einsum("ij,jdk->idk", law.center, v.symbols)
        + torch.einsum("ijk,jd->idk", law.symbols, v.center),
    )
    return found.fresh(law.reach() @ v.reach())


def _rows(scores: Zonotope) -> Zonotope:
    """1/Σ_l e^{s_l - s_j}: chords of each exponential, then one of the inverse."""
    rows = [
        _row(*(part[i] for part in (scores.center, scores.linear, scores.symbols)))
        for i in range(len(scores.center))
    ]
    center, linear, symbols, error = (torch.stack(part) for part in zip(*rows, strict=True))
    return Zonotope(center, linear, symbols).fresh(error)


def _row(center: Tensor, linear: Tensor, symbols: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    apart, a, x = (part.unsqueeze(0) - part.unsqueeze(1) for part in (center, linear, symbols))
    reach = a.norm(dim=-1) + x.abs().sum(-1)
    low, high = apart - reach, apart + reach
    if not float(high.max()) <= STEEPEST:
        raise Lost
    slope = torch.where(reach > 1e-9, (high.exp() - low.exp()) / (high - low).clamp_min(1e-300), apart.exp())
    above, below = low.exp() - slope * low, slope - slope * slope.log()
    above = torch.maximum(above, below)
    middle, error = (slope * apart + (above + below) / 2).sum(-1), ((above - below) / 2).sum(-1)
    a, x = (slope.unsqueeze(-1) * a).sum(1), (slope.unsqueeze(-1) * x).sum(1)
    around = a.norm(dim=-1) + x.abs().sum(-1) + error
    least = torch.maximum(torch.maximum(middle - around, low.exp().sum(-1)), torch.ones_like(middle))
    most = torch.minimum(middle + around, high.exp().sum(-1))
    tilt = -1 / (least * most)
    above, below = 1 / least - tilt * least, 2 * (-tilt).sqrt()
    above = torch.maximum(above, below)
    wide = tilt.unsqueeze(-1)
    return tilt * middle + (above + below) / 2, wide * a, wide * x, (above - below) / 2 + tilt.abs() * error


def interval_margin(network: maps.Map, x: Tensor, token: int, radius: float, direction: Tensor) -> float:
    """The same by intervals: every entry of every token in its own."""
    low, high = x.clone(), x.clone()
    low[token], high[token] = x[token] - radius, x[token] + radius
    low, high = _interval(in_double(network), low, high)
    low, high = _affine(low[:1], high[:1], direction.unsqueeze(-1), None)
    found = float(low)
    return found if math.isfinite(found) else -math.inf


def _affine(low: Tensor, high: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
    middle, half = (low + high) / 2 @ w, (high - low) / 2 @ w.abs()
    middle = middle if b is None else middle + b
    return middle - half, middle + half


def _interval(map: maps.Map | FeedForward, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(map, maps.Compose):
        for inner in group_feed_forward(map.maps):
            low, high = _interval(inner, low, high)
        return low, high
    if isinstance(map, maps.Residual):
        down, up = _interval(map.map, low, high)
        return low + down, high + up
    if isinstance(map, maps.Normalize):
        return _interval_norm(map, low, high)
    if isinstance(map, FeedForward):
        down, up = _affine(low, high, map.first.w, map.first.b)
        grid = down.unsqueeze(-1) + (up - down).unsqueeze(-1) * torch.linspace(
            0, 1, GRID, dtype=torch.float64
        )
        values = map.activation(grid)
        return _affine(values.amin(-1), values.amax(-1), map.second.w, map.second.b)
    if isinstance(map, maps.Heads):
        return _interval_heads(map, low, high)
    raise TypeError(f"the baseline does not know {type(map).__name__}")


def _interval_norm(map: maps.Normalize, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    d = low.shape[-1]
    low, high = _affine(low, high, torch.eye(d, dtype=torch.float64) - 1 / d, None)
    least = torch.where(low * high < 0, 0.0, torch.minimum(low.square(), high.square()))
    most = torch.maximum(low.square(), high.square())
    small, large = ((part.mean(-1, keepdim=True) + float(map.eps)).sqrt() for part in (least, most))
    ends = torch.stack([low / small, low / large, high / small, high / large]).clamp(-(d**0.5), d**0.5)
    gamma = torch.ones(d, dtype=torch.float64) if map.weight is None else map.weight
    return _affine(ends.amin(0), ends.amax(0), torch.diag(gamma), map.bias)


def _interval_heads(map: maps.Heads, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    dot, values, down, up = map.attention.potential, map.attention.lookup, 0.0, 0.0
    for h in range(len(map.w_o)):
        q = _affine(low, high, dot.w_q[h], None if dot.b_q is None else dot.b_q[h])
        k = _affine(low, high, dot.w_k[h], None if dot.b_k is None else dot.b_k[h])
        v = _affine(low, high, values.w_v[h], None if values.b_v is None else values.b_v[h])
        s = _products(q, k, float(dot.factor(dot.w_q.shape[-1])))
        apart = (s[0].unsqueeze(1) - s[1].unsqueeze(2), s[1].unsqueeze(1) - s[0].unsqueeze(2))
        own = torch.eye(len(low), dtype=torch.bool)
        sums = [part.masked_fill(own, 0.0).clamp_max(300.0).exp().sum(-1) for part in apart]
        law = 1 / sums[1], (1 / sums[0]).clamp_max(1.0)
        ends = torch.stack([p.unsqueeze(-1) * one.unsqueeze(0) for p in law for one in v])
        mixed = _affine(ends.amin(0).sum(1), ends.amax(0).sum(1), map.w_o[h], None)
        down, up = down + mixed[0], up + mixed[1]
    bias = 0.0 if map.b_o is None else map.b_o
    return down + bias, up + bias


def _products(q: tuple[Tensor, Tensor], k: tuple[Tensor, Tensor], factor: float) -> tuple[Tensor, Tensor]:
    ends = torch.stack([a.unsqueeze(1) * b.unsqueeze(0) for a in q for b in k]) * factor
    return ends.amin(0).sum(-1), ends.amax(0).sum(-1)
