"""Attention to a law that is close to a given one, by duality: as good as the worst law, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from regard._upper import Lower, Upper, exact, exact_lower
from regard.domains import Ball, NearbyLaws
from regard.norms import TokenMax
from regard.proofs.law_rows import LawRows
from regard.proofs.slices import Slices
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Theorem
from regard.proofs.theorems.measure_deviation import CHECKED, closed_form

THEOREM = Theorem(
    name="measure_dual",
    title="attention to a law near a given one, by duality",
    statement=r"""
In the letters of `measure_deviation`, with $h = k\,(V - u)$: if for some $\lambda \ge 0$ $$ \lambda\rho +
\sum_jw_j\sup_y\left[\,|h(y) - h(x_j)| - \tau\,(k(y) - \kappa_j) - \lambda|y - x_j|\,\right] \le \tau, $$ $y$
running over where mass may go, then $|T_\nu(x) - T_\mu(x)| \le \tau$ for every such law $\nu$ with $W_1(\mu,
\nu) \le \rho$. A vocabulary is enumerated. On a ball $|h(y) - h(x_j)| \le \min(|k - \kappa_j|z_j + k\min(wr,
v_j),\ kz + \kappa_jz_j)$ with $r = |y - x_j|$, $z \ge |V(y) - u|$ and $v_j \ge |V(y) - V_j|$, and $k$ runs
over cells. The weight says where $y$ is along the slope $\theta$ of the scores, $t = (\log k - \log
k(c))/\alpha$ from the center $c$, and $q = \sqrt{R^2 - t^2}$ how far it can be across: with $t_p$ and $a_p$
the same of a point $p$, $(t - t_p)^2 + (a_p - q)_+^2 \le |y - p|^2 \le (t - t_p)^2 + (a_p + q)^2$. That
bounds $r$ from below for $p = x_j$, and $z \le w|y - m|$ from above for the mean $m$ of the row's keys.
""",
    hypotheses=("softmax rows", "bilinear scores", "values affine in the tokens", "no masks, no positions"),
    source="(vuckovic2021)",
    proof=r"""
$|T_\nu(x) - u| \le \tau$ says that $\int k\,(e\cdot(V - u) - \tau)\,d\nu \le 0$ for every unit vector $e$.
Along an optimal coupling with $\mu$, where the same integral over $\mu$ is $-\tau$ since $\mu(h) = 0$ and
$\mu(k) = 1$: $\int k\,(e\cdot(V - u) - \tau)\,d\nu = -\tau + \mathbb{E}[e\cdot(h(Y) - h(X)) - \tau(k(Y) -
k(X))]$, and the expectation is at most $\lambda\,\mathbb{E}|Y - X| + \mathbb{E}[\,|h(Y) - h(X)| - \tau(k(Y) -
k(X)) - \lambda|Y - X|\,] \le \lambda\rho + \sum_jw_j\sup_y[\dots]$.

On a ball: the two ways of `measure_deviation` to write $h(y) - h(x_j)$, and the triangle inequality. Since
$\log k$ is affine with slope $\theta$, $t = \theta\cdot(y - c)/\alpha$; the part of $y - c$ across $\theta$
has at most the length $q$, as $|y - c| \le R$; and $|y - p|^2$ is the sum of the squares along and across.
For $k$ in a cell $[k_a, k_b]$ with $r \ge r_0$, $k\min(wr, v) - \lambda r$ is at most $k_bwr_0 - \lambda r_0$
where $k_bw \le \lambda$, and $k_bv - \lambda\max(r_0, v/w)$ otherwise. Above $\kappa_j$ there is
$(k - \kappa_j)(z_j - \tau) \le (k_b - \kappa_j)(z_j - \tau)_+ - (k_a - \kappa_j)(\tau - z_j)_+$; below,
$(\kappa_j - k)(z_j + \tau) \le (\kappa_j - k_a)(z_j + \tau)$. $\tau$ and $\lambda$ are searched without
proof, and the inequality is checked.
""",
)

CELLS, FEWEST, MOST = 256, 96, 2**22
"""Cells of log k on a ball, on either side of an atom; at least so many where all of them are too many."""

GOLDEN = (math.sqrt(5) - 1) / 2
REACH = 0.7
"""How far the best log λ is looked for beyond that of the τ before."""

Gains = Callable[[Tensor, Tensor], Upper]
"""gains(τ (m,), λ (m,)): at least the supremum for each atom, (m, n)."""


@THEOREM.deviation(Head, NearbyLaws, TokenMax)
def measure_dual(head: Head, domain: NearbyLaws, norm: TokenMax) -> Bound:
    """The largest over the given tokens as queries."""
    return Bound(dual(LawRows(head, domain)).amax(), CHECKED, note="for the given tokens as queries")


def dual(rows: LawRows) -> Upper:
    """The smallest τ that was found for each row and checked, (m,); never above the closed form."""
    known = closed_form(rows)
    gains = _on_ball(rows) if isinstance(rows.domain.within, Ball) else _on_words(rows)
    tau, multiplier = _search(rows, gains, known.bound)
    for wider in (1e-9, 1e-6, 1e-4, 1e-2):
        tried = tau * (1 + wider)
        holds = _needed(rows, gains, tried, multiplier).bound <= tried
        known = known.minimum(Upper(torch.where(holds, tried, math.inf)))
    return known


def _needed(rows: LawRows, gains: Gains, tau: Tensor, multiplier: Tensor) -> Upper:
    """λρ + Σ_j w_j sup[…], (m,)."""
    moved = exact(multiplier) * exact(rows.domain.radius)
    return moved + (rows.masses.unsqueeze(0) * gains(tau, multiplier)).sum(-1)


# A search that proves nothing


def _search(rows: LawRows, gains: Gains, known: Tensor) -> tuple[Tensor, Tensor]:
    """Bisection in τ, since what holds for τ holds for more, with the best λ for each."""
    size = rows.head.w.bound * rows.largest.exp() * (1 + rows.alpha.bound * 2 * rows.farthest.bound)
    around = (1e-9 * size.clamp(1e-200, 1e200)).log(), (4 * size.clamp(1e-200, 1e200)).log()
    low, high, best = torch.zeros_like(known), known, around[1]
    for _ in range(24):
        middle = (low + high) / 2
        near, needed = _golden(partial(_needed_for, rows, gains, middle), *around)
        around = near - REACH, near + REACH
        holds = needed <= middle
        low, high = torch.where(holds, low, middle), torch.where(holds, middle, high)
        best = torch.where(holds, near, best)
    return high, best.exp()


def _needed_for(rows: LawRows, gains: Gains, tau: Tensor, log_multiplier: Tensor) -> Tensor:
    return _needed(rows, gains, tau, log_multiplier.exp()).bound


def _golden(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Where a convex function of each number is smallest, and how small."""
    first, second = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    left, right = function(first), function(second)
    while float((high - low).amax()) > 1e-4:
        down = left < right
        low, high = torch.where(down, low, first), torch.where(down, second, high)
        inner = torch.where(down, high - GOLDEN * (high - low), low + GOLDEN * (high - low))
        value = function(inner)
        first, second = torch.where(down, inner, second), torch.where(down, first, inner)
        left, right = torch.where(down, value, right), torch.where(down, left, value)
    return torch.where(left < right, first, second), torch.minimum(left, right)


# Suprema


def _on_words(rows: LawRows) -> Gains:
    """max_y |h(y) - h(x_j)| + τκ_j - (τk(y) + λ|y - x_j|), (m, n); zero where mass stays."""
    moments, heavy = rows.moments(), rows.log_atoms.exp().unsqueeze(-1)
    light, apart = rows.log_words.exp_low().unsqueeze(1), rows.apart.unsqueeze(0)

    def gains(tau: Tensor, multiplier: Tensor) -> Upper:
        tau, multiplier = tau[:, None, None], multiplier[:, None, None]
        less = exact_lower(tau) * light + exact_lower(multiplier) * apart
        return ((moments + exact(tau) * heavy) - less).amax(-1)

    return gains


def _on_ball(rows: LawRows) -> Gains:
    """The same cell by cell of log k, from κ_j upward and from κ_j downward, (m, n)."""
    sides = [_Side(rows, upward) for upward in (True, False)]

    def gains(tau: Tensor, multiplier: Tensor) -> Upper:
        up, down = (side.gains(tau[:, None, None], multiplier[:, None, None]) for side in sides)
        return up.maximum(down).amax(-1)

    return gains


class _Side:
    """Cells [k_a, k_b] on one side of each κ_j, all (m, n, cells)."""

    def __init__(self, rows: LawRows, upward: bool) -> None:
        self.rows, self.upward = rows, upward
        ends = self._ends()
        low, high = (ends[..., :-1], ends[..., 1:]) if upward else (ends[..., 1:], ends[..., :-1])
        self.heaviest = Upper(high.exp(), 16)
        self.lightest = Lower(low.exp(), 16)
        self.kappa = rows.log_atoms.exp().unsqueeze(-1)
        self.kappa_low = rows.log_atoms.exp_low().unsqueeze(-1)
        self.size = rows.atoms.lengths().unsqueeze(-1)
        slices = Slices(rows, low, high)
        self.far = slices.nearest_atoms().bound
        self.farthest = rows.farthest[:, None, None].minimum(rows.head.w * slices.farthest_from_means())
        self.wide = rows.values_apart.map(lambda t: t[None, :, None]).firm()

    def _ends(self) -> Tensor:
        """From log κ_j to the last log k of the ball; the first end is on the near side of κ_j."""
        atoms = self.rows.log_atoms
        start = atoms.smallest() if self.upward else atoms.largest()
        last = (self.rows.largest if self.upward else self.rows.smallest).unsqueeze(-1)
        last = torch.maximum(last, atoms.largest()) if self.upward else torch.minimum(last, atoms.smallest())
        cells = max(FEWEST, min(CELLS, MOST // start.numel()))
        parts = torch.linspace(0, 1, cells + 1, dtype=torch.float64)
        ends = start.unsqueeze(-1) + parts * (last - start).unsqueeze(-1)
        ends[..., -1] = last
        return ends

    def gains(self, tau: Tensor, multiplier: Tensor) -> Upper:
        """min of both ways to write h(y) - h(x_j), with -τ(k - κ_j) - λ|y - x_j| added."""
        near = exact_lower(multiplier) * exact_lower(self.far)
        added, taken = self._moved(multiplier, near)
        more, less = self._weights(tau)
        one = (more + added) - (less + taken)
        farthest = self.farthest
        through = self.heaviest * (farthest - exact_lower(tau)) + self.kappa * (self.size + exact(tau))
        slack = exact_lower(tau) - farthest
        return one.minimum(through - (self.lightest * slack + near))

    def _weights(self, tau: Tensor) -> tuple[Upper, Lower]:
        """|k - κ_j| z_j - τ(k - κ_j), as what it is at most without what it certainly takes away."""
        if not self.upward:
            return (self.kappa - self.lightest) * (self.size + exact(tau)), exact_lower(torch.zeros_like(tau))
        more = (self.heaviest - self.kappa_low) * (self.size - exact_lower(tau))
        return more, (self.lightest - self.kappa) * (exact_lower(tau) - self.size)

    def _moved(self, multiplier: Tensor, near: Lower) -> tuple[Upper, Lower]:
        """k min(wr, v) - λr over r ≥ r_0: where k_b w ≤ λ at r_0, otherwise at max(r_0, v/w)."""
        w = self.rows.head.w.firm()
        slow = (self.heaviest * w).bound <= multiplier
        walked, jumped = self.heaviest * w * exact(self.far), self.heaviest * self.wide
        turning = exact_lower(multiplier) * exact_lower(self.far).maximum(exact_lower(self.wide.value) / w)
        added = Upper(torch.where(slow, walked.bound, jumped.bound))
        return added, Lower(torch.where(slow, near.bound, turning.bound))
