"""All layers of a decoder for one more token, as functions of their parameters.

A token is so little work that calling modules takes as long as what they compute. What layers are made of is
looked up once; parameters are read anew at every step, so that they may change between two tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from regard.nn.attention import MultiHeadAttention
from regard.nn.cache import Cache, LayerCache
from regard.nn.feed_forward import FeedForward
from regard.nn.layers import Branch, DecoderLayer
from regard.nn.next_token import Step, is_one_token

if TYPE_CHECKING:
    from regard.nn.stacks import Decoder

Function = Callable[[Tensor], Tensor]
_CALLED = (MultiHeadAttention, FeedForward, DecoderLayer, nn.Linear, nn.LayerNorm, nn.RMSNorm)
"""What a decoder calls, and hooks could hear."""


class Walk:
    """A decoder without attention to a context, whose layers do nothing but what their types say."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._width = decoder, decoder.design.width
        self._layers = [_Layer(layer) for layer in decoder.layers if isinstance(layer, DecoderLayer)]
        self._norm = _normalize(decoder.norm) if decoder.final_norm else None
        self._called = [
            (inside._modules, name, part, type(part))
            for inside in decoder.modules()
            for name, part in inside._modules.items()
            if isinstance(part, _CALLED)
        ]
        self._dropping = [part for part in decoder.modules() if _drops(part)]
        self._buffers = [
            (part._buffers, name, t, t._version)
            for part in decoder.modules()
            for name, t in part._buffers.items()
            if t is not None
        ]

    @classmethod
    def through(cls, decoder: Decoder) -> Walk | None:
        """The way through a decoder, where there is one."""
        return cls(decoder) if not decoder.cross and all(map(_is_plain, decoder.layers)) else None

    def is_open(self, x: Tensor, cache: Cache) -> bool:
        """Whether x is one more token after those in the cache, nobody listens to modules, and the decoder is
        made of what it was made of.
        """
        if not cache.length or not is_one_token(x, self._width, self._layers[0].weight):
            return False
        if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
            return False
        for inside, name, part, kind in self._called:  # a loop: this runs at every token
            if inside.get(name) is not part or part.__class__ is not kind:
                return False
            if part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__:
                return False
        for held, name, t, version in self._buffers:
            if held.get(name) is not t or t._version != version:
                return False
        return not any(part.training for part in self._dropping)

    def go(self, x: Tensor, cache: Cache) -> Tensor:
        """The value of the decoder for that token."""
        for layer, entry in zip(self._layers, cache.tokens, strict=True):
            x = layer.go(x, entry)
        return x if self._norm is None else self._norm(x)


class _Layer:
    def __init__(self, layer: DecoderLayer) -> None:
        attention, hidden = layer.attention, layer.feed_forward
        self._step, self._first = Step(attention), layer.design.norm_first
        self._project, self._output = _multiply(attention.projection), _multiply(attention.output)
        self._inner, self._outer = _multiply(hidden.inner), _multiply(hidden.outer)
        self._activation, self._gated = hidden.activation, hidden.gated
        self._norm, self._other_norm = (
            _normalize(branch.norm) for branch in (layer.attention_branch, layer.hidden_branch)
        )
        self._own = attention.projection._parameters

    @property
    def weight(self) -> Tensor:
        found = self._own["weight"]
        assert found is not None
        return found

    def go(self, x: Tensor, entry: LayerCache) -> Tensor:
        if self._first:
            x = x + self._attend(self._norm(x), entry)
            return x + self._feed(self._other_norm(x))
        x = self._norm(x + self._attend(x, entry))
        return self._other_norm(x + self._feed(x))

    def _attend(self, x: Tensor, entry: LayerCache) -> Tensor:
        return self._output(self._step.mix(self._project(x), entry))

    def _feed(self, x: Tensor) -> Tensor:
        hidden = self._inner(x)
        if not self._gated:
            return self._outer(self._activation(hidden))
        first, gate = hidden.chunk(2, -1)
        return self._outer(self._activation(first) * gate)


def _drops(part: nn.Module) -> bool:
    """Whether a module drops numbers while it trains."""
    share = part.p if isinstance(part, nn.Dropout) else getattr(part, "dropout", 0.0)
    return isinstance(share, float) and share > 0


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer goes on from token to token, and all its parts are of the types we know, with
    parameters under their own names.
    """
    if type(layer) is not DecoderLayer or layer.design.shaping is not None or not layer.attention.goes_on:
        return False
    known = (layer, layer.attention, layer.feed_forward, layer.attention_branch, layer.hidden_branch)
    linear = (
        layer.attention.projection,
        layer.attention.output,
        layer.feed_forward.inner,
        layer.feed_forward.outer,
    )
    norms = (layer.attention_branch.norm, layer.hidden_branch.norm)
    own = all(part._parameters.get("weight") is not None for part in (*linear, *norms))
    return own and all(type(part) in (*_CALLED, Branch) for part in (*known, *linear, *norms))


def _multiply(layer: nn.Module) -> Function:
    own = layer._parameters
    return lambda x: F.linear(x, own["weight"], own["bias"])  # type: ignore[arg-type]


def _normalize(norm: nn.Module) -> Function:
    own: Any = norm._parameters
    if isinstance(norm, nn.LayerNorm):
        shape, eps, scaled = norm.normalized_shape, norm.eps, torch.layer_norm
        return lambda x: scaled(x, shape, own["weight"], own["bias"], eps)
    assert isinstance(norm, nn.RMSNorm)
    return norm
