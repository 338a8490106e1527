"""Arguments of the wrong kind, found by the annotations of what was called: one rule for nouns and verbs."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from regard.errors import ArgumentError, RegardError

F = TypeVar("F", bound=Callable[..., Any])
Accepts = Callable[[Any], bool]


class Kind(NamedTuple):
    """A kind in words, whether a value is of it, and whether every value of a type is."""

    words: str
    accepts: Accepts
    surely: Callable[[type], bool] = lambda cls: False


Kinds = dict[str, Kind]
"""The kind of each argument."""

OTHER_NAMES = {
    "sigma": "bandwidth",
    "length_scale": "bandwidth",
    "lengthscale": "bandwidth",
    "gamma": "bandwidth",
    "mask": "support",
    "attn_mask": "support",
    "temp": "temperature",
    "tau": "temperature",
    "beta": "scale",
    "n": "tokens",
    "eps": "radius",
    "potential": "mechanism",
    "normalizer": "mechanism",
    "epsilon": "radius",
}
"""What other libraries call an argument."""


def names_wrong_kinds(function: F) -> F:
    """Turn an internal error of a function into an ArgumentError where an argument is of the wrong kind."""

    @functools.wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except RegardError:
            raise
        except Exception as error:
            _explain(function, arguments, options, error)
            raise

    return typing.cast(F, wrapped)


def refuse_unknown(owner: str, wanted: list[str], options: dict[str, Any]) -> None:
    """An error for the first keyword that is no argument."""
    for name in options:
        if name not in wanted:
            close = difflib.get_close_matches(name, wanted, 1)
            other = OTHER_NAMES.get(name)
            likely = other if other in wanted else close[0] if close else None
            every = f"its arguments are {', '.join(wanted)}" if wanted else "it has none"
            remedy = every if likely is None else f"write {likely}=...; {every}"
            raise ArgumentError(name, f"is no argument of {owner}", remedy)


def refuse_other_arguments(cls: type, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """An error for a keyword that is no field of a dataclass, too many values, or a missing field."""
    wanted, needed = _fields_of(cls)
    if options:
        refuse_unknown(cls.__name__, wanted, options)
    if len(arguments) > len(wanted):
        found = f"has {len(arguments)} values"
        raise ArgumentError(cls.__name__, found, f"give at most {len(wanted)}: {', '.join(wanted)}")
    for name in needed[len(arguments) :]:
        if name not in options:
            kind = kinds_of_fields(cls).get(name)
            remedy = f"write {cls.__name__}(..., {name}=...)"
            raise ArgumentError(name, "is missing", remedy if kind is None else f"{remedy}, {kind.words}")


@functools.cache
def _fields_of(cls: type) -> tuple[list[str], list[str]]:
    """The fields that can be given, and those at the beginning that must be."""
    _, *every = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
    return [one.name for one in every], [one.name for one in every if one.default is one.empty]


def refuse_wrong_kinds(value: Any, kinds: Kinds, cause: Exception | None = None) -> None:
    """An error for the first field of a noun whose value is not of its kind."""
    for name, kind in kinds.items():
        found = getattr(value, name)
        if not kind.accepts(found):
            raise _wrong(name, found, kind.words) from cause


@functools.cache
def kinds_by_value(cls: type, names: tuple[str, ...], types: tuple[type, ...]) -> Kinds:
    """The fields of a dataclass whose kinds their types do not decide."""
    found = dict(zip(names, types, strict=True))
    return {name: kind for name, kind in kinds_of_fields(cls).items() if not kind.surely(found[name])}


@functools.cache
def kinds_of_fields(cls: type) -> Kinds:
    """The kinds of the fields of a dataclass, where its annotations say them."""
    found, names = {}, {field.name for field in dataclasses.fields(cls)}
    for base in reversed(cls.__mro__):
        space = vars(sys.modules.get(base.__module__, typing))
        for name, annotation in vars(base).get("__annotations__", {}).items():
            kind = _kind(annotation, space)
            if kind is not None and name in names:
                found[name] = kind
    return found


def _explain(function: Any, arguments: Any, options: Any, error: Exception) -> None:
    """Raise an ArgumentError for the first argument that is unknown, of another kind, or unusual."""
    signature = inspect.signature(function)
    free = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    if not free:
        refuse_unknown(_name(function), [name for name in signature.parameters if name != "self"], options)
    try:
        given = signature.bind_partial(*arguments, **options).arguments
    except TypeError:
        named = [one.name for one in signature.parameters.values() if one.kind is one.KEYWORD_ONLY]
        if named and len(arguments) > len(signature.parameters) - len(named) - free:
            found = f"is given by position to {_name(function)}"
            raise ArgumentError(named[0], found, f"write {named[0]}=...") from error
        return
    space = vars(sys.modules[function.__module__])
    for name, value in given.items():
        annotation = signature.parameters[name].annotation
        kind = _MAP if annotation == "Any" and name in _MAPS else _kind(annotation, space)
        if kind is not None and not kind.accepts(value):
            raise _wrong(name, value, kind.words) from error
    for name, value in given.items():
        for tensor in _tensors(value):
            refuse_unusual(name, tensor, error)
            if tensor.is_meta:
                found = "is on the device meta, which holds no numbers"
                raise ArgumentError(name, found, "give a tensor with numbers") from error
            if tensor.numel() == 0:
                found = f"is empty, {list(tensor.shape)}"
                raise ArgumentError(name, found, "give at least one token") from error


def _name(function: Any) -> str:
    """The name of a function, of the class for its __init__."""
    *owner, name = function.__qualname__.split(".")
    return owner[-1] if name == "__init__" else str(name)


def refuse_unusual(name: str, tensor: Tensor, cause: Exception | None = None) -> None:
    """An error for a tensor that is nested, sparse, complex or of fewer than 16 bits."""
    if tensor.is_nested:
        found, remedy = (
            "is a nested tensor",
            f"pad it: {name}.to_padded_tensor(0.0) with support=Padding(lengths)",
        )
    elif tensor.layout is not torch.strided:
        found, remedy = f"has the layout {tensor.layout}", f"make it dense: {name}.to_dense()"
    elif tensor.is_complex():
        found, remedy = f"has dtype {tensor.dtype}", f"give real numbers, e.g. torch.view_as_real({name})"
    elif tensor.is_quantized or not _is_real(tensor):
        found, remedy = f"has dtype {tensor.dtype}", f"convert it, e.g. {name}.float()"
    else:
        return
    raise ArgumentError(name, found, remedy) from cause


_COMPUTED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument, and of a noun or a list that holds some."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif hasattr(value, "__dataclass_fields__"):
        for one in vars(value).values():
            yield from _tensors(one)


_MAPS = ("map", "model")
_MAP = Kind(
    "an Attention, a map of regard.maps, or a torch.nn.Module",
    lambda value: callable(value) and not isinstance(value, type),
)


def _wrong(name: str, value: Any, words: str) -> ArgumentError:
    if isinstance(value, type):
        found = f"is the class {value.__name__}"
    elif isinstance(value, Tensor):
        found = (
            f"is a tensor {list(value.shape)} of {value.dtype}"
            if not value.is_nested
            else "is a nested tensor"
        )
    elif isinstance(value, int) and value.bit_length() >= 1024:
        found = f"is a whole number of {value.bit_length()} bits"
    elif value is None or isinstance(value, (bool, int, float, str)):
        found = f"is {value!r}"
    else:
        found = f"is a {type(value).__name__}"
    return ArgumentError(name, found, f"give {words}")


def _kind(annotation: Any, space: dict[str, Any]) -> Kind | None:
    """What an annotation accepts, with words for it; None where it accepts anything, or cannot be read."""
    if annotation is inspect.Parameter.empty:
        return None
    try:
        meant = eval(annotation, space) if isinstance(annotation, str) else annotation
    except Exception:  # a name that only type checkers import
        return None
    return _accepted(meant)


def _accepted(meant: Any) -> Kind | None:
    if meant in _NAMED:
        return _NAMED[meant]
    origin = typing.get_origin(meant)
    if origin in (typing.Union, types.UnionType):
        parts = [_accepted(part) for part in typing.get_args(meant)]
        if any(part is None for part in parts):
            return None
        known = [part for part in parts if part is not None]
        return Kind(
            " or ".join(part.words for part in known),
            lambda value: any(part.accepts(value) for part in known),
            lambda cls: any(part.surely(cls) for part in known),
        )
    meant = origin or meant
    if not isinstance(meant, type) or getattr(meant, "_is_protocol", False):
        return None
    name = meant.__name__
    noun = "a value of" if getattr(meant, "__dataclass_fields__", None) is not None else "a"
    return Kind(f"{noun} {name}", lambda value: isinstance(value, meant), lambda cls: issubclass(cls, meant))


def _is_whole(value: Any) -> bool:
    whole = not (isinstance(value, Tensor) and value.is_floating_point())
    return whole and _is_one(value) and hasattr(type(value), "__index__")


def _is_number(value: Any) -> bool:
    kind = type(value)
    if kind is float:
        return True
    return _is_one(value) and (hasattr(kind, "__float__") or hasattr(kind, "__index__"))


def _is_one(value: Any) -> bool:
    """Whether a value is no truth value, no tensor of several numbers, and no integer beyond floats."""
    if isinstance(value, Tensor):
        return (
            value.layout is torch.strided and not value.is_nested and value.numel() == 1 and _is_real(value)
        )
    if isinstance(value, int):
        return not isinstance(value, bool) and value.bit_length() < 1024
    return True


def _is_real(tensor: Tensor) -> bool:
    return not tensor.is_complex() and (not tensor.is_floating_point() or tensor.dtype in _COMPUTED)


_NAMED: dict[Any, Kind | None] = {
    Any: None,
    type(None): Kind("None", lambda value: value is None, lambda cls: cls is type(None)),
    float: Kind("a number", _is_number, lambda cls: cls is float),
    int: Kind("a whole number", _is_whole),
    bool: Kind("True or False", lambda value: isinstance(value, bool), lambda cls: cls is bool),
    torch.Size: Kind(
        "a tuple of sizes", lambda value: isinstance(value, tuple), lambda cls: issubclass(cls, tuple)
    ),
    Tensor: Kind(
        "a torch.Tensor", lambda value: isinstance(value, Tensor), lambda cls: issubclass(cls, Tensor)
    ),
    Callable: Kind("a function", callable),
}
