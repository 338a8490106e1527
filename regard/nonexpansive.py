"""Maps of sequences that are made for a small Lipschitz constant: projections, sorting, reflections,
memories, slices.

Each is called on tokens (n, d), is declared once, and has theorems of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import _check
from regard.attention import Attention
from regard.errors import ArgumentError
from regard.maps import Map, Mapping
from regard.parameters import Tokens, parameter, part, shared


@dataclass(frozen=True, eq=False, repr=False)
class IntoBall(Map):
    """x_i ↦ x_i min(1, R/|x_i|): each token goes to the nearest point of the ball of this radius about zero.

    smooth=True is x_i ↦ x_i/√(1 + |x_i|²/R²), which has derivatives everywhere. Either way the constant is
    one and the tokens are in the ball afterwards, wherever they came from.

    Examples:
        >>> regard.nonexpansive.IntoBall(2.5)(torch.tensor([[3.0, 4.0], [0.5, 0.25]])).tolist()
        [[1.5, 2.0], [0.5, 0.25]]
    """

    radius: float = 1.0
    smooth: bool = False

    def __post_init__(self) -> None:
        _positive("radius", self.radius)

    def __call__(self, x: Tensor) -> Tensor:
        if self.smooth:
            return x * (1 + (x / self.radius).square().sum(-1, keepdim=True)).rsqrt()
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * (self.radius / length.clamp_min(self.radius))


@dataclass(frozen=True, eq=False, repr=False)
class Center(Map):
    """x_i ↦ x_i minus the mean of its coordinates: a projection.

    Examples:
        >>> regard.nonexpansive.Center()(torch.tensor([[1.0, 3.0]])).tolist()
        [[-1.0, 1.0]]
    """

    def __call__(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)


@dataclass(frozen=True, eq=False, repr=False)
class GroupSort(Map):
    """Coordinates sorted, largest first, within consecutive groups of `size` (anil2019).

    Almost everywhere a permutation of coordinates, so that no gradient is lost.

    Examples:
        >>> regard.nonexpansive.GroupSort(2)(torch.tensor([[1.0, 2.0, 5.0, 4.0]])).tolist()
        [[2.0, 1.0, 5.0, 4.0]]
    """

    size: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 2:
            raise ArgumentError("size", f"is {self.size!r}", "give a whole number of at least 2")

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[-1] % self.size:
            raise ArgumentError(
                "size", f"is {self.size} and tokens have width {x.shape[-1]}", "give a divisor of the width"
            )
        groups = x.unflatten(-1, (-1, self.size))
        if self.size == 2:
            return torch.stack((groups.amax(-1), groups.amin(-1)), -1).flatten(-2)
        return groups.sort(-1, descending=True).values.flatten(-2)


@dataclass(frozen=True, eq=False, repr=False)
class Reflected(Map):
    """x ↦ x - step · attention(x). With step = 2 and scores that hardly differ it is the reflection at the
    mean token, which keeps all lengths.

    Examples:
        >>> x = torch.randn(5, 3)
        >>> mirror = regard.nonexpansive.Reflected(regard.Attention(regard.Dot(scale=0.0)))
        >>> torch.allclose(mirror(x).norm(), x.norm(), atol=1e-5)  # at the mean token: no length is lost
        True
    """

    attention: Attention = part()
    step: float = 2.0

    def __post_init__(self) -> None:
        if not isinstance(self.attention, Attention):
            raise ArgumentError("attention", f"is a {type(self.attention).__name__}", "give an Attention")
        _finite("step", self.step)

    def __call__(self, x: Tensor) -> Tensor:
        return x - self.step * self.attention(x)


@dataclass(frozen=True, eq=False, repr=False)
class MemoryStep(Map):
    """x_i ↦ x_i - step · M softmax(t (Mᵀx_i + b)), M = memory (d, m), b = bias (m,), t = sharpness: a step
    down the convex energy (1/t) log Σ_k exp t(M_k·x + b_k) (ramsauer2021).

    Examples:
        >>> memory = torch.tensor([[1.0, -1.0]])  # two patterns on a line
        >>> regard.nonexpansive.MemoryStep(memory)(torch.zeros(1, 1)).tolist()  # between them nothing moves
        [[0.0]]
    """

    memory: Tensor = parameter(rank=2, widths=(Tokens.ALL, None))
    bias: Tensor | None = parameter(rank=1, default=None)
    sharpness: float = 1.0
    step: float = 1.0

    def __post_init__(self) -> None:
        _check.parameter("memory", self.memory, 2, "(d, m)")
        _check.parameter("bias", self.bias, 1, "(m,)")
        if self.bias is not None and len(self.bias) != self.memory.shape[-1]:
            found = f"has {len(self.bias)} entries and the memory {self.memory.shape[-1]} columns"
            raise ArgumentError("bias", found, "give one number for each column")
        _positive("sharpness", self.sharpness)
        _finite("step", self.step)

    def __call__(self, x: Tensor) -> Tensor:
        scores = x @ self.memory if self.bias is None else x @ self.memory + self.bias
        return x - self.step * (self.sharpness * scores).softmax(-1) @ self.memory.mT


@dataclass(frozen=True, eq=False, repr=False)
class Split(Map):
    """x ↦ (f_1(x^1), …, f_H(x^H)): coordinates are cut into H slices of equal width, and each map has one.

    Examples:
        >>> from regard.nonexpansive import Center, GroupSort, Split
        >>> Split((Center(), GroupSort(2)))(torch.tensor([[1.0, 3.0, 1.0, 3.0]])).tolist()
        [[-1.0, 1.0, 3.0, 1.0]]
    """

    maps: tuple[Mapping, ...] = part()

    def __post_init__(self) -> None:
        if not isinstance(self.maps, tuple) or not self.maps:
            raise ArgumentError("maps", f"is {self.maps!r}", "give a tuple of one or more maps")
        for inner in self.maps:
            if not isinstance(inner, (Map, Attention)):
                found = f"has a {type(inner).__name__}"
                raise ArgumentError("maps", found, "give maps of regard.maps or an Attention")

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[-1] % len(self.maps):
            found = f"are {len(self.maps)} and tokens have width {x.shape[-1]}"
            raise ArgumentError("maps", found, "give as many maps as the width can be cut into equal slices")
        slices = x.chunk(len(self.maps), -1)
        return torch.cat([inner(one) for inner, one in zip(self.maps, slices, strict=True)], -1)


@dataclass(frozen=True, eq=False, repr=False)
class MixTokens(Map):
    """x ↦ w x: the tokens of a sequence of fixed length are mixed, w (m, n).

    Examples:
        >>> swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        >>> regard.nonexpansive.MixTokens(swap)(torch.tensor([[1.0], [2.0]])).tolist()
        [[2.0], [1.0]]
    """

    w: Tensor = shared()

    def __post_init__(self) -> None:
        _check.parameter("w", self.w, 2, "(m, n)")

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[-2] != self.w.shape[-1]:
            found = f"mixes {self.w.shape[-1]} tokens and the sequence has {x.shape[-2]}"
            raise ArgumentError("w", found, "give a matrix (m, n) for sequences of n tokens")
        return self.w @ x


@dataclass(frozen=True, eq=False, repr=False)
class Flatten(Map):
    """(n, d) ↦ (1, n d): all tokens side by side, as one.

    Examples:
        >>> from regard.nonexpansive import Flatten, Unflatten
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> Flatten()(x).tolist(), torch.equal(Unflatten(2)(Flatten()(x)), x)
        ([[1.0, 2.0, 3.0, 4.0]], True)
    """

    def __call__(self, x: Tensor) -> Tensor:
        return x.flatten(-2).unsqueeze(-2)


@dataclass(frozen=True, eq=False, repr=False)
class Unflatten(Map):
    """(1, n d) ↦ (n, d): one token cut into as many.

    Examples:
        >>> regard.nonexpansive.Unflatten(2)(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).tolist()
        [[1.0, 2.0], [3.0, 4.0]]
    """

    tokens: int = shared()

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int) or isinstance(self.tokens, bool) or self.tokens < 1:
            raise ArgumentError("tokens", f"is {self.tokens!r}", "give a whole number of at least 1")

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[-2] != 1 or x.shape[-1] % self.tokens:
            found = f"is {self.tokens} and the sequence has shape {list(x.shape[-2:])}"
            raise ArgumentError("tokens", found, "give one token whose width is a multiple of it")
        return x.squeeze(-2).unflatten(-1, (self.tokens, -1))


@dataclass(frozen=True, eq=False, repr=False)
class Pool(Map):
    """(n, d) ↦ (1, d): Σ_i x_i/√n, whose constant in Frobenius norm is one (that of the mean is 1/√n).

    Examples:
        >>> regard.nonexpansive.Pool()(torch.ones(4, 2)).tolist()  # a sum over √4
        [[2.0, 2.0]]
    """

    def __call__(self, x: Tensor) -> Tensor:
        return x.sum(-2, keepdim=True) / math.sqrt(x.shape[-2])


def _finite(name: str, value: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ArgumentError(name, f"is {value!r}", "give a finite number")


def _positive(name: str, value: float) -> None:
    _finite(name, value)
    if not value > 0:
        raise ArgumentError(name, f"is {value!r}", "give a number above zero")
