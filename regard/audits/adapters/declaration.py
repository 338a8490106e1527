"""From what an adapter has read — matrices, pairs, positions — to the declaration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from regard.attention import Attention
from regard.audits.adapters.base import Call, Declared, Matrices, NotCovered
from regard.audits.adapters.calls import first_output
from regard.audits.adapters.masks import Pairs, bias_of, support_of
from regard.audits.adapters.rotary import Turning, check_turning, marks_of, positions_of
from regard.hf.plug import Plug
from regard.lookups import Linear
from regard.normalizers import Softmax
from regard.potentials import Dot, Potential, Rotary, SoftCap

PROJECTIONS = ("w_q", "w_k", "b_q", "b_k")
"""What a potential on projected points has, besides its own numbers."""


def potential_of(matrices: Matrices, turning: Turning | None = None) -> Potential:
    """Scaled dot products, turned by positions and capped where the module does that."""
    plain = Dot(matrices.w_q, matrices.w_k, matrices.scale, matrices.b_q, matrices.b_k)
    potential: Potential = plain if matrices.potential is None else matrices.potential
    if turning is not None:
        potential = Rotary(potential, frequencies=turning.frequencies)
    return potential if matrices.softcap is None else SoftCap(potential, matrices.softcap)


def plugged(potential: Potential, plug: Plug | None) -> Potential:
    """The potential that regard.hf registered in the place of dot products, on the same projections and under
    the same positions and cap.
    """
    if plug is None or plug.potential is None:
        return potential
    if isinstance(potential, (Rotary, SoftCap)):
        return potential.replace(potential=plugged(potential.potential, plug))
    own = {name: getattr(plug.potential, name, potential) for name in PROJECTIONS}
    if type(potential) is not Dot or any(value is not None for value in own.values()):
        raise NotCovered(f"the registered potential {plug.potential!r} is not one of projected points")
    return plug.potential.replace(**{name: getattr(potential, name) for name in PROJECTIONS})


def declare_self_attention(
    matrices: Matrices, potential: Potential, pairs: Pairs, points: Tensor, own: Tensor
) -> Declared:
    """Self-attention whose positions are 0, 1, 2, ..."""
    bias, potential = bias_of(pairs, len(matrices.w_q)), plugged(potential, pairs.plug)
    potential = potential if bias is None else potential + bias
    normalizer = Softmax() if pairs.plug is None else pairs.plug.normalizer
    lookup, support = Linear(matrices.w_v, matrices.b_v), support_of(pairs.allowed)
    attention = Attention(potential, lookup, normalizer=normalizer, support=support)
    return Declared(attention, matrices.w_o, matrices.b_o, points, None, None, own)


def declare_rotary(
    matrices: Matrices, turning: Turning, options: dict[str, Any], pairs: Pairs, call: Call
) -> Declared:
    """Self-attention with rotary positions, read from the call."""
    points: Tensor = options["hidden_states"].detach()
    positions = positions_of(options, points)
    check_turning(turning, options.get("position_embeddings"), positions)
    marks = marks_of(positions, pairs.allowed)
    found = declare_self_attention(
        matrices, potential_of(matrices, turning), pairs, points, first_output(call.output)
    )
    return found if marks is None else _at(found, pairs, marks)


def _at(found: Declared, pairs: Pairs, marks: Tensor) -> Declared:
    """The same at other positions: the support becomes a relation between these."""
    if pairs.bias is not None:
        raise NotCovered(
            "an additive mask with a bias cannot be expressed at positions other than 0, 1, 2, ..."
        )
    attention = found.attention.replace(support=support_of(pairs.allowed, marks))
    return replace(found, attention=attention, marks=marks)


def sizes_of(points: Tensor, context: Tensor | None = None) -> tuple[int, int, int]:
    """(batch, n, m)."""
    return points.shape[0], points.shape[1], (points if context is None else context).shape[1]


def split_output(output: Any, module: nn.Module) -> Tensor:
    """An output that stops before the output projection, (batch, n, h · e), as (batch, h, n, e)."""
    heads: Any = module.num_attention_heads
    return first_output(output).unflatten(-1, (heads, -1)).transpose(1, 2)
