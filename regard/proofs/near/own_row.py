"""The row of a token that moves alone: its second derivative exactly, all heads together, and what is of
third order.

Token j moves by δ, |δ| ≤ r. Row j moves beyond its linear part by T(δ, δ) and terms of third order,

    T(δ, δ) = P_j (own_j·δ) Vᵀδ + P_j z_j δᵀA_jδ + Σ_k P_k z_k (own_k·δ)²/2.                             (N25)
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import computed_lengths, largest_roots
from regard._upper import Upper, exact, relative_error, total
from regard.proofs.near.exponential import tail
from regard.proofs.near.head import LocalValues
from regard.proofs.near.heads import LocalHeads
from regard.proofs.near.moves import cubic_part
from regard.proofs.near.radii import TokenRadii
from regard.proofs.scores import Form, bilinear


class OwnRow:
    """Row j of all heads, when token j alone moves."""

    def __init__(self, heads: LocalHeads, token: int) -> None:
        self._heads, self._token = heads, token
        forms = [bilinear.one(head.potential, heads.d) for head in heads.subject.separate]
        self._forms: list[Form | None] = forms

    def remainder(self, radius: float) -> Upper:
        """At least |F_j(x') - F_j(x) - DF_j[δ]| over |δ| ≤ r."""
        moves = torch.zeros(self._heads.n, dtype=torch.float64)
        moves[self._token] = radius
        scores = [TokenRadii(local, moves) for local in self._heads.heads]
        beyond = self._heads.combine(lambda values, h: self._third_order(values, scores[h]))
        return exact(radius).square() * self.second_order + beyond

    @cached_property
    def second_order(self) -> Upper:
        """At least |T(e, e)| over unit e: the norm of T as a map of matrices to vectors,
        or of vectors to matrices.
        """
        form = self.form
        flat, tall = form.flatten(1), form.flatten(0, 1)
        found = largest_roots(flat @ flat.mT, flat.shape[-1]).minimum(
            largest_roots(tall.mT @ tall, len(tall))
        )
        return found + total([self._rounding(h, values) for h, values in enumerate(self._heads.joined)])

    @cached_property
    def form(self) -> Tensor:
        """T (e, d, d) as computed, symmetric in its arguments;
        heads that are not mixed are side by side in e.
        """
        parts = [self._form_of(h, matrix) for h, matrix in enumerate(self._heads.outputs)]
        return torch.cat(parts) if self._heads.folded is None else torch.stack(parts).sum(0)

    def _form_of(self, h: int, output: Tensor) -> Tensor:
        local, form, j = self._heads.heads[h], self._forms[h], self._token
        p, own, values = local.p[j], local.own.center[j], local.y.center[j] @ output
        bent = torch.einsum("kc,ka,kb->cab", values * p.unsqueeze(-1) / 2, own, own)
        turned = p[j] * output.mT.unsqueeze(1) * own[j][None, :, None]
        if form is not None:
            turned = turned + p[j] * values[j][:, None, None] * form.a
        return bent + (turned + turned.mT) / 2

    def _rounding(self, h: int, values: LocalValues) -> Upper:
        """What rounding may hide of T of one head, and its part with A_j where that is not known.

        Each term is a product of factors that are off by their errors; sums of n terms of width d are off by
        `relative` of their sizes.
        """
        local, form, j, matrix = values.local, self._forms[h], self._token, values.matrix
        p, own, size, e = local.law[j], local.own_size[j], values.size[j], local.own.error
        thick = matrix.length + matrix.error
        wide = computed_lengths(local.y.center[j]) + local.y.error  # |y|, so that |z| ≤ thick |y| in sizes
        known = local.a if form is None else form.error
        off = (p * (size * (2 * own * e + e.square()) + values.z.error * own.square())).sum(-1)
        off = off + p[j] * (
            matrix.norm * e + matrix.error * own[j] + values.z.error * local.a + size[j] * known
        )
        whole = (p * thick * wide * own.square()).sum(-1) + p[j] * thick * (own[j] + wide[j] * local.a)
        terms = (
            local.law_roundings + 2 * local.n + 4 * local.d + self._heads.width + len(self._heads.heads) + 32
        )
        return off + relative_error(terms) * whole

    def _third_order(self, values: LocalValues, scores: TokenRadii) -> Upper:
        """What is left of (N13) after T (N26).

        (E' - E)[Vᵀδ] beyond P_j (own_j·δ) Vᵀδ: |e^ζ/Z - 1 - own·δ| ≤ φ₂(ω) + ε(1 + ω) + (ω - o), o = r|own|;
        E[zζ²]/2 beyond its part in own; 1/Z beside one in that part, ε E[|z|ω²]/2; and the cubic part.
        """
        local, j = values.local, self._token
        radius, eps = scores.moves[j], scores.excess[j]
        p, reach, own, rest = local.law[j], scores.reach[j], scores.by_own[j], scores.beside_own[j]
        beyond = tail(reach[j], 2) + eps * (1 + reach[j]) + rest[j]
        moved = values.w * radius * (p[j] * beyond).minimum(scores.laws.change[j, j] + p[j] * own[j])
        mixed = (p * values.size[j] * (2 * own * rest + rest.square())).sum(-1).halved()
        square = (p * values.size[j] * reach.square()).sum(-1).halved()
        return moved + mixed + eps * square + cubic_part(values, scores)[j]
