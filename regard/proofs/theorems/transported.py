"""The law of all outputs when the law of tokens is close to a given one, in W₁."""

from __future__ import annotations

import math

from regard._upper import Upper, exact, stack
from regard.attention import Attention
from regard.domains import NearbyLaws
from regard.maps import Heads, Residual
from regard.norms import TokenMax, Wasserstein
from regard.proofs.law_rows import LawRows, ball_around
from regard.proofs.subject import Head, MultiHead, subject_of
from regard.proofs.theorem import Bound, Refusal, Theorem
from regard.proofs.theorems.measure_deviation import CHECKED
from regard.proofs.theorems.measure_dual import dual

THEOREM = Theorem(
    name="transported",
    title="a law carried by attention, near a given one",
    statement=r"""
Tokens are a law $\mu = \sum_iw_i\delta_{x_i}$, $\nu$ any law of a set in a ball of radius $R$ with $W_p(\mu,
\nu) \le \rho$, and $\delta_i$ bounds how far row $i$ moves when its keys become $\nu$ (`measure_dual`). For
every coupling with $\|Y - X\|_{L^p} \le \rho$ and every $q \le p$ $$ \|T_\nu(Y) - T_\mu(X)\|_{L^q} \le
\Bigl(\sum_iw_i\delta_i^q\Bigr)^{1/q} + w\|A\|R^2\rho, $$ which bounds $W_q$ of the outputs. Residual
connections add $\rho$. Heads: $\delta_i$ and the constants are added, or joined by
$|W_O|\sqrt{\sum_h\delta_h^2}$. In a tube of radius $r$ without jumps the coupling is one along which no mass
leaves the balls around its atoms, and $R^2$ may be $\max_i(e^{r(\|A\|R + \alpha_i)}\sigma_i + r)^2$, with
$\sigma_i^2$ the largest variance of the keys in row $i$.
""",
    hypotheses=("softmax rows", "bilinear scores", "values affine in the tokens", "no masks, no positions"),
    source="(vuckovic2021)",
    proof=r"""
$|T_\nu(Y) - T_\mu(X)| \le |T_\nu(X) - T_\mu(X)| + |T_\nu(Y) - T_\nu(X)|$. The first is $|T_\nu(x_i) -
T_\mu(x_i)|$ with probability $w_i$, and $\delta_i$ holds since $W_1 \le W_p \le \rho$. $T_\nu$ has the
derivative $W^\top\mathrm{Cov}\,A^\top$ with the covariance of a law in a ball of radius $R$, so the second
is at most $w\|A\|R^2|Y - X|$. With heads the derivative is a sum. In a tube without jumps, let $q$ be
within $r$ of $x_i$, and give each key of $\nu$ the atom $x_j$ that it comes from. The scores $q^\top Ay$
differ from $x_i^\top Ax_j$ by $(q - x_i)^\top Ay + x_i^\top A(y - x_j) + \beta\cdot(y - x_j)$, which varies
by at most $2r(\|A\|R + \alpha_i)$, so row $q$ of $\nu$ gives no atom more than $e^{2r(\|A\|R + \alpha_i)}$
times its weight in row $i$ of $\mu$. About the mean of that row the atoms have at most so many times its
variance, in every direction, and keys are within $r$ of them. With the residual connection $|Y - X|$ is
added. Minkowski's inequality, and $\|Y - X\|_{L^q} \le \|Y - X\|_{L^p}$.
""",
)


@THEOREM.deviation(MultiHead, NearbyLaws, TokenMax)
def rows_together(subject: MultiHead, domain: NearbyLaws, norm: TokenMax) -> Bound:
    """The largest move of the outputs of the given tokens, all heads together."""
    if subject.residual:
        raise Refusal("the tokens themselves are another law; ask for Wasserstein(1)")
    note = "for the given tokens as queries"
    return Bound(_rows(subject, domain).amax(), CHECKED, note=note)


def _around_attention(map: Residual, domain: NearbyLaws, norm: Wasserstein) -> bool:
    return isinstance(map.map, (Attention, Heads))


@THEOREM.deviation(Residual, NearbyLaws, Wasserstein, about=_around_attention)
def with_residual(map: Residual, domain: NearbyLaws, norm: Wasserstein) -> Bound:
    """ρ more."""
    assert isinstance(map.map, (Attention, Heads))
    return transported(subject_of(map.map, residual=True), domain, norm)


@THEOREM.deviation(MultiHead, NearbyLaws, Wasserstein)
def transported(subject: MultiHead, domain: NearbyLaws, norm: Wasserstein) -> Bound:
    """(Σ_i w_i δ_i^q)^{1/q} + w |A| R² ρ."""
    refuse_larger(domain, norm)
    rows = _rows(subject, domain)
    masses = LawRows(subject.separate[0], domain).masses
    radius = exact(domain.radius)
    moved = mean_power(masses, rows, norm.p) + own(subject, domain) * radius
    return Bound(moved + radius if subject.residual else moved, CHECKED)


def refuse_larger(domain: NearbyLaws, norm: Wasserstein) -> None:
    """Laws that are near in W_p may be far in W_q for q > p."""
    if norm.p > domain.p:
        remedy = f"use Wasserstein({domain.p:g}), or a NearbyLaws with p={norm.p:g}"
        raise Refusal(f"{norm!r} is not the distance of this domain, and larger; {remedy}")


def mean_power(masses: Upper, numbers: Upper, order: float) -> Upper:
    """(Σ_i w_i x_i^q)^{1/q}, and the largest for q = ∞."""
    if math.isinf(order):
        return numbers.amax()
    if order == 1:
        return (masses * numbers).sum()
    largest = numbers.amax()  # the smaller of both, where powers leave the range of numbers
    return (masses * numbers.power(order)).sum().inverse_power(order).minimum(largest)


def _rows(subject: MultiHead, domain: NearbyLaws) -> Upper:
    """δ_i, (m,)."""
    separate = [dual(LawRows(head, domain)) for head in subject.separate]
    folded = None if subject.folded is None else [dual(LawRows(head, domain)) for head in subject.folded]
    count = domain.measure.size
    rows = [
        subject.combined([one[i] for one in separate], folded and [one[i] for one in folded])
        for i in range(count)
    ]
    return stack(rows)


def own(subject: MultiHead, domain: NearbyLaws) -> Upper:
    """How fast a row moves with its query, for every law, while the query goes where mass may go."""
    separate = [_own_slopes(head, domain) for head in subject.separate]
    folded = None if subject.folded is None else [_own_slopes(head, domain) for head in subject.folded]
    rows = [
        subject.combined([one[i] for one in separate], folded and [one[i] for one in folded])
        for i in range(len(separate[0].value))
    ]
    return stack(rows).amax()


def _own_slopes(head: Head, domain: NearbyLaws) -> Upper:
    """w |A| R², (1,), or what is known around each query of a tube without jumps, (m,)."""
    whole, rows = slope_anywhere(head, domain).map(lambda t: t.reshape(1)), LawRows(head, domain)
    radius = rows.own_radius
    if radius is None:
        return whole
    norm, reach = score_norm(head, domain), exact(ball_around(domain).radius)
    turned = (radius * (norm * reach + rows.alpha)).exp()  # e^{Δ/2}
    near = head.w * norm * (turned * rows.spreads + radius).square()
    return near.minimum(whole.expand_as(near.value))


def slope_anywhere(head: Head, domain: NearbyLaws) -> Upper:
    """w |A| R²: how fast a row moves with a query that may be anywhere."""
    return head.w * score_norm(head, domain) * exact(ball_around(domain).radius).square()


def score_norm(head: Head, domain: NearbyLaws) -> Upper:
    """At least |A|."""
    form = head.form(domain.measure.points.shape[-1])
    if form is None:
        raise Refusal("the rows are not softmax rows of bilinear scores; use Dot or Bilinear with Softmax")
    return form.norm
