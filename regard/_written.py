"""Objects as plain values, and back: for files that people and programs read."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from regard._object import Object
from regard.errors import ArgumentError


def write_object(value: Any) -> Any:
    """An Object as {"type": its name, field: value, ...}; tensors as lists, infinities as strings."""
    if isinstance(value, Object):
        fields = {field.name: write_object(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, Tensor):
        return {"type": "Tensor", "dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
    if isinstance(value, float) and value in (float("inf"), -float("inf")):
        return {"type": "float", "value": str(value)}
    return value


def read_object(written: Any, rooms: tuple[ModuleType, ...]) -> Any:
    """What `write_object` wrote; types are looked up by name in the given modules, and nowhere else."""
    if not isinstance(written, dict):
        return written
    fields = dict(written)
    name = fields.pop("type", None)
    if name == "Tensor":
        return torch.tensor(fields["values"], dtype=getattr(torch, fields["dtype"]))
    if name == "float":
        return float(fields["value"])
    for room in rooms:
        kind = vars(room).get(name)
        if isinstance(kind, type) and issubclass(kind, Object):
            return kind(**{key: read_object(value, rooms) for key, value in fields.items()})
    raise ArgumentError("written", f"has type {name!r}", "read a certificate that regard wrote")
