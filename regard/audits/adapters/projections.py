"""Projections of modules as matrices with heads: what nn.Linear and the transposed layers of GPT-2 hold."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regard.audits.adapters.base import NotCovered

Affine = tuple[Tensor, Tensor | None]
"""w (d, width) and b (width,) of x ↦ wᵀx + b; with heads w (h, d, c) and b (h, c)."""


def affine(module: nn.Module, name: str) -> Affine:
    """A child that is a linear layer, as w (d, width) and b (width,)."""
    child: Any = module.get_submodule(name)
    kind = type(child).__name__
    if not (isinstance(child, nn.Linear) or kind == "Conv1D") or not child.weight.dtype.is_floating_point:
        raise NotCovered(
            f"the projection {name} is a {kind} whose matrix cannot be read; load the model with plain "
            "linear layers"
        )
    weight = child.weight.detach()
    return weight if kind == "Conv1D" else weight.mT, None if child.bias is None else child.bias.detach()


def split(projection: Affine, heads: int) -> Affine:
    """Consecutive columns belong to one head: w (d, heads · c) to (heads, d, c)."""
    weight, bias = projection
    return weight.unflatten(-1, (heads, -1)).movedim(-2, 0), None if bias is None else bias.unflatten(
        -1, (heads, -1)
    )


def parts(projection: Affine, count: int) -> list[Affine]:
    """A fused projection as `count` projections of equal width, one after the other; with heads,
    within each head.
    """
    weight, bias = projection
    biases: Any = [None] * count if bias is None else bias.chunk(count, -1)
    return list(zip(weight.chunk(count, -1), biases, strict=True))


def output_projection(projection: Affine, heads: int) -> Affine:
    """An output projection: w (heads · e, d) to (heads, e, d), with its bias (d,)."""
    weight, bias = projection
    return weight.unflatten(0, (heads, -1)), bias


def name_inside(path: str, name: str) -> str:
    """The name of something inside the module at a path."""
    return f"{path}.{name}" if path else name


def parameter_names(path: str, module: nn.Module, *children: str) -> tuple[str, ...]:
    """The full names of the parameters of some children."""
    return tuple(
        name_inside(path, f"{child}.{name}")
        for child in children
        for name, _ in module.get_submodule(child).named_parameters()
    )
