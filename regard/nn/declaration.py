"""Modules as maps: projections join the mechanism, in float64 and cut off from the parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from regard._object import Object
from regard._verb import Verb
from regard.attention import Attention
from regard.errors import ArgumentError
from regard.lookups import Linear
from regard.maps import Added, Affine, Compose, Heads, Map, ToContext
from regard.normalizers import Softmax
from regard.parameters import with_parts
from regard.potentials import (
    Additive,
    Bilinear,
    Cosine,
    Dot,
    Gaussian,
    Laplace,
    NormedDot,
    Potential,
    Rotary,
    SoftCap,
    StudentT,
    XPos,
)
from regard.potentials.base import Scaled, Sum, simple_parts
from regard.potentials.positions import PositionPotential
from regard.proofs.subject import single_heads

if TYPE_CHECKING:
    from regard.nn.attention import MultiHeadAttention

projected = Verb("projected")
"""projected.one(potential, projections) -> the same scores from the tokens themselves.

Examples:
    >>> w = torch.randn(2, 4, 3)  # two heads
    >>> torch.equal(regard.nn.projected(regard.Dot(), regard.nn.Projections(w, w)).w_q, w)
    True
"""


@dataclass(frozen=True, eq=False, repr=False)
class Projections(Object):
    """w_q (h, d, c), b_q (h, c), w_k (g, d, c), b_k (g, c): how tokens become queries and keys.

    Examples:
        >>> w = torch.randn(2, 4, 3)  # two heads
        >>> both = regard.nn.Projections(w, w)
        >>> torch.equal(regard.nn.projected(regard.Dot(), both).w_q, w)
        True
    """

    w_q: Tensor
    w_k: Tensor
    b_q: Tensor | None = None
    b_k: Tensor | None = None

    def then(
        self, w_q: Tensor | None, w_k: Tensor | None, b_q: Tensor | None, b_k: Tensor | None
    ) -> dict[str, Tensor | None]:
        """These projections followed by those of a potential, by the names of its fields."""
        (first, offset), (second, shift) = (
            _after(self.w_q, self.b_q, w_q, b_q),
            _after(self.w_k, self.b_k, w_k, b_k),
        )
        return {"w_q": first, "w_k": second, "b_q": offset, "b_k": shift}

    def ungrouped(self) -> Projections:
        """The same with one projection of keys for each head."""
        heads = len(self.w_q)
        return self.replace(
            w_k=repeat_groups(self.w_k, heads),
            b_k=None if self.b_k is None else repeat_groups(self.b_k, heads),
        )


def _after(
    w: Tensor, b: Tensor | None, then: Tensor | None, offset: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """x ↦ (wᵀx + b) followed by y ↦ thenᵀy + offset."""
    if then is not None:
        w, b = w @ then, None if b is None else (b.unsqueeze(-2) @ then).squeeze(-2)
    return w, b if offset is None else offset.expand(*w.shape[:-2], -1) if b is None else b + offset


@projected.rule(object, Projections)
def _unknown(potential: Any, projections: Projections) -> Potential:
    name = type(potential).__name__
    raise ArgumentError(
        "mechanism",
        f"compares projected tokens by {name}, which takes no projections",
        f"say how with @projected.rule({name}, Projections)",
    )


@projected.rule(Dot, Projections)
@projected.rule(NormedDot, Projections)
@projected.rule(Cosine, Projections)
@projected.rule(Additive, Projections)
def _fields(potential: Any, projections: Projections) -> Potential:
    made: Potential = potential.replace(
        **projections.then(potential.w_q, potential.w_k, potential.b_q, potential.b_k)
    )
    return made


@projected.rule(Gaussian, Projections)
@projected.rule(Laplace, Projections)
@projected.rule(StudentT, Projections)
def _differences(potential: Any, projections: Projections) -> Potential:
    """Distances subtract what queries and keys make of one center, head by head: groups are written out."""
    return _fields(potential, projections.ungrouped())


@projected.rule(Bilinear, Projections)
def _bilinear(potential: Bilinear, projections: Projections) -> Dot:
    return Dot(scale=1.0, **projections.then(potential.a, None, None, None))


@projected.rule(Sum, Projections)
@projected.rule(Scaled, Projections)
@projected.rule(SoftCap, Projections)
@projected.rule(Rotary, Projections)
@projected.rule(XPos, Projections)
def _around(potential: Potential, projections: Projections) -> Potential:
    return with_parts(potential, Potential, lambda part: projected.one(part, projections))


@projected.rule(PositionPotential, Projections)
def _positions(potential: PositionPotential, projections: Projections) -> PositionPotential:
    return potential


def exact(value: Any) -> Any:
    """Real numbers in float64, copied and cut off from what they came from."""

    def copy(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        return part.detach().to(
            "cpu", torch.float64 if part.dtype.is_floating_point else part.dtype, copy=True
        )

    return pytree.tree_map(copy, value)


def detach(value: Any) -> Any:
    """The numbers as they are, cut off from what they came from."""
    return pytree.tree_map(lambda part: part.detach() if isinstance(part, Tensor) else part, value)


def attention_of(module: MultiHeadAttention, read: Callable[[Any], Any] = exact) -> Attention:
    """All heads of a module on tokens, before they are joined: (h, n, c); read: how its numbers are taken,
    `exact` or `detach`.
    """
    mechanism = read(module.mechanism.value())
    w_q, w_k, w_v = _parts(module, read(module.projection.weight).mT)
    b_q, b_k, b_v = (
        (None, None, None) if module.projection.bias is None else _parts(module, read(module.projection.bias))
    )
    potential = projected.one(mechanism.potential, Projections(w_q, w_k, b_q, b_k))
    if all(
        isinstance(part, PositionPotential) for part in simple_parts(potential)
    ):  # scores that know of no heads
        w_v, b_v = repeat_groups(w_v, module.heads), None if b_v is None else repeat_groups(b_v, module.heads)
    made: Attention = mechanism.replace(potential=potential, lookup=Linear(w_v, b_v))
    return made


def repeat_groups(groups: Tensor, heads: int, dim: int = 0) -> Tensor:
    """What groups of heads share, once for each head."""
    return groups if groups.shape[dim] == heads else groups.repeat_interleave(heads // groups.shape[dim], dim)


def _parts(module: MultiHeadAttention, packed: Tensor) -> tuple[Tensor, ...]:
    """(d, (h + 2g) c) as (h, d, c), (g, d, c), (g, d, c); a bias without d."""
    heads = packed.unflatten(-1, (-1, module.head_width))
    heads = heads.movedim(-2, 0).contiguous()
    return heads.split((module.heads, module.kv_heads, module.kv_heads), 0)


def mixing(module: MultiHeadAttention, read: Callable[[Any], Any] = exact) -> tuple[Tensor, Tensor | None]:
    """w_o (h, c, d) and b_o (d,)."""
    w_o = read(module.output.weight).mT.unflatten(0, (module.heads, -1)).contiguous()
    return w_o, None if module.output.bias is None else read(module.output.bias)


def self_heads(module: MultiHeadAttention) -> Map:
    """Σ_h attention_h(x) w_o[h] + b_o, and for shaped attention what stands beside it."""
    (w_o, b_o), attention = mixing(module), attention_of(module)
    heads = Heads(attention, w_o, b_o)
    return (
        heads
        if not module.shaped
        else Added((heads, _identity(module, attention, w_o), Heads(_uniform(attention, module.heads), -w_o)))
    )


def _identity(module: MultiHeadAttention, attention: Attention, w_o: Tensor) -> Affine:
    """x ↦ Σ_h v_h(x) w_o[h]: what I does in I + P - uniform."""
    lookup = attention.lookup
    assert isinstance(lookup, Linear)
    repeats = module.heads // module.kv_heads
    w = (lookup.w_v.repeat_interleave(repeats, 0) @ w_o).sum(0)
    return Affine(
        w,
        None
        if lookup.b_v is None
        else (lookup.b_v.repeat_interleave(repeats, 0).unsqueeze(-2) @ w_o).sum((0, -2)),
    )


def _uniform(attention: Attention, heads: int) -> Attention:
    """The same values under laws that are uniform on what is seen."""
    lookup = attention.lookup
    assert isinstance(lookup, Linear)
    queries, keys = (
        lookup.w_v.new_zeros(count, lookup.w_v.shape[-2], 1) for count in (heads, len(lookup.w_v))
    )
    return attention.replace(potential=Dot(queries, keys, 1.0), normalizer=Softmax())


def cross_heads(module: MultiHeadAttention, context: Tensor) -> Map:
    """x ↦ Σ_h attention_h(x, context) w_o[h] + b_o for one context (m, d)."""
    if context.ndim != 2:
        raise ArgumentError(
            "context", f"has shape {list(context.shape)}", "declare attention to one context (m, width)"
        )
    if module.shaped:
        raise ArgumentError(
            "context",
            "is given to shaped attention, where I + P - uniform acts on one sequence",
            "leave it out",
        )
    w_o, b_o = mixing(module)
    points = exact(context)
    parts = [
        Compose((ToContext(head, points), Affine(w)))
        for head, w in zip(single_heads(attention_of(module)), w_o, strict=True)
    ]
    parts[0] = Compose((parts[0].maps[0], Affine(w_o[0], b_o)))
    return parts[0] if len(parts) == 1 else Added(tuple(parts))


def norm_map(module: nn.Module) -> Any:
    """A norm layer, a linear layer, ... of torch as a map."""
    from regard.proofs.certification import declare

    return declare.one(module)
