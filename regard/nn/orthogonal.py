"""Linear maps whose norm is bounded whatever their parameters are."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.maps import Affine
from regard.nn.attention import check_count, check_flags, check_tokens
from regard.nn.digits import below_one, working
from regard.nn.promises import Promise, Promised, exact
from regard.nonexpansive import MixTokens
from regard.norms import Frobenius


class Orthogonal(Promised):
    """x_i ↦ W x_i + b for each token, with orthonormal columns or rows of W: no length grows, and none is
    lost where W is not wide.

    A tall W is (2S - I; -2VS), S = (I + U - Uᵀ + VᵀV)⁻¹, from any numbers (U; V) (trockman2021, appendix).
    State: raw (U; V), bias.

    Examples:
        >>> layer, x = regard.nn.Orthogonal(4, 6, bias=False), torch.randn(3, 4)
        >>> torch.allclose(layer(x).norm(dim=-1), x.norm(dim=-1), atol=1e-3)  # no length is lost
        True
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        check_count("inputs", inputs)
        check_count("outputs", outputs)
        check_flags(bias=bias)
        self.inputs, self.outputs = inputs, outputs
        self.promise = Promise(Frobenius(), 1.0)
        self.raw = nn.Parameter(torch.empty(max(inputs, outputs), min(inputs, outputs)))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        spread_out(self.raw)
        self._made()

    @property
    def weight(self) -> Tensor:
        """W (outputs, inputs), in float32 at least."""
        found = cayley(self.raw)
        return found if self.outputs >= self.inputs else found.mT

    def run(self, x: Tensor) -> Tensor:
        """W x_i + b."""
        check_tokens("x", x, self.inputs)
        return nn.functional.linear(x, self.weight, None if self.bias is None else self.bias.to(x.dtype))

    def declare(self) -> Affine:
        """x_i ↦ W x_i + b."""
        return Affine(exact(self.weight).mT.contiguous(), None if self.bias is None else exact(self.bias))

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.outputs}"


class NormBounded(Promised):
    """x_i ↦ W x_i + b with |W|₂ ≤ bound: W = raw · min(1, bound/|raw|₂), so that W may be anything in the
    ball.

    State: weight, bias.

    Examples:
        >>> layer = regard.nn.NormBounded(4, 4, bound=0.5)
        >>> layer.certificate().value <= 0.500001
        True
    """

    def __init__(self, inputs: int, outputs: int, bound: float = 1.0, *, bias: bool = True) -> None:
        super().__init__()
        check_count("inputs", inputs)
        check_count("outputs", outputs)
        check_flags(bias=bias)
        if not isinstance(bound, (int, float)) or isinstance(bound, bool) or not 0 < bound < math.inf:
            raise ArgumentError("bound", f"is {bound!r}", "give a finite number above zero")
        self.inputs, self.outputs, self.bound = inputs, outputs, bound
        self.promise = Promise(Frobenius(), bound)
        self.raw = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        nn.init.normal_(self.raw, std=bound / (math.sqrt(inputs) + math.sqrt(outputs)))
        self._made()

    @property
    def weight(self) -> Tensor:
        """W (outputs, inputs), in float32 at least."""
        raw = self.raw.to(working(self.raw))
        size = torch.linalg.matrix_norm(raw, 2)
        return raw * (self.bound * below_one(raw.dtype) / size.clamp_min(self.bound))

    def run(self, x: Tensor) -> Tensor:
        """W x_i + b."""
        check_tokens("x", x, self.inputs)
        return nn.functional.linear(x, self.weight, None if self.bias is None else self.bias.to(x.dtype))

    def declare(self) -> Affine:
        """x_i ↦ W x_i + b."""
        return Affine(exact(self.weight).mT.contiguous(), None if self.bias is None else exact(self.bias))

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.outputs}, bound={self.bound:g}"


class OrthogonalMixing(Promised):
    """x ↦ Q x: the tokens of sequences of a fixed length are mixed by an orthogonal matrix.

    State: raw.

    Examples:
        >>> layer, x = regard.nn.OrthogonalMixing(tokens=3), torch.randn(3, 2)
        >>> torch.allclose(layer(x).norm(), x.norm(), atol=1e-3)
        True
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        check_count("tokens", tokens)
        self.tokens = tokens
        self.promise = Promise(Frobenius(), 1.0)
        self.raw = nn.Parameter(torch.empty(tokens, tokens))
        spread_out(self.raw)
        self._made()

    @property
    def weight(self) -> Tensor:
        """Q (n, n), in float32 at least."""
        return cayley(self.raw)

    def run(self, x: Tensor) -> Tensor:
        """Q x."""
        if x.shape[-2] != self.tokens:
            raise ArgumentError("x", f"has {x.shape[-2]} tokens", f"give tokens (..., {self.tokens}, d)")
        return self.weight @ x

    def declare(self) -> MixTokens:
        """x ↦ Q x."""
        return MixTokens(exact(self.weight))

    def extra_repr(self) -> str:
        return f"{self.tokens}"


def cayley(raw: Tensor) -> Tensor:
    """A matrix (m, k), m ≥ k, with orthonormal columns but for the room for rounding."""
    raw = raw.to(working(raw))
    square, rest = raw[: raw.shape[1]], raw[raw.shape[1] :]
    identity = torch.eye(raw.shape[1], dtype=raw.dtype, device=raw.device)
    inverse = torch.linalg.inv_ex(identity + square - square.mT + rest.mT @ rest).inverse
    return torch.cat((2 * inverse - identity, -2 * rest @ inverse)) * below_one(raw.dtype)


def spread_out(raw: Tensor) -> None:
    """Numbers from which `cayley` makes a matrix whose rows are about equally long."""
    tall, thin = raw.shape
    with torch.no_grad():
        nn.init.normal_(raw[:thin], std=1 / math.sqrt(2 * thin))
        if tall > thin:
            nn.init.normal_(raw[thin:], std=1 / math.sqrt(tall - thin))
