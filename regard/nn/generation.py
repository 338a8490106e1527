"""Generating tokens, one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard._object import Object
from regard.errors import ArgumentError
from regard.supports import Support, Where


@dataclass(frozen=True, eq=False, repr=False)
class Sampling(Object):
    """How the next token is drawn: from softmax(logits / temperature), temperature 0 takes the largest.

    top_k keeps the k most likely tokens; top_p the fewest of them whose probabilities add up to p
    (holtzman2020, 3.1).

    Examples:
        >>> logits, generator = torch.tensor([[0.0, 1.0, 2.0]]), torch.Generator()
        >>> regard.nn.Sampling(temperature=0.0).draw(logits, generator).tolist()
        [2]
        >>> float(regard.nn.Sampling(top_k=2).law(logits)[0, 0])  # the third most likely is never drawn
        0.0
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < float("inf"):
            raise ArgumentError(
                "temperature", f"is {self.temperature!r}", "give zero (greedy) or a positive number"
            )
        if self.top_k is not None and (not _is_whole(self.top_k) or self.top_k < 1):
            raise ArgumentError("top_k", f"is {self.top_k!r}", "keep one token or more, a whole number")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise ArgumentError("top_p", f"is {self.top_p!r}", "give a probability above 0, at most 1")

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """A token (batch,) for logits (batch, vocabulary)."""
        largest, tokens = logits.max(-1)
        _check_largest(largest, logits)
        if self.temperature == 0:
            return tokens
        law = self.law(logits)
        return torch.multinomial(law, 1, generator=generator).squeeze(-1)

    def law(self, logits: Tensor) -> Tensor:
        """The probabilities (batch, vocabulary) tokens are drawn from."""
        if self.temperature == 0:
            return torch.zeros_like(logits, dtype=torch.float64).scatter(
                -1, logits.argmax(-1, keepdim=True), 1.0
            )
        logits = logits.double()
        logits = (
            logits - logits.amax(-1, keepdim=True)
        ) / self.temperature  # no temperature is too small for numbers below zero
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            kept = logits.topk(self.top_k, -1)
            logits = torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values)
        law = logits.softmax(-1)
        if self.top_p is None or self.top_p == 1:
            return law
        ordered, places = law.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # the most likely token has nothing before it and always stays
        ordered = ordered.masked_fill(before >= self.top_p, 0.0)
        return torch.zeros_like(law).scatter(-1, places, ordered / ordered.sum(-1, keepdim=True))


def steps(
    logits: Callable[[Tensor], Tensor],
    ids: Tensor,
    tokens: int,
    *,
    sampling: Sampling,
    seed: int | None,
    end: int | None,
) -> Iterator[Tensor]:
    """New tokens (batch,), one step at a time; a sequence that came to its `end` goes on with it.

    Without a seed each run differs.
    """
    check_request(ids, tokens)
    check_seed(seed)
    return _steps(logits, ids, tokens, sampling, _generator(seed, ids.device), end)


def check_request(ids: Tensor, tokens: int) -> None:
    """Sequences to go on from, and a number of tokens."""
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.shape[-1]:
        found = f"has shape {list(ids.shape)}" if isinstance(ids, Tensor) else f"is a {type(ids).__name__}"
        raise ArgumentError("ids", found, "give sequences (batch, n) with one token or more")
    if not _is_whole(tokens) or tokens < 0:
        raise ArgumentError("tokens", f"is {tokens!r}", "ask for zero tokens or more")


def check_padding(real: Tensor, ids: Tensor) -> Tensor:
    """How many places of padding stand before each sequence, (batch,), from a mask of what is real."""
    if not isinstance(real, Tensor) or real.shape != ids.shape or real.dtype.is_floating_point:
        found = f"has shape {list(real.shape)}" if isinstance(real, Tensor) else f"is a {type(real).__name__}"
        remedy = f"give a boolean tensor {list(ids.shape)}: True for tokens, False for padding"
        raise ArgumentError("real", found, remedy)
    real = real.to(torch.bool)
    if not bool(real[:, -1].all()):
        found = "has padding at the end of a sequence, where new tokens go"
        raise ArgumentError("real", found, "pad on the left: the last place of each sequence is a token")
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise ArgumentError("real", "has padding between tokens", "pad on the left, before the first token")
    return (~real).sum(-1)


def seen_after(padding: Tensor, length: int) -> Support:
    """The places of `length` that are not padding, (batch, 1, 1, length): no query sees the others."""
    places = torch.arange(length, device=padding.device)
    return Where((places >= padding.unsqueeze(-1))[:, None, None])


def check_end(end: int | None, vocabulary: int) -> None:
    """The token that ends a sequence is a token."""
    if end is not None and (not _is_whole(end) or not 0 <= end < vocabulary):
        raise ArgumentError(
            "end",
            f"is {end!r} and the vocabulary has {vocabulary} tokens",
            f"give a token from 0 to {vocabulary - 1}",
        )


def check_seed(seed: int | None) -> None:
    """What torch takes as a seed."""
    if seed is not None and (not _is_whole(seed) or not -(2**63) <= seed < 2**64):
        raise ArgumentError("seed", f"is {seed!r}", "give a whole number from 0 to 2**64 - 1, or None")


def _check_largest(largest: Tensor, logits: Tensor) -> None:
    """The largest logits (batch,) are numbers; NaN is larger than all."""
    if not all(map(math.isfinite, largest.tolist())):
        found = "gave NaN" if bool(logits.isnan().any()) else "gave logits whose largest is infinite"
        raise ArgumentError(
            "model",
            found,
            "look at its weights: a training that diverged, or numbers beyond the range of their kind",
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@contextmanager
def at_rest(parts: list[nn.Module]) -> Iterator[None]:
    """Evaluation mode for one step, and the mode of each part restored after it, so that the caller may
    train between two tokens of a stream.
    """
    active = [part for part in parts if part.training]
    for part in active:
        part.training = False
    try:
        yield
    finally:
        for part in active:
            part.training = True


def _generator(seed: int | None, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def _steps(
    logits: Callable[[Tensor], Tensor],
    new: Tensor,
    tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
    end: int | None,
) -> Iterator[Tensor]:
    done = torch.zeros(len(new), dtype=torch.bool, device=new.device)
    for _ in range(tokens):
        with torch.no_grad():
            drawn = sampling.draw(logits(new)[:, -1], generator)
        if end is not None:
            drawn = drawn.masked_fill(done, end)
            done = done | (drawn == end)
        yield drawn
        if end is not None and bool(done.all()):
            return
        new = drawn.unsqueeze(-1)


def finish(ids: Tensor, found: Iterator[Tensor]) -> Tensor:
    """Given and new tokens side by side."""
    return torch.cat([ids, *(token.unsqueeze(-1) for token in found)], -1)
