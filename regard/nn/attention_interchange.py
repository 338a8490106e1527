"""Attention modules of torch, in and out, with every setting that they have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard._written import write_object
from regard.attention import Attention
from regard.errors import ArgumentError
from regard.nn.attention import MultiHeadAttention
from regard.nn.interchange import copy_numbers, copy_projections, reading, refuse_other, writing
from regard.nn.key_value_attention import KeyValueAttention
from regard.nn.layer_settings import check_plain
from regard.nn.returning import give_projections, refuse_change
from regard.nn.structure import undrawn
from regard.normalizers import SinkSoftmax, Softmax
from regard.potentials import Dot

Own = MultiHeadAttention | KeyValueAttention


@reading.rule(nn.MultiheadAttention)
def _read_attention(module: nn.MultiheadAttention) -> Own:
    """add_zero_attn is a sink: a key zero scores zero, and the value zero adds nothing."""
    with undrawn():
        template = nn.MultiheadAttention(**_options(module), batch_first=module.batch_first)
    refuse_other(template, module)
    normalizer = SinkSoftmax(0.0) if module.add_zero_attn else Softmax()
    shared: dict[str, Any] = {
        "mechanism": Attention(Dot(), normalizer=normalizer),
        "bias": module.in_proj_bias is not None,
        "dropout": float(module.dropout),
    }
    if module._qkv_same_embed_dim and module.bias_k is None:
        return copy_projections(MultiHeadAttention(module.embed_dim, module.num_heads, **shared), module)
    widths = {"key_width": module.kdim, "value_width": module.vdim}
    learned = module.bias_k is not None
    made = KeyValueAttention(module.embed_dim, module.num_heads, **widths, learned=learned, **shared)
    made.to(module.out_proj.weight)
    copy_numbers(_pairs(made, module))
    return made


def _options(module: nn.MultiheadAttention) -> dict[str, Any]:
    """The arguments that a module of torch was built with."""
    return {
        "embed_dim": module.embed_dim,
        "num_heads": module.num_heads,
        "dropout": module.dropout,
        "bias": module.in_proj_bias is not None,
        "add_bias_kv": module.bias_k is not None,
        "add_zero_attn": module.add_zero_attn,
        "kdim": module.kdim,
        "vdim": module.vdim,
    }


def _pairs(
    made: KeyValueAttention, module: nn.MultiheadAttention
) -> list[tuple[Tensor | None, Tensor | None]]:
    """Tensors here with the same ones there; those of one packed tensor are views of it."""
    layers = (made.queries, made.keys, made.values)
    weights: Any = (
        (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        if module.in_proj_weight is None
        else module.in_proj_weight.chunk(3)
    )
    pairs: list[tuple[Tensor | None, Tensor | None]] = [
        (layer.weight, weight) for layer, weight in zip(layers, weights, strict=True)
    ]
    if module.in_proj_bias is not None:
        pairs += [
            (layer.bias, bias) for layer, bias in zip(layers, module.in_proj_bias.chunk(3), strict=True)
        ]
    pairs += [(made.output.weight, module.out_proj.weight), (made.output.bias, module.out_proj.bias)]
    if made.learned_key is not None and module.bias_k is not None:
        pairs += [(made.learned_key, module.bias_k[0, 0]), (made.learned_value, module.bias_v[0, 0])]  # type: ignore[index]
    return pairs


# The other way


@writing.rule(MultiHeadAttention)
def _write_attention(module: MultiHeadAttention) -> nn.MultiheadAttention:
    sink = _check_mechanism(module.mechanism.value())
    if module.kv_heads != module.heads or module.shaped:
        raise ArgumentError(
            "module", "has grouped keys or shaped attention", "nn.MultiheadAttention has neither"
        )
    bias, dropout = module.projection.bias is not None, module.dropout
    mechanism = module.mechanism.value()
    with undrawn():
        template = MultiHeadAttention(
            module.width, module.heads, mechanism=mechanism, bias=bias, dropout=dropout
        )
    refuse_change(template, module)
    options = {"dropout": dropout, "bias": bias, "add_zero_attn": sink, "batch_first": True}
    made = nn.MultiheadAttention(module.width, module.heads, **options)
    made.to(module.projection.weight)
    give_projections(module, made)
    return made


@writing.rule(KeyValueAttention)
def _write_key_value(module: KeyValueAttention) -> nn.MultiheadAttention:
    sink = _check_mechanism(module.mechanism.value())
    made = nn.MultiheadAttention(
        module.width,
        module.heads,
        module.dropout,
        bias=module.queries.bias is not None,
        add_bias_kv=module.learned_key is not None,
        add_zero_attn=sink,
        kdim=module.key_width,
        vdim=module.value_width,
        batch_first=True,
    )
    made.to(module.queries.weight)
    with torch.no_grad():
        for mine, given in _pairs(module, made):
            if mine is not None and given is not None:
                given.copy_(mine)
    return made


def _check_mechanism(attention: Attention) -> bool:
    """Whether torch would add a key zero; what torch cannot say is refused."""
    sink = write_object(attention.normalizer) == write_object(SinkSoftmax(0.0))
    check_plain(attention.replace(normalizer=Softmax()) if sink else attention)
    return sink
