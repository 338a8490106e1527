"""Families of random cases: a family and a seed are a case, always the same one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import regard as r
from benchmarks.cases import Case
from benchmarks.drawing import (
    Draw,
    attentions,
    domains,
    first_valid,
    lookups,
    maps_around,
    potentials,
    supports,
)
from regard.domains import Ball, Domain, Near, Neighborhood, Radii, Shell, Whole
from regard.lipschitz_norm import LipschitzNorm
from regard.maps import (
    Added,
    Affine,
    Compose,
    FromQueries,
    Gated,
    Gelu,
    Heads,
    Joint,
    Map,
    Normalize,
    Pointwise,
    Relu,
    Residual,
    Silu,
    Tanh,
    ToContext,
    feed_forward,
    post_norm,
    pre_norm,
)
from regard.measure import Measure
from regard.norms import EntryMax, Frobenius, Norm, TokenMax, TokenSum, Wasserstein
from regard.tilt import Tilt

ORDERED = [Frobenius(), Frobenius(), TokenMax(), TokenMax(), TokenSum(), EntryMax()]
LAWS = [Wasserstein(1.0), Wasserstein(2.0), Wasserstein(math.inf)]
EQUIVARIANT = (
    "dot",
    "bare dot",
    "bilinear",
    "rank one",
    "zero",
    "cosine",
    "gaussian",
    "gaussian tied",
    "gaussian untied",
    "laplace",
    "student",
)
"""Scores that look at tokens and not at positions, whose slopes are known."""


def norms(draw: Draw, domain: Domain) -> Norm:
    """Of sequences, and of laws where tokens lie in one set."""
    found: Norm = draw.pick(ORDERED if isinstance(domain, Near) else ORDERED + LAWS)
    return found


def itself(seed: int) -> Case:
    """Self-attention, alone or in a block."""
    draw = Draw(seed)
    n, d = draw.count(1, 6), draw.count(1, 4)
    map = first_valid(lambda: maps_around(draw, attentions(draw, n, d), n, d))
    domain = domains(draw, n, d, plain=isinstance(map, Map) and not isinstance(map, Heads))
    return Case(seed, map, domain, norms(draw, domain), n, d)


# Attention to a context


def cross(seed: int) -> Case:
    """Queries move, keys move, or both, alone or in a block."""
    draw = Draw(seed)
    m, n, d = draw.count(1, 5), draw.count(1, 5), draw.count(1, 4)
    kind = draw.pick(["queries", "queries", "keys", "both"])
    attention = first_valid(lambda: _that_runs(draw, _looking(draw, max(m, n), d), d))
    size = draw.size(0.1, 10.0)
    if kind == "queries":
        map: Any = _decoder(draw, ToContext(attention, _context(draw, n, d, size)), m, d)
        tokens = m
    else:
        map = FromQueries(attention, size * draw.normal(m, d)) if kind == "keys" else Joint(attention, m)
        tokens = n if kind == "keys" else m + n
    domain = draw.pick(
        [Whole(tokens), *[domains(draw, tokens, d, plain=not isinstance(map, FromQueries)) for _ in range(7)]]
    )
    norm = norms(draw, domain) if kind == "queries" else draw.pick([Frobenius(), TokenMax()])
    return Case(seed, map, domain, norm, tokens, d, "cross")


def _looking(draw: Draw, n: int, d: int) -> r.Attention:
    """Mostly one head with softmax rows; masks that may leave a query with nothing to see."""
    if draw.chance(0.1):
        return attentions(draw, n, d).replace(support=supports(draw, n + 2))
    potential = draw.pick(potentials(draw, d, (), ()).items())[1]()
    return r.Attention(
        potential,
        lookups(draw, d, ()),
        r.Softmax(draw.pick([1.0, draw.size(0.3, 3.0)])),
        supports(draw, n + 2),
    )


def _that_runs(draw: Draw, attention: r.Attention, d: int) -> r.Attention:
    attention(draw.normal(1, d))
    return attention


def _context(draw: Draw, n: int, d: int, size: float) -> Any:
    points = size * draw.normal(n, d) + draw.pick([0.0, 3.0]) * draw.normal(d)
    marks = draw.maybe(torch.randperm(n + 2, generator=draw.generator)[:n], 0.3)
    weights = draw.maybe(2 * draw.normal(n), 0.4)
    return points if marks is None and weights is None else Measure(points, weights, marks)


def _decoder(draw: Draw, map: ToContext, m: int, d: int) -> Any:
    """The attention alone, behind a norm layer, or as a decoder has it."""
    value = map(draw.normal(m, d))
    if value.ndim > 2 or value.shape[-1] != d or draw.chance(0.5):
        return map
    norm, after = _norm_layer(draw, d), _norm_layer(draw, d)
    block = pre_norm(map, _hidden(draw, d), norm, after)
    return draw.pick([Residual(map), Compose((norm, map)), Compose((Residual(map), after)), block])


# Rows that are not softmax


def rows(seed: int) -> Case:
    """A slot for nothing, balanced columns, sigmoids, sparse laws; with heads."""
    draw = Draw(seed)
    n, d = draw.count(1, 5), draw.count(1, 4)
    normalizer = draw.pick([r.SinkSoftmax, r.Sinkhorn, r.Sigmoid, r.Entmax])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", r.errors.ConvergenceWarning)  # a draw asks for shapes alone
        map = first_valid(lambda: _rows(draw, n, d, normalizer))
    domain = domains(draw, n, d, plain=isinstance(map, Map) and not isinstance(map, Heads))
    known = {r.Sinkhorn: [Frobenius()], r.Sigmoid: [TokenMax()], r.Entmax: [Frobenius(), TokenMax()]}
    norm = (
        norms(draw, domain)
        if draw.chance(0.2)
        else draw.pick(known.get(normalizer, [Frobenius(), TokenMax(), TokenSum()]))
    )
    return Case(seed, map, domain, norm, n, d, "rows")


def _rows(draw: Draw, n: int, d: int, kind: type) -> Any:
    heads = draw.pick([(), (), (2,)])
    potential = draw.pick(potentials(draw, d, heads, heads).items())[1]()
    each = draw.normal(*heads) if heads and draw.chance(0.7) else 2 * float(draw.normal(1))
    makers: dict[type, Callable[[], Any]] = {
        r.SinkSoftmax: lambda: r.SinkSoftmax(each, draw.size(0.3, 3.0)),
        r.Sinkhorn: lambda: r.Sinkhorn(1e-9, 300),
        r.Sigmoid: lambda: r.Sigmoid(draw.maybe(each)),
        r.Entmax: lambda: draw.pick([r.Sparsemax(), r.Entmax(1.0 + draw.share())]),
    }
    lookup, support = lookups(draw, d, heads), supports(draw, n)
    if kind is r.Sinkhorn:  # small scores are balanced soon
        potential, support = draw.size(0.01, 0.3) * potential, r.Full()
    if kind is r.SinkSoftmax and isinstance(lookup, r.Linear):
        lookup = r.Linear(lookup.w_v)
    return maps_around(draw, r.Attention(potential, lookup, makers[kind](), support), n, d)


# What stands around attention


def layers(seed: int) -> Case:
    """Norm layers, gated layers, blocks and stacks of them; LipschitzNorm; also everywhere and on shells."""
    draw = Draw(seed)
    n, d = draw.count(1, 4), draw.count(2, 4)
    makers = [_norm_layer, _gated, _hidden, _lipschitz, _folded, _folded, _block, _block, _stack]
    map = first_valid(lambda: draw.pick(makers)(draw, d))
    inner = draw.size(0.01, 3.0)
    shell = Shell(inner, draw.pick([math.inf, inner * draw.size(1.0, 10.0)]), n, draw.chance(0.5))
    choices = [domains(draw, n, d, plain=True) for _ in range(5)]
    domain = draw.pick([Whole(n), shell, *choices] if _starts_with_a_norm(map) else [Whole(n), *choices])
    return Case(seed, map, domain, norms(draw, domain), n, d, "layers")


def _starts_with_a_norm(map: Any) -> bool:
    return isinstance(map, Normalize) or (isinstance(map, Compose) and isinstance(map.maps[0], Normalize))


def _norm_layer(draw: Draw, d: int) -> Normalize:
    weight, bias = draw.maybe(1 + 0.5 * draw.normal(d)), draw.maybe(draw.normal(d))
    return Normalize(draw.pick([1e-5, 1e-2, draw.size(1e-8, 1.0)]), weight, bias, centered=draw.chance(0.5))


def _gated(draw: Draw, d: int) -> Gated:
    c, activation = (
        draw.count(1, 4),
        draw.pick([Gelu(), Gelu(tanh=True), Silu(), Silu(1.702), Relu(), Tanh()]),
    )
    w, gate, out = (draw.size(0.1, 2.0) * draw.normal(*shape) for shape in ((d, c), (d, c), (c, d)))
    return Gated(activation, w, gate, out, draw.maybe(draw.normal(c)), draw.maybe(draw.normal(c)))


def _hidden(draw: Draw, d: int) -> Map:
    c, activation = draw.count(1, 5), draw.pick([Gelu(), Gelu(tanh=True), Silu(), Relu(), Tanh()])
    plain = feed_forward(
        activation, draw.normal(d, c), draw.size(0.1, 2.0) * draw.normal(c, d), draw.maybe(draw.normal(c))
    )
    return draw.pick([plain, plain, _gated(draw, d)])


def _lipschitz(draw: Draw, d: int) -> LipschitzNorm:
    c = draw.count(1, 3)
    return LipschitzNorm(*(draw.size(0.1, 3.0) * draw.normal(d, width) for width in (c, c, draw.count(1, 3))))


def _mixed(draw: Draw, d: int) -> Any:
    """Heads that give tokens of the width they take."""
    heads, c = draw.pick([(2,), (1,), (3,)]), draw.count(1, 3)
    names = [
        "dot",
        "dot",
        "dot",
        "bilinear",
        "gaussian",
        "cosine",
        "rotary",
        "alibi",
        "softcap",
        "additive",
        "sum",
    ]
    potential = potentials(draw, d, heads, heads)[draw.pick(names)]()
    support = draw.pick([r.Full(), r.Full(), r.Causal(), r.Window(1, 0)])
    lookup = r.Linear(draw.normal(*heads, d, c), draw.maybe(draw.normal(*heads, c)))
    attention = r.Attention(potential, lookup, r.Softmax(draw.pick([1.0, draw.size(0.3, 3.0)])), support)
    return Heads(attention, draw.size(0.1, 2.0) * draw.normal(*heads, c, d), draw.maybe(draw.normal(d)))


def _folded(draw: Draw, d: int) -> Compose:
    """A norm layer and the attention after it."""
    alone = r.Attention(
        r.Dot(draw.normal(d, 2), draw.normal(d, 2), None, draw.maybe(draw.normal(2))), lookups(draw, d, ())
    )
    return Compose((_norm_layer(draw, d), draw.pick([alone, _mixed(draw, d), _mixed(draw, d)])))


def _block(draw: Draw, d: int) -> Compose:
    block = draw.pick([pre_norm, post_norm])
    return block(_mixed(draw, d), _hidden(draw, d), _norm_layer(draw, d), _norm_layer(draw, d))  # type: ignore[no-any-return]


def _stack(draw: Draw, d: int) -> Compose:
    return Compose((*_block(draw, d).maps, *_block(draw, d).maps))


def depth(seed: int) -> Case:
    """Stacks of one to six blocks, some with residual connections around others, near a sequence."""
    draw = Draw(seed)
    n, d = draw.count(1, 4), draw.count(2, 4)
    map = _deep(draw, d, draw.count(1, 6))
    points, radius = draw.normal(n, d), draw.size(1e-7, 0.3)
    radii = radius * (draw.normal(n).abs() + 0.01) * draw.pick([torch.ones(n), torch.eye(n)[0]]).double()
    domain = draw.pick(
        [Neighborhood(points, radius), Neighborhood(points, radius, TokenMax()), Radii(points, radii)]
    )
    return Case(seed, map, domain, draw.pick([Frobenius(), TokenMax()]), n, d, "depth")


def _deep(draw: Draw, d: int, layers: int) -> Compose:
    parts: list[Any] = []
    for _ in range(layers):
        block = _block(draw, d)
        parts += [Residual(block)] if draw.chance(0.3) else block.maps
    return Compose(tuple(parts))


# Sums


def sums(seed: int) -> Case:
    """Heads, attention to a context, affine maps and layers added up, alone or in a block."""
    draw = Draw(seed)
    n, d = draw.count(1, 4), draw.count(2, 4)
    map = first_valid(lambda: _around_a_sum(draw, _sum(draw, n, d), d))
    choices = [domains(draw, n, d, plain=True) for _ in range(6)]
    domain = draw.pick([Whole(n), *choices])
    return Case(seed, map, domain, norms(draw, domain), n, d, "sums")


def _sum(draw: Draw, n: int, d: int) -> Added:
    """Often parts of one kind, and parts that nearly cancel."""
    makers = draw.pick(
        [
            [_term],
            [_affine],
            [_single],
            [_to_context],
            [_term, _affine, _single, _to_context, _hidden, _norm_layer],
        ]
    )
    parts = [draw.pick(makers)(draw, d) for _ in range(draw.count(1, 4))]
    first = parts[0]
    if isinstance(first, Affine) and draw.chance(0.5):
        parts.append(Affine(-first.w * (1 + draw.pick([0.0, 1e-6, 1e-3])), first.b))
    if isinstance(first, r.Attention) and isinstance(first.lookup, r.Linear) and draw.chance(0.5):
        parts.append(first.replace(lookup=r.Linear(-first.lookup.w_v, first.lookup.b_v)))
    made = Added(tuple(parts))
    made(draw.normal(n, d))  # a mask or a table that does not fit is drawn again
    return draw.pick([made, made, Added((made, _affine(draw, d)))])


def _around_a_sum(draw: Draw, map: Added, d: int) -> Any:
    norm, after = _norm_layer(draw, d), _norm_layer(draw, d)
    behind = Compose((norm, map))
    block = pre_norm(map, _hidden(draw, d), norm, after)
    return draw.pick(
        [
            map,
            map,
            Residual(map),
            behind,
            Residual(behind),
            Compose((norm, map, after)),
            block,
            Compose((map, _sum(draw, 1, d))),
            Compose((norm, map, _gated(draw, d))),
        ]
    )


def _affine(draw: Draw, d: int) -> Affine:
    return Affine(draw.size(0.1, 3.0) * draw.normal(d, d), draw.maybe(draw.normal(d)))


def _single(draw: Draw, d: int) -> r.Attention:
    """A head that stacks with its like."""
    potential = r.Dot(
        draw.normal(d, 2), draw.normal(d, 2), draw.maybe(draw.size(0.1, 1.0)), draw.maybe(draw.normal(2))
    )
    return r.Attention(
        potential, r.Linear(draw.size(0.1, 2.0) * draw.normal(d, d), draw.maybe(draw.normal(d)))
    )


def _term(draw: Draw, d: int) -> Any:
    """Heads, or a head and what mixes it."""
    return draw.pick([_mixed(draw, d), _single(draw, d), Compose((_single(draw, d), _affine(draw, d)))])


def _to_context(draw: Draw, d: int) -> Any:
    attention, c = _single(draw, d), draw.count(1, 3)
    if draw.chance(0.3):
        attention = attention.replace(support=r.Causal())
    narrow = attention.replace(lookup=r.Linear(draw.normal(d, c)))
    context = _context(draw, draw.count(1, 4), d, draw.size(0.1, 3.0))
    return draw.pick(
        [ToContext(attention, context), Compose((ToContext(narrow, context), Affine(draw.normal(c, d))))]
    )


# Modules of torch


def modules(seed: int) -> Case:
    """Modules as torch runs them, against what is declared of them."""
    draw = Draw(seed)
    n, d = draw.count(1, 4), 2 * draw.count(1, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _module(draw, d).double().eval()
    for parameter in module.parameters():
        parameter.data.add_(draw.pick([0.0, 0.3]) * draw.normal(*parameter.shape))
    choices = [domains(draw, n, d, plain=True) for _ in range(5)]
    inner = draw.size(0.01, 3.0)
    shell = Shell(inner, tokens=n, centered=draw.chance(0.5))
    domain = draw.pick(
        [Whole(n), shell, *choices] if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) else choices
    )
    return Case(seed, module, domain, norms(draw, domain), n, d, "modules")


def _module(draw: Draw, d: int) -> nn.Module:
    eps, bias, heads, hidden = draw.size(1e-8, 0.1), draw.chance(0.5), draw.pick([1, 2]), draw.count(1, 6)
    activation = draw.pick(["relu", "gelu", nn.functional.silu, nn.Tanh()])
    encoder = nn.TransformerEncoderLayer(
        d,
        heads,
        hidden,
        0.1,
        activation,
        eps,
        batch_first=True,
        norm_first=draw.chance(0.5),
        bias=draw.chance(0.7),
    )
    attention = nn.MultiheadAttention(d, heads, 0.1, bias=bias)
    stacked = nn.Sequential(
        nn.Linear(d, hidden, bias=bias),
        draw.pick([nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU()]),
        nn.Dropout(0.2),
    )
    norm = draw.pick(
        [
            nn.LayerNorm(d, eps, bias=bias),
            nn.LayerNorm(d, eps, elementwise_affine=False),
            nn.RMSNorm(d, draw.maybe(eps)),
        ]
    )
    two = nn.TransformerEncoder(encoder, 2, draw.maybe(nn.LayerNorm(d, eps)), enable_nested_tensor=False)
    linear = nn.Linear(d, hidden, bias=bias)
    made: nn.Module = draw.pick(
        [
            linear,
            norm,
            norm,
            attention,
            attention,
            encoder,
            encoder,
            two,
            stacked,
            nn.Sequential(norm, stacked),
        ]
    )
    return made


# Laws


def laws(seed: int) -> Case:
    """Maps of laws on a ball: sequences with different numbers of tokens, with weights, and the
    Boltzmann–Gibbs transformation.
    """
    draw = Draw(seed)
    n, m, d = draw.count(1, 6), draw.count(1, 6), draw.count(1, 3)
    size = draw.pick([1.0, draw.size(0.03, 3.0)])
    domain = Ball(size, draw.maybe(size * draw.normal(d)), None)
    map = first_valid(lambda: _of_laws(draw, n, d))
    norm = (
        Wasserstein(1.0)
        if isinstance(map, Tilt) and draw.chance(0.9)
        else draw.pick([*LAWS, Wasserstein(1.5), Wasserstein(3.0)])
    )
    return Case(seed, map, domain, norm, n, d, "laws", m)


def _of_laws(draw: Draw, n: int, d: int) -> Any:
    made = potentials(draw, d, (), ())
    potential = made[draw.pick(EQUIVARIANT)]()
    if draw.chance(0.25):
        return Tilt(potential, draw.size(0.1, 3.0) * draw.normal(d))
    lookup = r.Linear(draw.size(0.1, 3.0) * draw.normal(d, d), draw.maybe(draw.normal(d)))
    attention = r.Attention(
        potential, draw.pick([lookup, r.Identity()]), r.Softmax(draw.pick([1.0, draw.size(0.2, 4.0)]))
    )
    context = ToContext(
        _that_runs(draw, attention, d), _context(draw, draw.count(1, 5), d, draw.size(0.1, 3.0))
    )
    block = Compose((Residual(Compose((_norm_layer(draw, d), attention))), Residual(_hidden(draw, d))))
    tokenwise = Compose(
        (_hidden(draw, d), _norm_layer(draw, d), Affine(draw.normal(d, 2)), Pointwise(Tanh()))
    )
    return draw.pick(
        [attention, attention, attention, Residual(attention), context, Residual(context), block, tokenwise]
    )


FAMILIES: dict[str, Callable[[int], Case]] = {
    "self": itself,
    "cross": cross,
    "rows": rows,
    "layers": layers,
    "depth": depth,
    "sums": sums,
    "modules": modules,
    "laws": laws,
}
"""What `--family` names."""
