"""Arguments are checked where objects are made; every message names the argument, what was found,
and the remedy.
"""

from __future__ import annotations

import math
from operator import index
from typing import SupportsIndex

import torch
from torch import Tensor

from regard._kinds import refuse_unusual
from regard._transforms import is_recorded
from regard._types import Scalar
from regard.errors import ArgumentError


def holds(condition: Tensor) -> bool | None:
    """Whether a tensor condition is true; None where values cannot be read (a recorded program, vmap)."""
    if is_recorded(condition):
        return None
    try:
        return bool(condition)
    except RuntimeError:  # a batched or fake tensor has no single value
        return None


def describe(value: object) -> str:
    """A short, shape-first description of a value for error messages and reprs."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        if value.ndim == 0 and holds(torch.isfinite(value)):
            return f"{kind}({value.item():.4g})"
        return f"{kind}{list(value.shape)}"
    return f"{value:.7g}" if isinstance(value, float) else repr(value)


def floating(name: str, value: object) -> Tensor:
    """`value` must be a floating-point tensor."""
    if not isinstance(value, Tensor):
        raise ArgumentError(name, f"is a {type(value).__name__}", "give a torch.Tensor")
    refuse_unusual(name, value)
    if not value.dtype.is_floating_point:
        raise ArgumentError(
            name, f"has dtype {value.dtype}", f"convert it to a floating dtype, e.g. {name}.float()"
        )
    return value


def finite(name: str, value: Tensor) -> None:
    """Every entry must be finite: so it is where the sum is, which is ten times as fast to know."""
    if holds(torch.isfinite(value.detach().sum())) is False and not holds(torch.isfinite(value).all()):
        bad = int((~torch.isfinite(value)).sum())
        raise ArgumentError(
            name,
            f"has {bad} non-finite entries out of {value.numel()}",
            "remove NaN and infinity before declaring",
        )


def parameter(name: str, value: Tensor | None, rank: int, shape: str) -> None:
    """A tensor parameter of a declaration: floating, finite, of at least `rank` dimensions."""
    if value is None:
        return
    floating(name, value)
    if value.ndim < rank:
        raise ArgumentError(name, f"has shape {list(value.shape)}", f"give a tensor of shape {shape}")
    finite(name, value)


def projections(
    w_q: Tensor | None, w_k: Tensor | None, b_q: Tensor | None, b_k: Tensor | None, named: str = "scale"
) -> None:
    """The projections of queries and keys: w (..., d, c), b (..., c), with one common c.

    named: the number that comes after them.
    """
    for name, weight, bias in (("q", w_q, b_q), ("k", w_k, b_k)):
        if isinstance(weight, (bool, int, float)) or (isinstance(weight, Tensor) and weight.ndim == 0):
            found = f"is the number {describe(weight)}"
            remedy = f"the projections w_q and w_k come first: name the number, e.g. {named}=..."
            raise ArgumentError(f"w_{name}", found, remedy)
        parameter(f"w_{name}", weight, 2, "(..., d, c)")
        parameter(f"b_{name}", bias, 1, "(..., c)")
        if weight is not None and bias is not None and bias.shape[-1] not in (1, weight.shape[-1]):
            raise ArgumentError(
                f"b_{name}",
                f"has width {bias.shape[-1]}",
                f"w_{name} projects to {weight.shape[-1]}; give a bias of that width",
            )
    if w_q is not None and w_k is not None:
        if w_q.shape[-1] != w_k.shape[-1]:
            raise ArgumentError(
                "w_k",
                f"projects to {w_k.shape[-1]} and w_q to {w_q.shape[-1]}",
                "queries and keys are compared in one space: use one width",
            )
        same_device("w_k", w_k, "w_q", w_q)


def positive(name: str, value: Scalar) -> None:
    """A scalar parameter that must be positive and finite."""
    if isinstance(value, Tensor):
        floating(name, value)
        if holds(((value > 0) & torch.isfinite(value)).all()) is False:
            raise ArgumentError(name, "has entries that are not positive and finite", "give positive numbers")
    elif not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        raise ArgumentError(name, f"is {value}", "give a positive finite number")


def squared(name: str, value: Scalar) -> None:
    """A positive scalar parameter whose square float64 holds."""
    positive(name, value)
    if not isinstance(value, Tensor) and not 1e-150 <= value <= 1e150:
        found = f"is {value:g}, and float64 does not hold its square"
        raise ArgumentError(name, found, "scale the points, so that it is between 1e-150 and 1e150")


def number(name: str, value: Scalar | None) -> None:
    """A scalar parameter that must be finite."""
    if value is None:
        return
    if isinstance(value, Tensor):
        floating(name, value)
        finite(name, value)
    elif not (isinstance(value, (int, float)) and math.isfinite(value)):
        raise ArgumentError(name, f"is {value}", "give a finite number")


def same_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Two tensors must live on one device."""
    if value.device != other.device:
        raise ArgumentError(
            name,
            f"is on {value.device} and {other_name} on {other.device}",
            f"move one of them: {name}.to({str(other.device)!r})",
        )


def broadcast(names: str, *shapes: tuple[int, ...]) -> torch.Size:
    """The common batch shape, or an error that names the arguments."""
    longest: tuple[int, ...] = ()
    for shape in shapes:
        longest = shape if len(shape) > len(longest) else longest
    if all(len(shape) == 0 or shape == longest for shape in shapes):  # nearly always, and cheaper
        return torch.Size(longest)
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        found = " and ".join(str(list(shape)) for shape in shapes)
        raise ArgumentError(
            names,
            f"have batch shapes {found}",
            "batch dimensions must be equal or 1 (heads may also be grouped)",
        ) from None


def between(name: str, value: float, low: float, high: float) -> None:
    """A number strictly between two others."""
    if not (isinstance(value, (int, float)) and low < value < high):
        raise ArgumentError(name, f"is {value}", f"give a number between {low:g} and {high:g}")


def whole_number(name: str, value: object, remedy: str) -> int:
    """An integer of Python, numpy or torch, and no truth value."""
    try:
        if isinstance(value, bool) or not isinstance(value, SupportsIndex):
            raise TypeError
        return index(value)
    except TypeError:
        raise ArgumentError(name, f"is {value!r}", remedy) from None


def decomposable(matrix: Tensor) -> None:
    """The entries of a derivative must be finite, and have the digits that decompositions need."""
    if matrix.dtype.itemsize < 4:
        remedy = "convert the point and the map: linearize(map.float(), x.float())"
        raise ArgumentError("x", f"has dtype {matrix.dtype}, which has no singular values in PyTorch", remedy)
    if holds(torch.isfinite(matrix).all()) is False:
        remedy = "give points and parameters that are finite and not so large, or use float64"
        raise ArgumentError("x", "gives a derivative with NaN or infinity", remedy)
