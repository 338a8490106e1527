"""Lookups: the deterministic kernels that send a key to its value."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from regard import _check
from regard._gather import gather_rows
from regard._heads import project_points, repeat_groups
from regard.errors import ArgumentError
from regard.kernel import AnyLaw, Kernel
from regard.measure import Measure, dirac
from regard.normed import Normed
from regard.parameters import Tokens, parameter, part, projection, shared


class Lookup(Kernel):
    """L(k, ·) = δ_{v(k)} (vuckovic2020, Definition 5). A lookup says one thing: the values of keys.

    Examples:
        >>> doubled = regard.Linear(2 * torch.eye(2))
        >>> isinstance(doubled, regard.lookups.Lookup), doubled.values(torch.ones(1, 2), None).tolist()
        (True, [[2.0, 2.0]])
    """

    @abstractmethod
    def values(self, points: Tensor, marks: Tensor | None) -> Tensor:
        """The values (..., n, e) of the keys (..., n, d)."""

    def __call__(self, points: Tensor, marks: Tensor | None = None) -> AnyLaw:
        return dirac(self.values(points, marks))

    def after(self, law: Measure) -> AnyLaw:
        """The push-forward of the law: deterministic kernels move atoms and keep weights and marks."""
        if law.points.ndim == 2:
            return Measure(self.values(law.points, law.marks), law.log_weights, law.marks)
        # A batch of laws (..., m) on n atoms: m·n keys, so that weights with heads meet the heads and not the
        # laws.
        marks = None if law.marks is None else law.marks.expand(law.points.shape[:-1]).flatten(-2)
        values = self.values(law.points.flatten(-3, -2), marks).unflatten(-2, law.points.shape[-3:-1])
        if law.log_weights is not None and law.log_weights.ndim >= 3:
            values = repeat_groups("values", values, law.log_weights.shape[-3], -4)
        return Measure(values, law.log_weights, law.marks)


@dataclass(frozen=True, eq=False, repr=False)
class Identity(Lookup):
    """v(k) = k.

    Examples:
        >>> regard.Attention(regard.Dot(), regard.Identity())(torch.ones(3, 2))[0].tolist()
        [1.0, 1.0]
    """

    def values(self, points: Tensor, marks: Tensor | None) -> Tensor:
        return points


@dataclass(frozen=True, eq=False, repr=False)
class Linear(Lookup):
    """v(k) = w_vᵀ k + b_v.

    Examples:
        >>> regard.Attention(regard.Dot(), regard.Linear(torch.ones(2, 5)))(torch.ones(3, 2)).shape
        torch.Size([3, 5])
    """

    w_v: Tensor = projection(Tokens.KEYS)
    b_v: Tensor | None = parameter(rank=1, default=None)

    def __post_init__(self) -> None:
        _check.parameter("w_v", self.w_v, 2, "(..., d, e)")
        _check.parameter("b_v", self.b_v, 1, "(..., e)")
        if self.b_v is not None and self.b_v.shape[-1] not in (1, self.w_v.shape[-1]):
            raise ArgumentError(
                "b_v",
                f"has width {self.b_v.shape[-1]} and w_v gives {self.w_v.shape[-1]}",
                "give one number for each value",
            )

    def values(self, points: Tensor, marks: Tensor | None) -> Tensor:
        if points.shape[-1] != self.w_v.shape[-2]:
            raise ArgumentError(
                "w_v",
                f"takes width {self.w_v.shape[-2]} and the keys have {points.shape[-1]}",
                "give w_v (..., d, e) with d the width of the keys",
            )
        if points.dtype != self.w_v.dtype:
            raise ArgumentError(
                "w_v", f"is {self.w_v.dtype} and the keys are {points.dtype}", "convert one of them"
            )
        values = project_points(points, self.w_v)
        return values if self.b_v is None else values + self.b_v.unsqueeze(-2)


@dataclass(frozen=True, eq=False, repr=False)
class Factored(Lookup):
    """v(k) = uᵀ(wᵀk) + b: values of projected keys.

    With w the projection of the potential, values cannot see what scores do not.

    Examples:
        >>> regard.Factored(torch.eye(4)[:, :2], torch.ones(2, 3)).values(torch.ones(5, 4), None).shape
        torch.Size([5, 3])
    """

    w: Tensor = projection(Tokens.KEYS)
    u: Tensor = parameter(rank=2)
    b: Tensor | None = parameter(rank=1, default=None)

    def __post_init__(self) -> None:
        _check.parameter("w", self.w, 2, "(..., d, c)")
        _check.parameter("u", self.u, 2, "(..., c, e)")
        _check.parameter("b", self.b, 1, "(..., e)")
        if self.b is not None and self.b.shape[-1] not in (1, self.u.shape[-1]):
            raise ArgumentError(
                "b",
                f"has width {self.b.shape[-1]} and u gives {self.u.shape[-1]}",
                "give one number for each value",
            )
        if self.w.shape[-1] != self.u.shape[-2]:
            raise ArgumentError(
                "u",
                f"takes width {self.u.shape[-2]} and w gives {self.w.shape[-1]}",
                "give u (..., c, e) for w (..., d, c)",
            )

    def values(self, points: Tensor, marks: Tensor | None) -> Tensor:
        values = Linear(self.w).values(points, marks) @ self.u
        return values if self.b is None else values + self.b.unsqueeze(-2)


@dataclass(frozen=True, eq=False, repr=False)
class NormedLinear(Lookup):
    """v(k) = N(wᵀk + b): values of projected keys that pass through a norm layer, as latent ones do
    (deepseek2024).

    Examples:
        >>> latent = regard.lookups.NormedLinear(torch.eye(2), regard.normed.Normed(eps=1e-12))
        >>> latent.values(torch.tensor([[3.0, 3.0]]), None).tolist()
        [[1.0, 1.0]]
    """

    w: Tensor = projection(Tokens.KEYS)
    norm: Normed = part()
    b: Tensor | None = parameter(rank=1, default=None)

    def __post_init__(self) -> None:
        if not isinstance(self.norm, Normed):
            raise ArgumentError("norm", f"is a {type(self.norm).__name__}", "give a Normed")
        Linear(self.w, self.b)  # checks both

    def values(self, points: Tensor, marks: Tensor | None) -> Tensor:
        return self.norm(Linear(self.w, self.b).values(points, marks))


@dataclass(frozen=True, eq=False, repr=False)
class FunctionLookup(Lookup):
    """v(k) = g(k) for any function g of the key, applied to all keys at once: (..., n, d) -> (..., n, e).

    Examples:
        >>> squares = regard.Attention(regard.Dot(), regard.FunctionLookup(torch.square))
        >>> squares(torch.full((3, 2), 2.0))[0].tolist()
        [4.0, 4.0]
    """

    function: Callable[[Tensor], Tensor] = shared()

    def values(self, points: Tensor, marks: Tensor | None) -> Tensor:
        values = self.function(points)
        if not isinstance(values, Tensor) or values.shape[:-1] != points.shape[:-1]:
            found = _check.describe(values)
            raise ArgumentError(
                "function",
                f"maps keys {list(points.shape)} to {found}",
                "return one value for each key: (..., n, e)",
            )
        return values


@dataclass(frozen=True, eq=False, repr=False)
class Table(Lookup):
    """v(k) is the row of a table at the key's mark (its position):
    key-value pairs whose values are not functions of keys.

    Examples:
        >>> values = torch.tensor([[10.0], [20.0]])
        >>> regard.Attention(regard.Dot(), regard.Table(values))(torch.zeros(2, 3)).tolist()
        [[15.0], [15.0]]
    """

    table: Tensor = parameter(rank=2)

    def __post_init__(self) -> None:
        _check.parameter("table", self.table, 2, "(..., n, e)")

    def values(self, points: Tensor, marks: Tensor | None) -> Tensor:
        if marks is not None:
            return gather_rows("table", self.table, marks)
        if self.table.shape[-2] != points.shape[-2]:
            found = f"has {self.table.shape[-2]} rows for {points.shape[-2]} keys"
            raise ArgumentError(
                "table", found, "give one row for each key, or marks that say which row is whose"
            )
        return self.table
