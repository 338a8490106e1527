"""Attention that is divided by its constant and averaged with its input."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.domains import Ball
from regard.errors import ArgumentError
from regard.maps import Added, Affine, Compose, Mapping
from regard.nn.attention import check_count, check_heads, check_tokens
from regard.nn.digits import below_one, working
from regard.nn.orthogonal import Orthogonal
from regard.nn.promises import Promise, Promised, exact
from regard.nn.reflective import STRONGEST, check_ball, into_ball
from regard.nn.scores import DotScores, Scores
from regard.nonexpansive import IntoBall, Split
from regard.norms import Frobenius


class Averaging(Promised):
    """x ↦ (1 - a) x + a Q'(P z / L), z = Q x in slices, one for each head: attention as usual, with
    constant one.

    L is the constant of P z by the theorem about its scores: dot products, Gaussian or cosine scores of
    tokens on a ball, or distances of tokens anywhere. Averages and the division by L lose lengths of
    gradients, which Reflective does not. a is learned from 1/2, the strength of scores from g = 0.5.
    State: before, after (orthogonal), gate, strength (h,), log_radius (h,).

    Examples:
        >>> layer = regard.nn.Averaging(width=8, heads=2)
        >>> layer.certificate(tokens=4).value <= 1.000001
        True
    """

    def __init__(
        self,
        width: int,
        heads: int,
        scores: Scores = DotScores(),
        domain: Ball = Ball(1.0),
        *,
        tokens: int | None = None,
    ) -> None:
        super().__init__()
        check_heads(width, heads, heads)
        check_ball(domain)
        if not isinstance(scores, Scores):
            raise ArgumentError("scores", f"is {scores!r}", "give DotScores(), GaussianScores(), ...")
        if tokens is not None:
            check_count("tokens", tokens)
        self.width, self.heads, self.scores = width, heads, scores
        self.domain, self.tokens = domain, tokens
        self.promise = Promise(Frobenius(), 1.0)
        self.before, self.after = Orthogonal(width, width), Orthogonal(width, width)
        share = 0.5 / STRONGEST
        self.strength = nn.Parameter(torch.full((heads,), math.log(share / (1 - share))))
        self.log_radius = nn.Parameter(torch.full((heads,), math.log(domain.radius)))
        self.gate = nn.Parameter(torch.tensor(0.0))
        self._made()

    def numbers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """R, what sets the scores and a/L, each (h,); and 1 - a."""
        dtype = working(self.strength)
        radius = self.log_radius.to(dtype).exp()
        g = STRONGEST * self.strength.to(dtype).sigmoid()
        share, room = self.gate.to(dtype).sigmoid(), below_one(dtype)
        scale = room * share / self.scores.constant(g, radius, self.tokens)
        return radius, self.scores.setting(g, radius), scale, room * (1 - share)

    def run(self, x: Tensor) -> Tensor:
        """All heads at once."""
        check_tokens("x", x, self.width)
        if self.tokens is not None and x.shape[-2] > self.tokens:
            raise ArgumentError(
                "x", f"has {x.shape[-2]} tokens", f"the layer was made for up to {self.tokens}"
            )
        *each, rest = self.numbers()
        radius, setting, scale = (number[:, None, None] for number in each)
        z = self.before(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
        z = into_ball(z, radius) if self.scores.on_ball else z
        mixed = scale * (self.scores.compare(z, setting).softmax(-1) @ z)
        return rest * x + self.after(mixed.transpose(-3, -2).flatten(-2))

    def declare(self) -> Added:
        """A sum of the scaled input and the heads."""
        *each, rest = self.numbers()
        identity = torch.eye(self.width // self.heads, dtype=torch.float64)
        heads: list[Mapping] = []
        for radius, setting, scale in zip(*(exact(number).tolist() for number in each), strict=True):
            before = (IntoBall(radius),) if self.scores.on_ball else ()
            attention = Attention(self.scores.potential(setting))
            heads.append(Compose((*before, attention, Affine(scale * identity))))
        mixed = Compose((self.before.declare(), Split(tuple(heads)), self.after.declare()))
        return Added((Affine(exact(rest) * torch.eye(self.width, dtype=torch.float64)), mixed))

    def extra_repr(self) -> str:
        return f"{self.width}, heads={self.heads}, scores={self.scores!r}, domain={self.domain!r}"
