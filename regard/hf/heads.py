"""Heads that share keys, side by side: nothing is repeated."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """How heads lie: (batch, heads, ...) as it comes, or (batch, groups, members,
    ...) where members of a group share their keys.
    """

    groups: int
    members: int

    @staticmethod
    def of(query: Tensor, key: Tensor, divide: bool) -> Heads:
        """The way that fits queries (batch, heads, m, d) and keys (batch, groups, n, d);
        undivided where it cannot or may not be done.
        """
        heads, groups = query.shape[1], key.shape[1]
        return (
            Heads(groups, heads // groups)
            if divide and groups < heads and heads % groups == 0
            else Heads(heads, 1)
        )

    def queries(self, tensor: Tensor) -> Tensor:
        """Tensors (batch, heads, ...)."""
        return tensor if self.members == 1 else tensor.unflatten(1, (self.groups, self.members))

    def keys(self, tensor: Tensor) -> Tensor:
        """Tensors (batch, groups, n, ·), stored so that batch and groups are one dimension:
        then no engine copies them for each head.
        """
        if self.members == 1:
            return tensor
        return (tensor if len(tensor) == 1 else tensor.contiguous()).unsqueeze(2)

    def pairs(self, tensor: Tensor) -> Tensor:
        """Masks and biases (batch, 1 or heads, m, n)."""
        if self.members == 1:
            return tensor
        return (
            tensor.unsqueeze(2) if tensor.shape[1] == 1 else tensor.unflatten(1, (self.groups, self.members))
        )

    def parameters(self, tensor: Tensor) -> Tensor:
        """One number for each head, (heads,)."""
        return tensor if self.members == 1 else tensor.unflatten(0, (self.groups, self.members))

    def joined(self, tensor: Tensor) -> Tensor:
        """Back to (batch, heads, ...)."""
        return tensor if self.members == 1 else tensor.flatten(1, 2)
