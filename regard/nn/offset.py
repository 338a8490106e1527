"""Learned positions: a shift, which costs nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.maps import Affine, Compose
from regard.nn.attention import check_count
from regard.nn.promises import Promise, Promised, exact
from regard.nonexpansive import Flatten, Unflatten
from regard.norms import Frobenius


class Offset(Promised):
    """x_i ↦ x_i + p_i for sequences of a fixed length: each place has a learned vector.

    State: positions (n, d).

    Examples:
        >>> layer, x = regard.nn.Offset(tokens=3, width=2), torch.randn(3, 2)
        >>> torch.allclose(layer(x + 1) - layer(x), torch.ones(3, 2), atol=1e-5)
        True
    """

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        check_count("tokens", tokens)
        check_count("width", width)
        self.tokens, self.width = tokens, width
        self.promise = Promise(Frobenius(), 1.0)
        self.positions = nn.Parameter(torch.empty(tokens, width))
        nn.init.normal_(self.positions, std=0.1)
        self._made()

    def run(self, x: Tensor) -> Tensor:
        """x + p."""
        if x.shape[-2:] != self.positions.shape:
            shape = f"(..., {self.tokens}, {self.width})"
            raise ArgumentError("x", f"has shape {list(x.shape)}", f"give tokens {shape}")
        return x + self.positions.to(x.dtype)

    def declare(self) -> Compose:
        """The identity with a bias, on the flattened sequence."""
        shift = exact(self.positions).flatten()
        identity = torch.eye(len(shift), dtype=torch.float64)
        return Compose((Flatten(), Affine(identity, shift), Unflatten(len(self.positions))))

    def extra_repr(self) -> str:
        return f"{self.tokens}, {self.width}"
