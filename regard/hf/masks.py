"""Masks of transformers as supports: none and causal, boolean, additive."""

from __future__ import annotations

import torch
from torch import Tensor

from regard import _check
from regard._transforms import moves
from regard.errors import ArgumentError
from regard.supports import Causal, Full, Support, Where, Window


def without_mask(causal: bool, window: int | None, queries: int, keys: int) -> Support:
    """What a query sees where no mask is given: transformers leaves masks out where order alone, or nothing,
    says it.
    """
    order = Causal() if causal else Full()
    if window is None or keys <= window:
        return order
    if queries != keys:
        raise ArgumentError(
            "attention_mask",
            f"is None for {queries} queries, {keys} keys and a window of {window}",
            "give the mask that says where they stand",
        )
    return order & Window(window - 1, None if causal else window - 1)


def split_mask(mask: Tensor, queries: int, keys: int) -> tuple[Support, Tensor | None]:
    """A mask as the pairs it allows and what it adds to their scores; None where it adds nothing.

    Additive masks forbid by the lowest number of their dtype, or by -inf: below half of the lowest no score
    can be seen again.
    """
    _check_shape(mask, queries, keys)
    if mask.dtype == torch.bool:
        return Where(mask), None
    closed = mask.detach() <= torch.finfo(mask.dtype).min / 2
    bias = mask.masked_fill(closed, 0.0)
    plain = not moves(mask) and _check.holds(bias.any()) is False
    return Where(~closed), None if plain else bias


def _check_shape(mask: Tensor, queries: int, keys: int) -> None:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        raise ArgumentError(
            "attention_mask",
            f"is {_check.describe(mask)}",
            "give booleans (True is seen) or numbers that scores are added to",
        )
    if mask.ndim != 4 or mask.shape[-1] != keys or mask.shape[-2] not in (1, queries):
        raise ArgumentError(
            "attention_mask", f"has shape {list(mask.shape)}", f"give (batch, 1 or heads, {queries}, {keys})"
        )
