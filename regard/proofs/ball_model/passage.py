"""Ellipsoids of single tokens through attention, by its derivative: token i moves by Σ_j J_ij e_j (M11).

With P_ij the weights of a head, y_ij = v_j - o_i and M its mixer,

    J_ij = Σ_h M_hᵀ [P_ij (W_vᵀ + y_ij (W_k q_i)ᵀ) + δ_ij Σ_k P_ik y_ik (W_q k_k)ᵀ],

and I more for j = i with a residual connection. e_j moves independently of e_k, so that the moves of a token
are a sum of sets (M1). For j ≠ i no J_ij is written out: with a_h = W_k q_i, F = [a_hᵀQ_jW_v] and R =
[a_hᵀQ_ja_g]

    [·] Q_j [·]ᵀ = D (W_vᵀQ_jW_v + Y F' + F'ᵀYᵀ) D,    F' = F + RYᵀ/2,

where D has the weights P_ij and Y the y_ij of each head, and sums over j are mixed once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import Upper, exact, relative_error, stack
from regard.proofs.ball_model.ellipsoids import SMALLEST, Sum, lifted, pushed, trace_roots
from regard.proofs.ball_model.heads import HeadMoves
from regard.proofs.ball_model.updates import push_error


@dataclass(frozen=True)
class Part:
    """What one head says of J: weights P (n, n), y (n, n, e), W_v (d, e), W_k q_i for every key and W_q k_k
    for every query, (n, d, n) both. thick, key_sizes (n, n), query_sizes (n,): at least the sizes that W_v,
    y_ij (W_k q_i)ᵀ and Σ_k P_ik y_ik (W_q k_k)ᵀ are made of.
    """

    law: Tensor
    apart: Tensor
    values: Tensor
    by_key: Tensor
    by_query: Tensor
    thick: Upper
    key_sizes: Upper
    query_sizes: Upper

    @property
    def sizes(self) -> Upper:
        """At least what brackets are made of, but for those of queries, (n, n)."""
        return Upper(self.law) * (self.thick + self.key_sizes)


def parts_of(heads: HeadMoves) -> list[Part]:
    """Those of heads; nothing of rows of which nothing is known."""
    n, query, key = heads.state.tokens, heads.scores.query, heads.scores.key
    law = torch.where(heads.astray.unsqueeze(-1), 0.0, heads.law)
    q, k = computed_lengths(query.value), computed_lengths(key.value)
    thick_q, thick_k = (computed_lengths(side.w.flatten(-2)) for side in (query, key))
    thick = computed_lengths(heads.values.w.flatten(-3))
    key_sizes = heads.apart_sizes * (q.unsqueeze(-1) * thick_k.unsqueeze(-2))
    query_sizes = (Upper(law) * heads.apart_sizes * k.unsqueeze(-2)).sum(-1) * thick_q
    made = (
        law,
        heads.apart,
        heads.values.w,
        heads.scores.by_key,
        heads.scores.by_query,
        thick,
        key_sizes,
        query_sizes,
    )
    single = made if heads.mixer.ndim == 2 else None
    return [
        Part(p, y, values[0], by_key.expand(n, -1, -1), by_query.expand(n, -1, -1), *sizes)
        for p, y, values, by_key, by_query, *sizes in ([single] if single else zip(*made, strict=True))
    ]


class Passage:
    """The way through heads that are mixed by `mixer` (Σe, d)."""

    def __init__(self, parts: list[Part], mixer: Tensor) -> None:
        self.parts, self.mixer = parts, mixer
        widths = [part.values.shape[-1] for part in parts]
        self.bounds = [0, *itertools.accumulate(widths)]
        self.head = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(widths))
        self.law = torch.stack([part.law for part in parts])  # (h, i, j)
        self.apart = torch.cat([part.apart for part in parts], -1)  # (i, j, Σe)
        self.values = torch.cat([part.values for part in parts], -1)  # (d, Σe)
        self.by_key = torch.stack([part.by_key for part in parts], -1)  # (j, d, i, h)
        self.roundings = 4 * len(self.values) + 4 * self.law.shape[-1] + 4 * len(mixer) + 128

    def moves(self, shape: Tensor, residual: bool) -> Sum:
        """All moves of tokens by ellipsoids (n, d, d), with e_i itself for a residual connection."""
        own, off = self._own(residual)
        found = Sum(len(shape), self.mixer.shape[-1])
        found.shape(pushed(own, shape)).ball(off * trace_roots(shape))
        return found.shape(self._from_others(shape)) if len(shape) > 1 else found

    def _own(self, residual: bool) -> tuple[Tensor, Upper]:
        """J_ii (n, d, d), and at least how far it is off."""
        place = torch.arange(self.law.shape[-1])
        brackets, made_of = [], []
        for part in self.parts:
            along = part.apart[place, place].unsqueeze(-1) * part.by_key[place, :, place].unsqueeze(-2)
            bracket = part.law.diagonal()[:, None, None] * (part.values.mT + along)
            brackets.append(bracket + (part.law.unsqueeze(-1) * part.apart).mT @ part.by_query.mT)
            made_of.append(part.sizes.map(torch.diagonal) + part.query_sizes)
        own = self.mixer.mT @ torch.cat(brackets, 1)
        if residual:
            own.diagonal(dim1=-2, dim2=-1).add_(1.0)
        size = computed_lengths(self.mixer.flatten()) * stack(made_of, -1).norm() + exact(float(residual))
        return own, relative_error(self.roundings) * size

    def _from_others(self, shape: Tensor) -> Tensor:
        """The shapes of Σ_{j≠i} J_ij e_j, (n, d, d)."""
        square, cross = self._products(shape)
        tilted = self.law.permute(1, 2, 0)[..., self.head] * self.apart  # DY (i, j, Σe)
        weights = self._weights(square, cross, tilted)
        inverse = torch.where(weights > 0, 1 / weights.clamp_min(SMALLEST), 0.0)
        inner = self._summed(square, cross, tilted, inverse)
        whole = Upper(weights, 1).sum(-1)
        found = shape.new_empty(len(shape), self.mixer.shape[-1], self.mixer.shape[-1])
        length = []
        for one, factor, out in zip(inner, whole.bound, found, strict=True):
            matrix = factor * (one + one.mT)
            length.append(computed_lengths(matrix.flatten()))
            torch.matmul(self.mixer.mT @ matrix, self.mixer, out=out)
        made_of = stack([part.sizes for part in self.parts], -1).norm().square()
        lengths = computed_lengths(shape.flatten(1))
        error = relative_error(self.roundings) * (made_of * Upper(inverse, 2) * lengths).sum(-1) * whole
        mixing = computed_lengths(self.mixer.flatten()).square()
        return lifted(found, error * mixing + push_error(self.mixer.mT, stack(length)))

    def _products(self, shape: Tensor) -> tuple[Tensor, Tensor]:
        """W_vᵀQ_jW_v (j, Σe, Σe), and F'D for all pairs (i, h, j, Σe)."""
        n, h, wide = len(shape), len(self.parts), len(self.mixer)
        square, cross = shape.new_empty(n, wide, wide), shape.new_empty(n, h, n, wide)
        for j, one in enumerate(shape):
            along = self.by_key[j].flatten(1)  # (d, i h)
            turned = one @ torch.cat([self.values, along], 1)
            torch.matmul(self.values.mT, turned[:, :wide], out=square[j])
            both = (along.mT @ turned[:, :wide]).unflatten(0, (n, h))
            turned = turned[:, wide:].unflatten(1, (n, h)).permute(1, 0, 2)
            among = self.by_key[j].permute(1, 2, 0) @ turned  # R (i, h, h)
            both = both + 0.5 * among[..., self.head] * self.apart[:, j].unsqueeze(1)
            cross[:, :, j] = both * self.law[:, :, j].mT[:, self.head].unsqueeze(1)
        return square, cross

    def _weights(self, square: Tensor, cross: Tensor, tilted: Tensor) -> Tensor:
        """About the roots of traces before heads are mixed, (i, j), zero for j = i: any weights are sound."""
        at = cross.gather(1, self.head.expand(len(cross), 1, len(cross), -1)).squeeze(1)
        p = self.law.permute(1, 2, 0)[..., self.head]
        traces = (p.square() * square.diagonal(dim1=-2, dim2=-1) + 2 * tilted * at).sum(-1)
        return traces.clamp_min(0.0).sqrt().clamp_min(SMALLEST).fill_diagonal_(0.0)

    def _summed(self, square: Tensor, cross: Tensor, tilted: Tensor, inverse: Tensor) -> Tensor:
        """Half of the sums over j before heads are mixed, (i, Σe, Σe)."""
        n, wide = len(square), len(self.mixer)
        found = square.new_empty(n, wide, wide)
        tilted = tilted * inverse.unsqueeze(-1)
        spans = list(itertools.pairwise(self.bounds))
        for g, (begin, end) in enumerate(spans):
            torch.matmul(tilted[..., begin:end].mT, cross[:, g], out=found[:, begin:end])
        for (g, (a, b)), (f, (c, d)) in itertools.product(enumerate(spans), repeat=2):
            block = square[:, a:b, c:d].reshape(n, -1)
            both = 0.5 * self.law[g] * self.law[f] * inverse
            found[:, a:b, c:d] += (both @ block).unflatten(-1, (b - a, d - c))
        return found
