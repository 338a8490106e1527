"""Groups of keys that one atom stands for: what attention to the atoms gets wrong."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard._enclosed import Numbers, computed_lengths
from regard._upper import ELEMENTARY, Upper, exact
from regard.proofs.atoms import Atoms
from regard.proofs.theorem import Theorem
from regard.proofs.theorems.score_perturbation import perturbation

THEOREM = Theorem(
    name="tangent_atoms",
    title="tangent atoms for groups of keys",
    statement=r"""
Softmax rows of scores $\theta\cdot y_j$, $\theta = A^\top x + \beta$, weights $w_j$ (a bias of keys is part
of $\log w_j$), values affine in the keys. Keys are in groups $c$; $Z_c(\theta) = \sum_cw_je^{\theta\cdot
y_j}$, $o_c$ the output of the group alone. For any law $p^c$ on each group the **atom** is $k_c = \sum
p_jy_j$ with $\log\tilde w_c = \sum p_j(\log w_j - \log p_j)$; hats are of attention to the atoms, $F =
\log\sum Z_c$.

1. $\hat F \le F$, and with $\nu_j = \hat P_cp^c_j$: $\nu V = \hat o$, $\mathrm{KL}(\nu\,|\,P) = F - \hat F$.
2. For queries $\theta^1, \dots, \theta^m$ the mean of $F - \hat F$ does not grow when each group is tilted by
   the mean query that looks at it: $p^c_j \propto w_je^{\theta_c\cdot y_j}$, $\theta_c =
   \sum_q\hat P_c(q)\theta^q/\sum_q\hat P_c(q)$.
3. With such a $p^c$, whatever $\theta_c = A^\top x_c + \beta$ is, $u = |x - x_c|$, $b = u\max|A(y_j -
   k_c)|$, $s = u\|A\,\mathrm{Cov}_p A^\top\|^{1/2}$, $\sigma = \|\mathrm{Cov}_p(V)\|^{1/2}$, $r =
   \max|V_j - V(k_c)|$: $0 \le \log Z_c - \log\hat Z_c \le D_c$ and $|o_c - V(k_c)| \le E_c$,
   $$ D_c = \min\left(\log\Big(1 + s^2\frac{e^b - 1 - b}{b^2}\Big), \frac{b^2}{2}, b\right),\qquad
      E_c = \min\left(s\,\sigma\,\frac{e^b - 1}{b}, r\right). $$
4. One query: with $t_c = \hat P_c(e^{D_c} - 1)$, $$ |o - \hat o| \le \sum_c\left[\frac{t_c}{1 + t_c}|V(k_c) -
   \hat o| + \frac{\hat P_c + t_c}{1 + t_c}E_c\right]. $$
5. Every query within $Q$ of a point, $u_c \le Q + |x_c - \text{point}|$: $$ |o - \hat o| \le
   2\tanh\left(\tfrac14\max_cD_c\right)R + \max_cE_c, $$ $R$ the radius of the values of the atoms.
""",
    hypotheses=("softmax rows", "scores affine in the keys", "values affine in the keys"),
    source="",
    proof=r"""
1: by Gibbs' variational formula $\mathrm{KL}(\nu|P) = F - [\nu(\theta\cdot y) + \sum\nu_j(\log w_j -
\log\nu_j)]$. The bracket is $\sum_c\hat P_c(\theta\cdot k_c + \log\tilde w_c - \log\hat P_c) = \hat F$, since
$\hat P$ is the Gibbs law of the atoms. $\mathrm{KL} \ge 0$. And $\nu V = \sum_c\hat P_cV(k_c)$, values being
affine.

2: the bracket, for any rows $\pi_c(q)$ in place of $\hat P_c(q)$, is a lower bound of $F$ that is largest in
$\pi$ at $\hat P$. For fixed $\pi$ the sum over queries is, group by group, $\sum_q\pi_c(q)[p(\theta^q\cdot y)
+ \sum p_j(\log w_j - \log p_j)]$, which is largest at the Gibbs law of the mean query. Both steps raise $\hat
F$ in the mean.

3: $\log w_j = F_c + \log p_j - \theta_c\cdot y_j$ with $F_c = \log Z_c(\theta_c)$, so $\log\tilde w_c = F_c
- \theta_c\cdot k_c$ and $\log Z_c - \log\hat Z_c = \log\sum p_je^{\xi_j}$, $\xi_j = (\theta -
\theta_c)\cdot(y_j - k_c) = (x - x_c)\cdot A(y_j - k_c)$. $\xi$ has mean zero under $p$, $|\xi| \le b$,
variance at most $s^2$. Jensen gives the lower bound; Bennett's inequality, Hoeffding's lemma and $\xi \le
b$ the three upper ones. $o_c - V(k_c) = \sum p_j(e^{\xi_j} - 1)(V_j - V(k_c))/\sum p_je^{\xi_j}$, whose
denominator is at least one; by Cauchy and Schwarz and $|e^\xi - 1| \le |\xi|(e^b - 1)/b$ its length is at
most $s\sigma(e^b - 1)/b$. And $o_c$ is in the hull of the values.

4: $P_c = \hat P_ce^{\delta_c}/S$ with $0 \le \delta_c \le D_c$ and $S = \sum\hat P_ce^{\delta_c} \ge 1 + \hat
P_c(e^{\delta_c} - 1)$. Since $\sum\hat P_c(V(k_c) - \hat o) = 0$, $o - \hat o = \sum\hat P_c(e^{\delta_c} -
1)/S\,(V(k_c) - \hat o) + \sum P_c(o_c - V(k_c))$; each coefficient grows in $\delta_c$ when $S$ is
replaced by its bound.

5: $o - \hat o = \sum(P_c - \hat P_c)V(k_c) + \sum P_c(o_c - V(k_c))$. The first is that of two Gibbs laws on
the atoms whose scores differ by $\delta_c \in [0, D_c]$: `score_perturbation`.

**Rounding.** Stored atoms are off by $e$ in place and by $\eta$ in score, up to one number for all, so
$\delta_c \in [-\eta, D_c + \eta]$ in 5, and $|o_c - V(k_c)|$ grows by $\|W\|e$. In 4 the true means are
compared with the stored atoms by `score_perturbation`, and $\hat P$ taken $e^{2\eta}$ times as large. What
float64 loses in attention to all keys and in attention to the atoms is added, so that outputs that were
computed are not farther apart than the bound.
""",
)

SHARP = 8 * ELEMENTARY
"""Roundings of the two quotients below: from 1/2 on expm1(b) is at most 4.4 (expm1(b) - b)."""


def gaps(atoms: Atoms, apart: Upper) -> tuple[Upper, Upper]:
    """D_c and E_c of part 3 for queries that are `apart` (…, k) from the anchors."""
    groups, errors = atoms.groups, atoms.errors
    slack = errors.tilt * groups.spans
    b = apart * groups.reaches + slack
    s = apart * groups.spreads + slack
    mass = (s.square() * _bennett(b)).log1p().minimum(b.square().halved(), b)
    value = (s * groups.value_spreads * _slope(b)).minimum(groups.value_reaches)
    return mass, value + atoms.head.w * errors.mean


def ball_bound(atoms: Atoms, center: Tensor, radius: float) -> Upper:
    """Part 5, with rounding: every query of the ball."""
    away = exact(float(radius)) + computed_lengths(atoms.anchors - center)
    mass, value = gaps(atoms, away)
    moved = atoms.moved_by_rounding(away.amax())
    law = perturbation(mass.amax() + 2 * moved)
    found = (2 * law * atoms.radius + value.amax()).minimum(2 * atoms.hull)
    return found + _rounding(atoms, computed_lengths(center) + exact(float(radius)))


def row_bounds(atoms: Atoms, queries: Tensor) -> Upper:
    """Part 4, with rounding: one number for each query (m,)."""
    apart = _distances(queries, atoms.anchors)
    mass, value = gaps(atoms, apart)
    moved = atoms.moved_by_rounding(apart.amax())
    shifted = 2 * perturbation(2 * moved) * atoms.radius + atoms.head.w * atoms.errors.mean
    weights, outputs, error = atoms.rows(queries)
    law = Numbers(weights.center, weights.error + 2 * moved).exp().minimum(exact(1.0))
    away = computed_lengths(atoms.values.unsqueeze(0) - outputs.unsqueeze(1))
    away = away + error + atoms.value_error + 2 * shifted
    more = (law * mass.expm1()).bound
    share = _at_most_one(more / (1 + more))
    heavy = _at_most_one((law.bound + more) / (1 + more))
    found = (share * away + heavy * value).sum()
    everything = (away + atoms.groups.value_reaches).amax(-1)
    found = found.minimum(everything) + shifted
    return found + _rounding(atoms, computed_lengths(queries).amax())


def _at_most_one(value: Tensor) -> Upper:
    """A share that grows in what it was computed of; one where that left the range of numbers."""
    return Upper(value, 4).minimum(exact(1.0))


def _rounding(atoms: Atoms, reach: Upper) -> Upper:
    return atoms.rounding(reach, atoms.given.count) + atoms.rounding(reach, len(atoms.points))


def _distances(queries: Tensor, anchors: Tensor) -> Upper:
    """At least |x - x_c|, (m, k)."""
    found = torch.cdist(queries, anchors, compute_mode="donot_use_mm_for_euclid_dist")
    return Upper(found.clamp_min(1e-150), queries.shape[-1] + 4)


def _bennett(b: Upper) -> Upper:
    """At least (e^b - 1 - b)/b², which grows."""
    return _by_series(b, lambda x: (torch.expm1(x) - x) / x.square(), 2)


def _slope(b: Upper) -> Upper:
    """At least (e^b - 1)/b, which grows."""
    return _by_series(b, lambda x: torch.expm1(x) / x, 1)


def _by_series(b: Upper, closed: Callable[[Tensor], Tensor], first: int) -> Upper:
    """Σ b^k/(k + first)! below one half, where the closed form cancels; its tail is below the last term."""
    value = b.bound
    near, term = torch.zeros_like(value), torch.ones_like(value)
    for k in range(1, first + 1):
        term = term / k
    for k in range(first + 1, first + 16):
        near, term = near + term, term * value / k
    far = closed(value.clamp_min(0.5))
    return Upper(torch.where(value < 0.5, near + term + term, far), SHARP)
