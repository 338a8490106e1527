"""Refused: why something cannot be done, as a value that a caller can read, show or pass on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refused:
    """Not done, and why: one sentence that ends with a period and, where it can, says what would help.

    Examples:
        >>> layer = regard.Attention(regard.Laplace())
        >>> regard.explain(layer, torch.randn(8, 4)).refusals["sdpa"]
        'Laplace scores are not a dot product plus a key bias.'
    """

    why: str

    def __str__(self) -> str:
        return self.why
