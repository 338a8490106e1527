"""The law of all outputs when the law of tokens is close to a given one, in W₁."""

from __future__ import annotations

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
Tokens are a law $\mu = \sum_iw_i\delta_{x_i}$, $\nu$ any law of a set in a ball of radius $R$ with $W_1(\mu,
\nu) \le \rho$, and $\delta_i$ bounds how far row $i$ moves when its keys become $\nu$ (`measure_dual`). For
every coupling of cost at most $\rho$ $$ \mathbb{E}|T_\nu(Y) - T_\mu(X)| \le \sum_iw_i\delta_i +
w\|A\|R^2\rho, $$ which bounds $W_1$ of the outputs. Residual connections add $\rho$. Heads: $\delta_i$ and
the constants are added, or joined by $|W_O|\sqrt{\sum_h\delta_h^2}$.
""",
    hypotheses=("softmax rows", "bilinear scores", "values affine in the tokens", "no masks, no positions"),
    source="(vuckovic2021)",
    proof=r"""
$|T_\nu(Y) - T_\mu(X)| \le |T_\nu(X) - T_\mu(X)| + |T_\nu(Y) - T_\nu(X)|$. The first has the mean
$\sum_iw_i|T_\nu(x_i) - T_\mu(x_i)|$. $T_\nu$ has the derivative $W^\top\mathrm{Cov}\,A^\top$ with the
covariance of a law in a ball of radius $R$, so the second is at most $w\|A\|R^2|Y - X|$. With heads the
derivative is a sum. With the residual connection $|Y - X|$ is added.
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
    """Σ_i w_i δ_i + w |A| R² ρ."""
    if norm.p != 1:
        raise Refusal(f"{norm!r} is not the distance of this domain; use Wasserstein(1)")
    rows = _rows(subject, domain)
    masses = LawRows(subject.separate[0], domain).masses
    radius = exact(domain.radius)
    moved = (masses * rows).sum() + _own(subject, domain) * radius
    return Bound(moved + radius if subject.residual else moved, CHECKED)


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


def _own(subject: MultiHead, domain: NearbyLaws) -> Upper:
    """How fast a row moves with its query, for every law."""
    square = ball_around(domain).square()
    separate = [_own_of(head, domain) * square for head in subject.separate]
    folded = None if subject.folded is None else [_own_of(head, domain) * square for head in subject.folded]
    return subject.combined(separate, folded)


def _own_of(head: Head, domain: NearbyLaws) -> Upper:
    form = head.form(domain.measure.points.shape[-1])
    if form is None:
        raise Refusal("the rows are not softmax rows of bilinear scores; use Dot or Bilinear with Softmax")
    return head.w * form.norm
