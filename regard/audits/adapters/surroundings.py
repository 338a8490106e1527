"""Where a module stands: its ancestors, and the branches of the block around it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from regard.audits.adapters.base import Block, is_published
from regard.audits.adapters.norms import is_norm
from regard.audits.adapters.projections import name_inside


def ancestor(path: str, levels: int) -> str | None:
    """The path some levels up; None above the model."""
    names = path.split(".") if path else []
    return ".".join(names[: len(names) - levels]) if len(names) >= levels else None


def ancestors(path: str) -> Iterator[str]:
    """The paths of all that contains a module, the nearest first, the model last."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def elements(model: nn.Module, stack: str) -> list[str]:
    """The modules of a list or a sequence; none of what is no list."""
    holder = model.get_submodule(stack)
    listed = isinstance(holder, (nn.ModuleList, nn.Sequential))
    return [f"{stack}.{name}".lstrip(".") for name, _ in holder.named_children()] if listed else []


def exists(model: nn.Module, path: str) -> bool:
    """Whether there is a module at a path."""
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def block_at(
    model: nn.Module, path: str | None, attention: tuple[str, ...], mlp: tuple[str, ...], final: str | None
) -> Block | None:
    """The block at a path with branches named from there;
    the final norm is named from what holds the list of blocks.
    """
    if not path:
        return None
    branches = [tuple(name_inside(path, name) for name in branch) for branch in (attention, mlp)]
    if not all(exists(model, inner) for branch in branches for inner in branch):
        return None
    stack = ancestor(path, 2)
    norm = None if final is None or stack is None else name_inside(stack, final)
    return Block(path, branches[0], branches[1], norm if norm is not None and exists(model, norm) else None)


def norm_before(model: nn.Module, path: str, block: str | None, ending: str, embedding: str) -> str | None:
    """The norm whose output enters the block around a module: the one that ends the block before it, or the
    one that ends the embeddings.

    ending is named from a block, embedding from what holds the embeddings and the stack of blocks; None where
    there is no such norm.
    """
    blocks, number = (ancestor(block, 1), block.rpartition(".")[2]) if block else (None, "")
    levels = 2 if number == "0" else 1
    holder = ancestor(blocks, levels) if blocks else None
    if blocks is None or holder is None or not number.isdigit() or not is_published(model, holder, path):
        return None
    norm = name_inside(holder, embedding) if number == "0" else f"{blocks}.{int(number) - 1}.{ending}"
    known = exists(model, norm) and is_published(model, holder, norm)
    return norm if known and is_norm(model.get_submodule(norm)) else None


def may_turn(model: nn.Module, path: str) -> bool:
    """Whether rotary positions may turn the queries and keys of a module:
    something above it holds their frequencies.
    """
    children = (child for above in ancestors(path) for child in model.get_submodule(above).children())
    return any(
        name.endswith("inv_freq") for child in children for name, _ in child.named_buffers(recurse=False)
    )
