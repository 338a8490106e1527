"""How the arguments of torch's modules are written here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from regard.compute.tensors import torch_name

_SEEN = (
    "write support=regard.Where(~mask) for a boolean mask, which is True here where a token is seen, and "
    "support=regard.Causal() for the past"
)
_ADDED = "a mask that is added to scores is a potential of the mechanism: Attention(Dot() + PairBias(mask))"
_ORDER = f"{_SEEN}; {_ADDED}"
_PADDING = (
    "write support=regard.Where(~mask[:, None, None]): torch's mask is True for padding, here it is True for "
    "what is seen; or support=regard.Padding(lengths[:, None])"
)
TORCH: Mapping[str, str] = {
    "attn_mask": f"{_SEEN}; a mask that is added to scores is given as added=regard.PairBias(mask)",
    "mask": _ORDER,
    "src_mask": _ORDER,
    "tgt_mask": _ORDER,
    "is_causal": "write support=regard.Causal(); decoders see their past without it",
    "tgt_is_causal": "leave it out for a decoder that sees its past, else write support=regard.Causal()",
    "key_padding_mask": _PADDING,
    "src_key_padding_mask": _PADDING,
    "tgt_key_padding_mask": _PADDING,
    "memory_mask": _ORDER.replace("support=", "context_support="),
    "memory_key_padding_mask": _PADDING.replace("support=", "context_support="),
    "memory_is_causal": "write context_support=regard.Causal()",
    "dropout_p": "it is a setting: MultiHeadAttention(dropout=...), Design(attention_dropout=...)",
    "need_weights": "leave it out: module.declare() has the weights, attention.weights(x)",
    "average_attn_weights": "leave it out: module.declare() has the weights, attention.weights(x)",
    "key": "call module(x, context, values)",
    "value": "call module(x, context, values)",
}
"""Arguments of forward in torch's modules."""


def refuse_torch_names(names: Mapping[str, Any], module: nn.Module) -> None:
    """An error for the first argument that a forward does not have, with the way it is written here."""
    for name in names:
        known = inspect.signature(module.forward).parameters.values()
        own = [parameter.name for parameter in known if parameter.kind is not parameter.VAR_KEYWORD]
        raise torch_name(name, type(module).__name__, f"{', '.join(own[:-1])} and {own[-1]}", TORCH)
