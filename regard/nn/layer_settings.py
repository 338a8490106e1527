"""What a design says in the words of torch's layers, or why it cannot be said there."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional

from regard._written import write_object
from regard.attention import Attention
from regard.errors import ArgumentError
from regard.maps import Gelu, Relu, Silu
from regard.nn.design import Design
from regard.nn.positions import NoPositions
from regard.normalizers import Softmax
from regard.potentials import Dot
from regard.supports import Full


def check_plain(attention: Attention, causal: bool = False) -> None:
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


def layer_options(design: Design) -> dict[str, Any]:
    """The settings of a layer as torch names them; refuses what these cannot say."""
    check_plain(design.mechanism)
    refused = {
        "gated": design.gated,
        "kv_heads": design.kv_heads not in (None, design.heads),
        "positions": not isinstance(design.positions, NoPositions),
        "shaping": design.shaping is not None,
        "activation": activation_of(design) is None,
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
        "activation": activation_of(design),
        "layer_norm_eps": design.norm.eps,
        "norm_first": design.norm_first,
        "bias": design.bias,
        "batch_first": True,
    }


def activation_of(design: Design) -> Any:
    """The activation as torch's layers take it, None where they have none like it."""
    known = {repr(Relu()): "relu", repr(Gelu()): "gelu", repr(Gelu(tanh=True)): nn.GELU("tanh")}
    return {**known, repr(Silu()): functional.silu}.get(repr(design.activation))
