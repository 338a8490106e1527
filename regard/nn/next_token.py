"""One more token after others: the step that generation is made of.

What can be checked once was checked with the tokens before it; what is left is the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from regard._transforms import is_only_run
from regard._types import Scalar
from regard.attention import Attention
from regard.nn.cache import LayerCache, marks_after
from regard.normalizers import Softmax
from regard.potentials import Alibi, Dot, Potential, Rotary, Sum
from regard.supports import Causal

if TYPE_CHECKING:
    from regard.nn.attention import MultiHeadAttention


def may_go_on(layer: MultiHeadAttention, mechanism: Attention) -> bool:
    """Whether a token after others needs nothing but their keys and values: scores are products, of points
    as they are or turned to their positions, and may fall with distance.
    """
    potential, slope = _without_slope(mechanism.potential)
    inner = potential.potential if isinstance(potential, Rotary) else potential
    fixed = not (isinstance(slope, Tensor) and slope.requires_grad)
    return (
        type(inner) is Dot
        and fixed
        and not any(isinstance(leaf, Tensor) for leaf in tree_leaves((potential, mechanism.normalizer)))
        and float(inner.factor(layer.head_width)) > 0  # as the kernel takes it
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
    potential, slope = _without_slope(mechanism.potential)
    parts = layer.projection(x).view(len(x), 3, layer.heads, 1, layer.head_width)
    queries, keys, values = parts.unbind(1)
    if isinstance(potential, Rotary):
        marks = marks_after(cache.length, 1, x.device)
        queries, keys = potential.rotate(parts[:, :2], marks).unbind(1)
        potential = potential.potential
    known = cache.extend(keys, values)
    assert isinstance(potential, Dot)
    assert isinstance(mechanism.normalizer, Softmax)
    temperature = float(mechanism.normalizer.temperature)
    bias = None if slope is None else _fall(queries, cache.length, slope, temperature)
    scale = float(potential.factor(layer.head_width)) / temperature
    mixed = F.scaled_dot_product_attention(queries, *known, attn_mask=bias, scale=scale)
    found: Tensor = layer.output(mixed.reshape(x.shape))
    return found


def _without_slope(potential: Potential) -> tuple[Potential, Scalar | None]:
    """The potential without scores that fall with distance, and their slope."""
    if type(potential) is Sum and len(potential.terms) == 2 and type(potential.terms[1]) is Alibi:
        return potential.terms[0], potential.terms[1].slope
    return potential, None


def _fall(queries: Tensor, length: int, slope: Scalar, temperature: float) -> Tensor:
    """What is added to scores: the last of the keys is at the query, each before it is one farther away."""
    distances = torch.arange(length - 1, -1, -1, dtype=queries.dtype, device=queries.device)
    steep = slope.to(queries).view(-1, 1, 1) if isinstance(slope, Tensor) else float(slope)
    return (distances * (steep / -temperature)).expand(1, queries.shape[-3], 1, -1)
