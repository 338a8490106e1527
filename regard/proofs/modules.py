"""Modules of torch as maps: what a layer does, declared once, in float64 and cut off from its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard._upper import Upper, exact
from regard.attention import Attention
from regard.lookups import Linear
from regard.maps import (
    Activation,
    Affine,
    Compose,
    Gelu,
    Heads,
    Map,
    Normalize,
    Pointwise,
    Relu,
    Silu,
    Tanh,
    feed_forward,
    post_norm,
    pre_norm,
)
from regard.potentials import Dot
from regard.proofs.certification import declare
from regard.proofs.theorem import Refusal
from regard.proofs.tokenwise import steepness


@dataclass(frozen=True, eq=False, repr=False)
class Unchanged(Activation):
    """x: what dropout is outside of training."""

    def __call__(self, x: Tensor) -> Tensor:
        return x


@steepness.rule(Unchanged)
def _unit(activation: Unchanged) -> Upper:
    return exact(1.0)


FUNCTIONS: dict[Any, Activation] = {
    functional.relu: Relu(),
    torch.relu: Relu(),
    functional.gelu: Gelu(),
    functional.silu: Silu(),
    functional.tanh: Tanh(),
    torch.tanh: Tanh(),
}
"""Activations that encoder layers hold as functions."""
ACTIVATIONS: dict[type[nn.Module], Activation] = {nn.ReLU: Relu(), nn.SiLU: Silu(), nn.Tanh: Tanh()}
"""Activations that are modules without settings."""


@declare.rule(object)
def _unknown(module: Any) -> Map:
    name = type(module).__name__
    if type(module).__module__.startswith("transformers."):
        known = "regard.decisions.loaded_on(directory, text) reads models of transformers"
    else:
        known = "give a part of it that is known, such as its encoder (decide takes the rest as readout=)"
    raise Refusal(
        f"what a {name} does is not known; {known}, or say it with @regard.declare.rule({name}) and a map of "
        "regard.maps"
    )


@declare.rule(nn.Linear)
def _linear(module: nn.Linear) -> Affine:
    _refuse_changed_module(module, nn.Linear)
    return Affine(_copy(module.weight).mT.contiguous(), _optional(module.bias))


@declare.rule(nn.LayerNorm)
def _layer_norm(module: nn.LayerNorm) -> Normalize:
    _refuse_changed_module(module, nn.LayerNorm)
    _one_axis(module.normalized_shape)
    return Normalize(float(module.eps), _optional(module.weight), _optional(module.bias))


@declare.rule(nn.RMSNorm)
def _rms_norm(module: nn.RMSNorm) -> Normalize:
    """Without an eps the module takes that of its input's dtype, here that of its weights."""
    _refuse_changed_module(module, nn.RMSNorm)
    _one_axis(module.normalized_shape)
    kind = torch.get_default_dtype() if module.weight is None else module.weight.dtype
    eps = torch.finfo(kind).eps if module.eps is None else module.eps
    return Normalize(float(eps), _optional(module.weight), None, centered=False)


@declare.rule(nn.ReLU)
@declare.rule(nn.SiLU)
@declare.rule(nn.Tanh)
def _pointwise(module: nn.Module) -> Pointwise:
    kind = next(kind for kind in ACTIVATIONS if isinstance(module, kind))
    _refuse_changed_module(module, kind)
    return Pointwise(ACTIVATIONS[kind])


@declare.rule(nn.GELU)
def _gelu(module: nn.GELU) -> Pointwise:
    _refuse_changed_module(module, nn.GELU)
    return Pointwise(Gelu(tanh=module.approximate == "tanh"))


@declare.rule(nn.Sequential)
def _sequential(module: nn.Sequential) -> Map:
    """The modules one after another; those that do nothing are left out."""
    _refuse_changed_module(module, nn.Sequential)
    maps = [declare.one(inner) for inner in module if not _does_nothing(inner)] or [Pointwise(Unchanged())]
    return maps[0] if len(maps) == 1 else Compose(tuple(maps))


@declare.rule(nn.Identity)
@declare.rule(nn.Dropout)
def _identity(module: nn.Module) -> Pointwise:
    _does_nothing(module)
    return Pointwise(Unchanged())


@declare.rule(nn.MultiheadAttention)
def _attention(module: nn.MultiheadAttention) -> Heads:
    """Self-attention: queries, keys and values are projections of one sequence."""
    _refuse_changed_module(module, nn.MultiheadAttention)
    _check_attention(module)
    count = module.num_heads
    (w_q, w_k, w_v), (b_q, b_k, b_v) = _projections(module), _biases(module)
    values = Linear(_split(w_v, count), _split_bias(b_v, count))
    potential = Dot(
        _split(w_q, count), _split(w_k, count), b_q=_split_bias(b_q, count), b_k=_split_bias(b_k, count)
    )
    w_o = _copy(module.out_proj.weight).mT.unflatten(0, (count, -1)).contiguous()
    return Heads(Attention(potential, values), w_o, _optional(module.out_proj.bias))


@declare.rule(nn.TransformerEncoderLayer)
def _encoder_layer(module: nn.TransformerEncoderLayer) -> Compose:
    _refuse_changed_module(module, nn.TransformerEncoderLayer)
    for dropout in (module.dropout, module.dropout1, module.dropout2):
        _does_nothing(dropout)
    attention, first, second = (
        declare.one(inner) for inner in (module.self_attn, module.norm1, module.norm2)
    )
    before, after = declare.one(module.linear1), declare.one(module.linear2)
    hidden = feed_forward(_activation(module.activation), before.w, after.w, before.b, after.b)
    return (pre_norm if module.norm_first else post_norm)(attention, hidden, first, second)


@declare.rule(nn.TransformerEncoder)
def _encoder(module: nn.TransformerEncoder) -> Compose:
    _refuse_changed_module(module, nn.TransformerEncoder)
    maps = [inner for layer in module.layers for inner in declare.one(layer).maps]
    return Compose((*maps, declare.one(module.norm)) if module.norm is not None else tuple(maps))


def _refuse_changed_module(module: nn.Module, kind: type[nn.Module]) -> None:
    """Refuse a module of torch whose forward was replaced or that has hooks."""
    name = type(module).__name__
    if type(module).forward is not kind.forward or "forward" in vars(module):
        raise Refusal(
            f"{name} computes something other than {kind.__name__}; say what with @declare.rule({name})"
        )
    if module._forward_hooks or module._forward_pre_hooks:
        raise Refusal(f"{name} has hooks, which may change what it computes; remove them first")


def _does_nothing(module: nn.Module) -> bool:
    """Whether a module is the identity; dropout is, unless it is training."""
    if not isinstance(module, (nn.Identity, nn.Dropout)):
        return False
    _refuse_changed_module(module, nn.Dropout if isinstance(module, nn.Dropout) else nn.Identity)
    if isinstance(module, nn.Dropout) and module.training and module.p > 0:
        raise Refusal("dropout in training mode is random; call module.eval() first")
    return True


def _copy(parameter: Tensor) -> Tensor:
    return parameter.detach().to(torch.float64, copy=True)


def _optional(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else _copy(parameter)


def _one_axis(shape: tuple[int, ...]) -> None:
    if len(shape) != 1:
        raise Refusal(
            f"the norm layer normalizes over {len(shape)} axes; bounds are for one, the width of a token"
        )


def _check_attention(module: nn.MultiheadAttention) -> None:
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        raise Refusal(
            "add_bias_kv and add_zero_attn add keys that are not tokens; build the module without them"
        )
    if module.kdim != module.embed_dim or module.vdim != module.embed_dim:
        raise Refusal(
            "kdim and vdim differ from embed_dim, so it is not self-attention; declare ToContext(attention, "
            "context) instead"
        )
    if module.training and module.dropout > 0:
        raise Refusal("attention dropout in training mode is random; call module.eval() first")
    _refuse_changed_module(module.out_proj, nn.Linear)


def _projections(module: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    """w_q, w_k, w_v (d, d), packed in one parameter or separate."""
    if module.in_proj_weight is not None:
        return tuple(part.mT for part in _copy(module.in_proj_weight).chunk(3))
    return tuple(
        _copy(weight).mT for weight in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    )


def _biases(module: nn.MultiheadAttention) -> tuple[Tensor | None, ...]:
    return (None, None, None) if module.in_proj_bias is None else _copy(module.in_proj_bias).chunk(3)


def _split(weight: Tensor, heads: int) -> Tensor:
    """(d, h c) to (h, d, c)."""
    return weight.unflatten(-1, (heads, -1)).movedim(-2, 0).contiguous()


def _split_bias(bias: Tensor | None, heads: int) -> Tensor | None:
    return None if bias is None else bias.unflatten(-1, (heads, -1))


def _activation(found: Any) -> Activation:
    """The activation of an encoder layer, a function or a module."""
    if isinstance(found, nn.Module):
        declared = declare.one(found)
        if isinstance(declared, Pointwise):
            return declared.activation
    elif found in FUNCTIONS:
        return FUNCTIONS[found]
    raise Refusal(f"the activation {found!r} is not known; use relu, gelu, silu or tanh")
