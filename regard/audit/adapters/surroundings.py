"""Where a module stands: its ancestors, and the branches of the block around it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from regard.audit.adapters.base import Block
from regard.audit.adapters.projections import named


def ancestor(path: str, levels: int) -> str | None:
    """The path some levels up; None above the model."""
    names = path.split(".") if path else []
    return ".".join(names[: len(names) - levels]) if len(names) >= levels else None


def ancestors(path: str) -> Iterator[str]:
    """The paths of all that contains a module, the nearest first, the model last."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def exists(model: nn.Module, path: str) -> bool:
    """Whether there is a module at a path."""
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def block_at(model: nn.Module, path: str | None, attention: tuple[str, ...], mlp: tuple[str, ...], final: str | None) -> Block | None:
    """The block at a path with branches named from there; the final norm is named from what holds the list of blocks."""
    if not path:
        return None
    branches = [tuple(named(path, name) for name in branch) for branch in (attention, mlp)]
    if not all(exists(model, inner) for branch in branches for inner in branch):
        return None
    stack = ancestor(path, 2)
    norm = None if final is None or stack is None else named(stack, final)
    return Block(path, branches[0], branches[1], norm if norm is not None and exists(model, norm) else None)
