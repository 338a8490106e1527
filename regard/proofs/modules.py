"""Modules of torch as maps: what a layer does, declared once, in float64 and cut off from its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

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
    Mapping,
    Normalize,
    Pointwise,
    Relu,
    Silu,
    Tanh,
    post_norm,
    pre_norm,
)
from regard.potentials import Dot
from regard.proofs.certification import declare
from regard.proofs.intact import DROPOUTS, drops, in_training, refuse_altered
from regard.proofs.locating import steps
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
    refuse_altered(module, nn.Linear)
    return Affine(_copy(module.weight).mT.contiguous(), _optional(module.bias))


@declare.rule(nn.LayerNorm)
def _layer_norm(module: nn.LayerNorm) -> Normalize:
    refuse_altered(module, nn.LayerNorm)
    _one_axis(module.normalized_shape)
    return Normalize(float(module.eps), _optional(module.weight), _optional(module.bias))


@declare.rule(nn.RMSNorm)
def _rms_norm(module: nn.RMSNorm) -> Normalize:
    refuse_altered(module, nn.RMSNorm)
    _one_axis(module.normalized_shape)
    return Normalize(eps_of(module), _optional(module.weight), None, centered=False)


def eps_of(module: nn.RMSNorm) -> float:
    """The eps of an RMSNorm. Without one, PyTorch takes that of the dtype it computes in: float32 for
    bfloat16 and float16 too. A module without weights has the default dtype.
    """
    if module.eps is not None:
        return float(module.eps)
    kind = torch.get_default_dtype() if module.weight is None else module.weight.dtype
    return float(torch.finfo(torch.promote_types(kind, torch.float32)).eps)


@declare.rule(nn.ReLU)
@declare.rule(nn.SiLU)
@declare.rule(nn.Tanh)
def _pointwise(module: nn.Module) -> Pointwise:
    kind = _known(module, ACTIVATIONS)
    refuse_altered(module, kind)
    return Pointwise(ACTIVATIONS[kind])


@declare.rule(nn.GELU)
def _gelu(module: nn.GELU) -> Pointwise:
    refuse_altered(module, nn.GELU)
    return Pointwise(Gelu(tanh=module.approximate == "tanh"))


@declare.rule(nn.Sequential)
def _sequential(module: nn.Sequential) -> Mapping:
    """The modules one after another; those that do nothing are left out."""
    refuse_altered(module, nn.Sequential)
    return _chain([declare.one(inner) for inner in module])


@declare.rule(nn.Identity)
def _identity(module: nn.Identity) -> Pointwise:
    refuse_altered(module, nn.Identity)
    return Pointwise(Unchanged())


@declare.rule(nn.Dropout)
@declare.rule(nn.Dropout1d)
@declare.rule(nn.Dropout2d)
@declare.rule(nn.Dropout3d)
@declare.rule(nn.AlphaDropout)
@declare.rule(nn.FeatureAlphaDropout)
def _dropout(module: Any) -> Pointwise:
    refuse_altered(module, _known(module, DROPOUTS))
    if drops(module):
        raise in_training("its dropout is random")
    return Pointwise(Unchanged())


@declare.rule(nn.MultiheadAttention)
def _attention(module: nn.MultiheadAttention) -> Heads:
    """Self-attention: queries, keys and values are projections of one sequence."""
    refuse_altered(module, nn.MultiheadAttention)
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
    refuse_altered(module, nn.TransformerEncoderLayer)
    activation = _activation(module.activation)
    _refuse_other_fused(module, activation)
    inner = (module.linear1, module.dropout, module.linear2, module.dropout2)
    before, *after = (declare.one(part) for part in inner)
    attention = _chain([declare.one(module.self_attn), declare.one(module.dropout1)])
    first, second = declare.one(module.norm1), declare.one(module.norm2)
    hidden = _chain([before, Pointwise(activation), *after])
    return (pre_norm if module.norm_first else post_norm)(attention, hidden, first, second)


FUSED: dict[int, Activation] = {1: Relu(), 2: Gelu()}
"""The activations of PyTorch's fused encoder layer, by the number that a layer keeps of its own."""


def _refuse_other_fused(module: nn.TransformerEncoderLayer, activation: Activation) -> None:
    """Refuse a layer that has another activation where PyTorch runs it fused: in eval mode, without
    gradients, on batches.
    """
    fused, attention = FUSED.get(module.activation_relu_or_gelu), module.self_attn
    if fused is None or fused == activation or type(attention) is not nn.MultiheadAttention:
        return
    if (
        torch.backends.mha.get_fastpath_enabled()
        and not module.training
        and attention.batch_first
        and attention.num_heads % 2 == 0
        and attention.in_proj_bias is not None
        and attention._qkv_same_embed_dim
        and getattr(module.norm1, "eps", None) == getattr(module.norm2, "eps", None)
    ):
        raise Refusal(
            f"without gradients PyTorch runs this layer fused, with {fused!r} in place of {activation!r}; "
            "call torch.backends.mha.set_fastpath_enabled(False), or build the layer with that activation"
        )


@declare.rule(nn.TransformerEncoder)
def _encoder(module: nn.TransformerEncoder) -> Compose:
    refuse_altered(module, nn.TransformerEncoder)
    last = [] if module.norm is None else [declare.one(module.norm)]
    return Compose(steps(Compose((*(declare.one(layer) for layer in module.layers), *last))))


def _known(module: nn.Module, kinds: Iterable[type[nn.Module]]) -> type[nn.Module]:
    """Which of these a module is."""
    return next(kind for kind in kinds if isinstance(module, kind))


def _chain(maps: Sequence[Mapping]) -> Mapping:
    """Maps one after another, without those that do nothing."""
    acting = [map for map in maps if not (isinstance(map, Pointwise) and type(map.activation) is Unchanged)]
    acting = acting or [Pointwise(Unchanged())]
    return acting[0] if len(acting) == 1 else Compose(tuple(acting))


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
        raise in_training("its dropout of attention weights is random")
    refuse_altered(module.out_proj, _known(module.out_proj, (NonDynamicallyQuantizableLinear, nn.Linear)))


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
