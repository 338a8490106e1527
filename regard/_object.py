"""Object: a frozen dataclass that is also a pytree of its tensors, so every torch.func transform passes through it."""

from __future__ import annotations

import dataclasses
from abc import ABC
from typing import Any, TypeVar

import torch.utils._pytree as pytree
from torch import Tensor

from regard._check import describe

Self = TypeVar("Self", bound="Object")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Object(ABC):  # noqa: B024 (the base of abstract classes has no method of its own to leave open)
    """Base of all nouns. A subclass is `@dataclass(frozen=True, eq=False, repr=False)` and either abstract or final.

    Tensors (and Objects that hold them) are the children of the pytree; everything else is structure. Rebuilding from
    leaves skips the checks of construction, because leaves may be tangents, batches or placeholders.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        pytree.register_pytree_node(cls, _flatten, _unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")

    def replace(self: Self, **changes: Any) -> Self:
        """The same value with some fields changed; the checks of construction run again."""
        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        shown = [f"{f.name}={describe(getattr(self, f.name))}" for f in _fields(type(self)) if not _is_default(f, getattr(self, f.name))]
        return f"{type(self).__name__}({', '.join(shown)})"


def rebuild(cls: type[Self], names: tuple[str, ...], values: tuple[Any, ...]) -> Self:
    """An Object from its field values, without the checks of construction."""
    made = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default is dataclasses.MISSING or isinstance(value, Tensor):
        return False
    if isinstance(value, Object):
        return type(value) is type(field.default) and repr(value) == repr(field.default)
    return bool(value == field.default)


def _has_tensors(value: Any) -> bool:
    if value is None or isinstance(value, (int, float, str)):  # what most fields are; a tree costs ten times as much
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
