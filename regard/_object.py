"""Object: a frozen dataclass that is also a pytree of its tensors,
so every torch.func transform passes through it.
"""

from __future__ import annotations

import dataclasses
from abc import ABC
from collections.abc import Callable, Hashable, Iterator
from functools import wraps
from inspect import isabstract
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard import _kinds
from regard._check import describe
from regard.errors import RegardError

Self = TypeVar("Self", bound="Object")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Object(ABC):  # noqa: B024 (the base of abstract classes has no method of its own to leave open)
    """Base of all nouns. A subclass is `@dataclass(frozen=True, eq=False, repr=False)` and either abstract or
    final.

    Tensors (and Objects that hold them) are the children of the pytree; everything else is structure.
    Rebuilding from leaves skips the checks of construction, because leaves may be tangents, batches or
    placeholders.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[1:]:
            if (
                base is not Object
                and "__dataclass_params__" in vars(base)
                and issubclass(base, Object)
                and not isabstract(base)
            ):
                raise TypeError(
                    f"{cls.__name__} derives from {base.__name__}, which is final: what is known about "
                    f"{base.__name__} would be "
                    f"assumed of {cls.__name__}; derive it from {base.__mro__[1].__name__}"
                )
        if "__post_init__" in vars(cls):
            cls.__post_init__ = _with_kinds(cls.__post_init__)  # type: ignore[method-assign]
        pytree.register_pytree_node(
            cls, _flatten, _unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}"
        )

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        if (arguments or options) and not torch.compiler.is_compiling():
            _kinds.refuse_other_arguments(cls, arguments, options)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():
            _refuse_wrong_kinds(self)

    def __eq__(self, other: object) -> bool:
        """Equal values: the same type with equal fields, tensors with equal numbers on one device in one
        dtype.

        As for numbers, NaN equals nothing; a tensor that holds it, or whose numbers cannot be read (on the
        device meta, inside vmap), equals itself only.
        """
        if self is other:
            return True
        if type(self) is not type(other):
            return NotImplemented
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in _fields(type(self)))

    def __hash__(self) -> int:
        """Of the type, the shapes of tensors, and all that is no tensor:
        the numbers in tensors may be written to.
        """
        return hash((type(self), *(_hashable(getattr(self, f.name)) for f in _fields(type(self)))))

    def replace(self: Self, **changes: Any) -> Self:
        """The same value with some fields changed; the checks of construction run again."""
        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        shown = [
            f"{f.name}={describe(getattr(self, f.name))}"
            for f in _fields(type(self))
            if not _is_default(f, getattr(self, f.name))
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


def _with_kinds(check: Callable[..., None]) -> Callable[..., None]:
    """The checks of a noun, and those of the kinds of its fields where these say nothing of them."""

    @wraps(check)
    def __post_init__(self: Object, *only_given: Any) -> None:
        if torch.compiler.is_compiling():
            check(self, *only_given)
            return
        try:
            check(self, *only_given)
        except RegardError:
            raise
        except Exception as error:
            _kinds.refuse_wrong_kinds(self, _kinds.kinds_of_fields(type(self)), error)
            for name, value in vars(self).items():
                if isinstance(value, Tensor):
                    _kinds.refuse_unusual(name, value, error)
            raise
        _refuse_wrong_kinds(self)

    return __post_init__


def _refuse_wrong_kinds(value: Object) -> None:
    """Raise for the first field of another kind; a value is looked at where its type does not decide."""
    fields = vars(value)
    undecided = _kinds.kinds_by_value(type(value), tuple(fields), tuple(map(type, fields.values())))
    if undecided:
        _kinds.refuse_wrong_kinds(value, undecided)


def rebuild(cls: type[Self], names: tuple[str, ...], values: tuple[Any, ...]) -> Self:
    """An Object from its field values, without the checks of construction."""
    made = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors that a value holds; torch's trees give the same, and take ten times as long."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Object):
        for part in vars(value).values():
            if part is not None and type(part) not in _SIMPLE:
                yield from tensors_in(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def outline(value: Any) -> Hashable:
    """All of a value but the numbers in its tensors: types, shapes, and what is no tensor."""
    if value is None or type(value) in _SIMPLE:
        return value
    if isinstance(value, Tensor):
        return value.shape
    if isinstance(value, Object):
        return (type(value), *map(outline, vars(value).values()))
    if isinstance(value, (tuple, list)):
        return (type(value), *map(outline, value))
    return value if isinstance(value, Hashable) else id(value)


_SIMPLE = (float, int, bool, str)


def _fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default is dataclasses.MISSING or isinstance(value, Tensor):
        return False
    return bool(value == field.default)


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and _same_numbers(one, other)
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return (
            type(one) is type(other)
            and one.keys() == other.keys()
            and all(_equal(one[key], other[key]) for key in one)
        )
    return bool(one == other)


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.device != other.device or one.shape != other.shape or one.is_meta:
        return False
    try:
        return torch.equal(one, other)
    except RuntimeError:  # a batched or fake tensor has no numbers to read
        return False


def _hashable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(_hashable(part) for part in value)
    return value if isinstance(value, Hashable) else type(value)


def _has_tensors(value: Any) -> bool:
    if value is None or isinstance(
        value, (int, float, str)
    ):  # what most fields are; a tree costs ten times as much
        return False
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def _flatten(value: Object) -> tuple[list[Any], Any]:
    names = tuple(type(value).__dataclass_fields__)
    parts = [getattr(value, name) for name in names]
    dynamic = tuple(isinstance(part, (Tensor, Object)) or _has_tensors(part) for part in parts)
    children = [part for part, moves in zip(parts, dynamic, strict=True) if moves]
    fixed = tuple(None if moves else part for part, moves in zip(parts, dynamic, strict=True))
    return children, (type(value), names, dynamic, fixed)


def _unflatten(children: Any, context: Any) -> Any:
    cls, names, dynamic, fixed = context
    remaining = iter(children)
    values = tuple(next(remaining) if moves else part for part, moves in zip(fixed, dynamic, strict=True))
    return rebuild(cls, names, values)
