"""Attention to a law that is close to a given one, in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._upper import Lower, Upper, exact
from regard.domains import NearbyLaws
from regard.norms import TokenMax
from regard.proofs.law_rows import LawRows
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Theorem, checked

THEOREM = Theorem(
    name="measure_deviation",
    title="attention to a law near a given one",
    statement=r"""
Keys are a law $\mu = \sum_jw_j\delta_{x_j}$, $x$ a query, $P$ its row, $u = T_\mu(x)$, $k = e^{s(x,
\cdot)}/\mu(e^{s(x, \cdot)})$, $\kappa_j = k(x_j) = P_j/w_j$, $z_j = |V_j - u|$, $\alpha$ the slope of scores,
$w = \|W\|$; $k_{\min} \le k \le k_{\max}$ and $|V - u| \le z_{\max}$ where mass may go. For every law $\nu$
there with $W_1(\mu, \nu) \le \rho$ $$ |T_\nu(x) - T_\mu(x)| \le \min\left(z_{\max}, \frac{\rho L}{D}\right),
\qquad L = \max_j\min(\alpha z_jc_j + wk_{\max},\ \alpha z_{\max}c_j + w\kappa_j), $$ $$ D = \max(k_{\min},
e^{-\alpha\rho\max_j\kappa_j}), \qquad c_j = \frac{k_{\max} - \kappa_j}{\log k_{\max} - \log\kappa_j}. $$
Where no mass goes farther than $r$ from its atom (a tube without jumps), $k_{\max}$ in $L$ and $c_j$ is
$\kappa_je^{\alpha r}$, $z_{\max}$ in $L$ is $z_j + wr$, and $D$ is at least $e^{-\alpha r}$.
""",
    hypotheses=("softmax rows", "bilinear scores", "values affine in the tokens", "no masks, no positions"),
    source="(vuckovic2021)",
    proof=r"""
Let $h = k\,(V - u)$. Then $\mu(h) = 0$ and $T_\nu(x) - u = \nu(h)/\nu(k) = (\nu - \mu)(h)/\nu(k)$.

**Numerator.** Along an optimal coupling $|(\nu - \mu)(h)| \le \rho\,\sup_{j, y}|h(y) - h(x_j)|/|y - x_j|$:
only chords from atoms of $\mu$ count. Two ways to write one:
$h(y) - h(x_j) = (k - \kappa_j)(V_j - u) + k(V(y) - V_j) = (k - \kappa_j)(V(y) - u) + \kappa_j(V(y) - V_j)$.
Here $|V(y) - V_j| \le w|y - x_j|$ and $|\log k - \log\kappa_j| \le \alpha|y - x_j|$, and slopes of chords of
the exponential grow, so $|k - \kappa_j| \le c_j\,|\log k - \log\kappa_j| \le c_j\alpha|y - x_j|$ for $k \le
k_{\max}$.

**Denominator.** $\nu(k) \ge k_{\min}$. And for a coupling $(X, Y)$, with the law $k(X)\,\mu$ and Jensen's
inequality, $\nu(k) = \mathbb{E}\,k(X)e^{s(Y) - s(X)} \ge \exp\mathbb{E}\,k(X)(s(Y) - s(X)) \ge
\exp(-\alpha\max_j\kappa_j\,\rho)$; where $|Y - X| \le r$, it is at least $\mathbb{E}\,k(X)e^{-\alpha r} =
e^{-\alpha r}$, and chords from $x_j$ end where $k \le \kappa_je^{\alpha r}$ and $|V - u| \le z_j + wr$.

$T_\nu(x)$ is a mean of values, none of which is farther than $z_{\max}$ from $u$. The theorem on measures is
the source's; this bound is proved here.
""",
)

CHECKED = (
    checked("softmax rows of bilinear scores"),
    checked("no masks and no positions"),
    checked("mass goes where the domain says"),
)


@THEOREM.deviation(Head, NearbyLaws, TokenMax)
def measure_deviation(head: Head, domain: NearbyLaws, norm: TokenMax) -> Bound:
    """The largest over the given tokens as queries."""
    return Bound(closed_form(LawRows(head, domain)).amax(), CHECKED, note="for the given tokens as queries")


def closed_form(rows: LawRows) -> Upper:
    """min(z_max, ρ L/D), (m,)."""
    w, most, heaviest = rows.head.w, Upper(rows.largest_from.exp(), 16), rows.log_atoms.exp()
    above = (rows.largest_from - rows.log_atoms.smallest()).clamp_min(0.0)
    chord = heaviest * Upper(above, 1).grow(_chord)
    steep = rows.alpha.unsqueeze(-1) * chord
    one = steep * rows.atoms.lengths() + w * most
    two = steep * rows.farthest_from + w * heaviest
    slope = one.minimum(two).amax(-1)
    return rows.farthest.minimum(exact(rows.domain.radius) * slope / least_mass(rows))


def least_mass(rows: LawRows) -> Lower:
    """D: at most ν(k), (m,)."""
    heaviest = rows.log_atoms.exp().amax(-1)
    found = (rows.alpha * exact(rows.domain.radius) * heaviest).exp_minus()
    if rows.own_radius is not None:
        found = found.maximum((rows.alpha * rows.own_radius).exp_minus())
    return found.maximum(_weight_below(rows.smallest))


def _chord(logarithm: Tensor) -> Tensor:
    """(e^t - 1)/t, which grows: the slope of the chord of exp between 0 and t."""
    t = logarithm.clamp_min(1e-8)
    return torch.expm1(t) / t


def _weight_below(logarithm: Tensor) -> Lower:
    """At most e^t; the smallest weight is at most one, since weights have the mean one."""
    return Upper(logarithm.neg().clamp_min(0.0)).exp_minus()
