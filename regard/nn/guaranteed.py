"""Networks with a promise: layers one after the other, whose constants multiply."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.maps import Compose, Map
from regard.nn.attention import check_count
from regard.nn.promises import Promise, Promised
from regard.norms import Frobenius


class Fixed(Promised):
    """A map that learns nothing as a layer: GroupSort(), IntoBall(1.0), Center(), Pool(), Flatten(), ...

    Examples:
        >>> from regard.nonexpansive import GroupSort
        >>> regard.nn.Fixed(GroupSort())(torch.tensor([[1.0, 2.0]])).tolist()
        [[2.0, 1.0]]
    """

    def __init__(self, map: Map, promise: Promise = Promise(Frobenius(), 1.0)) -> None:
        super().__init__()
        if not isinstance(map, Map):
            raise ArgumentError("map", f"is a {type(map).__name__}", "give a map of regard.nonexpansive")
        self.map, self.promise = map, promise
        self._made()

    def run(self, x: Tensor) -> Tensor:
        """The map, in numbers in which neither its own nor those of the tokens are rounded."""
        own = [leaf for leaf in pytree.tree_leaves(self.map) if _real(leaf)]
        if not own:
            return self.map(x)
        kind = reduce(torch.promote_types, (leaf.dtype for leaf in own), x.dtype)
        made: Map = pytree.tree_map(lambda leaf: leaf.to(x.device, kind) if _real(leaf) else leaf, self.map)
        return made(x.to(kind)).to(x.dtype)

    def declare(self) -> Map:
        """The map."""
        return self.map

    def extra_repr(self) -> str:
        return repr(self.map)


class Guaranteed(Promised):
    """Layers one after the other, with a promise for all of them: f_k(… f_1(x)).

    stack: layers with a promise, or maps that learn nothing. The constant of the composition is proved when
    it is made, and again whenever `certificate` is called; it is never rescaled. Where it is above the
    promise, the error has the ladder of parts.

    Examples:
        >>> from regard.nn import Guaranteed, Orthogonal
        >>> from regard.nonexpansive import GroupSort
        >>> network = Guaranteed([Orthogonal(2, 8), GroupSort(), Orthogonal(8, 2)])
        >>> network.certificate().value <= 1  # whatever the weights are
        True
    """

    def __init__(
        self,
        stack: Sequence[Promised | Map],
        promise: Promise = Promise(Frobenius(), 1.0),
        *,
        tokens: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(promise, Promise):
            raise ArgumentError("promise", f"is {promise!r}", "give Promise(norm, value)")
        if tokens is not None:
            check_count("tokens", tokens)
        self.promise, self.tokens = promise, tokens
        self.stack = nn.ModuleList(layer_of(layer) for layer in _checked(stack))
        self._made()

    def run(self, x: Tensor) -> Tensor:
        """Layer after layer."""
        for layer in self.stack:
            x = layer(x)
        return x

    def declare(self) -> Compose:
        """The composition of all layers."""
        return Compose(tuple(layer.declare() for layer in self.stack))  # type: ignore[operator]


def _real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype.is_floating_point


def layer_of(layer: Promised | Map) -> Promised:
    """A layer as it is, a map as a layer."""
    if isinstance(layer, Promised):
        return layer
    if isinstance(layer, Map):
        return Fixed(layer)
    name = type(layer).__name__
    raise ArgumentError(
        "stack", f"has a {name}", "give layers with a promise, or maps of regard.nonexpansive"
    )


def _checked(stack: Sequence[Promised | Map]) -> Sequence[Promised | Map]:
    if not isinstance(stack, (list, tuple, nn.ModuleList, nn.Sequential)) or not len(stack):
        found = f"is an empty {type(stack).__name__}" if not stack else f"is a {type(stack).__name__}"
        raise ArgumentError("stack", found, "give a list of one or more layers")
    return list(stack)
