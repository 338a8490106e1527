"""Weights of torch's own Transformer modules, in and out: the same outputs and the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard._verb import Verb
from regard._written import write_object
from regard.attention import Attention
from regard.errors import ArgumentError
from regard.maps import Activation, Gelu, Normalize, Relu
from regard.nn.attention import MultiHeadAttention
from regard.nn.design import Design
from regard.nn.initialization import Xavier
from regard.nn.layers import Branch, DecoderLayer, EncoderLayer
from regard.nn.positions import NoPositions
from regard.nn.stacks import Decoder, Encoder, Transformer
from regard.nn.structure import changes, intrusions, undrawn
from regard.normalizers import Softmax
from regard.potentials import Dot
from regard.supports import Full

reading = Verb("from_torch")
writing = Verb("to_torch")
"""Which module becomes which; open to others."""


def from_torch(module: nn.Module) -> Any:
    """A module of regard.nn with the weights of one of torch: nn.MultiheadAttention,
    nn.TransformerEncoderLayer, nn.Transformer, ...

    Tokens are (batch, n, width) whatever batch_first said. Dropout is applied to branches and hidden layers,
    as torch does, and not to attention weights: outside of training nothing differs. Decoders see their past
    alone, as torch's do with a causal tgt_mask.
    """
    if isinstance(module, nn.Module):
        _refuse_subclass(module)
    made = reading.one(module)
    made.train(module.training)
    return made


def to_torch(module: nn.Module) -> Any:
    """The module of torch with the weights of one of regard.nn, batch_first;
    what torch has no module for is refused with the reason.
    """
    made = writing.one(module)
    made.train(module.training)
    return made


def _refuse_subclass(module: nn.Module) -> None:
    """Refuse a subclass of a module of torch that has no rule of its own: it may compute something else."""
    name = type(module).__name__
    known: Any = next(kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn."))
    if known is nn.Module or reading.choose(type(module)) is not reading.choose(known):
        return
    if type(module) is not known:
        what = "a forward" if type(module).forward is not known.forward else "a class"
        raise ArgumentError(
            "module", f"is a {name} with {what} of its own", f"say what it becomes with @reading.rule({name})"
        )
    _without_intrusions(module)


@reading.rule(object)
def _no_counterpart(module: Any) -> nn.Module:
    raise ArgumentError(
        "module",
        f"is a {type(module).__name__}",
        "give an nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, "
        "nn.TransformerEncoder, "
        "nn.TransformerDecoder, nn.Transformer or nn.Linear",
    )


@reading.rule(nn.MultiheadAttention)
def _read_attention(module: nn.MultiheadAttention) -> MultiHeadAttention:
    if not module._qkv_same_embed_dim:
        raise ArgumentError(
            "module", "has keys or values of another width (kdim, vdim)", "one width is used for all tokens"
        )
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        raise ArgumentError(
            "module", "adds keys of its own (add_bias_kv or add_zero_attn)", "build it without them"
        )
    bias = module.in_proj_bias is not None
    with undrawn():
        template = nn.MultiheadAttention(
            module.embed_dim, module.num_heads, module.dropout, bias, batch_first=module.batch_first
        )
    _same(template, module)
    return copy_projections(MultiHeadAttention(module.embed_dim, module.num_heads, bias=bias), module)


def copy_projections(made: MultiHeadAttention, module: nn.MultiheadAttention) -> MultiHeadAttention:
    """The projections of one module in another."""
    made.to(module.in_proj_weight)
    assert isinstance(made.projection, nn.Linear)
    assert isinstance(made.output, nn.Linear)
    pairs = [(made.projection.weight, module.in_proj_weight), (made.output.weight, module.out_proj.weight)]
    pairs += [(made.projection.bias, module.in_proj_bias), (made.output.bias, module.out_proj.bias)]
    _copy(pairs)
    return made


@reading.rule(nn.TransformerEncoderLayer)
def _read_encoder_layer(module: nn.TransformerEncoderLayer) -> EncoderLayer:
    made = EncoderLayer(_check_design(module))
    _fill_layer(made, module)
    return made


@reading.rule(nn.TransformerDecoderLayer)
def _read_decoder_layer(module: nn.TransformerDecoderLayer) -> DecoderLayer:
    made = DecoderLayer(_check_design(module))
    _fill_layer(made, module)
    return made


@reading.rule(nn.TransformerEncoder)
def _read_encoder(module: nn.TransformerEncoder) -> Encoder:
    made = Encoder(_one_design(module.layers), len(module.layers), final_norm=module.norm is not None)
    _fill_stack(made, module)
    return made


@reading.rule(nn.TransformerDecoder)
def _read_decoder(module: nn.TransformerDecoder) -> Decoder:
    made = Decoder(_one_design(module.layers), len(module.layers), final_norm=module.norm is not None)
    _fill_stack(made, module)
    return made


@reading.rule(nn.Transformer)
def _read_transformer(module: nn.Transformer) -> Transformer:
    for part, kind in ((module.encoder, nn.TransformerEncoder), (module.decoder, nn.TransformerDecoder)):
        if type(part) is not kind:
            raise ArgumentError(
                "module",
                f"has a custom part, {type(part).__name__}",
                "convert its encoder and decoder one by one",
            )
    encoder, decoder = from_torch(module.encoder), from_torch(module.decoder)
    if write_object(encoder.design) != write_object(decoder.design):
        raise ArgumentError(
            "module",
            "has an encoder and a decoder that differ in their settings",
            "convert its encoder and decoder one by one",
        )
    if encoder.final_norm != decoder.final_norm:
        raise ArgumentError(
            "module",
            "has a last norm in one stack and none in the other",
            "convert its encoder and decoder one by one",
        )
    made = Transformer(
        encoder.design, len(encoder.layers), len(decoder.layers), final_norm=encoder.final_norm
    )
    made.encoder, made.decoder = encoder, decoder
    return made


def design_of(layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> Design:
    """What a layer of torch says about itself."""
    attention = layer.self_attn
    return Design(
        attention.embed_dim,
        attention.num_heads,
        hidden=layer.linear1.out_features,
        activation=_activation(layer.activation),
        norm=Normalize(layer.norm1.eps),
        norm_first=layer.norm_first,
        bias=layer.linear1.bias is not None,
        dropout=layer.dropout1.p,
        initialization=Xavier(),
    )


def _check_design(layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> Design:
    """The design of a layer that is all of torch: another class,
    setting or hook anywhere in it would be lost.
    """
    if not isinstance(layer, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        raise ArgumentError(
            "module", f"has a layer that is a {type(layer).__name__}", "convert its layers one by one"
        )
    design = _read_design(layer)
    kind = (
        nn.TransformerEncoderLayer
        if isinstance(layer, nn.TransformerEncoderLayer)
        else nn.TransformerDecoderLayer
    )
    options = {
        **_layer_options(design),
        "activation": layer.activation,
        "batch_first": layer.self_attn.batch_first,
    }
    with undrawn():
        template = kind(**options)
    for name in (
        "self_attn",
        "multihead_attn",
    ):  # dropout of attention weights is not taken over, whatever it is
        if isinstance(part := getattr(layer, name, None), nn.MultiheadAttention):
            getattr(template, name).dropout = part.dropout
    _same(template, layer)
    return design


def _read_design(layer: Any) -> Design:
    try:
        return design_of(layer)
    except AttributeError as error:
        found = f"has a {type(layer).__name__} whose parts are not torch's ({error})"
        raise ArgumentError("module", found, "build it from the parts torch gives it") from None


def _same(template: nn.Module, module: nn.Module) -> None:
    """Refuse a module of torch that differs from what torch would build."""
    wrong = changes(template, module)
    if wrong:
        name = type(module).__name__
        remedy = f"convert a module as torch builds it, or say what yours becomes with @reading.rule({name})"
        raise ArgumentError("module", f"is a {name} that {wrong[0]}", remedy)


def _without_intrusions(module: nn.Module) -> None:
    wrong = next(intrusions(module), None)
    if wrong is not None:
        raise ArgumentError(
            "module", f"is a {type(module).__name__} that {wrong}", "remove what was put in: it would be lost"
        )


def _activation(found: Any) -> Activation:
    if found in (functional.relu, torch.relu) or type(found) is nn.ReLU:
        return Relu()
    if found is functional.gelu or (type(found) is nn.GELU and found.approximate == "none"):
        return Gelu()
    raise ArgumentError("module", f"has the activation {found!r}", "use relu or gelu")


def _one_design(layers: Iterable[Any]) -> Design:
    """The design that all layers of a stack share."""
    designs = [_check_design(layer) for layer in layers]
    if any(write_object(design) != write_object(designs[0]) for design in designs):
        raise ArgumentError(
            "module", "has layers that differ in their settings", "convert its layers one by one"
        )
    return designs[0]


def _fill_layer(made: EncoderLayer | DecoderLayer, module: Any) -> None:
    made.to(module.linear1.weight)
    copy_projections(made.attention, module.self_attn)
    norms: list[tuple[Branch | None, str]] = [(made.attention_branch, "norm1"), (made.hidden_branch, "norm2")]
    if isinstance(made, DecoderLayer):
        assert made.cross_attention is not None
        copy_projections(made.cross_attention, module.multihead_attn)
        norms = [
            (made.attention_branch, "norm1"),
            (made.cross_branch, "norm2"),
            (made.hidden_branch, "norm3"),
        ]
    for branch, name in norms:
        assert branch is not None
        branch.norm.load_state_dict(getattr(module, name).state_dict())
    made.feed_forward.inner.load_state_dict(module.linear1.state_dict())
    made.feed_forward.outer.load_state_dict(module.linear2.state_dict())


def _fill_stack(made: Encoder | Decoder, module: Any) -> None:
    made.to(module.layers[0].linear1.weight)
    for layer, given in zip(made.layers, module.layers, strict=True):
        _fill_layer(layer, given)  # type: ignore[arg-type]
    if module.norm is not None:
        if type(module.norm) is not nn.LayerNorm:
            raise ArgumentError("module", f"ends with a {type(module.norm).__name__}", "use a LayerNorm")
        made.norm = copy.deepcopy(module.norm)


def _copy(pairs: Sequence[tuple[Tensor | None, Tensor | None]]) -> None:
    with torch.no_grad():
        for mine, given in pairs:
            if mine is not None and given is not None:
                mine.copy_(given)


# The other way


@writing.rule(object)
def _no_torch(module: Any) -> nn.Module:
    raise ArgumentError(
        "module",
        f"is a {type(module).__name__}",
        "torch has counterparts of MultiHeadAttention, layers, Encoder, Decoder, Transformer and linear maps",
    )


@writing.rule(MultiHeadAttention)
def _write_attention(module: MultiHeadAttention) -> nn.MultiheadAttention:
    _plain(module.mechanism.value())
    if module.kv_heads != module.heads or module.shaped:
        raise ArgumentError(
            "module", "has grouped keys or shaped attention", "nn.MultiheadAttention has neither"
        )
    bias = module.projection.bias is not None
    with undrawn():
        template = MultiHeadAttention(module.width, module.heads, bias=bias)
    _refuse_change(template, module)
    made = nn.MultiheadAttention(module.width, module.heads, bias=bias, batch_first=True)
    made.to(module.projection.weight)
    _give(module, made)
    return made


def _give(module: MultiHeadAttention, made: nn.MultiheadAttention) -> None:
    _copy([(made.in_proj_weight, module.projection.weight), (made.out_proj.weight, module.output.weight)])
    _copy([(made.in_proj_bias, module.projection.bias), (made.out_proj.bias, module.output.bias)])


def _plain(attention: Attention, causal: bool = False) -> None:
    """What torch's modules can say: softmax of scaled dot products; masks are arguments there."""
    potential = attention.potential
    plain = write_object(potential) == write_object(Dot()) and write_object(
        attention.normalizer
    ) == write_object(Softmax())
    if not plain:
        raise ArgumentError(
            "module", f"has the mechanism {attention!r}", "torch has softmax of scaled dot products only"
        )
    if not causal and not isinstance(attention.support, Full):
        raise ArgumentError(
            "module",
            f"has the support {attention.support!r}",
            "torch takes masks as arguments: build it with Full()",
        )


def _layer_options(design: Design) -> dict[str, Any]:
    """The settings of a layer as torch names them; refuses what these cannot say."""
    _plain(design.mechanism)
    refused = {
        "gated": design.gated,
        "kv_heads": design.kv_heads not in (None, design.heads),
        "norm": not design.norm.centered,
        "positions": not isinstance(design.positions, NoPositions),
        "shaping": design.shaping is not None,
        "activation": repr(design.activation) not in ("Relu()", "Gelu()"),
    }
    wrong = [name for name, found in refused.items() if found]
    if wrong:
        raise ArgumentError(
            "module",
            f"has a design with {', '.join(wrong)} that torch's layers do not have",
            "keep it in regard.nn",
        )
    return {
        "d_model": design.width,
        "nhead": design.heads,
        "dim_feedforward": design.inner_width,
        "dropout": design.dropout,
        "activation": "relu" if isinstance(design.activation, Relu) else "gelu",
        "layer_norm_eps": design.norm.eps,
        "norm_first": design.norm_first,
        "bias": design.bias,
        "batch_first": True,
    }


@writing.rule(Encoder)
def _write_encoder(module: Encoder) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(**_layer_options(module.design))
    made = nn.TransformerEncoder(layer, len(module.layers), _last(module), enable_nested_tensor=False)
    _give_stack(module, made)
    return made


@writing.rule(Decoder)
def _write_decoder(module: Decoder) -> nn.TransformerDecoder:
    if not module.cross:
        raise ArgumentError(
            "module", "has no cross-attention", "torch's decoder always has it; use an Encoder and a mask"
        )
    layer = nn.TransformerDecoderLayer(**_layer_options(module.design))
    made = nn.TransformerDecoder(layer, len(module.layers), _last(module))
    _give_stack(module, made)
    return made


@writing.rule(Transformer)
def _write_transformer(module: Transformer) -> nn.Transformer:
    encoder, decoder = to_torch(module.encoder), to_torch(module.decoder)
    options = {
        name: value
        for name, value in _layer_options(module.design).items()
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
    made = kind(**_layer_options(module.design))
    _give_layer(module, made, module.design)
    return made


def _last(module: Encoder | Decoder) -> nn.Module | None:
    return copy.deepcopy(module.norm) if module.final_norm else None


def _give_stack(module: Encoder | Decoder, made: Any) -> None:
    _without_intrusions(module)
    for layer, given in zip(module.layers, made.layers, strict=True):
        _give_layer(layer, given, module.design)  # type: ignore[arg-type]


def _refuse_change(template: nn.Module, module: nn.Module) -> None:
    """Refuse a module of regard.nn that differs from what its design would build."""
    wrong = changes(template, module)
    if wrong:
        raise ArgumentError(
            "module", f"{wrong[0]}; it was changed after it was built", "build it from a design that says so"
        )


def _give_layer(module: EncoderLayer | DecoderLayer, made: Any, design: Design) -> None:
    with undrawn():
        template = EncoderLayer(design) if isinstance(module, EncoderLayer) else DecoderLayer(design)
    _refuse_change(template, module)
    made.to(module.feed_forward.inner.weight)
    _give(module.attention, made.self_attn)
    branches = [module.attention_branch, module.hidden_branch]
    if isinstance(module, DecoderLayer):
        assert module.cross_attention is not None
        assert module.cross_branch is not None
        _give(module.cross_attention, made.multihead_attn)
        branches.insert(1, module.cross_branch)
    for number, branch in enumerate(branches):
        getattr(made, f"norm{number + 1}").load_state_dict(branch.norm.state_dict())
    made.linear1.load_state_dict(module.feed_forward.inner.state_dict())
    made.linear2.load_state_dict(module.feed_forward.outer.state_dict())
