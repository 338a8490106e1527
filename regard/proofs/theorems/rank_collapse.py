"""Rank collapse: attention without skip connections brings tokens together, at a cubic rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard._enclosed import lengths
from regard._upper import Upper
from regard.attention import Attention, as_measure, log_counts
from regard.certificate import Certificate
from regard.domains import Ball, Domain, Neighborhood
from regard.errors import ArgumentError, RefusalError
from regard.maps import Heads
from regard.measure import Measure
from regard.norms import Frobenius, Norm, TokenMax
from regard.proofs.scores import Form
from regard.proofs.setting import equivariant, finite_ball, radius_of, width_of
from regard.proofs.subject import Head, MultiHead, subject_of
from regard.proofs.theorem import Bound, Refusal, Theorem, assumed, checked

THEOREM = Theorem(
    name="rank_collapse",
    title="rank collapse of softmax attention",
    statement=r"""
For scores $x_i^\top A x_j + \beta\cdot x_j + b_j$, any center $c$, $\rho = \max_i|x_i - c|$ and $c' =
W^\top\sum_j\pi_jx_j + \dots$, $\pi = \mathrm{softmax}_j((A^\top c + \beta)\cdot x_j + b_j)$:
$$ \max_i|f(X)_i - c'| \le \|W\|\|A\|\rho^3,\qquad \|f(X) - \mathbf{1}c'^\top\|_F \le \|W\|\|A\|\rho^2\,\|X -
\mathbf{1}c^\top\|_F. $$ Heads add up. After $L$ layers with $\kappa = \max\sum_h\|W_h\|\|A_h\|$ the radius is
at most $\kappa^{(3^L - 1)/2}\rho^{3^L}$: doubly exponential where $\kappa\rho^2 < 1$.
""",
    hypotheses=(
        "softmax rows",
        "bilinear scores",
        "values affine in the tokens",
        "no masks, no positions",
        "no skip connection",
    ),
    source="(dong2021)",
    proof=r"""
Softmax ignores what does not depend on $j$, so with $r = x - c$ the row law is $\mathrm{softmax}_j(\log\pi_j
+ r_i^\top A r_j)$. Along the scores $\log\pi_j + t\,r_i^\top A r_j$, $t \in [0, 1]$,
the mean of $r$ moves with speed $|\mathrm{Cov}_t(r)A^\top r_i| \le \rho^2\|A\||r_i|$, from $\sum_j\pi_jr_j$
to the row's mean. A bias that depends on the row gives every row
its own $\pi$, and then nothing is said about consensus. The phenomenon is the authors'; this bound has no
assumption of small scores and is proved here.
""",
)


def rank_collapse(
    map: Attention | Heads, x: Measure | Tensor, center: Tensor | None = None, norm: Norm = TokenMax()
) -> Certificate:
    """How far outputs are from one common point, `consensus(map, x, center)`: at most Σ_h |W_h||A_h| ρ³, ρ
    the radius of the tokens.

    center: any point (d,); None takes the mean or the middle of the tokens, whichever is closer to all. norm:
    TokenMax() or Frobenius().

    Examples:
        >>> layer, x = regard.Attention(regard.Dot(scale=1.0)), 0.2 * torch.eye(3, dtype=torch.float64)
        >>> regard.proofs.rank_collapse(layer, x).value < 0.2**3  # ρ³, about the middle of the tokens
        True
    """
    measure = _sequence(x)
    domain, middle = Neighborhood(measure, 0.0), _center(measure, center)
    offsets = lengths(measure.points - middle, 1)
    radius = offsets.amax()
    try:
        spread = _spread(offsets, norm)
        factor = _factor(_subject(map), measure.dimension, domain)
    except Refusal as refusal:
        return _infinity(refusal, domain, norm)
    return THEOREM.certificate(
        Bound(factor * radius.square() * spread, _HYPOTHESES), domain, norm, "radius of the outputs"
    )


def collapse_after(layers: Sequence[Attention | Heads], domain: Ball) -> Certificate:
    """The radius of the outputs of attention layers in a row, for tokens in a ball:
    ρ ↦ κ ρ³ at every layer.

    Examples:
        >>> layer = regard.Attention(regard.Dot(torch.eye(2), torch.eye(2), scale=1.0))
        >>> one, two = (regard.proofs.collapse_after([layer] * k, regard.Ball(0.5)).value for k in (1, 2))
        >>> round(one, 6), two < one**2  # 0.5³, and far less after another layer
        (0.125, True)
    """
    if not isinstance(domain, Ball):
        raise ArgumentError(
            "domain", f"is {domain!r}", "give Ball(radius): how far tokens are from one point"
        )
    radius, parts, ball, width = radius_of(domain), [], domain, width_of(domain)
    for layer in layers:
        try:
            subject = _subject(layer)
            width = subject.separate[0].width(width)
            factor, width = _factor(subject, width, ball), _output_width(subject, width)
            radius = factor * radius.square() * radius
            after = finite_ball(radius, None, None)  # about a center that only the tokens know
        except Refusal as refusal:
            return _infinity(refusal, domain, TokenMax())
        parts.append(
            THEOREM.certificate(Bound(radius, _HYPOTHESES), ball, TokenMax(), "radius of the outputs")
        )
        ball = after
    moved = (assumed("every layer after the first has tokens around a center of its own"),)
    return THEOREM.certificate(
        Bound(radius, moved, tuple(parts)), domain, TokenMax(), "radius of the outputs"
    )


def consensus(map: Attention | Heads, x: Measure | Tensor, center: Tensor | None = None) -> Tensor:
    """The point c' = Wᵀ Σ_j π_j x_j + biases (e,) that all outputs are near, computed in float64;
    heads side by side are joined.

    Examples:
        >>> layer, x = regard.Attention(regard.Dot()), 0.1 * torch.randn(5, 3, dtype=torch.float64)
        >>> point = regard.proofs.consensus(layer, x)
        >>> bound = regard.proofs.rank_collapse(layer, x)
        >>> bool((layer(x) - point).norm(dim=-1).max() <= bound.value)
        True
    """
    measure = _sequence(x)
    middle = _center(measure, center)
    try:
        subject = _subject(map)
        found = [_mixture(head, measure, middle) for head in subject.separate]
    except Refusal as refusal:
        raise RefusalError("consensus", [str(refusal)]) from None
    if subject.w_o is None:
        return torch.cat(found)
    mixed = sum(
        (value @ w for value, w in zip(found, subject.w_o, strict=True)),
        torch.zeros(subject.w_o.shape[-1], dtype=torch.float64),
    )
    return mixed if subject.b_o is None else mixed + subject.b_o


_NEEDED = ("softmax rows", "bilinear scores", "no masks and no positions", "no skip connection")
_HYPOTHESES = tuple(checked(statement) for statement in _NEEDED)


def _infinity(refusal: Refusal, domain: Domain, norm: Norm) -> Certificate:
    why = (f"{THEOREM.title}: {refusal}",)
    return Certificate(math.inf, domain, norm, "no theorem", refused=why, quantity="radius of the outputs")


def _spread(offsets: Upper, norm: Norm) -> Upper:
    """The norm of X - 1cᵀ, from above."""
    if isinstance(norm, TokenMax):
        return offsets.amax()
    if isinstance(norm, Frobenius):
        return lengths(offsets.bound)
    raise Refusal(f"the bound is for TokenMax() and Frobenius(), not for {norm!r}")


def _subject(map: Any) -> MultiHead:
    if not isinstance(map, (Attention, Heads)):
        raise Refusal(
            f"a {type(map).__name__} is not attention alone; skip connections "
            "and other maps keep tokens apart"
        )
    return subject_of(map)


def _factor(subject: MultiHead, width: int, domain: Domain) -> Upper:
    """Σ_h |W_h||A_h|, or |W_O| √Σ_h (|W_h||A_h|)², the smaller."""
    separate = [head.w * _form(head, width, domain).norm for head in subject.separate]
    if subject.folded is None:
        return subject.combined(separate, None)
    return subject.combined(separate, [head.w * _form(head, width, domain).norm for head in subject.folded])


def _form(head: Head, width: int, domain: Domain) -> Form:
    if not head.softmax:
        raise Refusal(f"rows of {type(head.normalizer).__name__} are not Gibbs laws")
    try:
        equivariant(head, domain)
    except Refusal:
        why = "masks and positions give every row a center of its own, so tokens need not meet"
        raise Refusal(f"{why}; the first token of a causal sequence never moves") from None
    form = head.form(width)
    if form is None:
        raise Refusal(
            f"the scores of {type(head.attention.potential).__name__} are not "
            "bilinear; use Dot() or Bilinear(a)"
        )
    return form


def _output_width(subject: MultiHead, width: int) -> int:
    """How wide a token is after the layer."""
    if subject.w_o is not None:
        return int(subject.w_o.shape[-1])
    return sum(int(head.factors[-1].shape[-1]) if head.factors else width for head in subject.separate)


def _sequence(x: Measure | Tensor) -> Measure:
    return Neighborhood(as_measure("x", x), 0.0).measure


def _center(measure: Measure, center: Tensor | None) -> Tensor:
    points = measure.points
    if center is not None:
        if center.shape != points.shape[-1:]:
            raise ArgumentError(
                "center", f"has shape {list(center.shape)}", f"give one point ({points.shape[-1]},)"
            )
        return center.detach().double()
    candidates = (points.mean(0), 0.5 * (points.amax(0) + points.amin(0)))
    return min(candidates, key=lambda one: float((points - one).norm(dim=-1).max()))


def _mixture(head: Head, measure: Measure, center: Tensor) -> Tensor:
    """Values under π: the law of a query at the center."""
    form = _form(head, measure.dimension, Neighborhood(measure, 0.0))
    scores = measure.points @ (center @ form.a + form.beta)
    counts = log_counts(measure)
    law = (scores if counts is None else scores + counts).softmax(-1)
    return law @ head.lookup.values(measure.points, None)
