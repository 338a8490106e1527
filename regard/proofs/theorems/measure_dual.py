"""Attention to a law that is close to a given one, by duality: as good as the worst law, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from regard._upper import Lower, Upper, exact, exact_lower
from regard.domains import Ball, NearbyLaws, Vocabulary
from regard.norms import TokenMax
from regard.proofs.law_rows import Balls, LawRows
from regard.proofs.slices import Slices
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Theorem
from regard.proofs.theorems.measure_deviation import CHECKED, closed_form

THEOREM = Theorem(
    name="measure_dual",
    title="attention to a law near a given one, by duality",
    statement=r"""
In the letters of `measure_deviation`, with $h = k\,(V - u)$: if for some $\lambda \ge 0$ $$ \lambda\rho +
\sum_jw_j\sup_y\left[\,|h(y) - h(x_j)| - \tau\,(k(y) - \kappa_j) - \lambda|y - x_j|\,\right] \le \tau, $$
$y$ running over where mass may go, then $|T_\nu(x) - T_\mu(x)| \le \tau$ for every such law $\nu$ with
$W_1(\mu, \nu) \le \rho$. A vocabulary is enumerated. On a ball, with $r = |y - x_j|$ and $z \ge |V(y) -
u|$, $|h(y) - h(x_j)| \le kz + \kappa_jz_j$; also $\le (k - \kappa_j)\min(z, z_j + wr) + \kappa_jwr$ where
$k \ge \kappa_j$, and $\le (\kappa_j - k)z_j + kwr$ where $k \le \kappa_j$; and $k$ runs over cells. The
weight says where $y$ is along the slope $\theta$ of the scores, $t = (\log k - \log k(c))/\alpha$ from the
center $c$, and $q = \sqrt{R^2 - t^2}$ how far it can be across: with $t_p$ and $a_p$ the same of a point
$p$, $(t - t_p)^2 + (a_p - q)_+^2 \le |y - p|^2 \le (t - t_p)^2 + (a_p + q)^2$. That bounds $r$ from both
sides for $p = x_j$, and $z \le w|y - m|$ from above for the mean $m$ of the row's keys. A tube is such a
ball about every atom: where mass may not jump, $y$ runs over the ball about $x_j$ alone; in the ball about
another atom $x_i$ also $|h(y) - h(x_j)| \le |h(x_i) - h(x_j)| + |k - \kappa_i|z + \kappa_iwr$, with the
radius $r$ of the tube.
""",
    hypotheses=("softmax rows", "bilinear scores", "values affine in the tokens", "no masks, no positions"),
    source="(vuckovic2021)",
    proof=r"""
$|T_\nu(x) - u| \le \tau$ says that $\int k\,(e\cdot(V - u) - \tau)\,d\nu \le 0$ for every unit vector $e$.
Along an optimal coupling with $\mu$, where the same integral over $\mu$ is $-\tau$ since $\mu(h) = 0$ and
$\mu(k) = 1$: $\int k\,(e\cdot(V - u) - \tau)\,d\nu = -\tau + \mathbb{E}[e\cdot(h(Y) - h(X)) - \tau(k(Y) -
k(X))]$, and the expectation is at most $\lambda\,\mathbb{E}|Y - X| + \mathbb{E}[\,|h(Y) - h(X)| - \tau(k(Y)
- k(X)) - \lambda|Y - X|\,] \le \lambda\rho + \sum_jw_j\sup_y[\dots]$.

On a ball: the two ways of `measure_deviation` to write $h(y) - h(x_j)$, the triangle inequality, and $|V(y)
- u| \le |V_j - u| + w|y - x_j|$. Since $\log k$ is affine with slope $\theta$, $t = \theta\cdot(y -
c)/\alpha$; the part of $y - c$ across $\theta$ has at most the length $q$, as $|y - c| \le R$; and $|y -
p|^2$ is the sum of the squares along and across. Let $k$ be in a cell $[k_a, k_b]$ and $r_0 \le r \le r_1$.
Above $\kappa_j$ the terms with $z(r) = \min(z, z_j + wr)$ are at most $g(r) = (k_b - \kappa_j)(z(r) -
\tau)_+ - (k_a - \kappa_j)(\tau - z(r))_+ + (\kappa_jw - \lambda)r$, which is convex up to where $z_j + wr$
reaches $z$ and linear beyond: it is largest at $r_0$, at that place where $\kappa_jw \le \lambda$, or at
$r_1$ otherwise. Below, $(\kappa_j - k)(z_j + \tau) + (kw - \lambda)r \le (\kappa_j - k_a)(z_j + \tau) +
(k_bw - \lambda)r$, which is linear in $r$. $\tau$ and $\lambda$ are searched without proof, and the
inequality is checked.
""",
)

CELLS, FEWEST, MOST = 256, 96, 2**22
"""Cells of log k on a ball, on either side of an atom; at least so many where all of them are too many."""
FEW, NARROW = 8, 1 / 128
"""On the balls of a tube: at least so many cells, and none wider than that while they are not too many."""

GOLDEN = (math.sqrt(5) - 1) / 2
REACH, CLOSE = 0.7, 1e-4
"""How far the best log λ is looked for beyond that of the τ before, and how closely."""

SECANTS, WIDE, EDGE = 11, 4, 1e-3
"""How many steps τ takes, for how many of them λ is looked for everywhere, and how near to the ends of the
interval of τ each may be.
"""

Gains = Callable[[Tensor, Tensor], Upper]
"""gains(τ (m,), λ (m,)): at least the supremum for each atom, (m, n)."""


@THEOREM.deviation(Head, NearbyLaws, TokenMax)
def measure_dual(head: Head, domain: NearbyLaws, norm: TokenMax) -> Bound:
    """The largest over the given tokens as queries."""
    return Bound(dual(LawRows(head, domain)).amax(), CHECKED, note="for the given tokens as queries")


def dual(rows: LawRows) -> Upper:
    """The smallest τ that was found for each row and checked, (m,); never above the closed form."""
    known = closed_form(rows)
    gains = _on_words(rows) if isinstance(rows.domain.within, Vocabulary) else _on_balls(rows)
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
    """Where what is needed for τ falls below τ, with the best λ for each: by secants, since their difference
    is a convex function of τ, one of whose ends counts half when it has stayed (Dowell and Jarratt 1971).
    """
    size = rows.head.w.bound * rows.largest.exp() * (1 + rows.alpha.bound * 2 * rows.farthest.bound)
    around = (1e-9 * size.clamp(1e-200, 1e200)).log(), (4 * size.clamp(1e-200, 1e200)).log()
    low, high = torch.zeros_like(known), known
    best, above = _golden(partial(_needed_for, rows, gains, high), *around)
    below = _golden(partial(_needed_for, rows, gains, low), *around)[1]
    below, above, near, side = below - low, above - high, best, torch.zeros_like(known)
    for step in range(SECANTS):
        share = torch.where((below > 0) & (above < 0), below / (below - above), 0.5).clamp(EDGE, 1 - EDGE)
        middle = low + share * (high - low)
        where = (near - REACH, near + REACH) if step >= WIDE else around
        near, needed = _golden(partial(_needed_for, rows, gains, middle), *where)
        value, holds = needed - middle, needed <= middle
        low, high = torch.where(holds, low, middle), torch.where(holds, middle, high)
        below = torch.where(holds, torch.where(side > 0, below / 2, below), value)
        above = torch.where(holds, value, torch.where(side < 0, above / 2, above))
        best, side = torch.where(holds, near, best), holds.double() * 2 - 1
    return high, best.exp()


def _needed_for(rows: LawRows, gains: Gains, tau: Tensor, log_multiplier: Tensor) -> Tensor:
    return _needed(rows, gains, tau, log_multiplier.exp()).bound


def _golden(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Where a convex function of each number is smallest, and how small."""
    first, second = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    left, right = function(first), function(second)
    while float((high - low).amax()) > CLOSE:
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


def _on_balls(rows: LawRows) -> Gains:
    """The same cell by cell of log k, from κ_j upward and from κ_j downward, (m, n)."""
    sides = [_Side(rows, balls, upward) for balls in rows.balls for upward in (True, False)]

    def gains(tau: Tensor, multiplier: Tensor) -> Upper:
        found = [side.gains(tau[:, None, None], multiplier[:, None, None]) for side in sides]
        return found[0].maximum(*found[1:])

    return gains


class _Side:
    """Cells [k_a, k_b] on one side of each κ_j, all (m, n, cells)."""

    def __init__(self, rows: LawRows, balls: Balls, upward: bool) -> None:
        self.rows, self.balls, self.upward = rows, balls, upward
        ends = self._ends()
        low, high = (ends[..., :-1], ends[..., 1:]) if upward else (ends[..., 1:], ends[..., :-1])
        self.heaviest = Upper(high.exp(), 16)
        self.lightest = Lower(low.exp(), 16)
        self.kappa = rows.log_atoms.exp().unsqueeze(-1)
        self.kappa_low = rows.log_atoms.exp_low().unsqueeze(-1)
        self.size = rows.atoms.lengths().unsqueeze(-1).firm()
        slices, self.w = Slices(rows, balls, low, high), rows.head.w.firm()
        self.near, self.far = slices.nearest_atoms().bound, slices.farthest_atoms().bound
        self.farthest = rows.farthest[:, None, None].minimum(
            self.w * slices.farthest_from_means(), self.size + self.w * exact(self.far)
        )
        self.jumped = self._jumped() if balls.shift else None

    def _ends(self) -> Tensor:
        """From log κ_j to the last log k of the ball; the first end is on the near side of κ_j."""
        atoms, at = self.rows.log_atoms, self.rows.log_centers(self.balls)
        more = self.rows.alpha.unsqueeze(-1) * self.balls.radius
        lowest, highest = at.smallest(more), at.largest(more)
        if self.upward:
            start = torch.maximum(atoms.smallest(), lowest)
            last = torch.maximum(start, highest)
        else:
            start = torch.minimum(atoms.largest(), highest)
            last = torch.minimum(start, lowest)
        self.empty = (highest < atoms.smallest()) if self.upward else (lowest > atoms.largest())
        parts = torch.linspace(0, 1, self._cells(last - start) + 1, dtype=torch.float64)
        ends = start.unsqueeze(-1) + parts * (last - start).unsqueeze(-1)
        ends[..., -1] = last
        return ends

    def _cells(self, spans: Tensor) -> int:
        """So many that they are narrow in a tube, whose balls are small and may be many."""
        most = max(FEWEST, min(CELLS, MOST // spans.numel()))
        if isinstance(self.rows.domain.within, Ball):
            return most
        return max(FEW, min(most, math.ceil(float(spans.abs().amax()) / NARROW)))

    def gains(self, tau: Tensor, multiplier: Tensor) -> Upper:
        """The smaller of both ways to bound |h(y) - h(x_j)|, with -τ(k - κ_j) - λ|y - x_j| added; nothing
        where no such key is in the ball, (m, n).
        """
        near = exact_lower(multiplier) * exact_lower(self.near)
        one = self._upward(tau, multiplier, near) if self.upward else self._downward(tau, multiplier)
        through = self.heaviest * (self.farthest - exact_lower(tau)) + self.kappa * (self.size + exact(tau))
        slack = exact_lower(tau) - self.farthest
        found = one.minimum(through - (self.lightest * slack + near))
        if self.jumped is not None:
            taken = exact_lower(tau) * self.lightest + near
            found = found.minimum((self.jumped + exact(tau) * self.kappa) - taken)
        return found.amax(-1).where(~self.empty)

    def _jumped(self) -> Upper:
        """At least |h(x_i) - h(x_j)| + |h(y) - h(x_i)| for keys y in the ball about another atom x_i, (m, n,
        cells); the last is at most |k - κ_i| z + κ_i w r.
        """
        rows, shift = self.rows, self.balls.shift
        kappa = self.kappa.map(lambda t: t.roll(shift, 1))
        low = self.kappa_low.map(lambda t: t.roll(shift, 1))
        apart = rows.atom_moments.map(lambda t: t.roll(shift, 2).diagonal(dim1=1, dim2=2).unsqueeze(-1))
        turned = (self.heaviest - low).maximum(kappa - self.lightest)
        return apart + turned * self.farthest + kappa * self.w * self.balls.radius

    def _upward(self, tau: Tensor, multiplier: Tensor, near: Lower) -> Upper:
        """(k - κ)(z - τ) + κwr - λr with z = min(z_cell, z_j + wr), at r_0 and where z bends, or at r_1."""
        start, heavy = exact(self.near), (self.kappa * self.w).firm()
        first = self._lifted(tau, (self.size + self.w * start).minimum(self.farthest), heavy * start, near)
        bend = ((Lower(self.farthest.bound) - self.size) / self.w).bound.maximum(self.near)
        place = torch.where(heavy.value >= multiplier, self.far, bend)
        taken = exact_lower(multiplier) * exact_lower(place)
        return first.maximum(self._lifted(tau, self.farthest, heavy * exact(place), taken))

    def _lifted(self, tau: Tensor, size: Upper, moved: Upper, taken: Lower) -> Upper:
        """(k - κ_j)(z - τ) + κ_jwr - λr for k in the cell."""
        more = (self.heaviest - self.kappa_low) * (size - exact_lower(tau))
        less = (self.lightest - self.kappa) * (exact_lower(tau) - size)
        return (more + moved) - (less + taken)

    def _downward(self, tau: Tensor, multiplier: Tensor) -> Upper:
        """(κ_j - k)(z_j + τ) + kwr - λr: at r_0 where k_b w ≤ λ, otherwise at r_1."""
        turned = (self.kappa - self.lightest) * (self.size + exact(tau))
        heavy = (self.heaviest * self.w).firm()
        place = torch.where(heavy.value > multiplier, self.far, self.near)
        taken = exact_lower(multiplier) * exact_lower(place)
        return (turned + heavy * exact(place)) - taken
