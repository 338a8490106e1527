"""A declaration whose tensors belong to a module: what is an nn.Parameter is learned,
what is a plain tensor is kept as a buffer.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from regard._object import Object
from regard.attention import Attention
from regard.errors import ArgumentError
from regard.lookups import Identity
from regard.moments import Mean


class Mechanism(nn.Module):
    """How queries and keys that are projected already meet: potential, normalizer and support.

    Its tensors are copies.

    Examples:
        >>> learned = regard.Gaussian(bandwidth=torch.nn.Parameter(torch.tensor(2.0)))
        >>> mechanism = regard.nn.Mechanism(regard.Attention(learned))
        >>> len(list(mechanism.parameters())), type(mechanism.value().potential).__name__
        (1, 'Gaussian')
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        check_mechanism(attention)
        leaves = pytree.tree_leaves(attention)
        self._form: Attention = pytree.tree_map(
            lambda leaf: torch.empty(0) if isinstance(leaf, Tensor) else leaf, attention
        )
        first: dict[int, str] = {}  # a tensor in two places stays one tensor, under its first name
        self._names = [
            first.setdefault(id(leaf), name) for name, leaf in zip(leaf_names(attention), leaves, strict=True)
        ]
        self._fixed = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for name, leaf in zip(self._names, leaves, strict=True):
            if isinstance(leaf, nn.Parameter):
                self.register_parameter(name, nn.Parameter(leaf.detach().clone(), leaf.requires_grad))
            elif isinstance(leaf, Tensor):
                self.register_buffer(name, leaf.detach().clone())
        self._plain = attention if not any(isinstance(leaf, Tensor) for leaf in leaves) else None
        self._made: tuple[list[Any], Attention] | None = None

    def value(self) -> Attention:
        """The declaration with the tensors as they are now."""
        if self._plain is not None:
            return self._plain
        leaves = [self._leaf(number) for number in range(len(self._names))]
        recorded = torch.compiler.is_compiling()
        made = None if recorded else self._made
        if made is not None and all(map(operator.is_, made[0], leaves)):
            return made[1]
        structure = pytree.tree_structure(self._form)  # not kept: torch does not copy structures in silence
        found: Attention = pytree.tree_unflatten(leaves, structure)
        if not recorded and not self._parameters:
            self._made = leaves, found
        return found

    def _leaf(self, number: int) -> Any:
        return getattr(self, self._names[number], self._fixed[number])

    def extra_repr(self) -> str:
        return repr(self.value())


def check_mechanism(attention: Any) -> None:
    """A mechanism is an Attention that leaves values and their average to the module."""
    if not isinstance(attention, Attention):
        raise ArgumentError(
            "mechanism", f"is {attention!r}", "give an Attention, e.g. Attention(Gaussian(bandwidth=2.0))"
        )
    if not isinstance(attention.lookup, Identity) or not isinstance(attention.moment, Mean):
        raise ArgumentError(
            "mechanism",
            "has a lookup or a moment of its own",
            "leave both out: the module projects and averages",
        )


def leaf_names(value: Any, prefix: str = "") -> Iterator[str]:
    """Names of the leaves of a declaration, in the order of its pytree: potential_bandwidth,
    potential_terms_1_table, ...
    """
    if isinstance(value, Object):
        parts = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        inner = [(name, part) for name, part in parts if isinstance(part, Object) or _holds_tensors(part)]
    elif isinstance(value, tuple):
        inner = [(str(number), part) for number, part in enumerate(value)]
    else:
        yield prefix
        return
    for name, part in inner:
        yield from leaf_names(part, f"{prefix}_{name}" if prefix else name)


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
