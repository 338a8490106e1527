"""Reflective attention: X - cPX, divided by its constant, with heads on slices of their own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.domains import Ball
from regard.errors import ArgumentError
from regard.maps import Affine, Compose, Mapping
from regard.nn.attention import check_heads, check_tokens
from regard.nn.digits import below_one, working
from regard.nn.orthogonal import Orthogonal
from regard.nn.promises import Promise, Promised, exact
from regard.nonexpansive import IntoBall, Reflected, Split
from regard.norms import Frobenius
from regard.potentials import Dot
from regard.proofs.theorems.isotropic_reflection import INTERVALS

STRONGEST = 4.0
"""No score is learned to be larger: the constant is e^g there, and a head that is divided by it says
nothing.
"""


class Reflective(Promised):
    """Q, then on each of the slices of a token z ↦ (z - c P z)/L(g), then Q': attention whose constant is
    one.

    z is projected on a ball of radius R about zero, and P is the softmax of t z·z', g = tR². At g = 0 and c
    = 2 this is the reflection at the mean token, which keeps all lengths; L(g), about 1 + 2.9g, is what
    scores cost, and the layer divides by it. A smaller step c costs less, 1 + 1.6g at 1.5, and shortens the
    mean. g is learned, from 0.05; so is R, from that of `domain`.
    State: before, after (orthogonal), strength (h,) from which g comes, log_radius (h,).

    Examples:
        >>> layer = regard.nn.Reflective(width=8, heads=2)
        >>> layer.certificate(tokens=4).value <= 1
        True
    """

    def __init__(self, width: int, heads: int, domain: Ball = Ball(1.0), *, step: float = 2.0) -> None:
        super().__init__()
        check_heads(width, heads, heads)
        check_ball(domain)
        if not isinstance(step, (int, float)) or isinstance(step, bool) or not 0 < step <= 2:
            raise ArgumentError("step", f"is {step!r}", "give a number above 0 and up to 2")
        self.width, self.heads, self.domain, self.step = width, heads, domain, step
        self.promise = Promise(Frobenius(), 1.0)
        self.before, self.after = Orthogonal(width, width), Orthogonal(width, width)
        share = 0.05 / STRONGEST
        self.strength = nn.Parameter(torch.full((heads,), math.log(share / (1 - share))))
        self.log_radius = nn.Parameter(torch.full((heads,), math.log(domain.radius)))
        self._made()

    def numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """R, t and 1/L(g) of each head, (h,)."""
        dtype = working(self.strength)
        radius = self.log_radius.to(dtype).exp()
        g = STRONGEST * self.strength.to(dtype).sigmoid()
        return radius, g / radius.square(), below_one(dtype) / reflective_constant(g, self.step)

    def run(self, x: Tensor) -> Tensor:
        """All heads at once."""
        check_tokens("x", x, self.width)
        radius, sharpness, scale = (number[:, None, None] for number in self.numbers())
        slices = self.before(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
        z = into_ball(slices, radius)
        mixed = (sharpness * z @ z.mT).softmax(-1) @ z
        return self.after((scale * (z - self.step * mixed)).transpose(-3, -2).flatten(-2))

    def declare(self) -> Compose:
        """Affine, split into heads, affine."""
        width = self.width // self.heads
        identity = torch.eye(width, dtype=torch.float64)
        heads: list[Mapping] = []
        for radius, sharpness, scale in zip(
            *(exact(number).tolist() for number in self.numbers()), strict=True
        ):
            reflected = Reflected(Attention(Dot(scale=sharpness)), float(self.step))
            heads.append(Compose((IntoBall(radius), reflected, Affine(scale * identity))))
        return Compose((self.before.declare(), Split(tuple(heads)), self.after.declare()))

    def extra_repr(self) -> str:
        return f"{self.width}, heads={self.heads}, domain={self.domain!r}, step={self.step:g}"


def reflective_constant(g: Tensor, step: float = 2.0) -> Tensor:
    """L(g), the smallest of three theorems: a supremum over the length σ of the mean token, over the same
    intervals as there (`isotropic_reflection`), e^g + cg(1 + e^{g/8}) (`reflection`), and for large g
    1 + c(e^{g/8} √(1 + g²) + g), attention apart.
    """
    ends = torch.arange(INTERVALS + 1, dtype=g.dtype, device=g.device) / INTERVALS
    low, high, g = ends[:-1], ends[1:], g.unsqueeze(-1)
    spread = torch.ones_like(low)
    for _ in range(3):
        spread = torch.minimum(spread, 1 - (low - spread * g).clamp_min(0).square())
    mean = (high + spread * g).clamp_max(1)
    bend = spread + spread * root(spread) * g + spread * g * (1 + mean).square() / 2
    turned = (step * (1 + g * torch.minimum(bend, 2 * spread)) - 1).clamp_min(1)
    tilt = (g * (high + spread * g / 4).clamp_max(1)).exp()
    mean_known = (tilt * (turned + step * g * root(spread) * mean)).amax(-1)
    g, crowd = g.squeeze(-1), (g.squeeze(-1) / 8).exp()
    apart = 1 + step * (crowd * (1 + g.square()).sqrt() + g)
    return mean_known.minimum(g.exp() + step * g * (1 + crowd)).minimum(apart)


def root(values: Tensor) -> Tensor:
    """√x with a derivative at zero."""
    return values.clamp_min(torch.finfo(values.dtype).tiny).sqrt()


def into_ball(z: Tensor, radius: Tensor) -> Tensor:
    """Each token to the nearest point of a ball about zero."""
    return z * (radius / torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp_min(radius))


def check_ball(domain: Ball) -> None:
    """A ball about zero that has an inside."""
    if not isinstance(domain, Ball) or domain.center is not None or not domain.radius > 0:
        raise ArgumentError(
            "domain", f"is {domain!r}", "give a ball about zero, Ball(radius) with radius > 0"
        )
