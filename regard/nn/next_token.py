"""One more token after others: the step that generation is made of.

What can be checked once was checked with the tokens before it; what is left is the work.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from regard._transforms import is_only_run
from regard._types import Scalar
from regard.attention import Attention
from regard.compute.tensors import attend_tokens
from regard.nn.cache import LayerCache
from regard.normalizers import Softmax
from regard.potentials import Alibi, Dot, Gaussian, Potential, Rotary, Sum
from regard.potentials.reductions import is_calm
from regard.supports import Causal, Full

if TYPE_CHECKING:
    from regard.nn.attention import MultiHeadAttention

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def may_go_on(layer: MultiHeadAttention, mechanism: Attention) -> bool:
    """Whether a token after others needs nothing but their keys and values: scores are products, of points
    as they are or turned to their positions, or distances, and may fall with the distance of positions.
    """
    potential, slope = _without_slope(mechanism.potential)
    inner = potential.potential if isinstance(potential, Rotary) else potential
    fixed = not (isinstance(slope, Tensor) and slope.requires_grad)
    return (
        (type(inner) is Dot or type(potential) is Gaussian)  # only keys of products are kept turned
        and fixed
        and not any(isinstance(leaf, Tensor) for leaf in tree_leaves((potential, mechanism.normalizer)))
        and _factor(inner, layer.head_width) > 0  # as the kernel takes it
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
    return (
        layer.goes_on
        and cache.length > 0
        and is_one_token(x, layer.width, layer.projection.weight)
        and not (layer.training and layer.dropout > 0)
    )


def is_one_token(x: Tensor, width: int, weight: Tensor) -> bool:
    """Whether x is one token of each text, (batch, 1, width), for a layer with such a weight, and nobody
    differentiates, maps or records the step.
    """
    return (
        x.ndim == 3
        and x.shape[1:] == (1, width)
        and x.dtype == weight.dtype
        and x.dtype.itemsize >= 4
        and is_only_run(x, weight)
        and not torch.is_autocast_enabled(x.device.type)
    )


def attend_next(layer: MultiHeadAttention, x: Tensor, cache: LayerCache) -> Tensor:
    """The value for that token, which sees itself and all others."""
    step = Step(layer)
    found: Tensor = layer.output(step.mix(layer.projection(x), cache))
    return found


class Step:
    """What is known of a layer before the next token comes."""

    def __init__(self, layer: MultiHeadAttention) -> None:
        self._mechanism = mechanism = layer.mechanism.value()
        assert isinstance(mechanism.normalizer, Softmax)
        potential, self._slope = _without_slope(mechanism.potential)
        self._turns = Turns(potential, layer.head_width) if isinstance(potential, Rotary) else None
        self._inner = potential.potential if isinstance(potential, Rotary) else potential
        self._factor, self._temperature = (
            _factor(self._inner, layer.head_width),
            float(mechanism.normalizer.temperature),
        )
        self._heads, self._width = layer.heads, layer.head_width
        self._table: Tensor | None = None

    def mix(self, projected: Tensor, cache: LayerCache) -> Tensor:
        """From queries, keys and values side by side (batch, 1, 3 · width) to averages of values (batch, 1,
        width), one head after the other.
        """
        parts = projected.view(len(projected), 3, self._heads, 1, self._width)
        queries, keys, values = parts.unbind(1)
        if self._turns is not None:
            queries, keys = self._turns.turn(parts[:, :2], cache.length).unbind(1)
        known = cache.extend(keys, values)
        bias = None if self._slope is None else self._fall(queries, cache.length)
        if type(self._inner) is Gaussian:
            squares, longest = cache.squares()
            if not is_calm(max(longest, float(queries.square().sum(-1).amax())), self._factor):
                return self._in_full(queries, *known, cache.length)
            own = (squares * (-0.5 * self._factor / self._temperature)).unsqueeze(-2)
            bias = own if bias is None else own + bias
        scale = self._factor / self._temperature
        if queries.is_cpu:
            mixed = _kernel(queries, *known, 0.0, False, attn_mask=bias, scale=scale)[0]
        else:
            mixed = F.scaled_dot_product_attention(queries, *known, attn_mask=bias, scale=scale)
        return mixed.reshape(len(projected), 1, -1)

    def _in_full(self, queries: Tensor, keys: Tensor, values: Tensor, length: int) -> Tensor:
        """The same where distances need more care: about a center, or with more digits."""
        potential = self._inner if self._slope is None else self._inner + Alibi(self._slope)
        marks = torch.arange(length - 1, length, device=queries.device)
        mixed = attend_tokens(potential, self._mechanism.normalizer, Full(), queries, keys, values, marks)
        return mixed.reshape(len(queries), 1, -1)

    def _fall(self, queries: Tensor, length: int) -> Tensor:
        """What is added to scores: the last of the keys is at the query, each before it is one farther away,
        and the end of a long row is a short one.
        """
        table = self._table
        if table is None or table.shape[-1] < length or table.dtype != queries.dtype:
            room = max(2 * length, 64)
            distances = torch.arange(room - 1, -1, -1, dtype=queries.dtype, device=queries.device)
            slope = self._slope
            steep = slope.to(queries).view(-1, 1, 1) if isinstance(slope, Tensor) else float(slope or 0.0)
            self._table = table = (distances * (steep / -self._temperature)).expand(1, self._heads, 1, -1)
        return table.narrow(-1, table.shape[-1] - length, length)


class Turns:
    """cos and sin of positions, computed once for many of them."""

    def __init__(self, potential: Rotary, width: int) -> None:
        self._potential, self._width = potential, width
        self._rows: Tensor | None = None

    def turn(self, z: Tensor, position: int) -> Tensor:
        """z (..., 1, c) turned to its position."""
        rows = self._rows
        if rows is None or rows.shape[1] <= position or rows.dtype != z.dtype or rows.device != z.device:
            places = torch.arange(2 * position + 64, device=z.device)
            self._rows = rows = torch.stack(self._potential.turns(z, places))
        return self._potential.turn(z, *rows.narrow(1, position, 1).unbind(0))


def _factor(potential: Potential, width: int) -> float:
    """What products of queries and keys are multiplied with."""
    if isinstance(potential, Gaussian):
        bandwidth = potential.bandwidth_at(width)
        return math.inf if isinstance(bandwidth, Tensor) else 1 / bandwidth**2
    return float(potential.factor(width)) if isinstance(potential, Dot) else 0.0


def _without_slope(potential: Potential) -> tuple[Potential, Scalar | None]:
    """The potential without scores that fall with distance, and their slope."""
    if type(potential) is Sum and len(potential.terms) == 2 and type(potential.terms[1]) is Alibi:
        return potential.terms[0], potential.terms[1].slope
    return potential, None
