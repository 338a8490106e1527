"""drift: the value of a map at weighted tokens, with the engine that was asked for."""

from __future__ import annotations

from torch import Tensor

from regard._heads import mix_heads
from regard._object import rebuild
from regard._verb import Verb
from regard.attention import Attention
from regard.compute import Engine
from regard.compute.application import problem_of
from regard.compute.moments import project
from regard.compute.selection import select_within
from regard.dynamics.displacement import Displacement
from regard.errors import ArgumentError
from regard.maps import Added, Affine, Compose, Gated, Heads, Map, Normalize, Pointwise, Residual, ToContext
from regard.measure import Measure

drift = Verb("drift")
"""drift(map, measure, engine) -> the values (..., n, e) at its points. A measure without weights and marks is
the sequence of its points, where every map says itself what it does; with weights a map needs a rule here.

Examples:
    >>> heavy = regard.Measure(torch.eye(2), torch.tensor([0.9, 0.1]).log())
    >>> layer = regard.Attention(regard.Dot())
    >>> torch.allclose(regard.dynamics.drift(layer, heavy, None), layer(heavy.points, heavy))
    True
"""


@drift.rule(Map)
def _map(map: Map, x: Measure, engine: Engine | None) -> Tensor:
    if x.log_weights is not None or x.marks is not None:
        what = "weights" if x.log_weights is not None else "marks"
        raise ArgumentError(
            "x",
            f"has {what}, and {type(map).__name__} does not say what they mean to it",
            f"give a Tensor, or add a rule with @regard.dynamics.drift.rule({type(map).__name__})",
        )
    if engine is not None and engine.over_processes:
        found = f"is a ring, and {type(map).__name__} does not say how it runs over several processes"
        raise ArgumentError("engine", found, "let the map be made of attention and of maps of single tokens")
    return map(x.points)


@drift.rule(Affine)
@drift.rule(Normalize)
@drift.rule(Pointwise)
@drift.rule(Gated)
def _tokenwise(map: Map, x: Measure, engine: Engine | None) -> Tensor:
    return map(x.points)


@drift.rule(Attention)
def _attention(map: Attention, x: Measure, engine: Engine | None) -> Tensor:
    return _means(map, x, None, engine)


@drift.rule(ToContext)
def _to_context(map: ToContext, x: Measure, engine: Engine | None) -> Tensor:
    return _means(map.attention, x, map.context, engine)


@drift.rule(Heads)
def _heads(map: Heads, x: Measure, engine: Engine | None) -> Tensor:
    value = mix_heads(_attention(map.attention, x, engine), map.w_o)
    return value if map.b_o is None else value + map.b_o


@drift.rule(Residual)
def _residual(map: Residual, x: Measure, engine: Engine | None) -> Tensor:
    return x.points + drift(map.map, x, engine)


@drift.rule(Displacement)
def _displacement(map: Displacement, x: Measure, engine: Engine | None) -> Tensor:
    return drift(map.map, x, engine) - x.points


@drift.rule(Added)
def _added(map: Added, x: Measure, engine: Engine | None) -> Tensor:
    first, *rest = (drift(inner, x, engine) for inner in map.maps)
    return sum(rest, first)


@drift.rule(Compose)
def _compose(map: Compose, x: Measure, engine: Engine | None) -> Tensor:
    for inner in map.maps:
        x = moved(x, drift(inner, x, engine))
    return x.points


def moved(x: Measure, points: Tensor) -> Measure:
    """The same weights and marks at other points, which may have left the numbers: a flow looks itself."""
    return rebuild(Measure, ("points", "log_weights", "marks"), (points, x.log_weights, x.marks))


def _means(
    attention: Attention, x: Measure, context: Measure | Tensor | None, engine: Engine | None
) -> Tensor:
    found = project.one(attention.moment, select_within(problem_of(attention, x, context, engine), engine))
    if isinstance(found, Tensor):
        return found
    raise ArgumentError(
        "map",
        f"has the moment {type(attention.moment).__name__}, whose values are laws and not velocities",
        "use the moment Mean",
    )
