"""Problem: what engines are given. pose: a problem from points, with all shapes checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from regard import _check
from regard._heads import head_count, match_key_heads, repeat_groups
from regard._object import Object, outline, tensors_in
from regard._transforms import moves
from regard._types import Features
from regard.errors import ArgumentError
from regard.normalizers import Normalizer, Reference
from regard.potentials import Bilinear, Dot, Potential
from regard.supports import Causal, Full, Padding, Support
from regard.supports.base import conjuncts


@dataclass(frozen=True, eq=False, repr=False)
class Problem(Object):
    """Weights of `queries` on `keys` under potential, normalizer and support, applied to `values`.

    What is decided here: the features of the potential, taken once; which group of keys each head of queries
    sees; and the batch shape of the output, in which all of it broadcasts.

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
    batch_shape: torch.Size = torch.Size()

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

    def hidden_parameters(self) -> bool:
        """Whether scores depend on a tensor under differentiation that is no field of the potential.

        That is a function that captured one.
        """
        leaves, tree = pytree.tree_flatten((self.potential, _first(self.queries), _first(self.keys)))
        blank = [
            torch.zeros(t.shape, dtype=t.dtype, device=t.device) if isinstance(t, Tensor) else t
            for t in leaves
        ]
        potential, queries, keys = pytree.tree_unflatten(blank, tree)
        return moves(potential.pair(queries, keys))

    def rows(self) -> Tensor:
        """The marks of the queries."""
        return (
            torch.arange(self.query_count, device=self.device)
            if self.query_marks is None
            else self.query_marks
        )

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
        floating = (
            t for t in pytree.tree_leaves(self) if isinstance(t, Tensor) and t.dtype.is_floating_point
        )
        if all(t.dtype == dtype for t in floating):
            return self
        moved = pytree.tree_map(
            lambda t: t.to(dtype) if isinstance(t, Tensor) and t.dtype.is_floating_point else t, self
        )
        return moved.replace(query_marks=self.query_marks, key_marks=self.key_marks, support=self.support)


def pose(
    potential: Potential,
    normalizer: Normalizer,
    support: Support,
    x: Tensor,
    y: Tensor,
    values: Tensor,
    *,
    log_counts: Tensor | None = None,
    log_queries: Tensor | None = None,
    query_marks: Tensor | None = None,
    key_marks: Tensor | None = None,
) -> Problem:
    """The problem of points x (..., m, d) that look at points y (..., n, d) with values (..., n, e)."""
    _check.same_device("queries", x, "keys", y)
    _check.same_device("values", values, "keys", y)
    if x.dtype != y.dtype:
        raise ArgumentError(
            "context", f"has dtype {y.dtype} and the queries {x.dtype}", "convert them to one dtype"
        )
    if x.dtype != torch.float64:
        _check_digits(x.dtype, potential=potential, normalizer=normalizer, log_weights=log_counts)
    potential, normalizer = normalizer.acting(potential)
    marks = _marks(x, y, query_marks, key_marks)
    potential, queries, keys = _compare_with_enough_digits(potential, x, y, *marks)
    heads = max(head_count(queries), x.shape[-3] if x.ndim >= 3 else 1)
    groups = max(head_count(keys), values.shape[-3] if values.ndim >= 3 else 1)
    if log_counts is not None and log_counts.ndim >= 2 and log_counts.shape[-2] == groups:
        log_counts = repeat_groups("log_weights", log_counts, heads, -2)
    keys, values = match_key_heads(queries, keys, heads), repeat_groups("values", values, heads)
    nouns, tensors = (potential, normalizer, support), (queries, keys, values)
    posed = Problem(
        *nouns, *tensors, x.shape[-2], log_counts, log_queries, query_marks, key_marks, torch.Size()
    )
    object.__setattr__(posed, "batch_shape", _batch_shape(posed))  # nobody has seen it yet
    return posed


def _marks(
    x: Tensor, y: Tensor, query_marks: Tensor | None, key_marks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The marks of queries and keys, one tensor where both stand in order and are as many."""
    own = torch.arange(x.shape[-2], device=x.device) if query_marks is None else query_marks
    if key_marks is not None:
        return own, key_marks
    same = query_marks is None and x.shape[-2] == y.shape[-2]
    return own, own if same else torch.arange(y.shape[-2], device=y.device)


def _compare_with_enough_digits(
    potential: Potential, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor
) -> tuple[Potential, Features, Features]:
    """The potential with the features of the tokens; half precision is for storage, not for scores.

    A bare product is exact in the kernel, which sums in float32. Whatever else is done to half-precision
    points before they meet (rotation, scaling, a norm) would be rounded to three digits, so it is done in
    float32.
    """
    if x.dtype.itemsize < 4 and not isinstance(potential, (Dot, Bilinear)):
        potential = pytree.tree_map(_widen, potential)
        x, y = _widen(x), _widen(y)
    return potential, *_features(potential, x, y, x_marks, y_marks)


def _widen(value: Any) -> Any:
    """Half-precision tensors in float32, everything else as it is."""
    half = isinstance(value, Tensor) and value.dtype.is_floating_point and value.dtype.itemsize < 4
    return value.float() if half else value


def _check_digits(dtype: torch.dtype, **nouns: Any) -> None:
    """Points of fewer digits than the declaration: an error rather than a cast that nobody asked for."""
    for name, noun in nouns.items():
        if any(t.dtype == torch.float64 for t in tensors_in(noun)):
            raise ArgumentError(
                name, f"has float64 tensors and the points are {dtype}", "convert one of them"
            )


def _batch_shape(problem: Problem) -> torch.Size:
    """The batch shape to which tokens, weights, parameters and support broadcast."""
    shapes = [t.shape[:-2] for t in tensors_in((problem.queries, problem.keys))]
    shapes.append(problem.values.shape[:-2])
    if problem.log_counts is not None:
        shapes.append(problem.log_counts.shape[:-1])
    if problem.log_queries is not None and not problem.normalizer.rowwise:
        shapes.append(problem.log_queries.shape[:-1])
    given = _check.broadcast("queries, keys, values and log_weights", *shapes)
    return _check.broadcast(
        "tokens, and the potential's parameters or the support,", given, _structure_shape(problem)
    )


def _structure_shape(problem: Problem) -> tuple[int, ...]:
    """The batch shape that parameters and support add: a slope for each head, a length for each text.

    It is found once for nouns and tokens of the same shapes.
    """
    if torch.compiler.is_compiling():
        return _find_structure_shape(problem)
    nouns = (problem.potential, problem.normalizer, problem.support, problem.query_marks, problem.key_marks)
    empty = 0 in (problem.query_count, problem.key_count)
    shapes = [(t.shape[:-2], t.shape[-1]) for t in tensors_in((problem.queries, problem.keys))]
    key = (empty, outline(nouns), outline(shapes))
    found = _structures.get(key)
    if found is None:
        if len(_structures) >= KEPT:
            _structures.clear()
        with _disable_current_modes():  # what is asked for its shape alone is no work: counters do not see it
            found = _structures[key] = _find_structure_shape(problem)
    return found


KEPT = 512
"""How many shapes are remembered."""
_structures: dict[Any, tuple[int, ...]] = {}


def _find_structure_shape(problem: Problem) -> tuple[int, ...]:
    learned = [t.shape for t in tensors_in(problem.normalizer)]  # a temperature for each head
    support = problem.support
    plain = isinstance(support, Full) or (isinstance(support, Causal) and problem.in_order())
    allowed = () if plain else support.allows(problem.rows()[..., :1], problem.columns()[..., :1]).shape[:-2]
    if 0 in (problem.query_count, problem.key_count):
        return tuple(_check.broadcast("normalizer and support", allowed, *learned))
    scored = _score_one(problem).shape[:-2]
    return tuple(_check.broadcast("potential, normalizer and support", allowed, scored, *learned))


def _score_one(problem: Problem) -> Tensor:
    """The score of the first query and the first key."""
    try:
        return problem.potential.pair(_first(problem.queries), _first(problem.keys))
    except ArgumentError:
        raise
    except RuntimeError as error:  # parameters for another number of heads
        batch = list(problem.values.shape[:-2])
        found = f"{problem.potential!r} does not fit tokens with batch dimensions {batch}"
        raise ArgumentError(
            "potential", found, f"give one parameter, or one for each head; torch says: {error}"
        ) from error


def _features(
    potential: Potential, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor
) -> tuple[Features, Features]:
    try:
        return potential.features(x, y, x_marks, y_marks)
    except ArgumentError:
        raise
    except RuntimeError as error:  # a shape torch could not broadcast: say which tensors met
        found = f"queries {list(x.shape)} and keys {list(y.shape)} do not fit {potential!r}"
        raise ArgumentError("potential", found, f"torch says: {error}") from error


def _first(features: Any) -> Any:
    """The features of the first token, in a precision that every operation has."""
    if type(features) is tuple:
        return tuple(map(_first, features))
    if not isinstance(features, Tensor):
        return features if features is None else pytree.tree_map_only(Tensor, _first, features)
    one = features.narrow(-2, 0, 1).detach()
    return one.to(torch.promote_types(one.dtype, torch.float32)) if one.dtype.is_floating_point else one


@dataclass(frozen=True)
class SupportParts:
    """A support as engines see it: is it causal, which keys does everyone see, what masks pairs."""

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
