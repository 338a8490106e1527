"""Group: queries that share keys, as candidates see them; made of a declaration, or of tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.attention import Attention
from regard.compression.candidates import Beside, Candidate, Fitted, everything
from regard.lookups import Linear
from regard.measure import Measure
from regard.potentials import Bilinear, Dot
from regard.potentials.positions import Rotary
from regard.proofs.subject import Head
from regard.proofs.theorem import Refusal


@dataclass(frozen=True)
class Group:
    """Heads that share keys: their queries (g, m, d), the keys that all queries see, and for each head those
    beside them that only some see, which stay as they are.
    """

    head: Head
    keys: Measure
    queries: Tensor
    beside: tuple[Beside, ...] = ()

    def fit(self, candidate: Candidate, rows: Tensor) -> Fitted:
        """The candidate, fitted to some of the queries."""
        return candidate.fit(self.head, self.keys, self.queries[:, rows].flatten(0, 1))

    def everything(self) -> Fitted:
        """All keys, as they are."""
        return everything(self.head, self.keys)

    def outputs(self, fitted: Fitted, rows: Tensor) -> list[Tensor]:
        """Of each head, (m, e)."""
        return [fitted.outputs(x[rows], near) for x, near in self._members(rows)]

    def laws(self, fitted: Fitted, rows: Tensor) -> list[Tensor | None]:
        """Of each head on the keys, (m, n)."""
        return [fitted.rows(x[rows], near) for x, near in self._members(rows)]

    def _members(self, rows: Tensor) -> list[tuple[Tensor, Beside | None]]:
        if not self.beside:
            return [(x, None) for x in self.queries]
        return [(x, near.of(rows)) for x, near in zip(self.queries, self.beside, strict=True)]


def of_tensors(queries: Tensor, keys: Tensor, values: Tensor, scale: float, allowed: Tensor) -> Group:
    """The group of queries (g, m, c), keys (n, c) and values (n, e), where allowed (m, n) says who sees
    whom: tokens are keys beside their values, and both projections pick their part.
    """
    shared = allowed.all(0)
    if not bool(shared.any()):
        raise Refusal("no key is seen by all queries: the layer is a window already, or give later queries")
    chosen = torch.eye(keys.shape[-1] + values.shape[-1], dtype=keys.dtype)
    w_k, w_v = chosen[:, : keys.shape[-1]], chosen[:, keys.shape[-1] :]
    w_q = torch.eye(keys.shape[-1], dtype=keys.dtype)
    head = Head(Attention(Dot(w_q, w_k, scale), Linear(w_v)))
    context = Measure(torch.cat([keys, values], -1)[shared])
    if bool(shared.all()):
        return Group(head, context, queries)
    closed = ~allowed[:, ~shared]
    logits = (scale * queries @ keys[~shared].mT).masked_fill(closed, -math.inf)
    return Group(head, context, queries, tuple(Beside(one, values[~shared]) for one in logits))


def of_heads(heads: list[Head], x: Measure, context: Measure | None) -> list[Group]:
    """Heads whose scores are inner products at positions, or whose queries do not all see the same keys.

    Without a context tokens look at tokens; where order decides what they see, the later half asks.
    """
    keys = x if context is None else context
    allowed = heads[0].support.allows(x.positions(), keys.positions()).expand(x.size, keys.size)
    later = slice(x.size // 2, None) if context is None and not bool(allowed.all()) else slice(None)
    asking = Measure(x.points[later], marks=x.positions()[later])
    groups: list[tuple[list[Tensor], Tensor, Tensor, float]] = []
    for head in heads:
        q, k, scale = _turned(head, asking, keys)
        values = head.lookup.values(keys.points, keys.positions())
        if groups and torch.equal(groups[-1][1], k) and torch.equal(groups[-1][2], values):
            groups[-1][0].append(q)
        else:
            groups.append(([q], k, values, scale))
    return [of_tensors(torch.stack(q), k, v, scale, allowed[later]) for q, k, v, scale in groups]


def _turned(head: Head, queries: Measure, keys: Measure) -> tuple[Tensor, Tensor, float]:
    """Features of queries and keys whose inner product, times a number, is the score."""
    potential = head.attention.potential
    inner = potential.potential if isinstance(potential, Rotary) else potential
    if not isinstance(inner, (Dot, Bilinear)):
        name = type(inner).__name__
        raise Refusal(f"{name} scores are not inner products of features of queries and keys; use Dot")
    q, k = potential.features(queries.points, keys.points, queries.positions(), keys.positions())
    factor = float(inner.factor(q.shape[-1])) if isinstance(inner, Dot) else 1.0
    return q, k, factor / float(head.normalizer.temperature)  # type: ignore[attr-defined]
