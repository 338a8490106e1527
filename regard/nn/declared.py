"""Modules that run a declaration: what they compute and what is said of it come from one value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from regard.attention import Attention
from regard.errors import ArgumentError
from regard.maps import Map, Mapping
from regard.nn.declaration import exact
from regard.nn.mechanism import leaf_names
from regard.parameters import leads
from regard.proofs.certification import declare
from regard.proofs.intact import refuse_altered


class Declaring(nn.Module, ABC):
    """A module that is a map with parameters: `value` makes the map from the parameters as they are, and
    `forward` runs it. Abstract.

    Examples:
        >>> from regard.maps import Affine
        >>> class Scaled(regard.nn.Declaring):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.by = torch.nn.Parameter(torch.tensor(3.0))
        ...     def value(self):
        ...         return Affine(self.by * torch.eye(2))
        >>> Scaled()(torch.ones(1, 2)).tolist()
        [[3.0, 3.0]]
    """

    @abstractmethod
    def value(self) -> Mapping:
        """The map, with tensors that have gradients."""

    def forward(self, x: Tensor) -> Tensor:
        """The map at each sequence (..., n, d)."""
        return on_batch(self.value(), x)

    def declare(self) -> Mapping:
        """The map in float64, cut off from the parameters."""
        made: Mapping = exact(self.value())
        return made


class Declared(Declaring):
    """A given map as a module: what is an nn.Parameter in it is learned, other tensors are kept as buffers.

    Parameters are shared with the declaration, so that an optimizer over these trains the module; other
    tensors are copied.

    Examples:
        >>> from regard.maps import Affine
        >>> layer = regard.nn.Declared(Affine(torch.nn.Parameter(torch.eye(2))))
        >>> len(list(layer.parameters())), layer(torch.ones(1, 2)).tolist()
        (1, [[1.0, 1.0]])
    """

    def __init__(self, map: Mapping) -> None:
        super().__init__()
        if not isinstance(map, (Map, Attention)):
            found = f"is a {type(map).__name__}"
            raise ArgumentError("map", found, "give a map of regard.maps or an Attention")
        leaves = pytree.tree_leaves(map)
        self._form = pytree.tree_map(lambda leaf: torch.empty(0) if isinstance(leaf, Tensor) else leaf, map)
        first: dict[int, str] = {}  # a tensor in two places stays one tensor, under its first name
        names = [first.setdefault(id(leaf), name) for name, leaf in zip(leaf_names(map), leaves, strict=True)]
        self._names = names
        self._fixed = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for name, leaf in zip(names, leaves, strict=True):
            if isinstance(leaf, nn.Parameter):
                self.register_parameter(name, leaf)
            elif isinstance(leaf, Tensor):
                self.register_buffer(name, leaf.detach().clone())

    def value(self) -> Mapping:
        """The map with the tensors as they are now."""
        structure = pytree.tree_structure(self._form)  # not kept: torch does not copy structures in silence
        leaves = [getattr(self, name, fixed) for name, fixed in zip(self._names, self._fixed, strict=True)]
        made: Mapping = pytree.tree_unflatten(leaves, structure)
        return made

    def extra_repr(self) -> str:
        return repr(self.value())


def on_batch(map: Mapping, x: Tensor) -> Tensor:
    """The map at each sequence of a batch (..., n, d); heads of the map are not mistaken for the batch."""
    if x.ndim == 2 or not any(lead for *_, lead in leads(map)):
        made: Tensor = map(x)
        return made
    return torch.vmap(map)(x.flatten(0, -3)).unflatten(0, x.shape[:-2])


@declare.rule(Declaring)
def _declaring(module: Declaring) -> Any:
    refuse_altered(module, Declaring)
    return module.declare()
