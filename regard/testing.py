"""The laws, for everyone who adds a noun: check_potential, check_normalizer, check_support, check_map,
check_certificates.

They raise AssertionError and name the law that is broken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard._enclosed import length
from regard._upper import exact
from regard.attention import Attention
from regard.compute import ReferenceEngine, Tiled, all_engines, attend
from regard.compute.forms import fast_form
from regard.compute.selection import select
from regard.compute.tensors import pose_tensors
from regard.domains import Ball, Neighborhood
from regard.errors import ArgumentError, RefusalError
from regard.maps import Map
from regard.normalizers import Normalizer, Reference, Softmax
from regard.norms import Frobenius, TokenMax, TokenSum
from regard.parameters import Tokens, leads, one_head, projections, walk
from regard.parameters import width as width_of
from regard.potentials import Dot, Potential
from regard.potentials.base import simple_parts
from regard.potentials.reductions import Reduction, reduce
from regard.proofs import certify, falsify, image
from regard.proofs.imaging import outputs
from regard.proofs.scores import BallFacts, bilinear, slopes
from regard.proofs.setting import positions_of
from regard.proofs.shapes import widths
from regard.proofs.subject import single_heads
from regard.proofs.theorem import Refusal
from regard.supports import Causal, Full, Support, Window

TOLERANCE = 1e-10


def check_potential(potential: Potential, *, width: int = 4, seed: int = 0) -> None:
    """Every law of potentials, on random points of this width in float64.

    Examples:
        >>> regard.testing.check_potential(regard.Gaussian(bandwidth=2.0))  # silent: every law holds
    """
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, width, generator=generator, dtype=torch.float64) for n in (5, 7))
    scores = potential.scores(x, y)
    _holds("scores have one entry for each pair", scores.shape[-2:] == (5, 7))
    _holds("scores of finite points are finite", bool(torch.isfinite(scores).all()))
    _scores_are_local(potential, x, y, scores)
    _tokens_permute(potential, x, y, scores)
    _close("p + p = 2 p", (potential + potential).scores(x, y), (2.0 * potential).scores(x, y))
    _close("-p is minus p", (-potential).scores(x, y), -scores)
    for causal in (False, True):
        _reduction_is_exact(potential, x, y, scores, causal)
    _heads_are_declared(potential, scores, lambda one: one.scores(x, y))
    _tokens_are_seen_as_declared(potential, x, y, scores)
    _slopes_are_bounds(potential, width, generator)
    form, queries, keys = fast_form.one(potential, *_features(potential, x, y))
    _close("the fast form gives the same scores", form.pair(queries, keys), scores)
    check_engines(potential, width=width, seed=seed)


def check_normalizer(normalizer: Normalizer, *, seed: int = 0) -> None:
    """Every law of normalizers, on random scores in float64.

    Examples:
        >>> regard.testing.check_normalizer(regard.Entmax(1.5))
    """
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    potential, acting = normalizer.acting(Dot())
    scores = potential.scores(q, k)
    weights = acting.weights(scores, Reference())
    _holds("weights are not negative", bool((weights >= 0).all()))
    if normalizer.laws:
        _close("rows sum to one", weights.sum(-1), torch.ones(6, dtype=torch.float64), 1e-9)
        shift = torch.randn(6, 1, generator=generator, dtype=torch.float64)
        _close(
            "a constant added to a row changes nothing",
            acting.weights(scores + shift, Reference()),
            weights,
            1e-6,
        )
    order = torch.randperm(6, generator=generator)
    _close(
        "keys may be listed in any order",
        acting.weights(scores[:, order], Reference()),
        weights[..., order],
        1e-6,
    )
    _heads_are_declared(acting, weights, lambda one: one.weights(scores, Reference()))
    _support_is_respected(acting, scores)
    _counts_are_copies(acting, scores)
    if normalizer.variational:
        _weights_maximize(acting, scores, generator)
    supports = (Full(), Causal()) if normalizer.rowwise else (Full(), Window(3, 3))
    check_engines(Dot(), normalizer=normalizer, supports=supports, seed=seed)


def check_support(support: Support, *, tokens: int = 6) -> None:
    """A support looks at marks only, its span is never too small, and & and | are what they say.

    Examples:
        >>> regard.testing.check_support(regard.Causal() & regard.Window(2, 0))
    """
    marks = torch.arange(tokens)
    allowed = support.allows(marks, marks).expand(*support.allows(marks, marks).shape[:-2], tokens, tokens)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
    moved = support.allows(marks[order], marks[order]).expand(allowed.shape)
    _holds(
        "permuting tokens with their marks permutes the mask",
        bool((moved == allowed[..., order, :][..., order]).all()),
    )
    _heads_are_declared(support, allowed.double(), lambda one: one.allows(marks, marks).double())
    for low in range(tokens):
        for high in range(low, tokens):
            first, last = support.span(low, high)
            outside = (marks < first) | (marks > last)
            _holds(
                "a span leaves out no allowed key",
                not bool(allowed[..., low : high + 1, :][..., outside].any()),
            )
    for other in (Causal(), Full()):
        theirs = other.allows(marks, marks)
        _holds(
            "a & b allows what both allow",
            bool(((support & other).allows(marks, marks) == (allowed & theirs)).all()),
        )
        _holds(
            "a | b allows what one allows",
            bool(((support | other).allows(marks, marks) == (allowed | theirs)).all()),
        )


def check_certificates(attention: Attention, *, width: int = 4, radius: float = 0.5, seed: int = 0) -> None:
    """No attack exceeds a certificate of this attention, on a ball of tokens and near a sequence,
    in three norms.
    """
    generator = torch.Generator().manual_seed(seed)
    center = torch.randn(width, generator=generator, dtype=torch.float64)
    points = center + radius * torch.rand(3, width, generator=generator, dtype=torch.float64)
    for domain in (Ball(radius, center, 3), Neighborhood(points, 0.1)):
        for norm in (Frobenius(), TokenMax(), TokenSum()):
            bound = certify(attention, domain, norm)
            attack = falsify(attention, domain, norm, steps=5, restarts=1, generator=generator)
            _holds(
                f"no attack exceeds the certificate in {norm!r} on {domain!r}", attack.value <= bound.value
            )


def check_map(map: Map, *, tokens: int = 3, width: int = 4, radius: float = 0.5, seed: int = 0) -> None:
    """A map runs on the widths that it declares, its values lie in its image, and no two of them are farther
    apart than its certificates say, in three norms on a ball of tokens.

    Examples:
        >>> regard.testing.check_map(regard.nonexpansive.GroupSort(2))
    """
    generator = torch.Generator().manual_seed(seed)
    center = torch.randn(width, generator=generator, dtype=torch.float64)
    steps = torch.randn(2, 40, tokens, width, generator=generator, dtype=torch.float64)
    x, y = center + radius * steps / steps.norm(dim=-1, keepdim=True)
    y = x + torch.logspace(-4, 0, len(x), dtype=torch.float64)[:, None, None] * (y - x)
    ball = Ball(radius, center, tokens)
    values, others = (torch.stack([map(one) for one in sequences]) for sequences in (x, y))
    found = widths.one(map, width)
    _holds("values are as wide as the map says", found.gives in (None, values.shape[-1]))
    _holds("there are as many tokens as the map says", outputs(map, tokens) == values.shape[-2])
    try:
        held = image(map, ball)
    except Refusal:  # nothing is claimed
        held = None
    if isinstance(held, Ball):
        middle = torch.zeros(values.shape[-1], dtype=torch.float64) if held.center is None else held.center
        far = (values - middle).norm(dim=-1).amax()
        _holds("values lie in the image", bool(far <= held.radius * (1 + 1e-9)))
    for norm in (Frobenius(), TokenMax(), TokenSum()):
        ratio = (norm.of(values - others) / norm.of(x - y)).amax()
        bound = certify(map, ball, norm).value
        _holds(f"no pair exceeds the certificate in {norm!r}", bool(ratio <= bound * (1 + 1e-9)))


def check_engines(
    potential: Potential,
    *,
    normalizer: Normalizer = Softmax(),
    supports: Sequence[Support] = (Full(), Causal()),
    width: int = 4,
    seed: int = 0,
) -> None:
    """Every engine that accepts the declaration equals the reference, outputs and gradients (of q, k,
    v and all parameters).

    Examples:
        >>> regard.testing.check_engines(regard.Laplace())
    """
    generator = torch.Generator().manual_seed(seed)
    for support in supports:
        q, k, v = (
            torch.randn(6, n, generator=generator, dtype=torch.float64).requires_grad_()
            for n in (width, width, 3)
        )
        parameters, tree = pytree.tree_flatten((potential, normalizer))
        parameters = [
            p.detach().clone().requires_grad_() if isinstance(p, Tensor) and p.dtype == torch.float64 else p
            for p in parameters
        ]
        mine, theirs = pytree.tree_unflatten(parameters, tree)
        moving = [q, k, v, *(p for p in parameters if isinstance(p, Tensor) and p.requires_grad)]
        expected = attend(
            q, k, v, potential=mine, normalizer=theirs, support=support, engine=ReferenceEngine()
        )
        upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        gradients = torch.autograd.grad(expected, moving, upstream, allow_unused=True)
        for engine in [
            *(e for e in all_engines() if e.name not in ("reference", "flex", "fourier")),
            Tiled(pairs=16),
        ]:
            problem = pose_tensors(q, k, v, mine, theirs, support, None)
            try:
                found = select(problem, engine).run()
            except RefusalError:
                continue
            _close(f"engine {engine.name} equals the reference under {support!r}", found, expected, 1e-9)
            for one, other in zip(
                torch.autograd.grad(found, moving, upstream, allow_unused=True), gradients, strict=True
            ):
                zero = torch.zeros((), dtype=torch.float64)
                _close(
                    f"gradients of engine {engine.name} equal the reference's under {support!r}",
                    one if one is not None else zero,
                    other if other is not None else zero,
                    1e-7,
                )


def _features(potential: Potential, x: Tensor, y: Tensor):  # type: ignore[no-untyped-def]
    return potential.features(x, y, torch.arange(x.shape[-2]), torch.arange(y.shape[-2]))


def _scores_are_local(potential: Potential, x: Tensor, y: Tensor, scores: Tensor) -> None:
    queries, keys = _features(potential, x, y)
    rows, columns = (
        pytree.tree_map(lambda t, s=s: t[..., s, :] if isinstance(t, Tensor) else t, f)
        for f, s in ((queries, slice(1, 3)), (keys, slice(2, 6)))
    )
    _close(
        "the scores of a block need the features of its tokens only",
        potential.pair(rows, columns),
        scores[..., 1:3, 2:6],
    )


def _heads_are_declared(noun: Any, whole: Tensor, run: Callable[[Any], Tensor]) -> None:
    """Where fields say what their tensors are, each head alone does what it does among all. whole (..., m,
    n).
    """
    try:
        shapes = [lead for *_, lead in leads(noun)]
    except ArgumentError:  # a field says nothing: nothing is claimed
        return
    heads = max((torch.Size(lead).numel() for lead in shapes), default=1)
    if any(torch.Size(lead).numel() not in (1, heads) for lead in shapes):
        return  # several batches
    _holds("there are as many heads as the fields say", whole.shape[:-2].numel() == heads)
    for head, expected in enumerate(whole.reshape(heads, *whole.shape[-2:])):
        found = run(one_head(noun, head, heads))
        _close(
            "a head alone is what it is among all",
            found.reshape(found.shape[-2:]).expand_as(expected),
            expected,
        )


def _tokens_are_seen_as_declared(potential: Potential, x: Tensor, y: Tensor, scores: Tensor) -> None:
    """Marks, widths and projections are what the potential says of them."""
    parts = [part for part in walk(potential) if isinstance(part, Potential)]
    if all(part.positional is False for part in parts):
        moved = potential.scores(x, y, torch.arange(5).flip(0) * 3, torch.arange(7).square() + 1)
        _close("a potential that is not positional does not look at marks", moved, scores)
    for tokens, points in ((Tokens.QUERIES, x), (Tokens.KEYS, y)):
        _holds("tensors are as wide as they say", width_of(potential, tokens) in (None, points.shape[-1]))
    unseen = []
    for tokens, points in ((Tokens.QUERIES, x), (Tokens.KEYS, y)):
        matrices = [matrix for part in parts for of, matrix in projections(part) if of is tokens]
        if not matrices or any(matrix is None or matrix.ndim != 2 for matrix in matrices):
            return
        seen = torch.cat([matrix.detach().double() for matrix in matrices if matrix is not None], -1)
        kernel = torch.eye(points.shape[-1], dtype=torch.float64) - seen @ torch.linalg.pinv(seen)
        unseen.append(points + torch.ones_like(points) @ kernel)
    if all(projections(part) for part in simple_parts(potential)):
        _close("tokens are seen through projections alone", potential.scores(*unseen), scores)


def _slopes_are_bounds(potential: Potential, width: int, generator: torch.Generator) -> None:
    """What the rules `bilinear` and `slopes` say, at random tokens of a ball;
    where there is no rule nothing is claimed.
    """
    center = torch.randn(width, generator=generator, dtype=torch.float64)
    steps = torch.randn(6, width, generator=generator, dtype=torch.float64)
    tokens = center + 0.7 * steps / steps.norm(dim=-1, keepdim=True) * torch.linspace(
        0.2, 1.0, 6, dtype=torch.float64
    ).unsqueeze(-1)
    ball = BallFacts(center, exact(0.7), length(center) + exact(0.7))
    try:
        heads = single_heads(Attention(potential))
        found = [(slopes.one(head.potential, ball), bilinear.one(head.potential, width)) for head in heads]
        fixed = [_fixed_scores(head.potential, tokens) for head in heads]
    except Refusal:
        return
    for head, (bounds, form), bias in zip(heads, found, fixed, strict=True):
        by_query, by_key = _pair_slopes(head.potential, tokens)
        moving = head.potential.scores(tokens, tokens) - bias
        alpha, reach, kappa, osc = (
            float(bound) for bound in (bounds.alpha, bounds.reach, bounds.kappa, bounds.osc)
        )
        nu, slack = max(float(bounds.nu), float(bounds.reversed_nu)), 1e-9 * (1 + alpha + reach)
        apart = [(part.unsqueeze(-2) - part.unsqueeze(-3)).norm(dim=-1).amax() for part in (by_key, by_query)]
        _holds("alpha is at least the slope in a key", bool(by_key.norm(dim=-1).amax() <= alpha + slack))
        _holds(
            "reach is at least the slope in a query",
            bool(by_query.norm(dim=-1).amax() <= reach + slack),
        )
        _holds(
            "slopes in keys lie in a ball of radius nu",
            bool(apart[0] <= 2 * nu + slack),
        )
        _holds("slopes in a query lie in a ball of radius kappa", bool(apart[1] <= 2 * kappa + slack))
        _holds(
            "osc is at least the oscillation of a row",
            bool((moving.amax(-1) - moving.amin(-1)).amax() <= osc + slack),
        )
        if form is not None:
            rest = (
                moving
                - tokens @ form.a @ tokens.mT
                - (tokens @ form.beta).unsqueeze(-2)
                - (tokens @ form.gamma).unsqueeze(-1)
            )
            _close("the bilinear form is exact up to a constant", rest, rest[:1, :1].expand_as(rest))


def _pair_slopes(potential: Potential, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """∂a(x_i, x_j)/∂x_i and ∂a(x_i, x_j)/∂x_j, (n, n, d)."""
    marks = torch.arange(len(tokens))

    def score(x: Tensor, y: Tensor, i: int, j: int) -> Tensor:
        return potential.scores(x.unsqueeze(0), y.unsqueeze(0), marks[i : i + 1], marks[j : j + 1]).sum()

    pairs = [
        [torch.func.grad(score, (0, 1))(x, y, i, j) for j, y in enumerate(tokens)]
        for i, x in enumerate(tokens)
    ]
    return tuple(torch.stack([torch.stack([pair[side] for pair in row]) for row in pairs]) for side in (0, 1))  # type: ignore[return-value]


def _fixed_scores(potential: Potential, tokens: Tensor) -> Tensor:
    """The part of the scores that looks at positions only."""
    positional = positions_of(potential)
    return (
        torch.zeros(len(tokens), len(tokens), dtype=torch.float64)
        if positional is None
        else positional.scores(tokens, tokens)
    )


def _tokens_permute(potential: Potential, x: Tensor, y: Tensor, scores: Tensor) -> None:
    rows, columns = torch.tensor([3, 0, 4, 1, 2]), torch.tensor([6, 2, 0, 5, 1, 4, 3])
    moved = potential.scores(x[rows], y[columns], rows, columns)
    _close("permuting tokens with their marks permutes the scores", moved, scores[..., rows, :][..., columns])


def _reduction_is_exact(potential: Potential, x: Tensor, y: Tensor, scores: Tensor, causal: bool) -> None:
    reduction = reduce.one(potential, *_features(potential, x, y), causal)
    if not isinstance(reduction, Reduction):
        return
    folded = reduction.folded()
    total = folded.queries @ folded.keys.mT
    for residue in folded.residues:
        total = total + residue.tile(slice(None), slice(None))
    total = total if folded.key_bias is None else total + folded.key_bias.unsqueeze(-2)
    total = total if folded.row_bias is None else total + folded.row_bias().unsqueeze(-1)
    seen = Causal().allows(torch.arange(5), torch.arange(7)) if causal else torch.ones(5, 7, dtype=torch.bool)
    _close(
        "the reduction to a dot product is exact",
        torch.where(seen, total, 0.0),
        torch.where(seen, scores, 0.0),
        1e-9,
    )


def _support_is_respected(normalizer: Normalizer, scores: Tensor) -> None:
    allowed = torch.ones(scores.shape, dtype=torch.bool)
    if normalizer.rowwise:
        allowed[1, 2:] = False
        allowed[3] = False
    else:  # a doubly stochastic matrix must exist on the support
        allowed[1, 2:4] = False
    weights = normalizer.weights(scores, Reference(allowed=allowed))
    _holds("no weight outside the support", bool((weights[..., ~allowed] == 0).all()))
    _holds("a query that sees nothing has no weights, and no NaN", bool(torch.isfinite(weights).all()))


def _counts_are_copies(normalizer: Normalizer, scores: Tensor) -> None:
    """A key that counts twice is two equal keys; one that counts zero is none."""
    counts = torch.ones(scores.shape[-1], dtype=scores.dtype)
    counts[1], counts[4] = 2.0, 0.0
    counted = normalizer.weights(scores, Reference(counts.log()))
    copied = normalizer.weights(scores[:, [0, 1, 1, 2, 3, 5]], Reference())
    together = torch.stack(
        [
            copied[..., 0],
            copied[..., 1] + copied[..., 2],
            copied[..., 3],
            copied[..., 4],
            torch.zeros_like(copied[..., 0]),
            copied[..., 5],
        ],
        -1,
    )
    _close("a key that counts twice is two equal keys", counted, together, 1e-6)


def _weights_maximize(normalizer: Normalizer, scores: Tensor, generator: torch.Generator) -> None:
    """No feasible perturbation has a larger objective: towards other laws, other doubly stochastic matrices,
    or other densities.
    """
    best = normalizer.weights(scores, Reference())
    value = normalizer.objective(best, scores, Reference())
    for step in (1.0, 0.1, 1e-3):
        for _ in range(20):
            if not normalizer.rowwise:
                other = torch.eye(scores.shape[-1], dtype=scores.dtype)[
                    torch.randperm(scores.shape[-1], generator=generator)
                ]
            elif normalizer.laws:
                other = torch.rand(scores.shape, generator=generator, dtype=scores.dtype).log().neg() ** 3
                other = other / other.sum(-1, keepdim=True)
            else:
                other = torch.rand(scores.shape, generator=generator, dtype=scores.dtype)
            tried = normalizer.objective((1 - step) * best + step * other, scores, Reference())
            gap = value - tried if normalizer.rowwise else value.sum() - tried.sum()
            _holds("the weights maximize the objective", bool((gap >= -1e-6 * step).all()))


def _holds(law: str, truth: bool) -> None:
    if not truth:
        raise AssertionError(f"broken law: {law}")


def _close(law: str, found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    found, expected = torch.broadcast_tensors(found, expected)
    scale = 1 + float(expected.detach().abs().max()) if expected.numel() else 1.0
    gap = float((found - expected).detach().abs().max()) if expected.numel() else 0.0
    if math.isnan(gap) or gap > tolerance * scale:
        raise AssertionError(f"broken law: {law} (off by {gap:.2e}, scale {scale:.2e})")
