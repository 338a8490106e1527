"""A call of torch's scaled_dot_product_attention."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.audits.adapters.base import NotCovered
from regard.audits.watching.seen import Seen, Sight, four
from regard.hf.masks import split_mask
from regard.normalizers import Softmax
from regard.potentials import Dot, PairBias, Potential
from regard.supports import Causal, Full, Support

NAME = "scaled_dot_product_attention"


def _signature(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """How it is called, which the function itself does not say."""


SIGNATURE = inspect.signature(_signature)
FUNCTIONS = {F.scaled_dot_product_attention}


def fused_sight(arguments: tuple[Any, ...], options: dict[str, Any], result: Tensor) -> Sight:
    """What was noticed in such a call."""
    return Sight(NAME, four(result), lambda: _readings(arguments, options, result))


def _readings(arguments: tuple[Any, ...], options: dict[str, Any], result: Tensor) -> Iterator[Seen]:
    try:
        bound = SIGNATURE.bind(*arguments, **options)
    except TypeError as error:
        raise NotCovered(f"it has arguments that are not known here: {error}") from None
    bound.apply_defaults()
    own = bound.arguments
    if own["dropout_p"]:
        raise NotCovered("it drops some of its weights at random")
    query, key, value = (four(own[name]) for name in ("query", "key", "value"))
    lead = query.shape[:2]
    key, value = (_spread(part, lead) for part in (key, value))
    support, bias = _support(own, query.shape[2], key.shape[2])
    potential: Potential = Dot(scale=own["scale"])
    potential = potential if bias is None else potential + PairBias(bias)
    yield Seen((query, key, value), potential, Softmax(), support, four(result))


def _support(own: dict[str, Any], queries: int, keys: int) -> tuple[Support, Tensor | None]:
    if own["attn_mask"] is None:
        return (Causal() if own["is_causal"] else Full()), None
    mask = own["attn_mask"]
    mask = mask.expand(*mask.shape[:-2], queries, keys) if mask.ndim > 1 else mask.expand(queries, keys)
    support, bias = split_mask(four(mask), queries, keys)
    return (support & Causal() if own["is_causal"] else support), bias


def _spread(part: Tensor, lead: torch.Size) -> Tensor:
    """Keys or values once for each head, and once for each of the batch."""
    members = lead[1] // part.shape[1]
    return part.repeat_interleave(members, 1).expand(lead[0], -1, -1, -1)
