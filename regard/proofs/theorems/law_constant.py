"""How fast attention carries laws apart that are both near a given one, in a tube around its atoms."""

from __future__ import annotations

from regard._upper import Upper, exact, stack
from regard.domains import NearbyLaws, Tube
from regard.norms import Wasserstein
from regard.proofs.law_rows import LawRows, ball_around
from regard.proofs.subject import Head, MultiHead
from regard.proofs.theorem import Bound, Refusal, Theorem
from regard.proofs.theorems.measure_deviation import CHECKED, least_mass
from regard.proofs.theorems.transported import mean_power, score_norm, slope_anywhere

THEOREM = Theorem(
    name="law_constant",
    title="attention between laws near a given one",
    statement=r"""
In the letters of `measure_deviation`, with $\nu, \nu'$ two laws near $\mu$ in a tube of radius $r$ around its
atoms, which lies in a ball of radius $R$: for every coupling $(X, Y)$ of them $$ \|T_{\nu'}(Y) -
T_\nu(X)\|_{L^p} \le \Bigl(\Bigl(\sum_iw_iL_i^p\Bigr)^{1/p} + w\|A\|R^2\Bigr)\|Y - X\|_{L^p}, \qquad L_i =
\frac{k_{\max, i}}{D_i}\,e^{2\|A\|rR}\,w\bigl(1 + 2R(\alpha_i + \|A\|r)\bigr). $$ Where mass may jump from one
atom to others the largest $L_i$ takes the place of the mean. Residual connections add one. Heads: as in
`transported`.
""",
    hypotheses=("softmax rows", "bilinear scores", "values affine in the tokens", "no masks, no positions"),
    source="(vuckovic2021)",
    proof=r"""
$|T_{\nu'}(Y) - T_\nu(X)| \le |T_{\nu'}(X) - T_\nu(X)| + |T_{\nu'}(Y) - T_{\nu'}(X)|$, and the last term is at
most $w\|A\|R^2|Y - X|$ (`transported`; $X$ and $Y$ may be around different atoms: the query goes anywhere).

**One query.** The laws $\nu_t = (1 - t)\nu + t\nu'$ are near $\mu$ too, since couplings can be mixed, and
$\frac{d}{dt}T_{\nu_t}(x) = (\nu' - \nu)(h_t)$ with $h_t = e^{s(x, \cdot)}(V - T_{\nu_t}(x))/\nu_t(e^{s(x,
\cdot)})$. So $|T_{\nu'}(x) - T_\nu(x)| \le W_1(\nu, \nu')\sup_t\mathrm{Lip}(h_t)$, on the convex hull of the
tube. There $|\nabla h_t| \le \frac{e^{s}}{\nu_t(e^{s})}(|\theta||V - T_{\nu_t}| + w)$, and $|V - T_{\nu_t}|
\le 2wR$; $e^s$ is a convex function of the key, so it is largest on the tube. For the query $x_i$ the
quotient is $k/\nu_t(k) \le k_{\max, i}/D_i$. A query $x$ with $|x - x_i| \le r$ changes $s$ by $(x -
x_i)^\top Ay$, which varies by at most $2\|A\|rR$ over keys $y$, so the quotient by at most the factor
$e^{2\|A\|rR}$; and $|\theta| \le \alpha_i + \|A\|r$.

**All queries.** $X$ has the law $\nu$: it is in the ball about $x_i$ with probability $w_i$, or in one of
them. $W_1 \le \|Y - X\|_{L^1} \le \|Y - X\|_{L^p}$.
""",
)


@THEOREM.constant(MultiHead, NearbyLaws, Wasserstein)
def law_constant(subject: MultiHead, domain: NearbyLaws, norm: Wasserstein) -> Bound:
    """(Σ_i w_i L_i^p)^{1/p} + w |A| R²."""
    if not isinstance(domain.within, Tube):
        raise Refusal("queries of these laws may be anywhere in a ball; use a Tube around the tokens")
    separate = [_slopes(head, domain) for head in subject.separate]
    folded = None if subject.folded is None else [_slopes(head, domain) for head in subject.folded]
    rows = stack(
        [
            subject.combined([one[i] for one in separate], folded and [one[i] for one in folded])
            for i in range(domain.measure.size)
        ]
    )
    masses = LawRows(subject.separate[0], domain).masses
    slopes = rows.amax() if domain.within.jumps else mean_power(masses, rows, norm.p)
    found = slopes + _own(subject, domain)
    return Bound(1 + found if subject.residual else found, CHECKED)


def _own(subject: MultiHead, domain: NearbyLaws) -> Upper:
    """w |A| R² of all heads: from one law to the other a query may go from atom to atom."""
    separate = [slope_anywhere(head, domain) for head in subject.separate]
    folded = None if subject.folded is None else [slope_anywhere(head, domain) for head in subject.folded]
    return subject.combined(separate, folded)


def _slopes(head: Head, domain: NearbyLaws) -> Upper:
    """L_i, (m,)."""
    assert isinstance(domain.within, Tube)
    rows, radius = LawRows(head, domain), exact(domain.within.radius)
    reach = exact(ball_around(domain).radius)
    norm = score_norm(head, domain)
    steep = rows.alpha + norm * radius
    heaviest = Upper(rows.largest.exp(), 16) / least_mass(rows)
    turned = (2 * norm * radius * reach).exp()
    return heaviest * turned * head.w * (1 + 2 * reach * steep)
