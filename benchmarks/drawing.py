"""What a random case is made of: numbers, declarations, domains.

The draws are functions of the seed alone; do not change their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import regard as r
from regard.domains import Ball, Domain, Neighborhood, Radii
from regard.errors import ArgumentError
from regard.maps import Compose, Gelu, Heads, Normalize, Residual, feed_forward
from regard.measure import Measure
from regard.norms import TokenMax

D = torch.float64


class Draw:
    """Random numbers of one case."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(*shape, generator=self.generator, dtype=D)

    def share(self) -> float:
        """Uniform on [0, 1)."""
        return float(torch.rand((), generator=self.generator, dtype=D))

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.share() < probability

    def count(self, low: int, high: int) -> int:
        """A whole number between both ends."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def size(self, low: float, high: float) -> float:
        """A positive number whose logarithm is uniform."""
        return low * (high / low) ** self.share()

    def pick(self, choices: Any) -> Any:
        """One of several."""
        return list(choices)[self.count(0, len(choices) - 1)]

    def maybe(self, value: Any, probability: float = 0.5) -> Any:
        """The value, or None."""
        return value if self.chance(probability) else None

    def units(self, n: int, d: int) -> Tensor:
        """n vectors of length one."""
        z = self.normal(n, d)
        return z / z.norm(dim=-1, keepdim=True).clamp_min(1e-300)


# Declarations


def potentials(
    draw: Draw, d: int, heads: tuple[int, ...], groups: tuple[int, ...]
) -> dict[str, Callable[[], Any]]:
    """One maker for each kind of score. heads and groups are () without heads, (h,) and (g,) with them."""
    c = 2 * draw.count(1, 2)
    size = draw.size(0.05, 4.0)
    w_q, w_k = size * draw.normal(*heads, d, c), draw.normal(*groups, d, c)
    b_q, b_k = (draw.maybe(size * draw.normal(*heads, c if draw.chance(0.8) else 1)) for _ in range(2))
    b_k = b_k if heads == groups else None
    slope = torch.rand(heads, generator=draw.generator, dtype=D) if heads else draw.share()
    table = r.RelativeBias(draw.normal(*heads, 7), r.potentials.Clipped(3))
    dot, one = r.Dot(w_q, w_k, None, b_q, b_k), draw.normal(*heads, d, c)
    rank_one = draw.normal(*heads, d, 1) * draw.normal(*heads, 1, d)
    return {
        "dot": lambda: dot,
        "bare dot": lambda: r.Dot(scale=size),
        "bilinear": lambda: r.Bilinear(size * draw.normal(*heads, d, d)),
        "rank one": lambda: r.Bilinear(size * rank_one),
        "zero": lambda: r.Bilinear(torch.zeros(*heads, d, d, dtype=D)),
        "cosine": lambda: r.Cosine(w_q, w_k, 3 * size, 0.1),
        "gaussian": lambda: r.Gaussian(bandwidth=draw.size(0.3, 3.0)),
        "gaussian tied": lambda: r.Gaussian(one, one, draw.size(0.3, 3.0)),
        "gaussian untied": lambda: r.Gaussian(w_q, w_k, draw.size(0.5, 3.0), b_q, b_k),
        "gaussian away": lambda: -r.Gaussian(bandwidth=draw.size(1.0, 3.0)),
        "laplace": lambda: r.Laplace(bandwidth=draw.size(0.5, 3.0)),
        "student": lambda: r.StudentT(nu=draw.size(0.5, 5.0), bandwidth=draw.size(0.5, 3.0)),
        "additive": lambda: r.Additive(w_q, w_k, 2 * draw.normal(c)),
        "alibi": lambda: dot + r.Alibi(slope),
        "positions alone": lambda: r.Alibi(slope),
        "relative": lambda: dot + table,
        "rotary": lambda: r.Rotary(dot, base=draw.size(2.0, 100.0), interleaved=draw.chance(0.5)),
        "rotary partial": lambda: r.Rotary(dot, frequencies=draw.normal(1)) + r.Alibi(slope),
        "softcap": lambda: r.SoftCap(dot, draw.size(0.5, 5.0)),
        "sum": lambda: dot + r.Gaussian(bandwidth=2.0) + r.Alibi(slope),
        "scaled": lambda: 0.5 * r.Laplace() - dot,
    }


def lookups(draw: Draw, d: int, lead: tuple[int, ...]) -> Any:
    """Values of any width, with or without a bias."""
    e = draw.count(1, 4)
    w = draw.size(0.1, 3.0) * draw.normal(*lead, d, e)
    linear = r.Linear(w, draw.maybe(draw.normal(*lead, e)))
    narrow = r.Factored(draw.normal(*lead, d, 2), draw.normal(*lead, 2, e))
    return draw.pick([r.Identity(), linear, linear, narrow] if not lead else [linear, linear, narrow])


def supports(draw: Draw, n: int) -> Any:
    """Every query sees a key."""
    seen = (torch.rand(n, n, generator=draw.generator) > 0.5) | torch.eye(n, dtype=torch.bool)
    documents = r.Document(torch.tensor([i * 2 // n for i in range(n)]))
    return draw.pick(
        [r.Full(), r.Full(), r.Causal(), r.Window(1, 1), r.Window(2, 0), documents, r.Where(seen)]
    )


def attentions(draw: Draw, n: int, d: int) -> r.Attention:
    """Any potential, support, temperature and number of heads; one in eight has rows that are not softmax."""
    heads, groups = draw.pick([((), ()), ((), ()), ((2,), (2,)), ((4,), (2,))])
    potential = draw.pick(potentials(draw, d, heads, groups).items())[1]()
    softmax = r.Softmax(draw.pick([1.0, 1.0, draw.size(0.2, 4.0)]))
    normalizer = draw.pick([r.Sparsemax(), r.Entmax(1.5), r.Sigmoid()]) if draw.chance(0.125) else softmax
    return r.Attention(potential, lookups(draw, d, groups), normalizer, supports(draw, n))


def maps_around(draw: Draw, attention: r.Attention, n: int, d: int) -> Any:
    """The attention alone, mixed, with a residual, or in a block with norm layers."""
    value = attention(draw.normal(n, d))
    if value.ndim == 2:
        return Residual(attention) if value.shape[-1] == d and draw.chance(0.5) else attention
    if draw.chance(0.3):
        return attention
    mixed = Heads(attention, draw.size(0.2, 2.0) * draw.normal(value.shape[0], value.shape[-1], d))
    norm = Normalize(1e-2, 1 + 0.2 * draw.normal(d), centered=draw.chance(0.5))
    hidden = feed_forward(Gelu(), draw.normal(d, 3), draw.normal(3, d))
    block = Compose((Residual(Compose((norm, mixed))), Residual(hidden)))
    return draw.pick([mixed, mixed, Residual(mixed), Compose((norm, mixed)), block])


# Domains


def domains(draw: Draw, n: int, d: int, plain: bool) -> Domain:
    """Balls about any center, and neighborhoods of sequences with equal tokens, weights,
    and tokens that stay.
    """
    size = draw.pick([1.0, draw.size(0.03, 10.0), draw.size(1e-6, 1e4)])
    if draw.chance(0.4):
        return Ball(size, draw.maybe(size * draw.normal(d)), n)
    x = size * draw.normal(n, d)
    x = x[torch.randint(0, n, (n,), generator=draw.generator)] if draw.chance(0.2) else x
    points = x if plain or draw.chance(0.7) else Measure(x, 2 * draw.normal(n))
    radius = (
        draw.pick(
            [0.0, draw.size(1e-4, 3.0), draw.size(1e-4, 3.0), draw.size(1e-2, 1.0), draw.size(1.0, 100.0)]
        )
        * size
    )
    radii = (
        radius
        * torch.rand(n, generator=draw.generator, dtype=D)
        * (torch.rand(n, generator=draw.generator) > 0.4)
    )
    alone = radius * torch.nn.functional.one_hot(torch.tensor(draw.count(0, n - 1)), n).to(D)
    choices = [
        Neighborhood(points, radius),
        Neighborhood(points, radius, TokenMax()),
        Radii(points, radii),
        Radii(points, alone),
    ]
    return draw.pick(choices)


def first_valid(make: Callable[[], Any]) -> Any:
    """Groups of values need as many heads of queries; what has none is not a declaration,
    and is drawn again.
    """
    while True:
        try:
            return make()
        except ArgumentError:
            continue
