"""A decoder layer with a promise in token-max norm: attention on a ball, sorting, averages in place of sums.

For a gate a in (0, 1), x ↦ (1 - a) x + a f(x)/L has the constant one where f has the constant L.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.errors import ArgumentError
from regard.maps import Added, Affine, Compose, Map
from regard.nn.attention import MultiHeadAttention, check_kind, check_tokens
from regard.nn.cache import ContextCache, LayerCache
from regard.nn.digits import working
from regard.nn.frames import Frames
from regard.nn.positions import AlibiPositions, NoPositions, Positions, RelativePositions
from regard.nonexpansive import GroupSort, IntoBall
from regard.parameters import walk
from regard.potentials import Dot
from regard.supports import Causal, Full, Support

RADIUS = 1.0
"""Attention sees tokens in the ball of this radius."""


class PromisedDecoderLayer(nn.Module):
    """x ↦ (1 - a) x + a attention(Π x)/L, then x ↦ (1 - b) x + b W₂ sort(W₁ x): token by token nothing grows.

    Π is the projection into the unit ball. All matrices are orthogonal, and the scores of head h are
    t_h (W_q x)·(W_k y), so that its constant is √(1 + g²) + g with g = |t_h|; L = √Σ_h of their squares
    (`token_max`). State: attention, inner, outer, gates (the logits of a and b).
    """

    def __init__(self, width: int, heads: int, positions: Positions) -> None:
        super().__init__()
        if not isinstance(positions, (NoPositions, AlibiPositions, RelativePositions)):
            found = f"are {positions!r}, and a promise is for positions that only add a bias to scores"
            remedy = "give RelativePositions(), AlibiPositions() or NoPositions()"
            raise ArgumentError("positions", found, remedy)
        self.width = width
        mechanism = Attention(Dot(scale=nn.Parameter(torch.ones(heads))), support=Causal())
        self.attention = MultiHeadAttention(
            width, heads, mechanism=positions.placed(mechanism, heads), bias=False, orthogonal=True
        )
        self.inner, self.outer = Frames(width), Frames(width)
        self.gates = nn.Parameter(torch.zeros(2))

    def forward(
        self,
        x: Tensor,
        context: None = None,
        *,
        support: Support = Full(),
        context_support: Support = Full(),
        cache: tuple[LayerCache, ContextCache] | None = None,
    ) -> Tensor:
        """Tokens (..., n, width) that see their past. It computes in float32 at least, and autocast does not
        reach inside: an orthogonal matrix in fewer digits is longer than one.
        """
        check_tokens("x", x, self.width)
        check_kind("x", x, self)
        with torch.autocast(x.device.type, enabled=False):
            return self._run(x.to(working(x)), support, None if cache is None else cache[0]).to(x.dtype)

    def _run(self, x: Tensor, support: Support, past: LayerCache | None) -> Tensor:
        (kept, read), (still, sorted_) = self._shares()
        found = self.attention(IntoBall(RADIUS)(x), support=support, cache=past)
        x = kept * x + read * found
        return still * x + sorted_ * self.outer(GroupSort()(self.inner(x)))

    def declare(self, context: None = None) -> Compose:
        """The layer as a map of sequences, in float64 and cut off from its parameters."""
        (kept, read), (still, sorted_) = self._numbers()
        hidden = (self.inner.declare(), GroupSort(), self.outer.declare(sorted_))
        attention = (IntoBall(RADIUS), self.attention.declare(), self._times(read))
        return Compose(
            (_average(self._times(kept), attention), _average(self._times(still), hidden)),
        )

    def constant(self) -> Tensor:
        """L = √Σ_h (√(1 + g_h²) + g_h)² of the attention, as the forward pass computes it."""
        return self._sharpness().square().add(1).sqrt().add(self._sharpness()).square().sum().sqrt()

    def _sharpness(self) -> Tensor:
        """g_h = |t_h| R²."""
        potential = self.attention.mechanism.value().potential
        (scores,) = (part for part in walk(potential) if isinstance(part, Dot))
        assert isinstance(scores.scale, Tensor)
        return scores.scale.abs().to(working(scores.scale)) * RADIUS**2

    def _shares(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """1 - a and a/L, 1 - b and b."""
        first, second = torch.sigmoid(self.gates.to(working(self.gates)))
        return (1 - first, first / self.constant()), (1 - second, second)

    @torch.no_grad()
    def _numbers(self) -> tuple[tuple[float, float], tuple[float, float]]:
        (kept, read), (still, sorted_) = self._shares()
        return (float(kept), float(read)), (float(still), float(sorted_))

    def _times(self, factor: float) -> Affine:
        return Affine(torch.eye(self.width, dtype=torch.float64) * factor)


def _average(kept: Affine, inner: tuple[Map, ...]) -> Map:
    """The sum of what is kept of a token and of what a branch makes of it."""
    return Added((kept, Compose(inner)))
