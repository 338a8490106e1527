"""How centered scores of a head move with tokens: a functional α_ij of all tokens for each query and key."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import Upper


@dataclass(frozen=True)
class Functionals:
    """Of q_i·k_j - Σ_l P_il q_i·k_l with the law P (n, n), for directions w_q k_j of queries and w_k q_i of
    keys, (n or 1, d, n). Heads may have a dimension of their own before all others.
    """

    law: Tensor
    by_query: Tensor
    by_key: Tensor

    @property
    def whole(self) -> Tensor:
        """α_ij as (n, n, n, d), the last token being the one that moves."""
        n = self.law.shape[-1]
        by_query, by_key = (one.expand(*self.law.shape[:-1], -1, -1) for one in (self.by_query, self.by_key))
        as_key = by_key.movedim(-1, -3)  # w_k q_i for token t, (i, t, d)
        mean = (self.law.unsqueeze(-1) * as_key).unsqueeze(-3)
        found = -mean.expand(*mean.shape[:-3], n, -1, -1).clone()
        found.diagonal(dim1=-3, dim2=-2).add_(as_key.mT)  # the key j itself
        away = by_query - by_query @ self.law.unsqueeze(-1)  # of the query i, (i, d, j)
        found.diagonal(dim1=-4, dim2=-2).add_(away.movedim(-3, -1).movedim(-2, -3))
        return found

    @cached_property
    def sizes(self) -> Upper:
        """At least the sizes that α_ij is made of, (n, n)."""
        q, k = (computed_lengths(one.mT) for one in (self.by_query, self.by_key))  # of i and j, of t and i
        along = q + k.map(lambda value: value.mT.expand_as(self.law))
        mean = (Upper(self.law, self.law.shape[-1] + 4) * along).sum(-1)
        return along + mean.unsqueeze(-1)
