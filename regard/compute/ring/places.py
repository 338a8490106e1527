"""Which tokens of a sequence a rank of a ring holds: some in a row, or two pieces that balance the past."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._object import Object
from regard.errors import ArgumentError


class Shards(Object):
    """How the tokens of a sequence are spread over the ranks. Abstract.

    Examples:
        >>> from regard.engines import Consecutive, Shards, ZigZag
        >>> isinstance(ZigZag(), Shards)
        True
        >>> [shards.marks(0, 2, 4).tolist() for shards in (Consecutive(), ZigZag())]  # rank 0 of 2
        [[0, 1], [0, 3]]
    """

    @abstractmethod
    def marks(self, rank: int, world: int, count: int) -> Tensor:
        """The places of the tokens of a rank in a sequence of `count` tokens."""

    def given(self, rank: int, lengths: list[int]) -> Tensor:
        """The same, where ranks hold shards of these lengths."""
        world, count = len(lengths), sum(lengths)
        wanted = [len(self.marks(one, world, count)) for one in range(world)]
        if lengths != wanted:
            raise ArgumentError(
                "tokens",
                f"number {lengths} over the ranks",
                f"{self!r} cuts {count} tokens into shards of {wanted}: take them by Ring.shard",
            )
        return self.marks(rank, world, count)


@dataclass(frozen=True, eq=False, repr=False)
class Consecutive(Shards):
    """Rank 0 holds the first tokens, rank 1 the next ones; shards may differ in length.

    Examples:
        >>> regard.engines.Consecutive().marks(1, 2, 6).tolist()  # rank 1 of 2 holds these of six tokens
        [3, 4, 5]
    """

    def marks(self, rank: int, world: int, count: int) -> Tensor:
        return torch.arange(count).tensor_split(world)[rank]

    def given(self, rank: int, lengths: list[int]) -> Tensor:
        return torch.arange(sum(lengths[:rank]), sum(lengths[: rank + 1]))


@dataclass(frozen=True, eq=False, repr=False)
class ZigZag(Shards):
    """The sequence in 2 w pieces, of which rank r holds piece r and piece 2w - 1 - r.

    Under a causal support all ranks then have the same work.

    Examples:
        >>> [regard.engines.ZigZag().marks(rank, 2, 8).tolist() for rank in (0, 1)]
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """

    def marks(self, rank: int, world: int, count: int) -> Tensor:
        pieces = torch.arange(count).tensor_split(2 * world)
        return torch.cat([pieces[rank], pieces[2 * world - 1 - rank]])
