"""The widths of tokens, composed before any theorem runs: what cannot run is not certified.

A width that a declaration leaves open, or that a map without a rule does not say, is None and fits
everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard import maps
from regard._verb import Verb
from regard.attention import Attention
from regard.domains import Domain
from regard.errors import ArgumentError
from regard.lipschitz_norm import LipschitzNorm
from regard.lookups import Factored, Identity, Linear, Lookup, NormedLinear, Table
from regard.measure import Measure
from regard.moments import Mean
from regard.nonexpansive import (
    Center,
    Flatten,
    GroupSort,
    IntoBall,
    MemoryStep,
    MixTokens,
    Pool,
    Reflected,
    Split,
    Unflatten,
)
from regard.parameters import Tokens, held
from regard.parameters import width as declared_width
from regard.potentials import Additive, Cosine, Dot, Potential, Rotary, SoftCap
from regard.potentials.base import Scaled, Sum
from regard.potentials.distance import DistancePotential
from regard.proofs.setting import width_of
from regard.proofs.subject import count_heads


@dataclass(frozen=True)
class Widths:
    """takes, gives: the widths of tokens before and after a map. keeps: both are the same,
    even where they are not known.
    """

    takes: int | None
    gives: int | None
    keeps: bool = False


@dataclass(frozen=True)
class Sides:
    """The widths of queries and keys that a potential compares. alike: both are the same,
    even where they are not known.
    """

    query: int | None = None
    key: int | None = None
    alike: bool = False


widths = Verb("widths")
"""widths.one(map, width) -> Widths, when tokens of this width go in; a mismatch is an ArgumentError."""

compared = Verb("compared")
"""compared.one(potential) -> Sides."""

looked_up = Verb("looked_up")
"""looked_up.one(lookup, width) -> Widths of values of keys of this width."""


def fit(map: Any, domain: Domain) -> None:
    """Refuse a map that cannot run on the tokens of a domain."""
    widths.one(map, width_of(domain))


def _met(argument: str, wanted: int | None, found: int | None, what: str = "the tokens have") -> int | None:
    """The common width."""
    if wanted is not None and found is not None and wanted != found:
        raise ArgumentError(
            argument, f"takes width {wanted} and {what} {found}", "give maps and a domain of widths that meet"
        )
    return found if wanted is None else wanted


def _inside(place: str, map: Any, width: int | None) -> Widths:
    """The widths of a part; errors say which part it is."""
    try:
        found: Widths = widths.one(map, width)
    except ArgumentError as error:
        raise ArgumentError(f"{place}.{error.argument}", error.found, error.remedy) from None
    return found


# Maps


@widths.rule(object)
def _open(map: Any, width: int | None) -> Widths:
    return Widths(width, None)


@widths.rule(maps.Affine)
def _affine(map: maps.Affine, width: int | None) -> Widths:
    return Widths(_met("w", map.w.shape[0], width), map.w.shape[1])


@widths.rule(maps.Pointwise)
def _pointwise(map: maps.Pointwise, width: int | None) -> Widths:
    return Widths(width, width, keeps=True)


@widths.rule(maps.Normalize)
def _normalize(map: maps.Normalize, width: int | None) -> Widths:
    for name, known in (("weight", map.weight), ("bias", map.bias)):
        width = _met(name, None if known is None else len(known), width)
    return Widths(width, width, keeps=True)


@widths.rule(maps.Gated)
def _gated(map: maps.Gated, width: int | None) -> Widths:
    width = _met("w", map.w.shape[0], width)
    return Widths(_met("w_gate", map.w_gate.shape[0], width), map.w_out.shape[1])


@widths.rule(LipschitzNorm)
def _lipschitz_norm(map: LipschitzNorm, width: int | None) -> Widths:
    return Widths(_met("w_q", map.w_q.shape[-2], width), map.w_v.shape[-1])


@widths.rule(maps.Compose)
def _compose(map: maps.Compose, width: int | None) -> Widths:
    takes, kept = width, True
    for k, inner in enumerate(map.maps):
        found = _inside(f"maps[{k}]", inner, width)
        takes = found.takes if takes is None and kept else takes
        kept, width = kept and found.keeps, found.gives
    return Widths(takes, width if not kept else takes, keeps=kept)


@widths.rule(maps.Added)
def _added(map: maps.Added, width: int | None) -> Widths:
    for k, part in enumerate(map.maps):
        width = _met(f"maps[{k}]", _inside(f"maps[{k}]", part, width).takes, width)
    found = [
        _inside(f"maps[{k}]", part, width) for k, part in enumerate(map.maps)
    ]  # what one part takes, all take
    given = {part.gives for part in found if part.gives is not None}
    if len(given) > 1:
        values = " and ".join(str(value) for value in sorted(given))
        raise ArgumentError(
            "maps", f"give values of widths {values}", "a sum needs maps that give values of one width"
        )
    return Widths(width, next(iter(given), None), keeps=any(part.keeps for part in found))


@widths.rule(maps.Residual)
def _residual(map: maps.Residual, width: int | None) -> Widths:
    found = _inside("map", map.map, width)
    if found.takes is not None and found.gives is not None and found.takes != found.gives:
        sizes = f"takes tokens of width {found.takes} to width {found.gives}"
        raise ArgumentError("map", sizes, "a residual connection needs a map that keeps the width")
    width = found.gives if found.takes is None else found.takes
    return Widths(width, width, keeps=True)


@widths.rule(IntoBall)
@widths.rule(Center)
@widths.rule(MixTokens)
@widths.rule(Pool)
def _keeps(map: Any, width: int | None) -> Widths:
    return Widths(width, width, keeps=True)


@widths.rule(GroupSort)
def _group_sort(map: GroupSort, width: int | None) -> Widths:
    if width is not None and width % map.size:
        raise ArgumentError(
            "size", f"is {map.size} and tokens have width {width}", "give a divisor of the width"
        )
    return Widths(width, width, keeps=True)


@widths.rule(MemoryStep)
def _memory_step(map: MemoryStep, width: int | None) -> Widths:
    width = _met("memory", int(map.memory.shape[0]), width)
    return Widths(width, width, keeps=True)


@widths.rule(Reflected)
def _reflected(map: Reflected, width: int | None) -> Widths:
    found = _residual(maps.Residual(map.attention), width)
    return Widths(found.takes, found.gives, keeps=True)


@widths.rule(Split)
def _split(map: Split, width: int | None) -> Widths:
    """Slices are as wide as each other."""
    count = len(map.maps)
    if width is not None and width % count:
        found = f"are {count} and tokens have width {width}"
        raise ArgumentError("maps", found, "give as many maps as the width can be cut into equal slices")
    slice = None if width is None else width // count
    for k, inner in enumerate(map.maps):
        slice = _met(f"maps[{k}]", _inside(f"maps[{k}]", inner, slice).takes, slice)
    found_parts = [_inside(f"maps[{k}]", inner, slice) for k, inner in enumerate(map.maps)]
    given = [part.gives for part in found_parts]
    total = None if any(size is None for size in given) else sum(size for size in given if size is not None)
    takes = None if slice is None else slice * count
    return Widths(takes, total, keeps=all(part.keeps for part in found_parts))


@widths.rule(Flatten)
def _flatten(map: Flatten, width: int | None) -> Widths:
    return Widths(width, None)


@widths.rule(Unflatten)
def _unflatten(map: Unflatten, width: int | None) -> Widths:
    if width is not None and width % map.tokens:
        found = f"is {map.tokens} and the token has width {width}"
        raise ArgumentError("tokens", found, "give a divisor of the width")
    return Widths(width, None if width is None else width // map.tokens)


# Attention


@widths.rule(Attention)
@widths.rule(maps.Joint)
def _attention(map: Attention | maps.Joint, width: int | None) -> Widths:
    """Queries and keys are the same tokens, or tokens of one sequence."""
    attention = map if isinstance(map, Attention) else map.attention
    sides: Sides = compared.one(attention.potential)
    width = _met("potential", sides.key, _met("potential", sides.query, width))
    values: Widths = looked_up.one(attention.lookup, width)
    _turned(attention.potential, values.takes)
    return Widths(
        values.takes, _given(attention, values), keeps=values.keeps and isinstance(attention.moment, Mean)
    )


@widths.rule(maps.Heads)
def _heads(map: maps.Heads, width: int | None) -> Widths:
    found = _inside("attention", map.attention, width)
    _met("w_o", map.w_o.shape[1], found.gives, "the heads give")
    heads = count_heads(map.attention)
    if len(map.w_o) not in (1, heads):
        sizes = f"has {len(map.w_o)} heads and the attention {heads}"
        raise ArgumentError("w_o", sizes, "give w_o (h, e, d) with one mixer for each head")
    return Widths(found.takes, map.w_o.shape[2])


@widths.rule(maps.ToContext)
def _to_context(map: maps.ToContext, width: int | None) -> Widths:
    points = map.context.points if isinstance(map.context, Measure) else map.context
    return _crossed(map.attention, width, points.shape[-1], queries_move=True)


@widths.rule(maps.FromQueries)
def _from_queries(map: maps.FromQueries, width: int | None) -> Widths:
    return _crossed(map.attention, map.queries.shape[-1], width, queries_move=False)


def _crossed(attention: Attention, queries: int | None, keys: int | None, queries_move: bool) -> Widths:
    sides: Sides = compared.one(attention.potential)
    queries = _met("potential", sides.query, queries, "the queries have")
    keys = _met("potential", sides.key, keys, "the keys have")
    if sides.alike:
        queries = keys = _met("potential", queries, keys, "the keys have")
    values: Widths = looked_up.one(attention.lookup, keys)
    return Widths(queries if queries_move else values.takes, _given(attention, values))


def _given(attention: Attention, values: Widths) -> int | None:
    return values.gives if isinstance(attention.moment, Mean) else None


# Potentials


@compared.rule(Potential)
def _declared(potential: Potential) -> Sides:
    """What its own fields say, and the potentials that are its parts."""
    query, key = (declared_width(potential, tokens) for tokens in (Tokens.QUERIES, Tokens.KEYS))
    parts = [
        compared.one(item)
        for _, meaning, item in held(potential)
        if isinstance(item, Potential) and meaning is not None and meaning.part and meaning.moving is None
    ]
    for sides in parts:
        query = _met("potential", sides.query, query, "another term")
        key = _met("potential", sides.key, key, "another term")
    return Sides(query, key, any(sides.alike for sides in parts))


@compared.rule(Dot)
@compared.rule(Cosine)
@compared.rule(DistancePotential)
def _projected(potential: Any) -> Sides:
    return _sides(potential.w_q, potential.w_k)


@compared.rule(Additive)
def _additive(potential: Additive) -> Sides:
    found, width = _sides(potential.w_q, potential.w_k), int(potential.v.shape[-1])
    return Sides(width, width, True) if found.alike else found


def _sides(w_q: Tensor | None, w_k: Tensor | None) -> Sides:
    """A side without a projection is compared as it is with what the other side projects to."""
    query = w_q.shape[-2] if w_q is not None else None if w_k is None else w_k.shape[-1]
    key = w_k.shape[-2] if w_k is not None else None if w_q is None else w_q.shape[-1]
    return Sides(query, key, alike=w_q is None and w_k is None)


def _turned(potential: Potential, width: int | None) -> None:
    """Rotary positions turn pairs of coordinates."""
    if isinstance(potential, (Scaled, SoftCap)):
        return _turned(potential.potential, width)
    for term in potential.terms if isinstance(potential, Sum) else ():
        _turned(term, width)
    inner = potential.potential if isinstance(potential, Rotary) else None
    if not isinstance(potential, Rotary) or not isinstance(inner, (Dot, Cosine, DistancePotential)):
        return None
    size = width if inner.w_q is None else int(inner.w_q.shape[-1])
    if size is not None and potential.frequencies is None and size % 2:
        remedy = "rotary positions turn pairs: use an even width, or give frequencies"
        raise ArgumentError("potential", f"projects to an odd width {size}", remedy)
    return None


# Lookups


@looked_up.rule(Lookup)
def _any_value(lookup: Lookup, width: int | None) -> Widths:
    return Widths(width, None)


@looked_up.rule(Identity)
def _itself(lookup: Identity, width: int | None) -> Widths:
    return Widths(width, width, keeps=True)


@looked_up.rule(Linear)
def _linear(lookup: Linear, width: int | None) -> Widths:
    return Widths(_met("w_v", int(lookup.w_v.shape[-2]), width, "the keys have"), int(lookup.w_v.shape[-1]))


@looked_up.rule(Factored)
def _factored(lookup: Factored, width: int | None) -> Widths:
    return Widths(_met("w", int(lookup.w.shape[-2]), width, "the keys have"), int(lookup.u.shape[-1]))


@looked_up.rule(Table)
def _table(lookup: Table, width: int | None) -> Widths:
    return Widths(width, int(lookup.table.shape[-1]))


@looked_up.rule(NormedLinear)
def _normed(lookup: NormedLinear, width: int | None) -> Widths:
    takes = _met("w", int(lookup.w.shape[-2]), width, "the keys have")
    return Widths(takes, lookup.norm.width(int(lookup.w.shape[-1])))
