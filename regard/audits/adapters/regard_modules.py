"""The attention of regard.nn, alone or in its layers: it declares itself,
so any mechanism is read without being known here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard._types import Scalar
from regard.attention import Attention
from regard.audits.adapters.base import Adapter, Block, Call, Declared, Matrices, NotCovered, register
from regard.audits.adapters.calls import first_output, options_of
from regard.audits.adapters.declaration import sizes_of
from regard.audits.adapters.masks import support_of
from regard.audits.adapters.norms import is_norm
from regard.audits.adapters.projections import name_inside, parameter_names
from regard.audits.adapters.surroundings import ancestor, block_at
from regard.lookups import Linear
from regard.normalizers import SinkSoftmax, Softmax
from regard.potentials import Dot, Gaussian, Potential, Rotary, SoftCap
from regard.potentials.base import Sum, linear_terms
from regard.potentials.positions import PositionPotential
from regard.supports import Full, Support

BRANCHES = {"attention": "attention_branch", "cross_attention": "cross_branch"}
"""The residual connection around each attention of a layer."""


class MultiHeadAttention(Adapter):
    """One projection for queries, keys and values, in this order; any potential and normalizer.

    Rows of shaped attention are no laws.
    """

    def declare(self, model: nn.Module, path: str, module: nn.Module, call: Call) -> Declared:
        from regard.nn.attention import intersection

        options = options_of(module, call, {"x", "context", "support"})
        if module.shaped:
            raise NotCovered("it is shaped (I + P - uniform), so its rows are not probability laws")
        context = options.get("context")
        points, own = _as_batch(options["x"]), _as_batch(first_output(call.output))
        context = None if context is None else _as_batch(context)
        attention, (w_o, b_o) = _read(module)
        pairs = intersection(attention.support, options.get("support", Full()))
        return Declared(
            attention.replace(support=_flat(pairs, points, context)), w_o, b_o, points, context, None, own
        )

    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        attention, (w_o, b_o) = _read(module)
        dot, factor = product(attention.potential)
        lookup, w_q, w_k = attention.lookup, dot.w_q, dot.w_k
        assert isinstance(lookup, Linear)
        assert w_q is not None
        assert w_k is not None
        scale = torch.as_tensor(factor / _temperature(attention), dtype=w_q.dtype, device=w_q.device).reshape(
            -1, 1, 1
        )
        b_q = (
            None if dot.b_q is None else dot.b_q * scale.squeeze(-1)
        )  # one number for all heads, or one for each
        return Matrices(w_q * scale, w_k, lookup.w_v, w_o, 1.0, b_q, dot.b_k, lookup.b_v, b_o)

    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        above, name = ancestor(path, 1), path.rpartition(".")[2]
        if not above or not _in_layer(model.get_submodule(above), name):
            return None
        first: Any = model.get_submodule(above).get_submodule(BRANCHES[name]).norm_first
        attention, mlp = (f"{BRANCHES[name]}.norm", name), ("hidden_branch.norm", "feed_forward")
        return block_at(
            model, above, attention if first else attention[1:], mlp if first else mlp[1:], "norm"
        )

    def parameters(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
        return parameter_names(path, module, "projection", "output", "mechanism") + _buffer_names(
            path, module
        )

    def entering(self, model: nn.Module, path: str, module: nn.Module) -> str | None:
        """The norm in front of self-attention in a pre-norm layer, for scores that matrices say wholly:
        dot products under a softmax.
        """
        block = self.block(model, path, module)
        if (
            block is None
            or len(block.attention) == 1
            or path.rpartition(".")[2] != "attention"
            or not _is_scaled_dot(module)
        ):
            return None
        return block.attention[0] if is_norm(model.get_submodule(block.attention[0])) else None


def _read(module: Any) -> tuple[Attention, tuple[Tensor, Tensor | None]]:
    """The heads of a module and what joins them, in its own numbers."""
    from regard.nn.declaration import (
        attention_of,
        detach,
        mixing,
    )  # there already: a module of regard.nn is at hand

    return attention_of(module, detach), mixing(module, detach)


def _as_batch(tokens: Any) -> Tensor:
    """Tokens as (batch, n, d)."""
    if not isinstance(tokens, Tensor) or tokens.ndim not in (2, 3):
        found = (
            f"of shape {list(tokens.shape)}" if isinstance(tokens, Tensor) else f"a {type(tokens).__name__}"
        )
        raise NotCovered(f"its tokens are {found}, not (batch, tokens, width)")
    tokens = tokens.detach()
    return tokens if tokens.ndim == 3 else tokens.unsqueeze(0)


def _flat(support: Support, points: Tensor, context: Tensor | None) -> Support:
    """A support that differs between inputs or heads as the pairs it allows, in the form that other
    adapters give; any other as it is.
    """
    batch, n, m = sizes_of(points, context)
    queries, keys = torch.arange(n, device=points.device), torch.arange(m, device=points.device)
    if support.allows(queries[:1], keys).ndim == 2:
        return support
    allowed = support.allows(queries, keys)
    allowed = allowed.expand(*allowed.shape[:-2], n, m)
    return support_of((allowed if allowed.ndim == 4 else allowed.unsqueeze(0)).expand(batch, -1, -1, -1))


def _temperature(attention: Attention) -> Scalar:
    normalizer = attention.normalizer
    return normalizer.temperature if isinstance(normalizer, (Softmax, SinkSoftmax)) else 1.0


def product(potential: Potential) -> tuple[Dot | Gaussian, Scalar]:
    """The part factor · q·k of scores, which decides how fast they grow; rotations,
    caps and biases by position do not change it.
    """
    moving = [
        (term, factor) for term, factor in linear_terms(potential) if not isinstance(term, PositionPotential)
    ]
    if len(moving) == 1:
        term, factor = moving[0]
        if isinstance(term, (Rotary, SoftCap)):
            inner, own = product(term.potential)
            return inner, factor * own
        if isinstance(term, (Dot, Gaussian)) and term.w_q is not None:
            width = term.w_q.shape[-1]
            own = term.factor(width) if isinstance(term, Dot) else term.bandwidth_at(width) ** -2
            return term, factor * own
    raise NotCovered(
        f"the scores of {type(potential).__name__} are not a multiple of the product of queries and keys: "
        "they have no QK norm"
    )


def _is_scaled_dot(module: Any) -> bool:
    """Whether scores are scaled dot products with biases by position alone and rows their softmax:
    then the matrices say all of it.
    """
    attention = module.mechanism.value()
    terms = attention.potential.terms if isinstance(attention.potential, Sum) else (attention.potential,)
    others = [term for term in terms if not isinstance(term, PositionPotential)]
    return (
        isinstance(attention.normalizer, Softmax)
        and len(others) == 1
        and isinstance(others[0], Dot)
        and not module.shaped
    )


def _in_layer(layer: nn.Module, name: str) -> bool:
    from regard.nn.layers import DecoderLayer, EncoderLayer

    return type(layer) in (EncoderLayer, DecoderLayer) and name in BRANCHES


def _buffer_names(path: str, module: nn.Module) -> tuple[str, ...]:
    """Tensors of the mechanism that are fixed count too."""
    return tuple(
        name_inside(path, f"mechanism.{name}")
        for name, _ in module.get_submodule("mechanism").named_buffers()
    )


register("MultiHeadAttention", adapter=MultiHeadAttention(), package="regard.nn.")
