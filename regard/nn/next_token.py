"""One more token after others: the step that generation is made of.

What can be checked once was checked with the tokens before it; what is left is the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from regard._transforms import is_only_run
from regard.attention import Attention
from regard.compute.tensors import attend_tokens
from regard.nn.cache import LayerCache, marks_after
from regard.normalizers import Softmax
from regard.potentials import Dot, Rotary
from regard.supports import Causal, Full

if TYPE_CHECKING:
    from regard.nn.attention import MultiHeadAttention

FULL = Full()


def may_go_on(layer: MultiHeadAttention, mechanism: Attention) -> bool:
    """Whether a token after others needs nothing but their keys and values: scores are products, of points
    as they are or turned to their positions.
    """
    potential = mechanism.potential
    inner = potential.potential if isinstance(potential, Rotary) else potential
    return (
        type(inner) is Dot
        and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(mechanism))
        and isinstance(mechanism.normalizer, Softmax)
        and type(mechanism.support) is Causal
        and isinstance(layer.projection, nn.Linear)
        and layer.kv_heads == layer.heads
        and not layer.shaped
    )


def is_next(layer: MultiHeadAttention, x: Tensor, cache: LayerCache) -> bool:
    """Whether this is one more token (batch, 1, width) of texts that are in the cache, and nothing else is
    asked for.
    """
    weight = layer.projection.weight
    return (
        layer.goes_on
        and cache.length > 0
        and x.ndim == 3
        and x.shape[1:] == (1, layer.width)
        and x.dtype == weight.dtype
        and x.dtype.itemsize >= 4
        and not (layer.training and layer.dropout > 0)
        and is_only_run(x, weight)
        and not torch.is_autocast_enabled(x.device.type)
    )


def attend_next(layer: MultiHeadAttention, x: Tensor, cache: LayerCache) -> Tensor:
    """The value for that token, which sees itself and all others."""
    mechanism = layer.mechanism.value()
    potential = mechanism.potential
    parts = layer.projection(x).view(len(x), 3, layer.heads, 1, layer.head_width)
    queries, keys, values = parts.unbind(1)
    if isinstance(potential, Rotary):
        marks = marks_after(cache.length, 1, x.device)
        queries, keys = potential.features(queries, keys, marks, marks)
        potential = potential.potential
    known = cache.extend(keys, values)
    mixed = attend_tokens(potential, mechanism.normalizer, FULL, queries, *known)
    found: Tensor = layer.output(mixed.reshape(x.shape))
    return found
