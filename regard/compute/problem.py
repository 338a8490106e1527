"""Problem: what an engine is given. Features are taken once, groups of queries are matched to their keys, shapes are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard import _check
from regard._heads import grouped, grouped_features, head_count
from regard._object import Object
from regard._transforms import moves
from regard._types import Features
from regard.errors import ArgumentError
from regard.normalizers import Normalizer, Reference
from regard.potentials import Potential
from regard.potentials.reductions import Reduction, reduce
from regard.supports import Causal, Full, Padding, Support
from regard.supports.base import conjuncts


@dataclass(frozen=True, eq=False, repr=False)
class Tokens(Object):
    """Points with what travels along: log-counts or weights (..., n) and marks (..., n)."""

    points: Tensor
    log_weights: Tensor | None = None
    marks: Tensor | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Problem(Object):
    """Weights of `queries` on `keys` under potential, normalizer and support, applied to `values`.

    queries, keys: features of the potential; values (..., n, e); log_counts (..., n); log_queries (..., m);
    marks None means 0, 1, 2, ... in order, which engines may rely on without reading data.
    """

    potential: Potential
    normalizer: Normalizer
    support: Support
    queries: Features
    keys: Features
    values: Tensor
    query_count: int
    log_counts: Tensor | None = None
    log_queries: Tensor | None = None
    query_marks: Tensor | None = None
    key_marks: Tensor | None = None

    @property
    def key_count(self) -> int:
        """n."""
        return self.values.shape[-2]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the output."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where it all happens."""
        return self.values.device

    @property
    def batch_shape(self) -> torch.Size:
        """The batch shape of the output."""
        return self._once("_batch_shape", self._broadcast)

    def _broadcast(self) -> torch.Size:
        shapes = [t.shape[:-2] for t in pytree.tree_leaves((self.queries, self.keys)) if isinstance(t, Tensor)]
        shapes.append(self.values.shape[:-2])
        if self.log_counts is not None:
            shapes.append(self.log_counts.shape[:-1])
        if self.log_queries is not None and not self.normalizer.rowwise:
            shapes.append(self.log_queries.shape[:-1])
        given = _check.broadcast("queries, keys, values and log_weights", *shapes)
        return _check.broadcast("tokens, and the potential's parameters or the support,", given, self.structure_shape())

    @property
    def reduction(self) -> Reduction | str:
        """The potential as a dot product plus biases, or a sentence that says why it is none."""
        return self._once("_reduction", lambda: reduce.one(self.potential, self.queries, self.keys, SupportParts.of(self.support).causal))

    def _once(self, name: str, compute: Callable[[], Any]) -> Any:
        """Engines ask for the same things when they refuse and when they run; a traced graph shares them by itself."""
        if torch.compiler.is_compiling():
            return compute()
        if name not in self.__dict__:
            self.__dict__[name] = compute()
        return self.__dict__[name]

    def structure_shape(self) -> tuple[int, ...]:
        """The batch shape that the potential's own parameters and the support add (a slope for each head, a length for each text)."""
        learned = [t.shape for t in pytree.tree_leaves(self.normalizer) if isinstance(t, Tensor)]  # a temperature for each head
        plain = isinstance(self.support, Full) or (isinstance(self.support, Causal) and self.in_order())
        allowed = () if plain else self.support.allows(self.rows()[..., :1], self.columns()[..., :1]).shape[:-2]
        if 0 in (self.query_count, self.key_count):
            return tuple(_check.broadcast("normalizer and support", allowed, *learned))
        few = pytree.tree_map(_first, (self.queries, self.keys))
        scored = self.potential.pair(*few).shape[:-2]
        return tuple(_check.broadcast("potential, normalizer and support", allowed, scored, *learned))

    def hidden_parameters(self) -> bool:
        """Whether scores depend on a tensor under differentiation that the declaration does not show: a function that captured one."""
        leaves, tree = pytree.tree_flatten((self.potential, *pytree.tree_map(_first, (self.queries, self.keys))))
        blank = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) if isinstance(t, Tensor) else t for t in leaves]
        potential, queries, keys = pytree.tree_unflatten(blank, tree)
        return moves(potential.pair(queries, keys))

    def rows(self) -> Tensor:
        """The marks of the queries."""
        return torch.arange(self.query_count, device=self.device) if self.query_marks is None else self.query_marks

    def columns(self) -> Tensor:
        """The marks of the keys."""
        return torch.arange(self.key_count, device=self.device) if self.key_marks is None else self.key_marks

    def allowed(self) -> Tensor | None:
        """The whole mask (..., m, n), None where everything is allowed."""
        return None if isinstance(self.support, Full) else self.support.allows(self.rows(), self.columns())

    def reference(self) -> Reference:
        """The reference measure of all rows."""
        return Reference(self.log_counts, self.allowed(), self.log_queries)

    def in_order(self) -> bool:
        """Whether queries and keys stand in the order of their marks 0, 1, 2, ..."""
        return self.query_marks is None and self.key_marks is None

    def to(self, dtype: torch.dtype) -> Problem:
        """The same problem in another floating dtype; positions and indices stay."""
        moved = pytree.tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.dtype.is_floating_point else t, self)
        return moved.replace(query_marks=self.query_marks, key_marks=self.key_marks, support=self.support)

    def change(self, **changes: Any) -> Problem:
        """Some fields changed."""
        return self.replace(**changes)


def pose(potential: Potential, normalizer: Normalizer, support: Support, x: Tokens, y: Tokens, values: Tensor) -> Problem:
    """A problem from points; x carries the weights of queries, y the log-counts of keys."""
    _check.same_device("queries", x.points, "keys", y.points)
    _check.same_device("values", values, "keys", y.points)
    if x.points.dtype != y.points.dtype:
        raise ArgumentError("context", f"has dtype {y.points.dtype} and the queries {x.points.dtype}", "convert them to one dtype")
    for name, noun in (("potential", potential), ("normalizer", normalizer), ("log_weights", y.log_weights)):
        wide = any(isinstance(t, Tensor) and t.dtype == torch.float64 for t in pytree.tree_leaves(noun))
        if wide and x.points.dtype != torch.float64:
            raise ArgumentError(name, f"has float64 tensors and the points are {x.points.dtype}", "convert one of them")
    potential, normalizer = normalizer.acting(potential)
    query_marks = torch.arange(x.points.shape[-2], device=x.points.device) if x.marks is None else x.marks
    key_marks = torch.arange(y.points.shape[-2], device=y.points.device) if y.marks is None else y.marks
    queries, keys = _features(potential, x.points, y.points, query_marks, key_marks)
    heads = max(head_count(queries), x.points.shape[-3] if x.points.ndim >= 3 else 1)
    groups = max(head_count(keys), values.shape[-3] if values.ndim >= 3 else 1)
    log_weights = y.log_weights
    if log_weights is not None and log_weights.ndim >= 2 and log_weights.shape[-2] == groups:
        log_weights = grouped("log_weights", log_weights, heads, -2)
    return Problem(
        potential,
        normalizer,
        support,
        queries,
        grouped_features(queries, keys, heads),
        grouped("values", values, heads),
        x.points.shape[-2],
        log_weights,
        x.log_weights,
        x.marks,
        y.marks,
    )


def _features(potential: Potential, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
    try:
        return potential.features(x, y, x_marks, y_marks)
    except ArgumentError:
        raise
    except RuntimeError as error:  # a shape torch could not broadcast: say which tensors met
        found = f"queries {list(x.shape)} and keys {list(y.shape)} do not fit {potential!r}"
        raise ArgumentError("potential", found, f"torch says: {error}") from error


def _first(features: Any) -> Any:
    """The features of the first token, in a precision that every operation has."""
    if not isinstance(features, Tensor):
        return features
    one = features[..., :1, :].detach()
    return one.to(torch.promote_types(one.dtype, torch.float32)) if one.dtype.is_floating_point else one


@dataclass(frozen=True)
class SupportParts:
    """A support as engines see it: is it causal, which keys does everyone see, and what is left."""

    causal: bool
    padding: tuple[Padding, ...]
    rest: tuple[Support, ...]

    @staticmethod
    def of(support: Support) -> SupportParts:
        """The conjuncts, sorted."""
        parts = conjuncts(support)
        return SupportParts(
            any(isinstance(part, Causal) for part in parts),
            tuple(part for part in parts if isinstance(part, Padding)),
            tuple(part for part in parts if not isinstance(part, (Causal, Padding))),
        )
