"""Weights of torch's own Transformer modules, in and out: the same outputs and the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard._verb import Verb
from regard._written import write_object
from regard.errors import ArgumentError
from regard.maps import Activation, Gelu, Normalize, Relu, Silu
from regard.nn.attention import MultiHeadAttention
from regard.nn.design import Design
from regard.nn.initialization import Xavier
from regard.nn.layer_settings import layer_options
from regard.nn.layers import Branch, DecoderLayer, EncoderLayer
from regard.nn.stacks import Decoder, Encoder, Transformer
from regard.nn.structure import changes, intrusions, undrawn
from regard.proofs.modules import eps_of
from regard.supports import Support

reading = Verb("from_torch")
writing = Verb("to_torch")
"""Which module becomes which; open to others."""


def from_torch(module: nn.Module, *, support: Support | None = None) -> Any:
    """A module of regard.nn with the weights of one of torch: nn.MultiheadAttention,
    nn.TransformerEncoderLayer, nn.Transformer, ...

    Tokens are (batch, n, width) whatever batch_first said. Dropout is kept, of attention weights too.
    support: what a decoder's tokens see of each other, Causal() for one that is
    called with a causal tgt_mask, Full() for one that is called without; only decoders need it.

    Examples:
        >>> theirs = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> ours, x = regard.nn.from_torch(theirs).eval(), torch.randn(1, 4, 8)
        >>> torch.allclose(ours(x), theirs(x), atol=1e-5)
        True
    """
    if isinstance(module, nn.Module):
        _refuse_subclass(module)
    _check_support(module, support)
    made = reading.one(module)
    if support is not None:
        set_support(made, support)
    made.train(module.training)
    return made


DECODING = (nn.TransformerDecoderLayer, nn.TransformerDecoder, nn.Transformer)


def _check_support(module: Any, support: Support | None) -> None:
    """A decoder of torch has no mask of its own, and one here has: nobody but the caller knows."""
    decodes = isinstance(module, DECODING)
    if decodes and support is None:
        found = f"is missing: a {type(module).__name__} of torch sees later tokens unless tgt_mask hides them"
        remedy = "write support=regard.Causal() if it is called with a causal tgt_mask, else regard.Full()"
        raise ArgumentError("support", found, remedy)
    if support is not None and (not decodes or not isinstance(support, Support)):
        found = f"is {support!r} for a {type(module).__name__}"
        raise ArgumentError(
            "support", found, "give a Support, and for decoders only: others take it when called"
        )


def set_support(made: nn.Module, support: Support) -> None:
    """Let the tokens of all decoder layers in a module see what a support allows."""
    for inner in made.modules():
        if isinstance(inner, (DecoderLayer, Decoder, Transformer)):
            inner.support = support
        if isinstance(inner, DecoderLayer):
            inner.attention.set_mechanism(inner.attention.mechanism.value().replace(support=support))


def to_torch(module: nn.Module) -> Any:
    """The module of torch with the weights of one of regard.nn, batch_first;
    what torch has no module for is refused with the reason. Masks are arguments there: call a decoder with
    tgt_mask where this one sees its past.

    Examples:
        >>> from regard.nn import MultiHeadAttention, to_torch
        >>> layer, x = MultiHeadAttention(8, 2), torch.randn(1, 4, 8)
        >>> torch.allclose(to_torch(layer)(x, x, x)[0], layer(x), atol=1e-5)
        True
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
    refuse_intrusions(module)


@reading.rule(object)
def _no_counterpart(module: Any) -> nn.Module:
    raise ArgumentError(
        "module",
        f"is a {type(module).__name__}",
        "give an nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, "
        "nn.TransformerEncoder, "
        "nn.TransformerDecoder, nn.Transformer or nn.Linear",
    )


def copy_projections(made: MultiHeadAttention, module: nn.MultiheadAttention) -> MultiHeadAttention:
    """The projections of one module in another."""
    made.to(module.in_proj_weight)
    assert isinstance(made.projection, nn.Linear)
    assert isinstance(made.output, nn.Linear)
    pairs = [(made.projection.weight, module.in_proj_weight), (made.output.weight, module.out_proj.weight)]
    pairs += [(made.projection.bias, module.in_proj_bias), (made.output.bias, module.out_proj.bias)]
    copy_numbers(pairs)
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
    encoder, decoder = (reading.one(part).train(part.training) for part in (module.encoder, module.decoder))
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
    attention, others = layer.self_attn, getattr(layer, "multihead_attn", layer.self_attn)
    if attention.dropout != others.dropout:
        found = f"drops {attention.dropout} and {others.dropout} of the weights of its two attentions"
        raise ArgumentError("module", found, "use one share, or convert them one by one")
    return Design(
        attention.embed_dim,
        attention.num_heads,
        hidden=layer.linear1.out_features,
        activation=_activation(layer.activation),
        norm=_norm(layer.norm1),
        norm_first=layer.norm_first,
        bias=layer.linear1.bias is not None,
        dropout=layer.dropout1.p,
        initialization=Xavier(),
        attention_dropout=float(attention.dropout),
    )


def _norm(layer: nn.Module) -> Normalize:
    """The kind of a norm layer."""
    if isinstance(layer, nn.RMSNorm):
        return Normalize(eps_of(layer), centered=False)
    return Normalize(layer.eps)  # type: ignore[arg-type]


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
        **layer_options(design),
        "activation": layer.activation,
        "batch_first": layer.self_attn.batch_first,
    }
    with undrawn():
        template = kind(**options)
        for name, part in [*template.named_children()]:
            found = getattr(layer, name, None)
            if isinstance(part, nn.MultiheadAttention) and isinstance(found, nn.MultiheadAttention):
                part.dropout = found.dropout  # a share of its own: design.attention_dropout
            elif isinstance(part, nn.LayerNorm) and not design.norm.centered:
                setattr(template, name, nn.RMSNorm(design.width, layer.norm1.eps))
    refuse_other(template, layer)
    return design


def _read_design(layer: Any) -> Design:
    try:
        return design_of(layer)
    except AttributeError as error:
        found = f"has a {type(layer).__name__} whose parts are not torch's ({error})"
        raise ArgumentError("module", found, "build it from the parts torch gives it") from None


def refuse_other(template: nn.Module, module: nn.Module) -> None:
    """Refuse a module of torch that differs from what torch would build."""
    wrong = changes(template, module)
    if wrong:
        name = type(module).__name__
        remedy = f"convert a module as torch builds it, or say what yours becomes with @reading.rule({name})"
        raise ArgumentError("module", f"is a {name} that {wrong[0]}", remedy)


def refuse_intrusions(module: nn.Module) -> None:
    wrong = next(intrusions(module), None)
    if wrong is not None:
        raise ArgumentError(
            "module", f"is a {type(module).__name__} that {wrong}", "remove what was put in: it would be lost"
        )


def _activation(found: Any) -> Activation:
    if found in (functional.relu, torch.relu) or type(found) is nn.ReLU:
        return Relu()
    if found is functional.gelu or type(found) is nn.GELU:
        return Gelu(tanh=getattr(found, "approximate", "none") == "tanh")
    if found is functional.silu or type(found) is nn.SiLU:
        return Silu()
    if isinstance(found, partial) and found.func is functional.gelu and not found.args:
        return Gelu(tanh=found.keywords == {"approximate": "tanh"})
    remedy = 'use relu, gelu, nn.GELU("tanh") or nn.SiLU()'
    raise ArgumentError("module", f"has the activation {found!r}", remedy)


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
        if type(module.norm) not in (nn.LayerNorm, nn.RMSNorm):
            found = f"ends with a {type(module.norm).__name__}"
            raise ArgumentError("module", found, "use a LayerNorm or an RMSNorm")
        made.norm = copy.deepcopy(module.norm)


def copy_numbers(pairs: Sequence[tuple[Tensor | None, Tensor | None]]) -> None:
    with torch.no_grad():
        for mine, given in pairs:
            if mine is not None and given is not None:
                mine.copy_(given)
