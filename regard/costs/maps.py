"""What the maps of regard take: one rule each, from shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard._heads import head_count, match_key_heads, repeat_groups
from regard._object import Object
from regard.attention import Attention
from regard.costs.account import (
    FEED_FORWARD,
    MIXING,
    NORMALIZATION,
    OTHER,
    OUTPUT,
    PROJECTIONS,
    SCORES,
    SOFTMAX,
    Cost,
    Ledger,
    Part,
    causal_pairs,
    size,
)
from regard.costs.costing import assess, charge
from regard.costs.sizes import Sizes
from regard.costs.trace import Trace, without_memory
from regard.errors import ArgumentError
from regard.fixed_point import FixedPoint
from regard.maps import (
    Affine,
    Compose,
    FromQueries,
    Gated,
    Heads,
    Joint,
    Map,
    Normalize,
    Pointwise,
    Residual,
    ToContext,
)
from regard.measure import Measure
from regard.nonexpansive import Center, GroupSort, IntoBall, Reflected, Split
from regard.normalizers import LinearKernel
from regard.parameters import Tokens
from regard.parameters import width as width_of
from regard.potentials import Potential
from regard.potentials.reductions import Reduction, reduce
from regard.supports import Causal, Support, Window
from regard.supports.base import conjuncts

BLOCK = 1 << 24
"""Pairs of a support that are looked at together."""


@assess.rule(Map)
@assess.rule(Attention)
def _assess(map: Any, sizes: Sizes, inputs: Any) -> Cost:
    """Charge the map for one sequence without memory; a batch takes as much for each."""
    if inputs is not None:
        raise ArgumentError(
            "inputs",
            "are given for a map of regard",
            "leave them out: a map takes one sequence, whose sizes are enough",
        )
    ledger = Ledger(sizes, square=sizes.context is None)
    width = sizes.width or width_of(map, Tokens.QUERIES)
    if width is None:
        raise ArgumentError(
            "sizes", f"give no width, and {type(map).__name__} takes any", "give Sizes(tokens, width=...)"
        )
    with without_memory():
        charge.one(map, torch.empty(sizes.tokens, width, dtype=_dtype(map)), ledger)
    return ledger.cost()


def _dtype(map: Object) -> torch.dtype:
    kinds = [
        leaf.dtype
        for leaf in pytree.tree_leaves(map)
        if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point
    ]
    return kinds[0] if kinds else torch.get_default_dtype()


@charge.rule(Map)
def _map(map: Map, x: Tensor, ledger: Ledger) -> Tensor:
    """A map without a rule of its own: what it runs is counted."""
    value = _trace(OTHER, lambda: map(x), x, ledger)
    ledger.own(OTHER, *_floating(map))
    ledger.keep(x)
    return value


@charge.rule(Compose)
def _compose(map: Compose, x: Tensor, ledger: Ledger) -> Tensor:
    for inner in map.maps:
        x = charge.one(inner, x, ledger)
    return x


@charge.rule(Residual)
def _residual(map: Residual, x: Tensor, ledger: Ledger) -> Tensor:
    value: Tensor = x + charge.one(map.map, x, ledger)
    return value


@charge.rule(FixedPoint)
def _fixed_point(map: FixedPoint, x: Tensor, ledger: Ledger) -> Tensor:
    """As many evaluations as it is declared with; solvers stop sooner."""
    value = x
    for _ in range(map.steps):
        value = charge.one(map.map, value, ledger) + x
    return value


@charge.rule(Reflected)
def _reflected(map: Reflected, x: Tensor, ledger: Ledger) -> Tensor:
    value: Tensor = x - map.step * charge.one(map.attention, x, ledger)
    return value


@charge.rule(Split)
def _split(map: Split, x: Tensor, ledger: Ledger) -> Tensor:
    pieces = x.chunk(len(map.maps), -1)
    return torch.cat([charge.one(f, piece, ledger) for f, piece in zip(map.maps, pieces, strict=True)], -1)


@charge.rule(IntoBall)
@charge.rule(Center)
@charge.rule(GroupSort)
def _tokenwise(map: IntoBall | Center | GroupSort, x: Tensor, ledger: Ledger) -> Tensor:
    ledger.keep(x)
    return map(x)


@charge.rule(Affine)
def _affine(map: Affine, x: Tensor, ledger: Ledger) -> Tensor:
    ledger.own(FEED_FORWARD, map.b)
    if _is_identity(map.w):
        return x if map.b is None else x + map.b
    return ledger.product(FEED_FORWARD, x, map.w)


def _is_identity(w: Tensor) -> bool:
    """Whether a matrix is exactly the identity, which is how a bias alone is declared;
    one without memory has no entries to tell.
    """
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

    if w.shape[0] != w.shape[1] or w.is_meta or isinstance(w, FakeTensor):
        return False
    with unset_fake_temporarily():
        return bool((w.diagonal() == 1).all()) and int(w.count_nonzero()) == len(w)


@charge.rule(Gated)
def _gated(map: Gated, x: Tensor, ledger: Ledger) -> Tensor:
    ledger.own(FEED_FORWARD, map.b, map.b_gate)
    inner, gate = ledger.product(FEED_FORWARD, x, map.w), ledger.product(FEED_FORWARD, x, map.w_gate)
    active = map.activation(inner)
    ledger.keep(inner, gate, active)
    return ledger.product(FEED_FORWARD, active * gate, map.w_out)


@charge.rule(Pointwise)
def _pointwise(map: Pointwise, x: Tensor, ledger: Ledger) -> Tensor:
    ledger.keep(x)
    return map(x)


@charge.rule(Normalize)
def _normalize(map: Normalize, x: Tensor, ledger: Ledger) -> Tensor:
    ledger.own(NORMALIZATION, map.weight, map.bias)
    ledger.keep(x, *(x.new_empty(*x.shape[:-1], 1) for _ in range(2 if map.centered else 1)))
    return map(x)


@charge.rule(Heads)
def _heads(map: Heads, x: Tensor, ledger: Ledger) -> Tensor:
    ledger.own(OUTPUT, map.b_o)
    return ledger.product(OUTPUT, charge.one(map.attention, x, ledger), map.w_o).sum(-3)


@charge.rule(Attention)
def _attention(attention: Attention, x: Tensor, ledger: Ledger) -> Tensor:
    if ledger.sizes.context is None:
        return _attend(attention, x, x, ledger)
    return _attend(
        attention,
        x,
        x.new_empty(ledger.sizes.context, width_of(attention, Tokens.KEYS) or x.shape[-1]),
        ledger,
    )


@charge.rule(ToContext)
def _to_context(map: ToContext, x: Tensor, ledger: Ledger) -> Tensor:
    points = map.context.points if isinstance(map.context, Measure) else map.context
    ledger.square = False
    return _attend(map.attention, x, torch.empty(points.shape, dtype=points.dtype), ledger)


@charge.rule(FromQueries)
def _from_queries(map: FromQueries, x: Tensor, ledger: Ledger) -> Tensor:
    ledger.square = False
    return _attend(map.attention, torch.empty(map.queries.shape, dtype=map.queries.dtype), x, ledger)


@charge.rule(Joint)
def _joint(map: Joint, x: Tensor, ledger: Ledger) -> Tensor:
    ledger.square = False
    return _attend(map.attention, x[..., : map.queries, :], x[..., map.queries :, :], ledger)


def _attend(attention: Attention, x: Tensor, y: Tensor, ledger: Ledger) -> Tensor:
    """Projections are what the potential and the lookup do with tokens; then come pairs,
    or sums where the kernel allows them.
    """
    potential, _ = attention.normalizer.acting(attention.potential)
    marks = torch.arange(x.shape[-2]), torch.arange(y.shape[-2])
    queries, keys = _trace(PROJECTIONS, lambda: potential.features(x, y, *marks), (x, y), ledger)
    values = _trace(PROJECTIONS, lambda: attention.lookup.values(y, None), y, ledger)
    ledger.own(PROJECTIONS, *_floating((attention.potential, attention.lookup, attention.normalizer)))
    ledger.keep(x, y, *(t for t in pytree.tree_leaves((queries, keys)) if isinstance(t, Tensor)), values)
    if isinstance(attention.normalizer, LinearKernel):
        return _sum_features(attention, x, y, ledger)
    heads = max(head_count(queries), x.shape[-3] if x.ndim > 2 else 1)
    return _pairs(
        attention,
        potential,
        (queries, match_key_heads(queries, keys, heads)),
        repeat_groups("values", values, heads),
        ledger,
    )


def _pairs(
    attention: Attention, potential: Potential, features: tuple[Any, Any], values: Tensor, ledger: Ledger
) -> Tensor:
    """Scores, normalizing and mixing, as a fused kernel does them: matrices of pairs are not written."""
    with Trace(features) as trace:
        scores = potential.pair(*features)
    out = scores.to(values.dtype) @ values  # scores may have more digits than values
    batch, seen = (
        ledger.sizes.batch,
        _share(attention.support, ledger.sizes.causal, scores.shape[-2], scores.shape[-1]),
    )
    pairs = batch * out.shape[:-2].numel() * scores.shape[-2] * scores.shape[-1]
    flops = (
        batch
        * (out.shape[:-2].numel() // scores.shape[:-2].numel())
        * _score_flops(potential, features, scores, trace)
    )
    inputs = sum(size(t) for t in pytree.tree_leaves(features) if isinstance(t, Tensor))
    ledger.book(Part(SCORES, flops, int(flops * seen), SOFTMAX * pairs, moved=batch * inputs))
    mixing = 2 * pairs * values.shape[-1]
    ledger.book(Part(MIXING, mixing, int(mixing * seen), moved=batch * (size(values) + size(out))))
    ledger.keep(out, out.new_empty(out.shape[:-1]))
    return out


def _score_flops(potential: Potential, features: tuple[Any, Any], scores: Tensor, trace: Trace) -> int:
    """Scores that are dot products run as such; others take the products that their potential takes."""
    reduction = reduce.one(potential, *features, False)
    return (
        2 * scores.numel() * reduction.queries.shape[-1] if isinstance(reduction, Reduction) else trace.flops
    )


def _sum_features(attention: Attention, x: Tensor, y: Tensor, ledger: Ledger) -> Tensor:
    """A feature kernel: sums over keys in the order that its engine takes;
    what tokens need has been booked.
    """
    with Trace((x, y)) as trace:
        out: Tensor = attention(x) if y is x else attention(x, y)
    with Trace((x, y)) as features:
        potential, _ = attention.normalizer.acting(attention.potential)
        potential.features(x, y, torch.arange(x.shape[-2]), torch.arange(y.shape[-2]))
        attention.lookup.values(y, None)
    flops = ledger.sizes.batch * (trace.flops - features.flops)
    ledger.book(Part(MIXING, flops, flops, moved=ledger.sizes.batch * size(out)))
    ledger.square = False
    return out


def _trace(name: str, run: Callable[[], Any], inputs: Any, ledger: Ledger) -> Any:
    """Run something on shapes and book its products."""
    with Trace(inputs) as trace:
        value = run()
    flops, batch = trace.flops * ledger.sizes.batch, ledger.sizes.batch
    moved = sum(event.fixed + batch * event.moved for event in trace.events if event.flops)
    ledger.book(Part(name, flops, flops, moved=moved))
    return value


def _floating(value: Any) -> list[Tensor]:
    return [
        leaf
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point
    ]


def _share(support: Support, causal: bool | None, queries: int, keys: int) -> Fraction:
    """The share of pairs that are visible; `causal` overrules the support."""
    if causal is not None:
        return Fraction(causal_pairs(queries, keys), queries * keys) if causal else Fraction(1)
    if all(isinstance(part, Causal) for part in conjuncts(support)):  # or none, which is everything
        return Fraction(causal_pairs(queries, keys) if conjuncts(support) else queries * keys, queries * keys)
    if all(isinstance(part, (Causal, Window)) for part in conjuncts(support)):
        spans = (support.span(row, row) for row in range(queries))
        seen = (math.floor(min(high, keys - 1)) - math.ceil(max(low, 0)) + 1 for low, high in spans)
        return Fraction(sum(max(0, one) for one in seen), queries * keys)
    return _count_pairs(support, queries, keys)


def _count_pairs(support: Support, queries: int, keys: int) -> Fraction:
    """Look at every pair, some rows at a time, with entries."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    seen = looked = 0
    with unset_fake_temporarily():
        columns = torch.arange(keys)
        for rows in torch.arange(queries).split(max(1, BLOCK // keys)):
            allowed = support.allows(rows, columns)
            allowed = allowed.expand(*allowed.shape[:-2], len(rows), keys)
            seen, looked = seen + int(allowed.sum()), looked + allowed.numel()
    return Fraction(seen, looked)
