"""The contraction coefficient of a Markov kernel in W₁: how much closer it brings two laws;
it multiplies along compositions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._enclosed import length, lengths, product_norm
from regard._upper import Upper, exact, least, product, relative_error
from regard._verb import Verb
from regard.attention import Attention, Softmatch
from regard.certificate import Certificate
from regard.domains import Ball, Domain, Whole
from regard.errors import ArgumentError
from regard.kernel import Composed, Kernel
from regard.lookups import Lookup
from regard.maps import ToContext
from regard.moments import Law, Mean, Moment
from regard.norms import Wasserstein
from regard.potentials import Dot, Gaussian, Potential
from regard.potentials.base import linear_terms, of_terms
from regard.proofs.scores import BallFacts, bandwidth_of, bilinear, slopes
from regard.proofs.setting import equivariant, finite_ball, radius_of
from regard.proofs.subject import Head, single_heads
from regard.proofs.theorem import Bound, Refusal, Theorem, checked

THEOREM = Theorem(
    name="contraction",
    title="contraction coefficients of Markov kernels",
    statement=r"""
$\tau(K) = \sup_{x \ne x'} W_1(K(x, \cdot), K(x', \cdot))/|x - x'|$ satisfies $W_1(\mu K, \nu K) \le
\tau(K)W_1(\mu, \nu)$ and $\tau(KL) \le \tau(K)\tau(L)$.
A lookup has $\tau = \mathrm{Lip}(v)$, the mean $\tau = 1$. A softmatch with fixed keys in $B(c, R)$, whatever
their weights, has $$ \tau \le R\kappa, $$ $\kappa$ the radius of a ball that holds the query slopes
$\partial_x a(x, y)$ of all keys $y$; for $a = x^\top A y + \dots$ it is $\max_j|A(y_j - c)|$, for all
queries.
""",
    hypotheses=("softmax rows", "keys that are given", "no masks, no positions"),
    source="(vuckovic2020)",
    proof=r"""
$f$ 1-Lipschitz implies $|Kf(x) - Kf(x')| \le \tau(K)|x - x'|$; the rest is Kantorovich duality. For a mean,
$|\int v\,d\nu - \int v\,d\nu'| \le W_1(\nu, \nu')$. For a softmatch
$\partial_e\,\mathbb{E}_x f = \mathrm{Cov}_x(f, e\cdot\partial_x a) \le
\mathrm{sd}_x(f)\,\mathrm{sd}_x(e\cdot\partial_x a)$. A 1-Lipschitz $f$ differs from its (extended) value at
$c$
by at most $R$ on the keys, so its standard deviation is at most $R$; that of $e\cdot\partial_x a$ is at most
$\kappa$ for the same reason.
""",
)

contract = Verb("contract")
"""contract.one(kernel, domain) -> (Bound, a Domain that holds the points of the laws)."""


def contraction(kernel: Kernel | ToContext, domain: Domain) -> Certificate:
    """The contraction coefficient of a kernel on a domain in W₁; below one it brings any two laws together.

    ToContext(attention, context) is its attention kernel. Infinity comes with the sentence that says why.

    Examples:
        >>> keys = torch.tensor([[-0.5], [0.5]], dtype=torch.float64)
        >>> kernel = regard.maps.ToContext(regard.Attention(regard.Dot(scale=1.0)), keys)
        >>> bound = regard.proofs.contraction(kernel, regard.Ball(1.0, width=1))
        >>> bound.value < 1  # any two laws of queries come closer
        True
    """
    if not isinstance(kernel, (Kernel, ToContext)):
        remedy = "give a Kernel, e.g. attention.kernel(context), or ToContext(attention, context)"
        raise ArgumentError("kernel", f"is a {type(kernel).__name__}", remedy)
    try:
        bound, _ = contract.one(
            kernel.attention.kernel(kernel.context) if isinstance(kernel, ToContext) else kernel, domain
        )
    except Refusal as refusal:
        theorem, why = "no theorem", (f"{THEOREM.title}: {refusal}",)
        return Certificate(
            math.inf, domain, Wasserstein(1.0), theorem, refused=why, quantity="contraction coefficient"
        )
    return _certificate(bound, domain)


def _certificate(bound: Bound, domain: Domain) -> Certificate:
    return THEOREM.certificate(bound, domain, Wasserstein(1.0), "contraction coefficient")


@contract.rule(Kernel)
def _unknown(kernel: Kernel, domain: Domain) -> tuple[Bound, Domain]:
    raise Refusal(
        f"nothing is known about {type(kernel).__name__}; add a rule with "
        f"@contract.rule({type(kernel).__name__})"
    )


@contract.rule(Composed)
def _composed(kernel: Composed, domain: Domain) -> tuple[Bound, Domain]:
    """Coefficients multiply; the second kernel acts where the laws of the first live."""
    first, middle = contract.one(kernel.first, domain)
    second, last = contract.one(kernel.second, middle)
    parts = (_certificate(first, domain), _certificate(second, middle))
    return Bound(first.value * second.value, parts=parts), last


@contract.rule(Mean)
@contract.rule(Law)
def _moment(kernel: Moment, domain: Domain) -> tuple[Bound, Domain]:
    """A mean stays in the ball, and means are at most as far apart as laws."""
    return Bound(exact(1.0), (checked(f"the moment {type(kernel).__name__} does not expand W₁"),)), domain


@contract.rule(Lookup)
def _lookup(kernel: Lookup, domain: Domain) -> tuple[Bound, Domain]:
    """The norm of the matrix; a ball goes to a ball."""
    factors = _one_head(Attention(Dot(), kernel)).factors
    value = product_norm(*factors)
    return Bound(value, (checked("values are affine in the keys"),)), _image(kernel, domain, factors, value)


def _image(kernel: Lookup, domain: Domain, factors: tuple[Tensor, ...], value: Upper) -> Domain:
    if not factors or not isinstance(domain, Ball) or domain.center is None:
        # Without a center the width is not known either: nothing below a bounded set is claimed of the image.
        return domain if not factors else Whole()
    center = domain.center.detach().double()
    moved = kernel.values(center.unsqueeze(0).to(factors[0].dtype), None).double().reshape(-1)
    size = length(center) * product([length(factor) for factor in factors]) + length(moved)
    rounding = relative_error(8 * sum(factor.shape[0] for factor in factors) + 64) * size
    return finite_ball(value * radius_of(domain) + rounding, moved, None)


@contract.rule(Softmatch)
def _softmatch(kernel: Softmatch, domain: Domain) -> tuple[Bound, Domain]:
    """R κ, the smallest over two balls that hold the keys."""
    head = _one_head(Attention(kernel.potential, normalizer=kernel.normalizer, support=kernel.support))
    if not head.softmax:
        raise Refusal(f"rows of {type(kernel.normalizer).__name__} are not Gibbs laws; use Softmax()")
    equivariant(head, domain)
    keys = kernel.context.points.detach().double()
    if keys.ndim != 2 or not len(keys):
        raise Refusal(f"the context has shape {list(keys.shape)}; give one set of keys (n, d)")
    centers = (keys.mean(0), 0.5 * (keys.amax(0) + keys.amin(0)))
    found = [(_around(keys, center), center) for center in centers]
    values = [radius * _slope_radius(head.potential, keys, center, domain) for radius, center in found]
    radius, center = min(found, key=lambda pair: float(pair[0]))
    hypotheses = (
        checked("softmax rows"),
        checked("no masks and no positions"),
        checked("the keys are given and do not move"),
    )
    return Bound(least(values), hypotheses), Ball(float(radius), center)


def _one_head(attention: Attention) -> Head:
    heads = single_heads(attention)
    if len(heads) > 1:
        raise Refusal(f"there are {len(heads)} heads, each with a kernel of its own; bound them one by one")
    return Head(heads[0])


def _around(keys: Tensor, center: Tensor) -> Upper:
    return lengths(keys - center, 1).amax()


def _slope_radius(potential: Potential, keys: Tensor, center: Tensor, domain: Domain) -> Upper:
    """κ: for forms that are bilinear up to terms of one point alone, exactly where the keys are;
    else from slopes on a ball.
    """
    form = bilinear.one(_joint_scores(potential, keys.shape[-1]), keys.shape[-1])
    if form is not None:
        offsets = (keys - center) @ form.a.mT
        rounding = form.error + relative_error(keys.shape[-1] + 4) * length(form.a)
        return (lengths(offsets) + rounding * lengths(keys - center, 1)).amax()
    if not isinstance(domain, Ball):
        raise Refusal(f"slopes of {type(potential).__name__} depend on where queries are; use Ball(radius)")
    query = torch.zeros_like(center) if domain.center is None else domain.center.detach().double()
    radius = _around(keys, center).maximum(lengths(query - center, 1) + radius_of(domain))
    kappa: Upper = slopes.one(potential, BallFacts(center, radius, length(center) + radius)).kappa
    return kappa


def _joint_scores(potential: Potential, width: int) -> Potential:
    """The part of the scores that both points enter:
    -|q - k|²/(2b²) is q·k/b² and terms of one point alone.
    """
    found = of_terms([(_mixed_term(term, width), factor) for term, factor in linear_terms(potential)])
    return potential if found is None else found


def _mixed_term(potential: Potential, width: int) -> Potential:
    if isinstance(potential, Gaussian):  # the form of a Dot counts the rounding of its scale
        scale = 1 / bandwidth_of(potential, width) ** 2
        return _mixed_term(Dot(potential.w_q, potential.w_k, scale), width)
    if (
        isinstance(potential, Dot) and potential.w_q is None and potential.w_k is not None
    ):  # queries are as wide as projected keys
        return potential.replace(w_q=torch.eye(potential.w_k.shape[-1], dtype=torch.float64))
    return potential
