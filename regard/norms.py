"""Norms on sequences of tokens: what "how far" means in a Lipschitz constant.

The same norm is used before and after a map.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._object import Object
from regard.errors import ArgumentError


class Norm(Object):
    """A way to compare two inputs, and two outputs, of a map.

    Examples:
        >>> [isinstance(one, regard.norms.Norm) for one in (regard.Frobenius(), regard.Wasserstein(1))]
        [True, True]
    """


class SequenceNorm(Norm):
    """A norm of a sequence of tokens (..., n, d).

    Examples:
        >>> x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> [float(norm.of(x)) for norm in (regard.Frobenius(), regard.TokenMax(), regard.TokenSum())]
        [5.0, 5.0, 5.0]
        >>> isinstance(regard.TokenMax(), regard.norms.SequenceNorm)
        True
    """

    @abstractmethod
    def of(self, difference: Tensor) -> Tensor:
        """The norm of each sequence, (...)."""


@dataclass(frozen=True, eq=False, repr=False)
class Frobenius(SequenceNorm):
    """√Σ_i |x_i|²; over √n it is the Wasserstein distance W₂ between sequences that are matched token by
    token.

    Examples:
        >>> unit = regard.Ball(1.0, tokens=4, width=2)
        >>> regard.certify(regard.Attention(regard.Dot()), unit, regard.Frobenius()).value > 1
        True
    """

    def of(self, difference: Tensor) -> Tensor:
        return torch.linalg.vector_norm(difference, dim=(-2, -1))


@dataclass(frozen=True, eq=False, repr=False)
class TokenMax(SequenceNorm):
    """max_i |x_i|: no token moves farther than this.

    Examples:
        >>> many = regard.Ball(1.0, tokens=100, width=2)  # their number does not matter in this norm
        >>> regard.certify(regard.Attention(regard.Dot()), many, regard.TokenMax()).value < 5
        True
    """

    def of(self, difference: Tensor) -> Tensor:
        return torch.linalg.vector_norm(difference, dim=-1).amax(-1)


@dataclass(frozen=True, eq=False, repr=False)
class TokenSum(SequenceNorm):
    """Σ_i |x_i|: the lengths of all tokens together.

    Examples:
        >>> small = regard.Ball(0.5, tokens=4, width=2)
        >>> regard.certify(regard.Attention(regard.Dot()), small, regard.TokenSum()).value > 0
        True
    """

    def of(self, difference: Tensor) -> Tensor:
        return torch.linalg.vector_norm(difference, dim=-1).sum(-1)


@dataclass(frozen=True, eq=False, repr=False)
class EntryMax(SequenceNorm):
    """max_ic |x_ic|: no coordinate moves farther than this.

    Examples:
        >>> layer, typo = regard.Attention(regard.Dot()), regard.one_token(torch.zeros(2, 3), 0, 0.1)
        >>> regard.deviation(layer, typo, regard.EntryMax()).value < 0.2
        True
    """

    def of(self, difference: Tensor) -> Tensor:
        return difference.abs().amax((-2, -1))


@dataclass(frozen=True, eq=False, repr=False)
class OwnToken(Norm):
    """How far token i of the value moves when token i alone does: |f_i(x) - f_i(x')| ≤ L |x_i - x'_i|.

    Not a distance of sequences: it compares those that differ in one token. With L < 1 a causal x + f(x) has
    one inverse, and the determinant of its derivative is a product over tokens.

    Examples:
        >>> layer = regard.Attention(regard.Dot())
        >>> regard.certify(layer, regard.Ball(0.5, tokens=4, width=2), regard.OwnToken()).value < 3
        True
    """


@dataclass(frozen=True, eq=False, repr=False)
class Wasserstein(Norm):
    """W_p between the uniform measures on the tokens: the order of tokens does not count.

    Examples:
        >>> near = regard.Ball(0.5, width=2)  # for laws with any number of tokens
        >>> regard.certify(regard.Attention(regard.Dot()), near, regard.Wasserstein(1.0)).value < 5
        True
    """

    p: float = 1.0

    def __post_init__(self) -> None:
        if not self.p >= 1:
            raise ArgumentError("p", f"is {self.p}", "give a number of at least 1; infinity is allowed")

    def __repr__(self) -> str:
        return f"Wasserstein(p={self.p:g})"
