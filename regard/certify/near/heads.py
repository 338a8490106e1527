"""Facts about heads at one sequence, from which bounds on a neighborhood follow. Rows are those of the queries, in float64.

For row i with law P: m = Σ P x, y_k = x_k - m, scores s_k with slopes v_k = ∂s_k/∂x_k and z_k = ∂s_k/∂x_i. When tokens move by d the scores
of a row change, up to a constant, by the centered ζ_k = own_k·d_i + Σ_{l≠i} (1{k=l} - P_l) v_l·d_l + d_iᵀ(A_k d_k - E A d), own_k = z_k - E
z + (1{k=i} - P_i) v_i.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard._round import EPS, gamma, outward, vector_norm_bound
from regard.certify.near.curvature import curvature
from regard.certify.near.matrix_norms import (
    MARGIN,
    bounds,
    half_diameter,
    row_norms,
)
from regard.certify.scores import bilinear
from regard.certify.setting import pair_bias, positions_of
from regard.certify.subject import Head, MultiHead
from regard.certify.theorem import Refusal
from regard.domains import Near
from regard.potentials import Potential


class LocalHead:
    """One head at one sequence, without its values."""

    def __init__(self, head: Head, domain: Near) -> None:
        if not head.softmax:
            raise Refusal(f"rows of {type(head.normalizer).__name__} are not Gibbs laws")
        measure = domain.measure
        x = measure.points
        self.n, self.d = x.shape
        a = curvature.one(head.potential, self.d)
        if a is None:
            raise Refusal(
                f"scores of {type(head.potential).__name__} are not bilinear in pairs of tokens; bounds on a ball that holds them apply"
            )
        self.a: float = a
        center = x.mean(0)
        self.x = x - center
        marks = measure.positions()
        scores, self.z, self.v = _slopes(head.potential, x, marks, self.d)
        bias = pair_bias(head, domain)
        positional = scores if bias is None else _content(head, x, marks, scores) + bias
        self.log_p = positional.log_softmax(-1)
        self.p = self.log_p.exp()
        self.seen = self.log_p > -math.inf  # a weight that is too small for float64 can still grow
        self.queries = torch.arange(self.n)
        self._margins(head, x, scores)

    def _margins(self, head: Head, x: Tensor, scores: Tensor) -> None:
        """What rounding may have changed: `eta` in a score, `shift` in a mean, `tilt` in a slope."""
        if not bool(torch.isfinite(scores).any()):
            raise Refusal("scores leave the range of float64; scale the tokens")
        lengths = max(vector_norm_bound(row) for row in x)
        size = self.a * lengths * lengths + float(self.v.norm(dim=-1).max()) * lengths + float(scores[torch.isfinite(scores)].abs().max())
        self.eta = outward(8 * gamma(4 * self.d + 16) * math.sqrt(self.d) * size)
        self.radius = max(vector_norm_bound(row) for row in self.x) * MARGIN
        self.shift = outward((4 * self.eta + 4 * gamma(self.n + 8)) * 2 * self.radius + 4 * EPS * lengths)
        slope = float(self.v.norm(dim=-1).max()) + self.a * lengths
        self.tilt = outward(8 * gamma(4 * self.d + 16) * math.sqrt(self.d) * slope + 4 * self.eta * slope)
        self.error = outward(16 * self.eta + 64 * (self.n + self.d) * EPS)

    def with_rows(self, queries: Tensor) -> LocalHead:
        """The same head with the rows of some queries, (rows, n) and (rows, n, d) where others are (n, n) and (n, n, d)."""
        part = copy.copy(self)
        for name, value in LocalHead.__dict__.items():
            if isinstance(value, cached_property):
                part.__dict__.pop(name, None)
        part.queries, part.p, part.log_p, part.seen = queries, self.p[queries], self.log_p[queries], self.seen[queries]
        part.z, part.v = self.z if self.z.shape[0] == 1 else self.z[queries], self.v[queries]
        return part

    @cached_property
    def log_rest(self) -> Tensor:
        """log(1 - P_ik), for the largest weight of a row from the others: one minus nearly one has no digits."""
        top = self.log_p.argmax(-1, keepdim=True)
        others = self.log_p.scatter(-1, top, -math.inf).logsumexp(-1, keepdim=True)
        return torch.log1p(-self.p).scatter(-1, top, others)

    @cached_property
    def odds(self) -> Tensor:
        """log P_ik/(1 - P_ik)."""
        return self.log_p - self.log_rest

    @cached_property
    def y(self) -> Tensor:
        """x_k - m_i, (n, n, d)."""
        return self.x.unsqueeze(0) - self.means.unsqueeze(1)

    @cached_property
    def means(self) -> Tensor:
        """m_i, (n, d)."""
        return self.p @ self.x

    @cached_property
    def alpha(self) -> Tensor:
        """At least |v_ik|, (n, n) or (n, 1)."""
        return self.v.norm(dim=-1) * MARGIN + self.tilt

    @cached_property
    def own(self) -> Tensor:
        """own_ik, (n, n, d)."""
        rows, queries = torch.arange(len(self.p)), self.queries
        mean = torch.einsum("ik,ikd->id", self.p, self.z.expand(len(rows), self.n, self.d))
        diagonal = self.v[rows, queries if self.v.shape[1] > 1 else torch.zeros_like(rows)]
        own = self.z - mean.unsqueeze(1) - (self.p[rows, queries].unsqueeze(-1) * diagonal).unsqueeze(1)
        own[rows, queries] += diagonal
        return own

    @cached_property
    def own_size(self) -> Tensor:
        """At least |own_ik|."""
        return self.own.norm(dim=-1) * MARGIN + self.a * self.shift + 4 * self.tilt

    @cached_property
    def own_spread(self) -> Tensor:
        """At least |[√P_ik own_ik]_k|₂ for each row."""
        return row_norms(self.p, self.own) + self.a * self.shift + 4 * self.tilt

    @cached_property
    def own_narrow(self) -> tuple[Tensor, float]:
        """The vectors own_ik in fewer coordinates, and at least the length of what that leaves out."""
        if len(self.p) < self.n:  # directions of some rows are few themselves
            return self.own, 0.0
        flat = self.own.flatten(0, 1)
        values, vectors = torch.linalg.eigh(flat.mT @ flat)
        keep = vectors[:, values > 1e-13 * values[-1].clamp_min(1e-300)]
        narrow = flat @ keep
        left = float((flat - narrow @ keep.mT).norm(dim=-1).max()) * MARGIN
        return narrow.unflatten(0, (self.n, self.n)), left

    @cached_property
    def own_pairs(self) -> Tensor:
        """(own_k·own_l)², (n, n, n)."""
        return (self.own @ self.own.mT).square()

    @cached_property
    def own_apart(self) -> Tensor:
        """At least |own_ik - own_il|, (n, n, n)."""
        apart = torch.cdist(self.own, self.own, compute_mode="donot_use_mm_for_euclid_dist")
        return apart * MARGIN + 2 * self.a * self.shift + 8 * self.tilt

    @cached_property
    def query_half(self) -> Tensor:
        """At least half of the largest |z_ik - z_il| over the keys that a row sees: no law on them deviates more in any direction."""
        return half_diameter(self.z, self.seen) + 4 * self.tilt

    def covariance_in_query(self, rows: Tensor) -> Tensor:
        """Cov_i(x, z) (rows, d, d): how the mean of a row moves with its query."""
        law, z = self.p[rows], self.z.expand(self.n, self.n, self.d)[rows]
        away = z - torch.einsum("ik,ikd->id", law, z).unsqueeze(1)
        return ((self.x - self.means[rows].unsqueeze(1)) * law.unsqueeze(-1)).mT @ away

    def push(self, tangents: Tensor) -> Tensor:
        """How the means of rows move, (n, d, b): E[d] + Cov(x, ∂s)."""
        by_query = (
            torch.einsum("kd,idb->ikb", self.z[0], tangents) if self.z.shape[0] == 1 else torch.einsum("ikd,idb->ikb", self.z, tangents)
        )
        by_key = (
            torch.einsum("id,kdb->ikb", self.v[:, 0], tangents) if self.v.shape[1] == 1 else torch.einsum("ikd,kdb->ikb", self.v, tangents)
        )
        change = by_query + by_key
        law = self.p.unsqueeze(-1)
        centered = law * (change - (law * change).sum(1, keepdim=True))
        return torch.einsum("ik,kdb->idb", self.p, tangents) + torch.einsum("ikb,kd->idb", centered, self.x)

    def pull(self, cotangents: Tensor) -> Tensor:
        """The transpose of `push`."""
        worth = torch.einsum("idb,kd->ikb", cotangents, self.x)
        law = self.p.unsqueeze(-1)
        by_scores = law * (worth - (law * worth).sum(1, keepdim=True))
        found = torch.einsum("ik,idb->kdb", self.p, cotangents)
        found += (
            torch.einsum("ikb,kd->idb", by_scores, self.z[0]) if self.z.shape[0] == 1 else torch.einsum("ikb,ikd->idb", by_scores, self.z)
        )
        found += (
            torch.einsum("ikb,id->kdb", by_scores, self.v[:, 0])
            if self.v.shape[1] == 1
            else torch.einsum("ikb,ikd->kdb", by_scores, self.v)
        )
        return found


@dataclass(frozen=True)
class LocalValues:
    """A head with values Vᵀx: what it adds to the facts of its scores."""

    local: LocalHead
    matrix: Tensor
    w: float

    @cached_property
    def z(self) -> Tensor:
        """Vᵀy_ik (n, n, e)."""
        return self.local.y @ self.matrix

    @cached_property
    def size(self) -> Tensor:
        """At least |Vᵀy_ik|."""
        return self.z.norm(dim=-1) * MARGIN + self.w * self.local.shift

    @cached_property
    def spread(self) -> Tensor:
        """At least |[√P_ik Vᵀy_ik]_k|₂ for each row."""
        return row_norms(self.local.p, self.z) + self.w * self.local.shift

    @cached_property
    def largest(self) -> Tensor:
        """At least max_k |Vᵀy_ik| over the keys that a row sees."""
        return torch.where(self.local.seen, self.size, torch.zeros_like(self.size)).amax(-1)

    @cached_property
    def half(self) -> Tensor:
        """At least half of the largest |Vᵀ(x_k - x_l)| over the keys that a row sees: no law on them deviates more in any direction."""
        return half_diameter((self.local.x @ self.matrix).unsqueeze(0), self.local.seen) + self.w * self.local.shift


class LocalHeads:
    """All heads of a subject at one sequence, with both ways to combine their bounds."""

    def __init__(self, subject: MultiHead, domain: Near) -> None:
        self.subject, self.domain = subject, domain
        self.residual = subject.residual
        self.heads = [LocalHead(head, domain) for head in subject.separate]
        width = self.heads[0].d
        self.separate = [LocalValues(local, head.matrix(width), head.w) for local, head in zip(self.heads, subject.separate, strict=True)]
        self.folded: list[LocalValues] | None = None
        if subject.folded is not None:
            pairs = zip(self.heads, subject.folded, strict=True)
            self.folded = [LocalValues(local, _narrow(head, width), head.w) for local, head in pairs]
        self.n, self.d = self.heads[0].n, width

    def combined(self, separate: list[Tensor], folded: list[Tensor] | None) -> Tensor:
        """The smaller of Σ_h b_h and |W_O| √Σ_h b_h², row by row."""
        joined = torch.stack(separate).square().sum(0).sqrt() * (self.subject.mixing * MARGIN)
        return joined if folded is None else torch.minimum(joined, torch.stack(folded).sum(0) * MARGIN)

    def added(self, each: list[Tensor]) -> Tensor:
        """Bounds of what heads add to the output, from one for each; heads that are not mixed are side by side."""
        return bounds(self.combined(each, None) if self.folded is None else torch.stack(each).sum(0) * MARGIN)

    @cached_property
    def jacobian(self) -> Tensor:
        """∂F_i/∂x_j of all heads together (n, n, e, d), the residual included; heads that are not mixed are side by side in e."""
        every = torch.arange(self.n)
        return self._columns(every, every)

    def columns(self, tokens: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """The blocks of some rows and some tokens, (rows, tokens, e, d); those of a few alone where the whole is not there yet."""
        if "jacobian" in self.__dict__ or 2 * len(tokens) > self.n:
            return self.jacobian[rows][:, tokens]
        return self._columns(tokens, torch.arange(self.n)[rows])

    def column_grams(self, token: int) -> tuple[Tensor, Tensor]:
        """Σ_i J_ijᵀJ_ij of one column (d, d): that of its own row, and the sum over all others, some rows at a time."""
        column, rows = torch.tensor([token]), torch.arange(self.n)
        some = max(1, AT_ONCE // max(1, self.width * self.d))
        rest = torch.zeros(self.d, self.d, dtype=torch.float64)
        for others in rows[rows != token].split(some):
            blocks = self.columns(column, others)[:, 0].flatten(0, 1)
            rest += blocks.mT @ blocks
        own = self.columns(column, column)[0, 0]
        return own.mT @ own, rest

    @property
    def width(self) -> int:
        """Of an output token."""
        chosen = self.subject.separate if self.subject.folded is None else self.subject.folded
        widths = [head.matrix(self.d).shape[-1] for head in chosen]
        return sum(widths) if self.subject.folded is None else widths[0]

    def _columns(self, tokens: Tensor, rows: Tensor) -> Tensor:
        chosen = self.subject.separate if self.subject.folded is None else self.subject.folded
        pairs = [(local, head.matrix(self.d)) for local, head in zip(self.heads, chosen, strict=True)]
        if self.subject.folded is None:
            total = torch.cat([_blocks([pair], tokens, rows) for pair in pairs], -2)
        else:
            some = max(1, AT_ONCE // max(1, pairs[0][1].numel()))
            total = _blocks(pairs[:some], tokens, rows)
            for first in range(some, len(pairs), some):
                total += _blocks(pairs[first : first + some], tokens, rows)
        if self.residual:
            total[rows.unsqueeze(-1) == tokens] += torch.eye(self.d, dtype=torch.float64)
        return total

    def push(self, tangents: Tensor) -> Tensor:
        """J t for several tangents at once, (n, d, b) to (n, e, b)."""
        chosen = self.subject.separate if self.subject.folded is None else self.subject.folded
        parts = [
            torch.einsum("idb,de->ieb", local.push(tangents), head.matrix(self.d)) for local, head in zip(self.heads, chosen, strict=True)
        ]
        total = torch.cat(parts, 1) if self.subject.folded is None else torch.stack(parts).sum(0)
        return total + tangents if self.residual else total

    def pull(self, cotangents: Tensor) -> Tensor:
        """Jᵀu for several cotangents at once, (n, e, b) to (n, d, b)."""
        chosen = self.subject.separate if self.subject.folded is None else self.subject.folded
        total = cotangents.clone() if self.residual else torch.zeros(self.n, self.d, cotangents.shape[-1], dtype=torch.float64)
        offset = 0
        for local, head in zip(self.heads, chosen, strict=True):
            matrix = head.matrix(self.d)
            mine = cotangents if self.subject.folded is not None else cotangents[:, offset : offset + matrix.shape[-1]]
            offset += matrix.shape[-1]
            total += local.pull(torch.einsum("ieb,de->idb", mine, matrix))
        return total

    def jacobian_error(self, moves: Tensor) -> Tensor:
        """What rounding of the Jacobian's blocks may hide of a row's linear move, (n,)."""
        values = self.separate if self.folded is None else self.folded
        total = torch.zeros(self.n, dtype=torch.float64)
        for value in values:
            local = value.local
            steep = local.alpha.expand(local.n, local.n)
            mixed = (local.p * (1 + 2 * local.radius * steep)) @ moves
            own = moves * (4 * local.a * local.radius**2)
            total = total + value.w * (
                local.error * (mixed + own) + local.shift * ((local.p * steep) @ moves + 2 * local.a * local.radius * moves)
            )
            total = total + value.w * local.tilt * 2 * local.radius * ((local.p @ moves) + moves)
        return total


AT_ONCE = 4_000_000
"""Numbers in the matrices of heads that are looked at together."""


def _blocks(pairs: list[tuple[LocalHead, Tensor]], columns: Tensor, rows: Tensor) -> Tensor:
    """Σ_h ∂(V_hᵀm_i)/∂x_j (rows, columns, e, d) = P_ij (Vᵀ + Vᵀy_ij v_ijᵀ) summed over heads, and Vᵀ Cov_i(x, z) more for j = i."""
    law = torch.stack([local.p[rows][:, columns] for local, _ in pairs], -1)  # (rows, columns, heads)
    away = (local.x[columns] - local.means[rows].unsqueeze(1) for local, _ in pairs)
    turns = torch.stack([y @ matrix for y, (_, matrix) in zip(away, pairs, strict=True)], -2) * law.unsqueeze(-1)
    chosen = (local.v[rows] if local.v.shape[1] == 1 else local.v[rows][:, columns] for local, _ in pairs)
    slopes = torch.stack([v.expand(-1, len(columns), -1) for v in chosen], -2)
    matrices = torch.stack([matrix.mT for _, matrix in pairs])
    blocks = (law @ matrices.flatten(1)).unflatten(-1, matrices.shape[1:])
    blocks += turns.mT @ slopes
    at, own = (rows.unsqueeze(-1) == columns).nonzero().unbind(-1)
    for local, matrix in pairs:
        blocks[at, own] += matrix.mT @ local.covariance_in_query(rows[at])
    return blocks


def _narrow(head: Head, width: int) -> Tensor:
    """A matrix with the same lengths |Vᵀy| and fewer columns: its rank is at most the width of a head. V = AB with Bᵀ = QR is like ARᵀ."""
    matrix = head.matrix(width)
    if len(head.factors) == 2 and head.factors[1].shape[0] < head.factors[1].shape[1]:
        return head.factors[0] @ torch.linalg.qr(head.factors[1].mT, mode="r")[1].mT
    u, s, _ = torch.linalg.svd(matrix, full_matrices=False)
    keep = int((s > 1e-14 * s[0]).sum()) if len(s) else 0
    return u[:, : max(keep, 1)] * s[: max(keep, 1)]


def _slopes(potential: Potential, x: Tensor, marks: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (n, n), their slopes in the query (1 or n, n, d) and in the key (n, 1 or n, d)."""
    form = bilinear.one(potential, width)
    if form is not None:
        z = (x @ form.a.mT + form.gamma).unsqueeze(0)
        v = (x @ form.a + form.beta).unsqueeze(1)
        return x @ form.a @ x.mT + x @ form.beta + (x @ form.gamma).unsqueeze(-1), z, v
    queries, keys = x.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    with torch.enable_grad():
        scores = potential.scores(queries, keys, marks, marks)
        z = torch.stack([torch.autograd.grad(scores[:, j].sum(), queries, retain_graph=True)[0] for j in range(len(x))], 1)
        v = torch.stack([torch.autograd.grad(scores[i].sum(), keys, retain_graph=True)[0] for i in range(len(x))], 0)
    return scores.detach(), z, v


def _content(head: Head, x: Tensor, marks: Tensor, scores: Tensor) -> Tensor:
    """The scores without the biases of positions, which `pair_bias` has."""
    positional = positions_of(head.potential)
    if positional is None or bilinear.one(head.potential, x.shape[-1]) is not None:
        return scores
    return scores - positional.scores(x, x, marks, marks)
