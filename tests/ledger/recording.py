"""Recording: one number for all that a function of a proof returned."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.mutate.declared import read
from regard._enclosed import Matrix, Numbers, Vectors
from regard._upper import Directed
from regard.certificate import Certificate
from regard.proofs.near import facts

ROOT = Path(__file__).resolve().parents[2]
PROOFS = read(ROOT).proofs
DEPTH = 4
"""How far parts of parts of values are looked at."""
NO_NUMBER = 1000.0
"""Stands for infinities."""


class Recorder:
    """While it is entered, adds up the sizes of what functions of proofs return.

    A size is asinh |x|, which is |x| of small numbers and log 2|x| of large ones, so that a sum feels each of
    them. With `lines` it also notes which lines run.
    """

    def __init__(self, lines: bool = False) -> None:
        self.sums: dict[str, float] = {}
        self.calls = 0
        self.lines: set[tuple[str, int]] | None = set() if lines else None
        self._names: dict[CodeType, str | None] = {}

    def __enter__(self) -> Recorder:
        forget()
        if self.lines is not None:
            sys.settrace(self._entered)
        sys.setprofile(self._heard)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        if self.lines is not None:
            sys.settrace(None)

    def _heard(self, frame: FrameType, event: str, value: Any) -> None:
        name = self._name(frame.f_code) if event == "return" else None
        if name is not None:
            self.calls += 1
            self.sums[name] = self.sums.get(name, 0.0) + size(value)

    def _entered(self, frame: FrameType, event: str, value: Any) -> Any:
        return None if self._name(frame.f_code) is None else self._passed

    def _passed(self, frame: FrameType, event: str, value: Any) -> Any:
        name = self._name(frame.f_code)
        if event == "line" and name is not None and self.lines is not None:
            self.lines.add((name, frame.f_lineno))
        return self._passed

    def _name(self, code: CodeType) -> str | None:
        if code not in self._names:
            self._names[code] = _name(code)
        return self._names[code]


def _name(code: CodeType) -> str | None:
    """The file and the function; None of what is no proof."""
    root, path = f"{ROOT}/", code.co_filename
    inside = code.co_name.startswith("<")  # pythons differ in which of these are functions
    if inside or not path.startswith(root) or path[len(root) :] not in PROOFS:
        return None
    return f"{path[len(root) :]}:{code.co_name}"


def size(value: Any) -> float:
    """1, so that calls count, and the sizes of all numbers of a value."""
    return 1.0 + sum(_sizes(value, DEPTH))


def _sizes(value: Any, depth: int) -> Iterator[float]:
    if isinstance(value, torch.Tensor):
        yield _of_tensor(value)
    elif isinstance(value, (bool, int, float)):
        yield _of_number(float(value))
    elif isinstance(value, Directed):
        yield _of_tensor(value.value) + math.log1p(value.roundings)
    elif isinstance(value, Certificate):
        yield _of_number(value.value)
    elif depth:
        for part in _parts(value):
            yield from _sizes(part, depth - 1)


def _parts(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (Numbers, Vectors, Matrix)):
        return (value.center, value.error)
    if dataclasses.is_dataclass(value) and type(value).__module__.startswith("regard.proofs"):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return ()


def _of_number(x: float) -> float:
    return math.asinh(abs(x)) if math.isfinite(x) else NO_NUMBER


def _of_tensor(value: torch.Tensor) -> float:
    """What a transform of torch holds is no number yet; whole numbers are names and places: they count."""
    if torch._C._functorch.is_functorch_wrapped_tensor(value) or value.is_meta:
        return 0.0
    if not value.dtype.is_floating_point and value.dtype != torch.bool:
        return math.log1p(value.numel())
    with torch.no_grad(), _disable_current_modes():
        sizes = value.detach().double().abs().asinh()
        return float(torch.where(torch.isfinite(sizes), sizes, NO_NUMBER).sum())


def forget() -> None:
    """What was kept of earlier tests: functions that are not called again return nothing."""
    facts.forget_facts()
    for name, module in list(sys.modules.items()):
        if name.startswith("regard."):
            for kept in list(vars(module).values()):
                if hasattr(kept, "cache_clear"):
                    kept.cache_clear()
