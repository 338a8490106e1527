"""What outlines are made of: modules under the names of transformers' classes, and what a config says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from regard.audits import own

ROTATIONS = ("default", "linear", "dynamic", "llama3")
"""Kinds of rotary positions that turn queries and keys and do not scale them."""


class Unsaid(Exception):
    """Raised where a config does not say what an outline needs, or says something that is not known here."""


class Outline(nn.Module):
    """A module that stands for one of transformers: its children and numbers, and no computation."""


class Said:
    """What a config.json says."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number, one or more."""
        found = self._values.get(name)
        found = default if found is None else found
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise Unsaid(name)
        return found

    def real(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        found = self._values.get(name, default)
        if not isinstance(found, (int, float)) or isinstance(found, bool) or not found > 0:
            raise Unsaid(name)
        return float(found)

    def perhaps(self, name: str, default: float) -> float | None:
        """A positive number, or None where the config says so."""
        return None if self._values.get(name, default) is None else self.real(name, default)

    def flag(self, name: str, default: bool) -> bool:
        """Yes or no."""
        found = self._values.get(name, default)
        if not isinstance(found, bool):
            raise Unsaid(name)
        return found

    def refuse(self, *names: str) -> None:
        """None of these is asked for: each would change what a model is made of."""
        for name in names:
            if self._values.get(name):
                raise Unsaid(name)

    def only_turns(self) -> None:
        """Its rotary positions do not scale queries and keys."""
        for name in ("rope_scaling", "rope_parameters"):
            found = self._values.get(name)
            if found and (not isinstance(found, dict) or any(isinstance(v, dict) for v in found.values())):
                raise Unsaid(name)
            if found and found.get("rope_type", found.get("type", "default")) not in ROTATIONS:
                raise Unsaid(name)


Build = Callable[[Said], nn.Module]
_outlines: dict[str, Build] = {}


def register(*types: str) -> Callable[[Callable[[Said, str], nn.Module]], None]:
    """Make the outline of models with these values of model_type known; it is told which one it is."""

    def keep(build: Callable[[Said, str], nn.Module]) -> None:
        for kind in types:
            if kind in _outlines:
                raise ValueError(f"there is an outline for {kind} already")
            _outlines[kind] = lambda said, kind=kind: build(said, kind)  # type: ignore[misc]

    return keep


def outlined() -> tuple[str, ...]:
    """The values of model_type that have an outline."""
    return tuple(sorted(_outlines))


def outline_of(config: dict[str, Any]) -> nn.Module | None:
    """The outline of the model of a config.json; None where it has none."""
    build = _outlines.get(str(config.get("model_type")))
    if build is None or own.is_own(config) or config.get("quantization_config"):
        return None
    try:
        with torch.device("meta"):
            return build(Said(config)).eval()
    except Exception:  # of a field that is not known here, or of a size: transformers says what is wrong
        return None


def part(package: str, kind: str, **children: nn.Module | float | None) -> Outline:
    """A module under the name of a class of transformers; what is no module is a fact about it."""
    where = f"transformers.models.{package}.modeling_{package}"
    made: Outline = type(kind, (Outline,), {"__module__": where})()
    for name, child in children.items():
        setattr(made, name, child)
    return made


def layers(count: int, build: Callable[[int], nn.Module]) -> nn.ModuleList:
    """As many blocks, each told its number."""
    return nn.ModuleList([build(number) for number in range(count)])


def rotary(package: str, prefix: str, width: int) -> Outline:
    """A holder of the frequencies of rotary positions that turn `width` coordinates."""
    made = part(package, f"{prefix}RotaryEmbedding", attention_scaling=1.0)
    made.register_buffer("inv_freq", torch.empty(width // 2), persistent=False)
    return made


def weighted(package: str, kind: str, width: int, **facts: float) -> Outline:
    """A module with one weight for each coordinate."""
    made = part(package, kind, **facts)
    made.weight = nn.Parameter(torch.empty(width))
    return made
