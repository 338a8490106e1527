"""Calls of modules: which one of several it is, the tensors that move in it, and a copy that can be used
again.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

_CALL = re.compile(r"(.*) \(call ([0-9]+)\)")


def called(path: str, turn: int) -> str:
    """The name of a call of the module at a path: the path itself for the first."""
    return path if turn == 0 else f"{path} (call {turn + 1})"


def path_and_turn(name: str) -> tuple[str, int]:
    """The module and the number of the call that a name means."""
    found = _CALL.fullmatch(name)
    return (name, 0) if found is None else (found[1], int(found[2]) - 1)


def moving_tensors(call: Any) -> Iterator[Tensor]:
    """The tensors of real numbers among the arguments of a call, in order, also inside tuples and
    dictionaries.
    """
    for leaf in pytree.tree_leaves(call):
        if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point:
            yield leaf


def fresh(value: Any) -> Any:
    """Arguments that can be used once more: a cache of keys is copied, since a call changes it."""
    if hasattr(value, "get_seq_length"):
        return copy.deepcopy(value)
    if isinstance(value, dict):
        return {name: fresh(part) for name, part in value.items()}
    return tuple(fresh(part) for part in value) if type(value) is tuple else value
