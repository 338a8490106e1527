"""Objects as plain values, and back: for files that people and programs read."""

from __future__ import annotations

import dataclasses
import json
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from regard._object import Object, rebuild
from regard.errors import ArgumentError

DEEPEST = 100
"""Levels of JSON that are read; what regard and transformers write has fewer than twenty."""


def parsed(content: str | bytes) -> Any:
    """Return the values of JSON; a ValueError says why there are none, also where it is nested so deeply that
    no function could walk through it.
    """
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level, depth = [found], 0
    while level := [part for value in level for part in _inside(value)]:
        depth += 1
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
    return found


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def write_object(value: Any) -> Any:
    """An Object as {"type": its name, field: value, ...}; tensors as lists, infinities as strings."""
    if isinstance(value, Object):
        fields = {field.name: write_object(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, Tensor):
        numbers = {"dtype": str(value.dtype).removeprefix("torch."), "values": _finite(value.tolist())}
        return (
            {"type": "Parameter", "learned": value.requires_grad, **numbers}
            if isinstance(value, Parameter)
            else {"type": "Tensor", **numbers}
        )
    if isinstance(value, tuple):
        return {"type": "tuple", "items": [write_object(part) for part in value]}
    if isinstance(value, float) and value in (float("inf"), -float("inf")):
        return {"type": "float", "value": str(value)}
    return value


def _finite(values: Any) -> Any:
    """JSON has no infinity: it is written as text."""
    if isinstance(values, list):
        return [_finite(value) for value in values]
    return values if not isinstance(values, float) or math.isfinite(values) else str(values)


def _numbers(values: Any) -> Any:
    if isinstance(values, list):
        return [_numbers(value) for value in values]
    return float(values) if isinstance(values, str) else values


def read_object(written: Any, rooms: tuple[ModuleType, ...]) -> Any:
    """What `write_object` wrote; types are looked up by name in the given modules, and nowhere else."""
    if not isinstance(written, dict):
        return written
    fields = dict(written)
    name = fields.pop("type", None)
    if name in ("Tensor", "Parameter"):
        tensor = torch.tensor(_numbers(fields["values"]), dtype=getattr(torch, fields["dtype"]))
        return Parameter(tensor, bool(fields["learned"])) if name == "Parameter" else tensor
    if name == "tuple":
        return tuple(read_object(part, rooms) for part in fields["items"])
    if name == "float":
        return float(fields["value"])
    for room in rooms:
        kind = vars(room).get(name)
        if isinstance(kind, type) and issubclass(kind, Object):
            kind(
                **(made := {key: read_object(value, rooms) for key, value in fields.items()})
            )  # checked as if it were new
            return rebuild(kind, tuple(made), tuple(made.values()))  # but nothing is normalized again
    raise ArgumentError("written", f"has type {name!r}", "read what this version of regard wrote")


def plain(value: Any) -> Any:
    """Values for JSON, which has no NaN and no infinity: null is "does not apply", "inf" is an answer."""
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def number(value: Any) -> float:
    """A number that was written by `plain`."""
    return math.nan if value is None else float(value)
