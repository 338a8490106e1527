"""located: the value of a map at a given sequence in float64, and how far it may be from the exact one."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard import maps
from regard._enclosed import length, lengths, root_of_squares
from regard._upper import Upper, exact, exact_lower, product, relative_error, root, sizes, total
from regard._verb import Verb
from regard.attention import Attention
from regard.domains import Ball, Near, Neighborhood
from regard.measure import Measure
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
from regard.norms import TokenMax
from regard.potentials import Bilinear, Dot, Gaussian, Potential, Rotary, SoftCap
from regard.potentials.base import Scaled, Sum
from regard.potentials.positions import PositionPotential
from regard.proofs.certification import certify
from regard.proofs.question import once
from regard.proofs.scores import FACTOR, bandwidth_of
from regard.proofs.setting import balls_of, finite_ball, pair_bias
from regard.proofs.subject import Head, single_heads, subject_of
from regard.proofs.theorem import Refusal
from regard.proofs.tokenwise import ACTIVATION, affine_size, deviations, largest_weight, refuse_jump, with_eps

locate = Verb("locate")
"""located.one(map, measure) -> (value, margin): the value in float64,
and how far at most a token of it is from the exact one.
"""


def one_sequence(map: Any) -> None:
    """Refuse what gives one sequence for each head: the algebra combines sequences."""
    attention = map if isinstance(map, Attention) else getattr(map, "attention", None)
    if (
        isinstance(attention, Attention)
        and not isinstance(map, maps.Heads)
        and len(single_heads(attention)) > 1
    ):
        raise Refusal(
            "an attention with several heads gives a sequence for each; mix them with Heads(attention, w_o)"
        )
    for inner in map.maps if isinstance(map, (maps.Added, maps.Compose, Split)) else ():
        one_sequence(inner)
    if isinstance(map, maps.Residual):
        one_sequence(map.map)


def keeps_tokens(map: Any) -> bool:
    """Whether as many tokens come out as go in."""
    if isinstance(map, (maps.Compose, maps.Added, Split)):
        return all(keeps_tokens(inner) for inner in map.maps)
    if isinstance(map, MixTokens):
        return bool(map.w.shape[0] == map.w.shape[1])
    return (
        keeps_tokens(map.map)
        if isinstance(map, maps.Residual)
        else not isinstance(map, (maps.FromQueries, maps.Joint, Flatten, Unflatten, Pool))
    )


def summands(map: maps.Added) -> list[maps.Mapping]:
    """The parts of a sum, sums among them taken apart;
    each gives one sequence of as many tokens as it takes.
    """
    one_sequence(map)
    if not keeps_tokens(map):
        raise Refusal(
            "a part of the sum gives a different number of tokens than it takes; add maps that keep it"
        )
    return [
        part for inner in map.maps for part in (summands(inner) if isinstance(inner, maps.Added) else [inner])
    ]


def steps(map: Any) -> tuple[Any, ...]:
    """The maps of a composition in their order, compositions among them taken apart; any other map alone."""
    return (
        tuple(step for part in map.maps for step in steps(part)) if isinstance(map, maps.Compose) else (map,)
    )


def in_double(map: Any) -> Any:
    """The same declaration in float64, cut off from any graph."""
    return pytree.tree_map(
        lambda part: (
            part.detach().double() if isinstance(part, Tensor) and part.dtype.is_floating_point else part
        ),
        map,
    )


def tokenwise(map: Any) -> bool:
    """Whether a map acts on each token alone."""
    if isinstance(map, (maps.Compose, maps.Added, Split)):
        return all(tokenwise(inner) for inner in map.maps)
    return tokenwise(map.map) if isinstance(map, maps.Residual) else isinstance(map, TOKENWISE)


TOKENWISE = (
    maps.Affine,
    maps.Pointwise,
    maps.Normalize,
    maps.Gated,
    IntoBall,
    Center,
    GroupSort,
    MemoryStep,
)
"""Maps of one token each that are not made of others."""


def enclosing(domain: Near) -> Ball:
    """The smallest ball at hand that holds every token of a neighborhood."""
    return once(("enclosing", domain), None, lambda: _enclosing(domain))


def _enclosing(domain: Near) -> Ball:
    measure = domain.measure
    if measure.log_weights is not None or measure.marks is not None:
        raise Refusal("a ball of tokens forgets weights and marks; give the points without them")
    best = min(balls_of(domain, measure.points.shape[-1]), key=lambda ball: float(ball.radius))
    return finite_ball(best.radius, best.center, measure.size)


# A sequence that is only known up to a margin


def margin_after(map: Any, measure: Measure, margin: Upper) -> Upper:
    """A margin after one more map; a value that cannot be located has no center,
    and no margin is asked of it.
    """
    try:
        return locate.one(map, measure)[1] + slip(map, measure, margin)
    except Refusal:
        return Upper(math.inf)


def slip(map: Any, measure: Measure, margin: Upper) -> Upper:
    """How far a value moves, token by token, when the sequence is only known up to a margin."""
    if float(margin) == 0:
        return exact(0.0)
    if not math.isfinite(margin):
        raise Refusal("the value may move without bound; use a smaller radius, or put a norm layer first")
    domain = Neighborhood(measure, float(margin), TokenMax())
    bare = measure.log_weights is None and measure.marks is None
    held = enclosing(domain) if bare and not tokenwise(map) else domain
    return margin * Upper(certify(map, held, TokenMax()).value)


# Maps


def _valued(measure: Measure, points: Tensor) -> Measure:
    """The tokens of a value, with the weights and marks of the sequence."""
    if not bool(torch.isfinite(points).all()):
        raise Refusal("the value at the given sequence is not finite; use smaller weights")
    return measure.replace(points=points)


@locate.rule(object)
def _nowhere(map: Any, measure: Measure) -> tuple[Measure, Upper]:
    name = type(map).__name__
    raise Refusal(f"the rounding of {name} is not known; add a rule with @located.rule({name})")


@locate.rule(maps.Affine)
def _affine_value(map: maps.Affine, measure: Measure) -> tuple[Measure, Upper]:
    map = in_double(map)
    rounding = relative_error(2 * len(map.w) + 8) * affine_size(map.w, map.b, measure.points)
    return _valued(measure, map(measure.points)), rounding.amax()


@locate.rule(maps.Pointwise)
def _pointwise_value(map: maps.Pointwise, measure: Measure) -> tuple[Measure, Upper]:
    return _valued(measure, map(measure.points)), relative_error(ACTIVATION) * lengths(measure.points).amax()


@locate.rule(maps.Normalize)
def _normalize_value(map: maps.Normalize, measure: Measure) -> tuple[Measure, Upper]:
    """x - mean is exact up to γ|x|, which counts against the deviation."""
    map, width = in_double(map), measure.points.shape[-1]
    low, _ = deviations(map, measure.points, torch.zeros(measure.size, dtype=torch.float64))
    refuse_jump(map, float(low.bound.min()))
    relative = relative_error(8 * width + 64) * (1 + lengths(measure.points) / with_eps(map, low))
    if not bool((relative.bound < 1e-3).all()):
        raise Refusal("a token is so close to constant that rounding decides its direction")
    size = largest_weight(map) * root(width) * relative.amax()
    size = size if map.bias is None else size + relative_error(8) * length(map.bias)
    return _valued(measure, map(measure.points)), 4 * size


@locate.rule(maps.Gated)
def _gated_value(map: maps.Gated, measure: Measure) -> tuple[Measure, Upper]:
    map = in_double(map)
    inner, gate = (
        affine_size(map.w, map.b, measure.points),
        affine_size(map.w_gate, map.b_gate, measure.points),
    )
    rounding = (
        8 * relative_error(2 * sum(map.w.shape) + ACTIVATION) * length(map.w_out) * (inner * gate).amax()
    )
    return _valued(measure, map(measure.points)), rounding


@locate.rule(maps.Compose)
def _compose_value(map: maps.Compose, measure: Measure) -> tuple[Measure, Upper]:
    margin = exact(0.0)
    for inner in map.maps:
        one_sequence(inner)
        margin = margin_after(inner, measure, margin)
        measure = locate.one(inner, measure)[0]
    return measure, margin


@locate.rule(maps.Residual)
def _residual_value(map: maps.Residual, measure: Measure) -> tuple[Measure, Upper]:
    one_sequence(map.map)
    value, margin = locate.one(map.map, measure)
    added = measure.points + value.points
    return _valued(measure, added), margin + relative_error(4) * lengths(added).amax()


@locate.rule(maps.Added)
def _added_value(map: maps.Added, measure: Measure) -> tuple[Measure, Upper]:
    found = [locate.one(part, measure) for part in summands(map)]
    values = [value.points for value, _ in found]
    if len({value.shape for value in values}) > 1:
        raise Refusal("the parts of the sum give tokens of different widths; give them one width")
    rounding = relative_error(len(values)) * total([lengths(value).amax() for value in values])
    return _valued(measure, torch.stack(values).sum(0)), total([margin for _, margin in found]) + rounding


@locate.rule(IntoBall)
@locate.rule(Center)
def _projected_value(map: IntoBall | Center, measure: Measure) -> tuple[Measure, Upper]:
    rounding = relative_error(4 * measure.points.shape[-1] + 64) * lengths(measure.points).amax()
    return _valued(measure, map(measure.points)), rounding


@locate.rule(GroupSort)
def _sorted_value(map: GroupSort, measure: Measure) -> tuple[Measure, Upper]:
    return _valued(measure, map(measure.points)), exact(0.0)


@locate.rule(MemoryStep)
def _memory_value(map: MemoryStep, measure: Measure) -> tuple[Measure, Upper]:
    """As for attention: a score is exact up to δ, so a mean up to 4δ times the longest column."""
    map, longest = in_double(map), lengths(measure.points).amax()
    column = lengths(map.memory.mT).amax()
    bias = exact(0.0) if map.bias is None else sizes(map.bias).amax()
    terms = sum(map.memory.shape)
    score = relative_error(4 * terms + 256) * (exact(float(map.sharpness)) * (longest * column + bias) + 1)
    if not float(score) < 0.01:
        raise Refusal("scores are so large that rounding decides the weights")
    moved = exact(abs(float(map.step))) * (4 * score + relative_error(8 * terms + 256)) * column
    return _valued(measure, map(measure.points)), moved + relative_error(8) * (longest + moved)


@locate.rule(Reflected)
def _reflected_value(map: Reflected, measure: Measure) -> tuple[Measure, Upper]:
    one_sequence(map)
    value, margin = locate.one(map.attention, measure)
    step = exact(abs(float(map.step)))
    size = lengths(measure.points) + step * lengths(value.points)
    turned = measure.points - float(map.step) * value.points
    return _valued(measure, turned), step * margin + relative_error(8) * size.amax()


@locate.rule(Split)
def _split_value(map: Split, measure: Measure) -> tuple[Measure, Upper]:
    one_sequence(map)
    pieces = measure.points.chunk(len(map.maps), -1)
    found = [
        locate.one(inner, measure.replace(points=piece))
        for inner, piece in zip(map.maps, pieces, strict=True)
    ]
    joined = torch.cat([value.points for value, _ in found], -1)
    return _valued(found[0][0], joined), root_of_squares([margin for _, margin in found])


@locate.rule(Flatten)
@locate.rule(Unflatten)
def _reshaped_value(map: Flatten | Unflatten, measure: Measure) -> tuple[Measure, Upper]:
    return Measure(map(_bare(measure).points)), exact(0.0)


@locate.rule(Pool)
@locate.rule(MixTokens)
def _mixed_value(map: Pool | MixTokens, measure: Measure) -> tuple[Measure, Upper]:
    map, points = in_double(map), _bare(measure).points
    weight = exact(1.0) if isinstance(map, Pool) else sizes(map.w).amax()
    rounding = relative_error(2 * len(points) + 16) * weight * len(points) * lengths(points).amax()
    return _valued(Measure(points), map(points)), rounding


def _bare(measure: Measure) -> Measure:
    """Tokens that are joined or mixed have no weights and no marks afterwards."""
    if measure.log_weights is not None or measure.marks is not None:
        raise Refusal("tokens that are joined or mixed lose weights and marks; give the points without them")
    return measure


@locate.rule(Attention)
@locate.rule(maps.Heads)
def _attention_value(map: Any, measure: Measure) -> tuple[Measure, Upper]:
    """A score is exact up to δ, so a weight up to the factor e^{2δ},
    and a mean up to (e^{2δ} - 1) times the longest value.
    """
    one_sequence(map)
    subject = subject_of(map)
    errors = [_head_error(head, measure) for head in subject.separate]
    error = errors[0]
    if subject.w_o is not None:
        error = total([one * length(output) for one, output in zip(errors, subject.w_o, strict=True)])
    if subject.b_o is not None:
        error = error + relative_error(len(errors) + 8) * length(subject.b_o)
    return _valued(measure, _attention_points(in_double(map), measure)), error


@locate.rule(maps.ToContext)
def _context_value(map: maps.ToContext, measure: Measure) -> tuple[Measure, Upper]:
    """As for attention of queries and keys together, which are longer, more,
    and farther from each other than those that meet.
    """
    one_sequence(map)
    given = map.context if isinstance(map.context, Measure) else Measure(map.context)
    if given.points.ndim != 2 or given.points.shape[-1] != measure.points.shape[-1]:
        raise Refusal("the rounding is known where queries and one context have the same width")
    if given.log_weights is not None or measure.log_weights is not None:
        raise Refusal(
            "the rounding of attention to a context with weights is not known; give the points without them"
        )
    points, marks = (
        torch.cat([measure.points, given.points.detach().double()]),
        torch.cat([measure.positions(), given.positions()]),
    )
    error = _head_error(subject_of(map.attention).separate[0], Measure(points, marks=marks))
    value = in_double(map.attention)(measure, in_double(given)).points
    return _valued(measure, value.reshape(value.shape[-2:])), error


def _attention_points(map: Any, measure: Measure) -> Tensor:
    found = (map.attention if isinstance(map, maps.Heads) else map)(measure).points
    if not isinstance(map, maps.Heads):
        return found.reshape(found.shape[-2:])
    mixed = (found @ map.w_o).sum(-3)
    return mixed if map.b_o is None else mixed + map.b_o


def _head_error(head: Head, measure: Measure) -> Upper:
    if not head.softmax:
        raise Refusal(
            f"the rounding of {type(head.normalizer).__name__} is not known; only softmax values are located"
        )
    width, longest = measure.points.shape[-1], lengths(measure.points).amax()
    bias = pair_bias(head, Neighborhood(measure, 0.0, TokenMax()))
    size = score_size.one(head.potential, longest, measure) + 1
    size = size if bias is None else size + sizes(bias[bias > -math.inf]).amax()
    score = relative_error(8 * width + 256) * size
    if not float(score) < 0.01:
        raise Refusal("scores are so large that rounding decides the weights")
    value = longest * product([length(factor) for factor in head.factors])
    value = value if head.value_bias is None else value + length(head.value_bias)
    return (4 * score + relative_error(8 * width + 8 * measure.size + 256)) * value


score_size = Verb("score_size")
"""score_size.one(potential, longest, measure) -> what roundings of scores are relative to:
products of lengths.
"""


@score_size.rule(Potential)
def _unknown_size(potential: Potential, longest: Upper, measure: Measure) -> Upper:
    name = type(potential).__name__
    raise Refusal(f"the rounding of scores by {name} is not known; add a rule with @score_size.rule({name})")


@score_size.rule(PositionPotential)
def _position_size(potential: PositionPotential, longest: Upper, measure: Measure) -> Upper:
    return exact(0.0)


@score_size.rule(Dot)
def _dot_size(potential: Dot, longest: Upper, measure: Measure) -> Upper:
    width = measure.points.shape[-1] if potential.w_q is None else potential.w_q.shape[-1]
    return Upper(abs(float(potential.factor(width))), FACTOR) * product(_projected_sizes(potential, longest))


@score_size.rule(Gaussian)
def _gaussian_size(potential: Gaussian, longest: Upper, measure: Measure) -> Upper:
    bandwidth = bandwidth_of(potential, measure.points.shape[-1])
    return (total(_projected_sizes(potential, longest)) / exact_lower(bandwidth)).square()


@score_size.rule(Bilinear)
def _bilinear_size(potential: Bilinear, longest: Upper, measure: Measure) -> Upper:
    return length(potential.a) * longest.square()


@score_size.rule(Rotary)
def _rotary_size(potential: Rotary, longest: Upper, measure: Measure) -> Upper:
    """An angle is a position times a frequency, rounded."""
    turned = sizes(measure.positions().double()).amax()
    if potential.frequencies is not None:
        turned = turned * sizes(potential.frequencies.double()).amax().maximum(exact(1.0))
    return (1 + turned) * score_size.one(potential.potential, longest, measure)


@score_size.rule(Scaled)
def _scaled_size(potential: Scaled, longest: Upper, measure: Measure) -> Upper:
    return Upper(abs(float(potential.factor)), FACTOR) * score_size.one(potential.potential, longest, measure)


@score_size.rule(Sum)
def _sum_size(potential: Sum, longest: Upper, measure: Measure) -> Upper:
    return total([score_size.one(term, longest, measure) for term in potential.terms])


@score_size.rule(SoftCap)
def _capped_size(potential: SoftCap, longest: Upper, measure: Measure) -> Upper:
    size: Upper = score_size.one(potential.potential, longest, measure)
    return size


def _projected_sizes(potential: Dot | Gaussian, longest: Upper) -> tuple[Upper, Upper]:
    """At least |w_qᵀx + b_q| and |w_kᵀy + b_k| for tokens that are no longer than this."""
    queries = projected_size(potential.w_q, potential.b_q, longest)
    return queries, projected_size(potential.w_k, potential.b_k, longest)


def projected_size(w: Tensor | None, b: Tensor | None, longest: Upper) -> Upper:
    """At least |wᵀx + b| for tokens that are no longer than this, by Frobenius norms."""
    linear = longest if w is None else length(w) * longest
    return linear if b is None else linear + length(b)
