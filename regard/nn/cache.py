"""Keys and values of tokens that were seen already, so that generating a token costs one token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard._kinds import names_wrong_kinds
from regard.errors import ArgumentError


class LayerCache:
    """Keys and values (batch, heads, n, c) of one self-attention, in buffers that grow by doubling.

    Examples:
        >>> cache, new = regard.nn.LayerCache(), torch.randn(1, 2, 3, 4)
        >>> keys, values = cache.extend(new, new)
        >>> keys, values = cache.extend(new, new)
        >>> cache.length, keys.shape
        (6, torch.Size([1, 2, 6, 4]))
    """

    def __init__(self) -> None:
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._squares: Tensor | None = None
        self._squared, self._longest = 0, 0.0

    def squares(self) -> tuple[Tensor, float]:
        """|k|² of all keys, (batch, heads, n), and the largest of them; only new ones are computed."""
        assert self._keys is not None
        room = self._keys.shape[-2]
        if self._squares is None or self._squares.shape[-1] < room:
            made = self._keys.new_empty(*self._keys.shape[:-2], room)
            if self._squares is not None:
                made[..., : self._squared] = self._squares[..., : self._squared]
            self._squares = made
        if self._squared < self.length:
            count = self.length - self._squared
            new = self._keys.narrow(-2, self._squared, count).square().sum(-1)
            self._squares.narrow(-1, self._squared, count).copy_(new)
            self._longest, self._squared = max(self._longest, float(new.amax())), self.length
        return self._squares.narrow(-1, 0, self.length), self._longest

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, with these at the end."""
        self._check(keys)
        count = keys.shape[-2]
        if self._keys is None or self._values is None or self.length + count > self._keys.shape[-2]:
            room = max(2 * self.length, self.length + count, 16)
            self._keys, self._values = (
                self._grow(self._keys, keys, room),
                self._grow(self._values, values, room),
            )
        self._keys.narrow(-2, self.length, count).copy_(keys)
        self._values.narrow(-2, self.length, count).copy_(values)
        self.length += count
        return self._keys.narrow(-2, 0, self.length), self._values.narrow(-2, 0, self.length)

    def _grow(self, old: Tensor | None, new: Tensor, room: int) -> Tensor:
        made = new.new_empty(*new.shape[:-2], room, new.shape[-1])
        if old is not None:
            made[..., : self.length, :] = old[..., : self.length, :]
        return made

    def _check(self, keys: Tensor) -> None:
        if keys.requires_grad:
            raise ArgumentError(
                "cache",
                "is used while gradients are recorded",
                "a cache is for inference: call under torch.no_grad()",
            )
        old = self._keys
        if old is not None and not _fits(old, keys):
            found = f"holds {_sizes(old)} and the layer gives {_sizes(keys)}"
            raise ArgumentError(
                "cache", found, "use one cache for one model and one batch; make a new one with model.cache()"
            )


class ContextCache:
    """Keys and values of a context that does not grow: what cross-attention reads at every step.

    Examples:
        >>> cache, context = regard.nn.ContextCache(), torch.randn(1, 5, 4)
        >>> cache.known(context) is None
        True
        >>> cache.keep(context, context, context)
        >>> cache.known(context)[0] is context
        True
    """

    def __init__(self) -> None:
        self.context: Tensor | None = None
        self._projected: tuple[Tensor, Tensor] | None = None

    def known(self, context: Tensor) -> tuple[Tensor, Tensor] | None:
        """Keys and values of this context, where they were kept; another context than before is an error."""
        if self.context is not None and self.context is not context:
            raise ArgumentError(
                "context",
                "is not the one that the cache was filled with",
                "make a new cache for a new context",
            )
        return self._projected

    def keep(self, context: Tensor, keys: Tensor, values: Tensor) -> None:
        """Remember what was projected."""
        if keys.requires_grad:
            raise ArgumentError(
                "cache",
                "is used while gradients are recorded",
                "a cache is for inference: call under torch.no_grad()",
            )
        self.context, self._projected = context, (keys, values)


class Cache:
    """What a stack of layers has seen: one entry for each layer. `length` tokens are in it.

    Examples:
        >>> from regard.nn import Design, LanguageModel
        >>> model, ids = LanguageModel(Design(8, 2), 5, 2).eval(), torch.tensor([[1, 2, 3]])
        >>> cache = model.cache()
        >>> with torch.no_grad():
        ...     steps = [model(ids[:, i : i + 1], cache=cache) for i in range(3)]
        ...     torch.allclose(torch.cat(steps, 1), model(ids), atol=1e-5), cache.length
        (True, 3)
    """

    @names_wrong_kinds
    def __init__(self, layers: int) -> None:
        self.tokens = [LayerCache() for _ in range(layers)]
        self.contexts = [ContextCache() for _ in range(layers)]
        self._seen = 0
        self._walk: tuple[object, Any] | None = None

    def walk(self, owner: object, make: Callable[[Any], Any]) -> Any:
        """What `make` finds for the stack that fills this cache, found once."""
        if self._walk is None or self._walk[0] is not owner:
            self._walk = owner, make(owner)
        return self._walk[1]

    def begin(self) -> None:
        """Check that all layers hold the same tokens: a pass that was interrupted leaves some layers ahead
        of others.
        """
        found = [entry.length for entry in self.tokens]
        if any(length != self._seen for length in found):
            remedy = "make a new one with model.cache() and give all tokens again"
            raise ArgumentError(
                "cache", f"holds {found} tokens in its layers after whole passes over {self._seen}", remedy
            )

    def end(self) -> None:
        """A pass through all layers is over."""
        self._seen = self.length

    @property
    def length(self) -> int:
        """How many tokens were seen."""
        return self.tokens[0].length if self.tokens else 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Cache({len(self)} layers, {self.length} tokens)"


def marks_after(length: int, count: int, device: torch.device) -> Tensor:
    """The positions of `count` tokens that follow `length` others."""
    return torch.arange(length, length + count, device=device)


def _fits(old: Tensor, keys: Tensor) -> bool:
    """Whether keys are of the same batch, heads, width and numbers."""
    same = old.shape[:-2] == keys.shape[:-2] and old.shape[-1] == keys.shape[-1]
    return same and old.dtype == keys.dtype


def _sizes(keys: Tensor) -> str:
    return f"{list(keys.shape[:-2])} of width {keys.shape[-1]} in {keys.dtype}"
