"""located: the value of a map at a given sequence in float64, and how far it may be from the exact one."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard import maps
from regard._round import EPS, gamma, outward, vector_norm_bound
from regard._verb import Verb
from regard.attention import Attention
from regard.domains import Ball, Near, Neighborhood
from regard.measure import Measure
from regard.norms import TokenMax
from regard.potentials import Bilinear, Dot, Gaussian, Potential, Rotary, SoftCap
from regard.potentials.base import Scaled, Sum
from regard.potentials.positions import PositionPotential
from regard.proofs.certification import certify
from regard.proofs.setting import balls_of, finite_ball, pair_bias
from regard.proofs.subject import Head, single_heads, subject_of
from regard.proofs.theorem import Refusal
from regard.proofs.tokenwise import affine_size, deviations, largest_weight, lengths, refuse_jump

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
    for inner in map.maps if isinstance(map, (maps.Added, maps.Compose)) else ():
        one_sequence(inner)
    if isinstance(map, maps.Residual):
        one_sequence(map.map)


def keeps_tokens(map: Any) -> bool:
    """Whether as many tokens come out as go in."""
    if isinstance(map, (maps.Compose, maps.Added)):
        return all(keeps_tokens(inner) for inner in map.maps)
    return (
        keeps_tokens(map.map)
        if isinstance(map, maps.Residual)
        else not isinstance(map, (maps.FromQueries, maps.Joint))
    )


def summands(map: maps.Added) -> list[maps.Mapping]:
    """The parts of a sum, sums among them taken apart;
    each gives one sequence of as many tokens as it takes.
    """
    one_sequence(map)
    if not keeps_tokens(map):
        raise Refusal("a part of the sum gives another number of tokens than it takes; add maps that keep it")
    return [
        part for inner in map.maps for part in (summands(inner) if isinstance(inner, maps.Added) else [inner])
    ]


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
    if isinstance(map, (maps.Compose, maps.Added)):
        return all(tokenwise(inner) for inner in map.maps)
    return (
        tokenwise(map.map)
        if isinstance(map, maps.Residual)
        else isinstance(map, (maps.Affine, maps.Pointwise, maps.Normalize, maps.Gated))
    )


def enclosing(domain: Near) -> Ball:
    """The smallest ball at hand that holds every token of a neighborhood."""
    measure = domain.measure
    if measure.log_weights is not None or measure.marks is not None:
        raise Refusal("a ball of tokens forgets weights and marks; give the points without them")
    best = min(balls_of(domain, measure.points.shape[-1]), key=lambda ball: ball.radius)
    return finite_ball(best.radius, best.center, measure.size)


# A sequence that is only known up to a margin


def margin_after(map: Any, measure: Measure, margin: float) -> float:
    """A margin after one more map; a value that cannot be located has no center,
    and no margin is asked of it.
    """
    try:
        return outward(locate.one(map, measure)[1] + slip(map, measure, margin))
    except Refusal:
        return math.inf


def slip(map: Any, measure: Measure, margin: float) -> float:
    """How far a value moves, token by token, when the sequence is only known up to a margin."""
    if margin == 0:
        return 0.0
    if not math.isfinite(margin):
        raise Refusal("the value may move without bound; use a smaller radius, or put a norm layer first")
    domain = Neighborhood(measure, margin, TokenMax())
    bare = measure.log_weights is None and measure.marks is None
    return outward(
        margin * certify(map, enclosing(domain) if bare and not tokenwise(map) else domain, TokenMax()).value
    )


# Maps


def _valued(measure: Measure, points: Tensor) -> Measure:
    """The tokens of a value, with the weights and marks of the sequence."""
    if not bool(torch.isfinite(points).all()):
        raise Refusal("the value at the given sequence is no finite number; use smaller weights")
    return measure.replace(points=points)


@locate.rule(object)
def _nowhere(map: Any, measure: Measure) -> tuple[Measure, float]:
    name = type(map).__name__
    raise Refusal(f"the rounding of {name} is not known; add a rule with @located.rule({name})")


@locate.rule(maps.Affine)
def _affine_value(map: maps.Affine, measure: Measure) -> tuple[Measure, float]:
    map = in_double(map)
    rounding = gamma(2 * len(map.w) + 8) * affine_size(map.w, map.b, measure.points)
    return _valued(measure, map(measure.points)), outward(float(rounding.max()))


@locate.rule(maps.Pointwise)
def _pointwise_value(map: maps.Pointwise, measure: Measure) -> tuple[Measure, float]:
    return _valued(measure, map(measure.points)), 1e-13 * float(lengths(measure.points).max())


@locate.rule(maps.Normalize)
def _normalize_value(map: maps.Normalize, measure: Measure) -> tuple[Measure, float]:
    """x - mean is exact up to γ|x|, which counts against the deviation."""
    map, width = in_double(map), measure.points.shape[-1]
    low, _ = deviations(map, measure.points, torch.zeros(measure.size, dtype=torch.float64))
    refuse_jump(map, float(low.min()))
    relative = gamma(8 * width + 64) * (1 + lengths(measure.points) / (low.square() + map.eps).sqrt())
    if not bool((relative < 1e-3).all()):
        raise Refusal("a token is so close to constant that rounding decides its direction")
    offset = 0.0 if map.bias is None else vector_norm_bound(map.bias)
    size = largest_weight(map) * math.sqrt(width) * float(relative.max()) + gamma(8) * offset
    return _valued(measure, map(measure.points)), outward(4 * size)


@locate.rule(maps.Gated)
def _gated_value(map: maps.Gated, measure: Measure) -> tuple[Measure, float]:
    map = in_double(map)
    sizes = affine_size(map.w, map.b, measure.points) * affine_size(map.w_gate, map.b_gate, measure.points)
    rounding = 8 * gamma(2 * sum(map.w.shape) + 1000) * vector_norm_bound(map.w_out) * float(sizes.max())
    return _valued(measure, map(measure.points)), outward(rounding)


@locate.rule(maps.Compose)
def _compose_value(map: maps.Compose, measure: Measure) -> tuple[Measure, float]:
    margin = 0.0
    for inner in map.maps:
        one_sequence(inner)
        margin = margin_after(inner, measure, margin)
        measure = locate.one(inner, measure)[0]
    return measure, margin


@locate.rule(maps.Residual)
def _residual_value(map: maps.Residual, measure: Measure) -> tuple[Measure, float]:
    one_sequence(map.map)
    value, margin = locate.one(map.map, measure)
    total = measure.points + value.points
    return _valued(measure, total), outward(margin + 2 * EPS * float(lengths(total).max()))


@locate.rule(maps.Added)
def _added_value(map: maps.Added, measure: Measure) -> tuple[Measure, float]:
    found = [locate.one(part, measure) for part in summands(map)]
    values = [value.points for value, _ in found]
    if len({value.shape for value in values}) > 1:
        raise Refusal("the parts of the sum give tokens of different widths; give them one width")
    rounding = gamma(len(values)) * sum(float(lengths(value).max()) for value in values)
    return _valued(measure, torch.stack(values).sum(0)), outward(
        sum(margin for _, margin in found) + rounding
    )


@locate.rule(Attention)
@locate.rule(maps.Heads)
def _attention_value(map: Any, measure: Measure) -> tuple[Measure, float]:
    """A score is exact up to δ, so a weight up to the factor e^{2δ},
    and a mean up to (e^{2δ} - 1) times the longest value.
    """
    one_sequence(map)
    subject = subject_of(map)
    sizes = [_head_error(head, measure) for head in subject.separate]
    error = sizes[0]
    if subject.w_o is not None:
        error = outward(
            sum(size * vector_norm_bound(output) for size, output in zip(sizes, subject.w_o, strict=True))
        )
        error += 0.0 if subject.b_o is None else gamma(len(sizes) + 8) * vector_norm_bound(subject.b_o)
    return _valued(measure, _attention_points(in_double(map), measure)), outward(error)


@locate.rule(maps.ToContext)
def _context_value(map: maps.ToContext, measure: Measure) -> tuple[Measure, float]:
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
    return _valued(measure, value.reshape(value.shape[-2:])), outward(error)


def _attention_points(map: Any, measure: Measure) -> Tensor:
    found = (map.attention if isinstance(map, maps.Heads) else map)(measure).points
    if not isinstance(map, maps.Heads):
        return found.reshape(found.shape[-2:])
    mixed = (found @ map.w_o).sum(-3)
    return mixed if map.b_o is None else mixed + map.b_o


def _head_error(head: Head, measure: Measure) -> float:
    if not head.softmax:
        raise Refusal(
            f"the rounding of {type(head.normalizer).__name__} is not known; only softmax values are located"
        )
    width, longest = measure.points.shape[-1], float(lengths(measure.points).max())
    bias = pair_bias(head, Neighborhood(measure, 0.0, TokenMax()))
    fixed = 0.0 if bias is None else float(bias[bias > -math.inf].abs().max())
    score = gamma(8 * width + 256) * (score_size.one(head.potential, longest, measure) + fixed + 1)
    if not score < 0.01:
        raise Refusal("scores are so large that rounding decides the weights")
    value = longest * math.prod(vector_norm_bound(factor) for factor in head.factors)
    value += 0.0 if head.value_bias is None else vector_norm_bound(head.value_bias)
    return outward((4 * score + gamma(8 * width + 8 * measure.size + 256)) * value)


score_size = Verb("score_size")
"""score_size.one(potential, longest, measure) -> what roundings of scores are relative to:
products of lengths.
"""


@score_size.rule(Potential)
def _unknown_size(potential: Potential, longest: float, measure: Measure) -> float:
    name = type(potential).__name__
    raise Refusal(f"the rounding of scores by {name} is not known; add a rule with @score_size.rule({name})")


@score_size.rule(PositionPotential)
def _position_size(potential: PositionPotential, longest: float, measure: Measure) -> float:
    return 0.0


@score_size.rule(Dot)
def _dot_size(potential: Dot, longest: float, measure: Measure) -> float:
    width = measure.points.shape[-1] if potential.w_q is None else potential.w_q.shape[-1]
    return outward(abs(float(potential.factor(width))) * math.prod(_projected_sizes(potential, longest)))


@score_size.rule(Gaussian)
def _gaussian_size(potential: Gaussian, longest: float, measure: Measure) -> float:
    return outward((sum(_projected_sizes(potential, longest)) / float(potential.bandwidth)) ** 2)


@score_size.rule(Bilinear)
def _bilinear_size(potential: Bilinear, longest: float, measure: Measure) -> float:
    return outward(vector_norm_bound(potential.a) * longest**2)


@score_size.rule(Rotary)
def _rotary_size(potential: Rotary, longest: float, measure: Measure) -> float:
    """An angle is a position times a frequency, rounded."""
    fastest = 1.0 if potential.frequencies is None else max(1.0, float(potential.frequencies.abs().max()))
    turned = float(measure.positions().abs().max()) * fastest
    return outward((1 + turned) * score_size.one(potential.potential, longest, measure))


@score_size.rule(Scaled)
def _scaled_size(potential: Scaled, longest: float, measure: Measure) -> float:
    return outward(abs(float(potential.factor)) * score_size.one(potential.potential, longest, measure))


@score_size.rule(Sum)
def _sum_size(potential: Sum, longest: float, measure: Measure) -> float:
    return outward(sum(score_size.one(term, longest, measure) for term in potential.terms))


@score_size.rule(SoftCap)
def _capped_size(potential: SoftCap, longest: float, measure: Measure) -> float:
    size: float = score_size.one(potential.potential, longest, measure)
    return size


def _projected_sizes(potential: Dot | Gaussian, longest: float) -> tuple[float, float]:
    """At least |w_qᵀx + b_q| and |w_kᵀy + b_k| for tokens that are no longer than this."""
    queries = _projected_size(potential.w_q, potential.b_q, longest)
    return queries, _projected_size(potential.w_k, potential.b_k, longest)


def _projected_size(w: Tensor | None, b: Tensor | None, longest: float) -> float:
    offset = 0.0 if b is None else vector_norm_bound(b)
    return (1.0 if w is None else vector_norm_bound(w)) * longest + offset
