"""Whole networks of transformers as one map, from the tokens that enter the first layer to the answer; each
is run beside its model before anything is said of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard import maps
from regard.attention import Attention
from regard.audits.outputs import answer_of
from regard.errors import ArgumentError
from regard.lookups import Linear
from regard.nonexpansive import MixTokens
from regard.potentials import Dot
from regard.proofs import declare
from regard.proofs.agreement import relative_gap
from regard.supports import Causal, Full

TOLERANCE = 1e-4
"""How far the map's value may be from the model's own, relative to its norm."""
ACTIVATIONS: dict[str, maps.Activation] = {
    "gelu": maps.Gelu(),
    "gelu_new": maps.Gelu(tanh=True),
    "gelu_pytorch_tanh": maps.Gelu(tanh=True),
    "relu": maps.Relu(),
    "silu": maps.Silu(),
    "swish": maps.Silu(),
    "tanh": maps.Tanh(),
}


@dataclass(frozen=True)
class Stack:
    """The layers of a model: `first` is the module that tokens enter, blocks are maps, last what follows."""

    first: nn.Module
    blocks: tuple[maps.Compose, ...]
    last: tuple[maps.Map, ...] = ()


class Entered(nn.Module):
    """A model on one input, as a function of the tokens that enter its first layer."""

    def __init__(self, model: nn.Module, options: dict[str, Tensor], first: nn.Module, map: maps.Map) -> None:
        super().__init__()
        self.model, self.first, self.options, self.map = model, first, options, map

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, n, d) to (batch, 1, classes)."""

        def put(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
            return ((x, *args[1:]), named) if args else (args, {**named, "hidden_states": x})

        handle = self.first.register_forward_pre_hook(put, with_kwargs=True)
        try:
            found = self.model(**{name: part.expand(len(x), -1) for name, part in self.options.items()})
        finally:
            handle.remove()
        return answer_of(found)


@declare.rule(Entered)
def _entered(module: Entered) -> maps.Map:
    return module.map


class _Enough(Exception):
    """The model has run far enough."""


def entering(model: nn.Module, options: dict[str, Tensor], first: nn.Module) -> Tensor:
    """The tokens (batch, n, d) that enter a module; the model stops there."""
    seen: list[Tensor] = []

    def look(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append((args[0] if args else named["hidden_states"]).detach())
        raise _Enough

    handle = first.register_forward_pre_hook(look, with_kwargs=True)
    try:
        with torch.no_grad(), contextlib.suppress(_Enough):
            model(**options)
    finally:
        handle.remove()
    return seen[0].double()


def network_of(model: nn.Module, options: dict[str, Tensor]) -> tuple[Entered, Tensor]:
    """The model on one input as a function of its tokens, with the map that it is, and these tokens."""
    stack, tokens = stack_of(model), options["input_ids"].shape[-1]
    whole = maps.Compose((*stack.blocks, *stack.last, *_readout(model, tokens)))
    found = Entered(model, options, stack.first, whole)
    x = entering(model, options, stack.first)[0]
    with torch.no_grad():
        own = found(x.unsqueeze(0).to(next(model.parameters()).dtype))[0].double()
    gap = relative_gap(whole(x), own)
    if not gap <= TOLERANCE:
        name = type(model).__name__
        what = f"is a {name}, whose layers as they are read differ from what it computes by {gap:.1e}"
        raise ArgumentError("MODEL", what, "declare it yourself and call regard.decide")
    return found, x


def stack_of(model: nn.Module) -> Stack:
    """The layers of a model of a family that is known."""
    for holder, name, read in FAMILIES:
        for module in model.modules():
            inner = getattr(module, holder, None)
            layers = getattr(inner, name, None) if holder else getattr(module, name, None)
            if isinstance(layers, nn.ModuleList) and len(layers) and _is_known(layers[0], name):
                return read(module, layers)
    kinds = "BERT and its relatives, DistilBERT and GPT-2"
    raise ArgumentError(
        "MODEL", f"is a {type(model).__name__}, whose layers are not read", f"it takes {kinds}"
    )


def _is_known(layer: nn.Module, name: str) -> bool:
    return hasattr(layer, {"layer": "attention", "h": "attn"}[name])


def _encoder(module: Any, layers: Any) -> Stack:
    """BERT and DistilBERT: the norm comes after the residual connection."""
    read = _distil_layer if hasattr(layers[0], "sa_layer_norm") else _bert_layer
    return Stack(layers[0], tuple(read(layer, module.config) for layer in layers))


def _bert_layer(layer: Any, config: Any) -> maps.Compose:
    own, out = layer.attention.self, layer.attention.output
    heads = attention(_parts(own, ("query", "key", "value")), affine(out.dense), own.num_attention_heads)
    hidden = _hidden(layer.intermediate.dense, layer.output.dense, config.hidden_act)
    return maps.post_norm(heads, hidden, declare.one(out.LayerNorm), declare.one(layer.output.LayerNorm))


def _distil_layer(layer: Any, config: Any) -> maps.Compose:
    own = layer.attention
    heads = attention(_parts(own, ("q_lin", "k_lin", "v_lin")), affine(own.out_lin), config.n_heads)
    hidden = _hidden(layer.ffn.lin1, layer.ffn.lin2, config.activation)
    return maps.post_norm(
        heads, hidden, declare.one(layer.sa_layer_norm), declare.one(layer.output_layer_norm)
    )


def _decoder(module: Any, layers: Any) -> Stack:
    """GPT-2: norms come first, and tokens see those before them."""
    return Stack(
        layers[0], tuple(_gpt_layer(layer, module.config) for layer in layers), (declare.one(module.ln_f),)
    )


def _gpt_layer(layer: Any, config: Any) -> maps.Compose:
    if config.scale_attn_by_inverse_layer_idx or not config.scale_attn_weights:
        raise ArgumentError("MODEL", "scales its scores by the layer", "declare it and call regard.decide")
    weight, bias = affine(layer.attn.c_attn)
    parts = list(zip(weight.chunk(3, -1), bias.chunk(3, -1), strict=True))
    heads = attention(parts, affine(layer.attn.c_proj), config.n_head, causal=True)
    hidden = _hidden(layer.mlp.c_fc, layer.mlp.c_proj, config.activation_function)
    return maps.pre_norm(heads, hidden, declare.one(layer.ln_1), declare.one(layer.ln_2))


FAMILIES: tuple[tuple[str, str, Callable[[Any, Any], Stack]], ...] = (
    ("encoder", "layer", _encoder),
    ("transformer", "layer", _encoder),
    ("", "h", _decoder),
)
"""Where the list of layers is, and how it is read."""

Weights = tuple[Tensor, Tensor]


def attention(parts: Sequence[Weights], out: Weights, heads: int, causal: bool = False) -> maps.Heads:
    """Self-attention from the weights (d, h c) and biases of queries, keys and values."""
    (w_q, b_q), (w_k, b_k), (w_v, b_v) = parts
    potential = Dot(_split(w_q, heads), _split(w_k, heads), b_q=_cut(b_q, heads), b_k=_cut(b_k, heads))
    values = Linear(_split(w_v, heads), _cut(b_v, heads))
    support = Causal() if causal else Full()
    w_o = out[0].unflatten(0, (heads, -1)).contiguous()
    return maps.Heads(Attention(potential, values, support=support), w_o, out[1])


def affine(module: Any) -> Weights:
    """Weights (inputs, outputs) and bias of a linear layer, of torch or in the layout of GPT-2."""
    weight = module.weight.detach().double()
    weight = weight if type(module).__name__ == "Conv1D" else weight.mT
    bias = getattr(module, "bias", None)
    none = torch.zeros(weight.shape[-1], dtype=torch.float64)
    return weight.contiguous(), none if bias is None else bias.detach().double()


def _parts(module: Any, names: Sequence[str]) -> list[Weights]:
    return [affine(getattr(module, name)) for name in names]


def _hidden(first: Any, second: Any, name: str) -> maps.Map:
    if name not in ACTIVATIONS:
        raise ArgumentError("MODEL", f"has the activation {name}", f"it takes {', '.join(ACTIVATIONS)}")
    (w_1, b_1), (w_2, b_2) = affine(first), affine(second)
    return maps.feed_forward(ACTIVATIONS[name], w_1, w_2, b_1, b_2)


def _split(weight: Tensor, heads: int) -> Tensor:
    return weight.unflatten(-1, (heads, -1)).movedim(-2, 0).contiguous()


def _cut(bias: Tensor, heads: int) -> Tensor:
    return bias.unflatten(-1, (heads, -1))


def _readout(model: Any, tokens: int) -> tuple[maps.Map, ...]:
    """What follows the layers: a head of classes, the next token, or the mean."""
    if hasattr(model, "lm_head"):
        return one_of(tokens, tokens - 1), _affine_map(model.lm_head)
    if hasattr(model, "score"):
        return one_of(tokens, tokens - 1), _affine_map(model.score)
    if not hasattr(model, "classifier"):
        return (MixTokens(torch.full((1, tokens), 1 / tokens, dtype=torch.float64)),)
    first = one_of(tokens, 0)
    if hasattr(model, "pre_classifier"):
        return (
            first,
            _affine_map(model.pre_classifier),
            maps.Pointwise(maps.Relu()),
            _affine_map(model.classifier),
        )
    if hasattr(model.classifier, "out_proj"):
        dense, last = model.classifier.dense, model.classifier.out_proj
    else:
        pooler = next(
            module.pooler for module in model.modules() if getattr(module, "pooler", None) is not None
        )
        dense, last = pooler.dense, model.classifier
    return first, _affine_map(dense), maps.Pointwise(maps.Tanh()), _affine_map(last)


def one_of(tokens: int, index: int) -> MixTokens:
    """One token of a sequence."""
    return MixTokens(torch.eye(tokens, dtype=torch.float64)[index : index + 1])


def _affine_map(module: Any) -> maps.Affine:
    return maps.Affine(*affine(module))
