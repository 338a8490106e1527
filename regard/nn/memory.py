"""A step down a convex energy: the memory of a layer, which costs nothing of its constant."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.maps import Compose, Map
from regard.nn.attention import check_count
from regard.nn.digits import below_one, working
from regard.nn.promises import Promise, Promised, exact
from regard.nonexpansive import Flatten, MemoryStep, Unflatten
from regard.norms import Frobenius

SMALLEST = 1e-12
"""Columns whose squared distances are all smaller make no longer steps."""


class Memory(Promised):
    """x_i ↦ x_i - c M softmax(t(Mᵀx_i + b)), c = 8/(tΔ²), Δ the largest distance of two columns of M: the
    longest step down a convex energy that cannot move two points apart (ramsauer2021).

    With `tokens`, sequences of that length are one long token, so that one memory holds whole sequences.
    State: memory M (d, slots), bias b (slots,), log_sharpness.

    Examples:
        >>> layer = regard.nn.Memory(width=4, slots=3)
        >>> layer.certificate().value <= 1.000001
        True
    """

    def __init__(self, width: int, slots: int, tokens: int | None = None) -> None:
        super().__init__()
        check_count("width", width)
        check_count("slots", slots)
        if slots < 2:
            raise ArgumentError("slots", f"is {slots}", "give two or more: one alone is a constant shift")
        if tokens is not None:
            check_count("tokens", tokens)
        self.width, self.slots, self.tokens = width, slots, tokens
        self.promise = Promise(Frobenius(), 1.0)
        whole = width * (tokens or 1)
        self.memory = nn.Parameter(torch.empty(whole, slots))
        self.bias = nn.Parameter(torch.empty(slots))
        self.log_sharpness = nn.Parameter(torch.tensor(2.0))
        nn.init.normal_(self.memory, std=1 / math.sqrt(whole))
        nn.init.normal_(self.bias, std=0.1)
        self._made()

    def numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """M (d, slots), t and c."""
        memory = self.memory.to(working(self.memory))
        sharpness = self.log_sharpness.to(memory.dtype).exp()
        apart = torch.nn.functional.pdist(memory.mT.contiguous()).amax()
        step = 8 * below_one(memory.dtype) / (sharpness * apart.square().clamp_min(SMALLEST))
        return memory, sharpness, step

    def run(self, x: Tensor) -> Tensor:
        """The step of each token, or of the sequence."""
        self._check(x)
        memory, sharpness, step = self.numbers()
        points = x if self.tokens is None else x.flatten(-2)
        law = (sharpness * (points @ memory + self.bias.to(x.dtype))).softmax(-1)
        return (points - step * (law @ memory.mT)).reshape(x.shape)

    def _check(self, x: Tensor) -> None:
        if x.shape[-1] != self.width or self.tokens not in (None, x.shape[-2]):
            shape = f"(..., {'n' if self.tokens is None else self.tokens}, {self.width})"
            raise ArgumentError("x", f"has shape {list(x.shape)}", f"give tokens {shape}")

    def declare(self) -> Map:
        """The step, on the flattened sequence where `tokens` is given."""
        memory, sharpness, step = self.numbers()
        made = MemoryStep(exact(memory), exact(self.bias), exact(sharpness).item(), exact(step).item())
        return made if self.tokens is None else Compose((Flatten(), made, Unflatten(self.tokens)))

    def extra_repr(self) -> str:
        return f"{self.width}, slots={self.slots}" + (
            "" if self.tokens is None else f", tokens={self.tokens}"
        )
