"""The layer between attentions: each token by itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.maps import Activation, Affine, Compose, Gated, Gelu, Map, feed_forward
from regard.nn.declaration import exact


class FeedForward(nn.Module):
    """x ↦ W_2 φ(W_1 x + b_1) + b_2 (vaswani2017, 3.3); gated: W_2(φ(W x + b) · (V x + c)) + b_2
    (shazeer2020), SwiGLU with Silu().

    State: inner (for gated layers W, then V) and outer.

    Examples:
        >>> layer = regard.nn.FeedForward(4, 16, activation=regard.maps.Silu(), gated=True)
        >>> layer(torch.randn(3, 4)).shape
        torch.Size([3, 4])
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: Activation = Gelu(),
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_feed_forward(width, hidden, gated, dropout)
        self.activation, self.gated = activation, gated
        self.inner = nn.Linear(width, 2 * hidden if gated else hidden, bias)
        self.outer = nn.Linear(hidden, width, bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Each token (..., width) by itself."""
        hidden = self.inner(x)
        if self.gated:
            first, gate = hidden.chunk(2, -1)
            hidden = self.activation(first) * gate
        else:
            hidden = self.activation(hidden)
        return self.outer(self.dropout(hidden) if self.dropout.training else hidden)

    def declare(self) -> Map:
        """The layer as a map, in float64 and cut off from its parameters."""
        (w_in, b_in), (w_out, b_out) = (_affine(layer) for layer in (self.inner, self.outer))
        if not self.gated:
            return feed_forward(self.activation, w_in, w_out, b_in, b_out)
        (w, w_gate), (b, b_gate) = w_in.chunk(2, -1), (None, None) if b_in is None else b_in.chunk(2)
        gated = Gated(self.activation, w.contiguous(), w_gate.contiguous(), w_out, b, b_gate)
        return (
            gated
            if b_out is None
            else Compose((gated, Affine(torch.eye(len(b_out), dtype=torch.float64), b_out)))
        )

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}{', gated=True' if self.gated else ''}"


def check_feed_forward(width: int, hidden: int, gated: bool, dropout: float) -> None:
    """Widths that exist, a choice, and a share."""
    for name, value in (("width", width), ("hidden", hidden)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ArgumentError(name, f"is {value!r}", "give the width of the layer, one or more")
    if not isinstance(gated, bool):
        raise ArgumentError("gated", f"is {gated!r}", "give True or False")
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise ArgumentError(
            "dropout", f"is {dropout!r}", "give the share that is dropped, from 0 up to below 1"
        )


def _affine(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return exact(layer.weight).mT.contiguous(), None if layer.bias is None else exact(layer.bias)
