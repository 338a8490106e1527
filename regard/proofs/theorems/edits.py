"""Tokens that come and go: what a word more, a word less, or another word does to the rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._enclosed import Numbers, computed_lengths, root_of_squares
from regard._upper import Upper, exact, largest, relative_error, stack, total
from regard.attention import Attention
from regard.domains import Ball, Edited, Vocabulary
from regard.errors import ArgumentError
from regard.maps import Heads, Residual
from regard.norms import Frobenius, Norm, TokenMax, TokenSum, Wasserstein
from regard.proofs.candidates import Joined, Rows, about, joined
from regard.proofs.setting import equivariant
from regard.proofs.subject import Head, MultiHead, subject_of
from regard.proofs.theorem import Bound, Refusal, Theorem, checked

THEOREM = Theorem(
    name="edits",
    title="tokens that come and go",
    statement=r"""
Tokens of a sequence go, $k$ tokens of a set $Y$ come, and token $i$ stays. Softmax rows of bilinear scores
that all see all keys; $u_i^h$ is row $i$ of head $h$ over the tokens that stay, after mixing, $a_h(y) =
e^{s_i(y) - \mathrm{lse}_i}$ the odds of a candidate against all of them, $z_h(y) = V_h(y) - u_i^h$, and
$\delta_i = \sum_h u_i^h - (\text{row } i \text{ before})$. Then the output of token $i$ moves by

1. $\delta_i$, where none comes: exact;
2. $\delta_i + \sum_h\frac{a_h}{1 + a_h}z_h$, where one comes: exact, so that a vocabulary is enumerated;
3. at most $|\delta_i| + \sum_h\max_{y \in Y}\frac{k a_h}{1 + k a_h}|z_h|$, where any $k$ come; on a ball
   $a_h \le e^{\max s_i - \mathrm{lse}_i}$ and $|z_h| \le \max|z_h|$;
4. at most $k\max_{y \in Y}\left\{\left|\delta_i/k + \sum_h\bar p_hz_h\right| + \sum_h r_h|z_h|\right\}$ with
   $\bar p_h$ and $r_h$ the middle and the half length of
   $\left[\frac{a_h}{1 + a_h + (k-1)\max_Ya_h}, \frac{a_h}{1 + a_h}\right]$.

In TokenMax, Frobenius and TokenSum norm over the $K$ tokens that stay. The laws of all outputs, $n$ before
and $n'$ after, are at most $\mu\sum_i|\Delta_i| + (1 - K\mu)D$ apart in $W_1$, $\mu = \min(1/n, 1/n')$, $D$
the diameter of all values.
""",
    hypotheses=("softmax rows", "bilinear scores", "no masks, no positions in the scores"),
    source="",
    proof=r"""
With $k$ keys more, of odds $a_1, \dots, a_k$ against the others together, the weights of the old keys are
divided by $1 + \sum a_l$, and the new ones have $p_l = a_l/(1 + \sum a_j)$: the row moves by
$\sum_lp_lz(y_l)$. That is 2 for $k = 1$, summed over heads, and 1 for $k = 0$.

3: let $\tau = \max_Y k a|z|/(1 + ka)$. Then $a(|z| - \tau) \le \tau/k$ for every $y$; summed over the new
keys $\sum a_l|z_l| \le \tau(1 + \sum a_l)$, which says $|\sum_lp_lz_l| \le \tau$. The function grows in $a$
and in $|z|$.

4: $p_l$ is in the interval, since $0 \le \sum_{j \ne l}a_j \le (k-1)\max_Ya$. So $|\delta_i +
\sum_l\sum_hp_l^hz_h(y_l)|$ is at most the sum over $l$ of
$\left|\delta_i/k + \sum_h\bar p_hz_h(y_l)\right| + \sum_h r_h|z_h(y_l)|$.

Laws: couple each token that stays with itself, with the mass $\mu$; what is left, $1 - K\mu$ on both sides,
is carried by at most $D$. Rows are means of values.
""",
)

ROOM = 4_000_000
"""Numbers that one block of candidates may take."""


def _around_attention(map: Residual, domain: Edited, norm: Norm) -> bool:
    return isinstance(map.map, (Attention, Heads))


@THEOREM.deviation(Residual, Edited, Norm, about=_around_attention)
def with_residual(map: Residual, domain: Edited, norm: Norm) -> Bound:
    """The same of x + f(x), whose first part moves with the shift of positions alone."""
    assert isinstance(map.map, (Attention, Heads))
    return edits(subject_of(map.map, residual=True), domain, norm)


@THEOREM.deviation(MultiHead, Edited, Norm)
def edits(subject: MultiHead, domain: Edited, norm: Norm) -> Bound:
    """How far outputs of tokens that stay move."""
    if not isinstance(norm, (TokenMax, Frobenius, TokenSum, Wasserstein)) or getattr(norm, "p", 1.0) != 1.0:
        raise Refusal(f"{norm!r} is not a norm of this theorem; use TokenMax() or Wasserstein(1)")
    edit = Edit(subject, domain)
    rows = edit.rows()
    hypotheses = [checked("softmax rows of bilinear scores"), checked("no masks and no positions in scores")]
    if isinstance(norm, Wasserstein):
        return Bound(edit.between_laws(rows), tuple(hypotheses), note="laws of all outputs")
    if isinstance(norm, TokenMax):
        value = rows.amax()
    else:
        value = rows.norm() if isinstance(norm, Frobenius) else rows.sum()
    return Bound(value, tuple(hypotheses), note="outputs of the tokens that stay")


def row_deviations(map: Attention | Heads | Residual, domain: Edited) -> Tensor:
    """A bound for each token that stays, in order: what `deviation` takes the largest of.

    Examples:
        >>> x = torch.randn(4, 2, dtype=torch.float64)
        >>> layer, shorter = regard.Attention(regard.Dot()), regard.domains.deleted(x, 0)
        >>> regard.theorems.row_deviations(layer, shorter).shape
        torch.Size([3])
    """
    inner = map.map if isinstance(map, Residual) else map
    if not isinstance(inner, (Attention, Heads)):
        raise ArgumentError("map", f"is {type(map).__name__}", "give an Attention, Heads, or their Residual")
    return Edit(subject_of(inner, isinstance(map, Residual)), domain).rows().bound


class Edit:
    """One edit as all heads see it."""

    def __init__(self, subject: MultiHead, domain: Edited) -> None:
        heads = subject.folded or subject.separate
        for head in heads:
            equivariant(head, domain, "give the positions in the embeddings, with after=")
        self.subject, self.domain = subject, domain
        self.middle = domain.points.detach().double().mean(0)
        self.rows_after = [self._rows(head, domain.kept, domain.kept) for head in heads]
        self.wide = subject.folded is None and len(heads) > 1

    def _rows(self, head: Head, queries: Tensor, keys: Tensor) -> Rows:
        return Rows(head, queries, keys, self.middle, self._reach)

    @property
    def _reach(self) -> Upper:
        """At least the distance of every token, before, after and new, from the middle."""
        place, sequence = self.domain.within, self.domain.points.detach().double()
        found = [about(tokens, self.middle).lengths().amax() for tokens in (sequence, self.domain.kept)]
        if isinstance(place, Vocabulary):
            found.append(about(_double(place.points), self.middle).lengths().amax())
        if isinstance(place, Ball):
            center, radius = self._ball(place)
            found.append(about(center.unsqueeze(0), self.middle).lengths().amax() + radius)
        return largest(found)

    def _ball(self, place: Ball) -> tuple[Tensor, Upper]:
        center = torch.zeros_like(self.middle) if place.center is None else _double(place.center)
        return center, exact(float(place.radius))

    # The rows

    def rows(self) -> Upper:
        """At least how far the output of each token that stays moves, (m,)."""
        offset, error = self.offset
        if not self.domain.added:
            return computed_lengths(offset) + error
        if isinstance(self.domain.within, Ball):
            return computed_lengths(offset) + error + self._anywhere_in(self.domain.within)
        assert isinstance(self.domain.within, Vocabulary)
        return self._from(_double(self.domain.within.points), offset, error)

    @property
    def offset(self) -> tuple[Tensor, Upper]:
        """δ_i (m, e) as computed, and how far it is off (m,): nothing where nothing goes and nothing
        shifts.
        """
        domain = self.domain
        width = self._spread(torch.stack([row.mean_values.center for row in self.rows_after], 1)).shape[-1]
        nothing = torch.zeros(len(domain.kept), width, dtype=torch.float64), exact(0.0)
        if not domain.removed and domain.after is None:
            return nothing
        before = _double(domain.points)
        stays = before[domain.stays]
        heads = self.subject.folded or self.subject.separate
        rows_before = [self._rows(head, stays, before) for head in heads]
        means = [
            self._spread(torch.stack([row.mean_values.center for row in rows], 1))
            for rows in (self.rows_after, rows_before)
        ]
        error = total([row.mean_values.error for row in (*self.rows_after, *rows_before)])
        terms = total([computed_lengths(part).sum(-1) for part in means])
        moved = (means[0] - means[1]).sum(1)
        if self.subject.residual:
            shift = domain.kept - stays
            moved, terms = moved + shift, terms + computed_lengths(shift)
        return moved, error + relative_error(len(heads) + 6) * terms

    def _anywhere_in(self, ball: Ball) -> Upper:
        """Part 3 on a ball, (m,): each head by itself, before or after mixing."""
        separate = self._in_ball(self.subject.separate, ball)
        folded = None if self.subject.folded is None else self._in_ball(self.subject.folded, ball)
        rows = [
            self.subject.combined([one[i] for one in separate], folded and [one[i] for one in folded])
            for i in range(len(self.domain.kept))
        ]
        return stack(rows)

    def _in_ball(self, heads: list[Head], ball: Ball) -> list[Upper]:
        center, radius = self._ball(ball)
        found = []
        for head in heads:
            rows = self._rows(head, self.domain.kept, self.domain.kept)
            odds = rows.log_odds_in(center, radius)
            found.append(_weight(odds, self.domain.added) * rows.farthest_in(center, radius))
        return found

    def _from(self, words: Tensor, offset: Tensor, error: Upper) -> Upper:
        """Parts 2 to 4 on a vocabulary, block by block."""
        count = self.domain.added
        most = self._largest_odds(words) if count > 1 else None
        width = offset.shape[-1] * len(self.rows_after)
        size = max(8, ROOM // (len(offset) * width))
        together, apart = [], []
        for block in words.split(size):
            seen = self._seen(block)
            together.append(_jointly(seen, count, offset, most).amax(-1))
            apart.append((_weight(seen.log_odds, count) * seen.distances()).amax(1) if count > 1 else None)
        found = largest(together) * count
        if count > 1:
            by_heads = largest([one for one in apart if one is not None])
            summed = by_heads.norm() if self.wide else by_heads.sum(-1)
            found = found.minimum(computed_lengths(offset) + summed)
        return found + error + relative_error(4) * computed_lengths(offset)

    def _largest_odds(self, words: Tensor) -> Numbers:
        odds = [row.log_odds(row.seen(words)) for row in self.rows_after]
        centers = torch.stack([one.center.amax(-1) for one in odds], -1)
        return Numbers(centers, largest([one.error for one in odds]))

    def _seen(self, words: Tensor) -> Joined:
        found = joined(self.rows_after, words)
        if not self.wide:
            return found
        return Joined(found.log_odds, self._spread(found.values), self._spread(found.means), found.error)

    def _spread(self, values: Tensor) -> Tensor:
        """Values (r, h, e) of heads side by side as one wide token, each in its own coordinates."""
        if not self.wide:
            return values
        heads = torch.eye(values.shape[1], dtype=torch.float64)
        return torch.einsum("rhe,hg->rhge", values, heads).flatten(2)

    # Laws of all outputs

    def between_laws(self, rows: Upper) -> Upper:
        """μ Σ|Δ_i| + (1 - Kμ) D."""
        before, kept = len(self.domain.points), len(self.domain.kept)
        most = max(before, kept + self.domain.added)
        reach = 2 * self._reach
        heads = self.subject.folded or self.subject.separate
        sizes = [head.w * reach for head in heads]
        wide = root_of_squares(sizes) if self.wide else total(sizes)
        wide = wide + reach if self.subject.residual else wide
        return rows.sum() / most + wide * (most - kept) / most


def _jointly(seen: Joined, count: int, offset: Tensor, most: Numbers | None) -> Upper:
    """|δ/k + Σ_h p̄_h z_h| + Σ_h r_h |z_h|, (m, N): the middle is any number, and r is what it misses."""
    high = seen.log_odds.logistic()
    if most is None:
        low = seen.log_odds.logistic_low()
    else:  # a/(1 + a + (k-1) max a) = σ(log a - log(1 + (k-1) max a))
        low = seen.log_odds.logistic_low((exact(float(count - 1)) * most.exp()).log1p().unsqueeze(1))
    middle = 0.5 * (high.bound + low.bound)
    missed = Upper(torch.maximum(high.bound - middle, middle - low.bound).clamp_min(0.0), 1)
    away = seen.lengths if most is None else seen.distances()
    return seen.moved(middle, offset / count) + (missed * away).sum(-1) + (missed * seen.error).sum(-1)


def _weight(odds: Numbers, count: int) -> Upper:
    """At least k a/(1 + k a) = σ(log k + log a)."""
    return odds.logistic(Upper(math.log(count), 16) if count > 1 else None)


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().double()
