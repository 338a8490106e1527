"""Upper and Lower: float64 numbers that are at least, or at most, true ones, with arithmetic that keeps it
so.

A number carries how many roundings it went through (the counter of Stewart; Higham 2002, section 3.4). With u
= 2⁻⁵³,

    Upper:  true ≤ value · (1 - u)^(-roundings)          Lower:  true ≥ value · (1 - u)^roundings

for true numbers that are real and not negative. One rounded sum, product, quotient or root adds one: fl(z) =
z (1 + δ), |δ| ≤ u. So arithmetic costs what it costs without proofs, and `bound` pays for all roundings at
once. ∞ or NaN in an Upper means that nothing is known about a true number, which is real all the same. A
product below `TINY` is lifted to it in an Upper, and is zero in a Lower: there rounding is no longer
relative. A product of single numbers is zero where one of them is and the other is finite; in tensors it is
`TINY`, which is as good as zero.

Assumed: sums, products, quotients and roots are rounded to nearest; exp, log and their kin are right to
`ELEMENTARY` roundings.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

UNIT = 2.0**-53
TINY = 1e-290
"""No product is taken to be less."""
ELEMENTARY = 16
"""Roundings that an elementary function of torch may have: eight units in the last place."""

Self = TypeVar("Self", bound="Directed")


class Directed(ABC):
    """Numbers that are not negative, each on one side of a true one. Abstract."""

    __slots__ = ("roundings", "value")
    __array_priority__ = 1000  # numpy's arrays and torch's tensors leave operators to us, and we refuse them

    def __init__(self, value: Tensor | float, roundings: int = 0) -> None:
        self.value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        self.roundings = roundings

    @property
    @abstractmethod
    def bound(self) -> Tensor:
        """The numbers with all roundings paid for."""

    @staticmethod
    @abstractmethod
    def _settle(value: Tensor, *factors: Tensor) -> Tensor:
        """A fresh product of factors without its underflow, in place."""

    def __float__(self) -> float:
        return float(self.bound)

    def __repr__(self) -> str:
        value = self.value
        shown = value.tolist() if value.ndim == 0 else list(value.shape)
        return f"{type(self).__name__}({shown}, {self.roundings} roundings)"

    # What does not round

    def map(self: Self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same numbers in another shape: any function of tensors that only moves,
        repeats or selects entries.
        """
        return type(self)(change(self.value), self.roundings)

    def __getitem__(self: Self, index: Any) -> Self:
        return type(self)(self.value[index], self.roundings)

    def __iter__(self: Self) -> Iterator[Self]:
        return (type(self)(part, self.roundings) for part in self.value)

    def unsqueeze(self: Self, dim: int) -> Self:
        return type(self)(self.value.unsqueeze(dim), self.roundings)

    def expand_as(self: Self, other: Tensor) -> Self:
        return type(self)(self.value.expand_as(other), self.roundings)

    def where(self: Self, mask: Tensor) -> Self:
        """Zero where the mask is false."""
        return type(self)(torch.where(mask, self.value, 0.0), self.roundings)

    def amax(self: Self, dim: int | tuple[int, ...] = ()) -> Self:
        """The largest of true numbers lies on the same side of the largest of these; zero of none."""
        found = self.value.amax(dim) if self.value.numel() or dim != () else self.value.new_zeros(())
        return type(self)(found, self.roundings)

    def amin(self: Self, dim: int | tuple[int, ...] = ()) -> Self:
        """The same of the smallest."""
        return type(self)(self.value.amin(dim), self.roundings)

    # What does

    def __add__(self: Self, other: Self | int) -> Self:
        other = self._like(other)
        return type(self)(self.value + other.value, max(self.roundings, other.roundings) + 1)

    def __mul__(self: Self, other: Self | int) -> Self:
        other = self._like(other)
        value = self._settle(self.value * other.value, self.value, other.value)
        return type(self)(value, self.roundings + other.roundings + 1)

    __radd__ = __add__
    __rmul__ = __mul__

    def halved(self: Self) -> Self:
        """Half of it, exactly."""
        return type(self)(self._settle(self.value * 0.5, self.value), self.roundings)

    def square(self: Self) -> Self:
        return type(self)(self._settle(self.value.square(), self.value), 2 * self.roundings + 1)

    def sqrt(self: Self) -> Self:
        return type(self)(self.value.sqrt(), (self.roundings + 1) // 2 + 1)

    def sum(self: Self, dim: int = -1) -> Self:
        """In any order."""
        return type(self)(self.value.sum(dim), self.roundings + max(1, self.value.shape[dim]) - 1)

    def norm(self: Self, dim: int = -1) -> Self:
        """√Σ x²."""
        return self.square().sum(dim).sqrt()

    def power(self: Self, exponent: float) -> Self:
        """x^p for an exponent that is exact and positive."""
        base = self.bound
        return type(self)(self._settle(base**exponent, base), ELEMENTARY)

    def inverse_power(self: Self, order: float) -> Self:
        """x^{1/p} for a p that is exact and positive: a rounded exponent changes it by |log x^{1/p}| < 1024
        roundings.
        """
        return type(self)(self.power(1 / order).value, ELEMENTARY + 1024)

    def __matmul__(self: Self, other: Self) -> Self:
        other = self._like(other)
        terms = self.value.shape[-1]
        return type(self)(
            self._settle(self.value @ other.value), self.roundings + other.roundings + terms + 1
        )

    def _like(self: Self, other: Self | int) -> Self:
        if type(other) is type(self):
            return other
        if type(other) is int and other >= 0:
            return type(self)(float(other))
        raise TypeError(
            f"{type(self).__name__} with {type(other).__name__}: say on which side of the truth it is, "
            f"by Upper(…), Lower(…) or exact(…); whole numbers are exact"
        )


class Upper(Directed):
    """At least the true numbers.

    Examples:
        >>> from regard.theorems import Upper
        >>> tenth = Upper(1.0) * Upper(0.1)
        >>> tenth.roundings, float(tenth.bound) > 0.1  # what rounding may have lost is added at the end
        (1, True)
    """

    __slots__ = ()

    @property
    def bound(self) -> Tensor:
        """value · (1 - u)^(-roundings - 1), one for this product; ∞ where the value is NaN."""
        value = self.value if self.roundings == 0 else self.value * _grown(self.roundings + 1)
        return torch.nan_to_num(value, nan=math.inf, posinf=math.inf)

    def firm(self) -> Upper:
        """The same with its roundings paid for."""
        return Upper(self.bound)

    @staticmethod
    def _settle(value: Tensor, *factors: Tensor) -> Tensor:
        if value.ndim == 0 and not value and not all(factors):
            return value
        return value.clamp_min_(TINY)

    def __sub__(self, other: Lower) -> Upper:
        """A difference is at least the true one where what is taken away is at most the true one.

        Never below zero.
        """
        if type(other) is not Lower:
            raise TypeError(f"Upper minus {type(other).__name__}: only a Lower may be taken from an Upper")
        return Upper((self.bound - other.bound).clamp_min(0.0), 1)

    def __rsub__(self, other: int) -> Lower:
        """1 - x, for instance: at most the true one."""
        return exact_lower(other) - self

    def __truediv__(self, other: Lower | int) -> Upper:
        if type(other) is int and other > 0:
            other = Lower(float(other))
        if type(other) is not Lower:
            raise TypeError(
                f"Upper over {type(other).__name__}: only a Lower, or a whole number, may divide an Upper"
            )
        value = self._settle(self.value / other.value, self.value)
        return Upper(value, self.roundings + other.roundings + 1)

    def minimum(self, *others: Upper) -> Upper:
        """Of several bounds of the same number, the smallest; and of numbers, the smallest.

        NaN is passed over.
        """
        return _fold(torch.fmin, (self, *others))

    def maximum(self, *others: Upper) -> Upper:
        """Of several numbers, the largest."""
        return _fold(torch.maximum, (self, *others))

    def sums_of_others(self) -> Upper:
        """Σ_{l≠k} x_l for each k, each summed by itself:
        x_k taken from the sum of all would lose what is small beside it.
        """
        size = self.value.shape[-1]
        others = 1 - torch.eye(size, dtype=torch.float64)
        finite = torch.isfinite(self.value)
        found = torch.where(finite, self.value, 0.0) @ others
        endless = (~finite).double() @ others > 0  # ∞ · 0 would be NaN
        return Upper(torch.where(endless, math.inf, found), self.roundings + size)

    # Functions that grow: of the bound, and rounded themselves

    def grow(self, function: Callable[[Tensor], Tensor]) -> Upper:
        """f(x) for an elementary function that grows and is not negative."""
        return Upper(function(self.bound), ELEMENTARY)

    def exp(self) -> Upper:
        return self.grow(torch.exp)

    def expm1(self) -> Upper:
        return self.grow(torch.expm1)

    def sinh(self) -> Upper:
        return self.grow(torch.sinh)

    def tanh(self) -> Upper:
        return self.grow(torch.tanh)

    def log1p(self) -> Upper:
        return self.grow(torch.log1p)

    def fall(self, function: Callable[[Tensor], Tensor]) -> Lower:
        """f(x) for an elementary function that falls and is not negative: at most the true one."""
        return Lower(Lower._settle(function(self.bound)), ELEMENTARY)

    def exp_minus(self) -> Lower:
        """e^{-x}, at most the true one."""
        return self.fall(lambda x: torch.exp(-x))


class Lower(Directed):
    """At most the true numbers, and not negative.

    Examples:
        >>> from regard.theorems import Lower, Upper
        >>> ratio = Upper(1.0) / Lower(3.0)  # above over below is above
        >>> type(ratio).__name__, float(ratio.bound) >= 1 / 3
        ('Upper', True)
    """

    __slots__ = ()

    @property
    def bound(self) -> Tensor:
        """value · (1 - u)^(roundings + 1), one for this product; 0 where the value is NaN."""
        value = self.value if self.roundings == 0 else self.value * (1 - (self.roundings + 1) * UNIT)
        return torch.nan_to_num(value, nan=0.0)

    @staticmethod
    def _settle(value: Tensor, *factors: Tensor) -> Tensor:
        return value.masked_fill_(~(value >= TINY), 0.0)

    def __sub__(self, other: Upper) -> Lower:
        """At most the true difference; zero where nothing is known about it."""
        if type(other) is not Upper:
            raise TypeError(f"Lower minus {type(other).__name__}: only an Upper may be taken from a Lower")
        return Lower(torch.nan_to_num((self.bound - other.bound), nan=0.0).clamp_min(0.0), 1)

    def __rsub__(self, other: int) -> Upper:
        """1 - x, for instance: at least the true one."""
        return exact(other) - self

    def __truediv__(self, other: Upper | int) -> Lower:
        if type(other) is int and other > 0:
            other = Upper(float(other))
        if type(other) is not Upper:
            raise TypeError(
                f"Lower over {type(other).__name__}: only an Upper, or a whole number, may divide a Lower"
            )
        return Lower(self._settle(self.value / other.value), self.roundings + other.roundings + 1)

    def maximum(self, *others: Lower) -> Lower:
        """Of several bounds of the same number, the largest; and of numbers, the largest.

        NaN is passed over.
        """
        return _fold(torch.fmax, (self, *others))

    def minimum(self, *others: Lower) -> Lower:
        """Of several numbers, the smallest."""
        return _fold(torch.minimum, (self, *others))


def exact(value: Tensor | float) -> Upper:
    """Numbers that are the true ones: given radii, whole numbers, powers of two.

    Examples:
        >>> float(regard.theorems.exact(2.0).bound)
        2.0
    """
    made = Upper(value)
    if bool((made.value < 0).any()):
        raise ValueError(f"a bound is of numbers that are not negative, found {float(made.value.min()):g}")
    return made


def exact_lower(value: Tensor | float) -> Lower:
    """The same as a Lower."""
    return Lower(exact(value).value)


def sizes(tensor: Tensor) -> Upper:
    """|x| of numbers that are the true ones."""
    return Upper(tensor.abs())


def stack(parts: Sequence[Self], dim: int = 0) -> Self:
    """Bounds side by side."""
    roundings = max(part.roundings for part in parts)
    return type(parts[0])(torch.stack([part.value for part in parts], dim), roundings)


def total(parts: Sequence[Upper]) -> Upper:
    """Σ of bounds that broadcast; zero of none."""
    found = parts[0] if parts else exact(0.0)
    for part in parts[1:]:
        found = found + part
    return found


def product(parts: Sequence[Upper]) -> Upper:
    """∏ of bounds that broadcast; one of none."""
    found = parts[0] if parts else exact(1.0)
    for part in parts[1:]:
        found = found * part
    return found


def least(parts: Sequence[Upper]) -> Upper:
    """Of several bounds of the same number, the smallest."""
    return parts[0].minimum(*parts[1:])


def largest(parts: Sequence[Upper]) -> Upper:
    """The largest of several numbers."""
    return parts[0].maximum(*parts[1:])


def relative_error(roundings: int) -> Upper:
    """At least (1 - u)^(-roundings) - 1."""
    return Upper(_grown(roundings) - 1.0)  # this difference is exact


def root(number: int | float) -> Upper:
    """√number, for a number that is exact."""
    return Upper(math.sqrt(number), 1)


def _grown(roundings: int) -> float:
    """At least (1 - u)^(-roundings): 1 + k u/(1 - k u), rounded up; infinite where no digit is left.

    The 2 k u below is more than the rounding of the quotient.
    """
    units = roundings * UNIT
    return math.inf if units >= 0.5 else math.nextafter(1 + units / (1 - 2 * units), math.inf)


def _fold(function: Callable[[Tensor, Tensor], Tensor], parts: Sequence[Self]) -> Self:
    kind = type(parts[0])
    if any(type(part) is not kind for part in parts):
        raise TypeError(f"{[type(part).__name__ for part in parts]}: only bounds of one side are compared")
    value = parts[0].value
    for part in parts[1:]:
        value = function(value, part.value)
    return kind(value, max(part.roundings for part in parts))
