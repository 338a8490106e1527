"""Modules of this room for every verb that takes a module: what regard.declare gives, and what
certify(module, ...) is about.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from regard.maps import Map
from regard.nn.attention import MultiHeadAttention
from regard.nn.feed_forward import FeedForward
from regard.nn.key_value_attention import KeyValueAttention
from regard.nn.layers import DecoderLayer, EncoderLayer
from regard.nn.models import LanguageModel, Logits, SequenceToSequence
from regard.nn.promises import Promised
from regard.nn.stacks import Decoder, Encoder, Transformer
from regard.proofs.certification import declare
from regard.proofs.intact import DROPOUTS, in_training, refuse_altered
from regard.proofs.theorem import Refusal

PUBLISHED = ("regard.nn.", "torch.nn.")


@declare.rule(MultiHeadAttention)
@declare.rule(FeedForward)
@declare.rule(EncoderLayer)
@declare.rule(Encoder)
@declare.rule(Promised)
def _own(module: Any) -> Map:
    _refuse_changed_module(module)
    made: Map = module.declare()
    return made


@declare.rule(DecoderLayer)
@declare.rule(Decoder)
def _decoder(module: Any) -> Map:
    if any(isinstance(part, DecoderLayer) and part.cross_attention is not None for part in module.modules()):
        raise Refusal("what it does depends on a context; module.declare(context) is the map for one")
    return _own(module)


@declare.rule(LanguageModel)
def _language_model(module: LanguageModel) -> Map:
    """From embedded tokens to what the output reads."""
    return _own(module)


@declare.rule(Logits)
def _logits(read: Logits) -> Map:
    _refuse_changed_module(read.model)
    return read.model.declare_logits()


@declare.rule(KeyValueAttention)
def _two_widths(module: nn.Module) -> Map:
    raise Refusal("its keys and values are not its tokens, and only attention of tokens is a map of them")


@declare.rule(Transformer)
@declare.rule(SequenceToSequence)
def _two_sequences(module: nn.Module) -> Map:
    raise Refusal("it reads two sequences; declare its encoder, or its decoder with decoder.declare(context)")


def _refuse_changed_module(module: nn.Module) -> None:
    """Refuse a module of regard.nn that has a changed module inside; an error where its dropout is on."""
    for part in _parts(module):
        lines = type_before_parametrizations(part).__mro__
        refuse_altered(part, next(kind for kind in lines if kind.__module__.startswith(PUBLISHED)))
        if part.training and dropout_of(part) > 0:
            raise in_training(_RANDOM[isinstance(part, DROPOUTS)])


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """A module and all inside, but for what computes its parametrized weights."""
    yield module
    for name, part in module.named_children():
        if name != "parametrizations":
            yield from _parts(part)


def dropout_of(part: nn.Module) -> float:
    """The share of numbers, or of attention weights, that a part drops in training."""
    if isinstance(part, DROPOUTS):
        return part.p
    return part.dropout if isinstance(part, (MultiHeadAttention, KeyValueAttention)) else 0.0


_RANDOM = {
    True: "its dropout is random",
    False: "its dropout of attention weights leaves random rows that are not laws",
}
