"""to_torch: modules of regard.nn as modules of torch, with the same weights."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from regard.errors import ArgumentError
from regard.nn.attention import MultiHeadAttention
from regard.nn.design import Design
from regard.nn.interchange import copy_numbers, refuse_intrusions, to_torch, writing
from regard.nn.layer_settings import layer_options
from regard.nn.layers import DecoderLayer, EncoderLayer
from regard.nn.stacks import Decoder, Encoder, Transformer
from regard.nn.structure import changes, undrawn


@writing.rule(object)
def _no_torch(module: Any) -> nn.Module:
    raise ArgumentError(
        "module",
        f"is a {type(module).__name__}",
        "torch has counterparts of MultiHeadAttention, layers, Encoder, Decoder, Transformer and linear maps",
    )


@writing.rule(Encoder)
def _write_encoder(module: Encoder) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(**layer_options(module.design))
    made = nn.TransformerEncoder(layer, len(module.layers), _last(module), enable_nested_tensor=False)
    _give_stack(module, made)
    return made


@writing.rule(Decoder)
def _write_decoder(module: Decoder) -> nn.TransformerDecoder:
    if not module.cross:
        raise ArgumentError(
            "module", "has no cross-attention", "torch's decoder always has it; use an Encoder and a mask"
        )
    layer = nn.TransformerDecoderLayer(**layer_options(module.design))
    made = nn.TransformerDecoder(layer, len(module.layers), _last(module))
    _give_stack(module, made)
    return made


@writing.rule(Transformer)
def _write_transformer(module: Transformer) -> nn.Transformer:
    encoder, decoder = to_torch(module.encoder), to_torch(module.decoder)
    options = {
        name: value
        for name, value in layer_options(module.design).items()
        if name in ("d_model", "nhead", "batch_first")
    }
    made = nn.Transformer(
        **options, custom_encoder=copy.deepcopy(encoder), custom_decoder=copy.deepcopy(decoder)
    )
    made.encoder, made.decoder = (
        encoder,
        decoder,
    )  # the constructor draws all weights anew, also those it was given
    return made


@writing.rule(EncoderLayer)
@writing.rule(DecoderLayer)
def _write_layer(module: EncoderLayer | DecoderLayer) -> nn.Module:
    if isinstance(module, DecoderLayer) and module.cross_attention is None:
        raise ArgumentError(
            "module",
            "has no cross-attention",
            "torch's decoder layer always has it; use an EncoderLayer and a mask",
        )
    kind = nn.TransformerEncoderLayer if isinstance(module, EncoderLayer) else nn.TransformerDecoderLayer
    made = kind(**layer_options(module.design))
    _give_layer(module, made, module.design)
    return made


def _last(module: Encoder | Decoder) -> nn.Module | None:
    return copy.deepcopy(module.norm) if module.final_norm else None


def _give_stack(module: Encoder | Decoder, made: Any) -> None:
    refuse_intrusions(module)
    for layer, given in zip(module.layers, made.layers, strict=True):
        _give_layer(layer, given, module.design)  # type: ignore[arg-type]


def give_projections(module: MultiHeadAttention, made: nn.MultiheadAttention) -> None:
    """The numbers of a module, and the share of weights that it drops, in one of torch."""
    made.dropout = module.dropout
    copy_numbers(
        [(made.in_proj_weight, module.projection.weight), (made.out_proj.weight, module.output.weight)]
    )
    copy_numbers([(made.in_proj_bias, module.projection.bias), (made.out_proj.bias, module.output.bias)])


def refuse_change(template: nn.Module, module: nn.Module) -> None:
    """Refuse a module of regard.nn that differs from what its design would build."""
    wrong = changes(template, module)
    if wrong:
        raise ArgumentError(
            "module", f"{wrong[0]}; it was changed after it was built", "build it from a design that says so"
        )


def _give_layer(module: EncoderLayer | DecoderLayer, made: Any, design: Design) -> None:
    with undrawn():
        template = (
            EncoderLayer(design)
            if isinstance(module, EncoderLayer)
            else DecoderLayer(design, support=module.support)
        )
    refuse_change(template, module)
    made.to(module.feed_forward.inner.weight)
    give_projections(module.attention, made.self_attn)
    branches = [module.attention_branch, module.hidden_branch]
    if isinstance(module, DecoderLayer):
        assert module.cross_attention is not None
        assert module.cross_branch is not None
        give_projections(module.cross_attention, made.multihead_attn)
        branches.insert(1, module.cross_branch)
    for number, branch in enumerate(branches):
        setattr(made, f"norm{number + 1}", copy.deepcopy(branch.norm))
    made.linear1.load_state_dict(module.feed_forward.inner.state_dict())
    made.linear2.load_state_dict(module.feed_forward.outer.state_dict())
