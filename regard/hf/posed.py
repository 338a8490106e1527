"""Posed: one call of attention as a declaration and the tensors it acts on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.attention import Attention
from regard.compute.dropout import dropped_weights
from regard.compute.tensors import attend, pose_tensors
from regard.derive.rows import RowStatistics, row_statistics
from regard.hf.heads import Heads
from regard.hf.plain import Plain
from regard.normalizers import Normalizer
from regard.potentials import Potential
from regard.supports import Support, Where


@dataclass(frozen=True)
class Posed:
    """Queries, keys and values (batch, heads or groups, ·, ·) and what is done to them,
    in the layout of `heads`.
    """

    tensors: tuple[Tensor, Tensor, Tensor]
    potential: Potential
    normalizer: Normalizer
    support: Support
    heads: Heads

    def attend(self) -> Tensor:
        """Outputs (batch, heads, m, e), the fastest way there is."""
        plain = Plain.of(self.potential, self.normalizer, self.support, self.tensors[0].shape[-1])
        if plain is not None and not torch.is_autocast_enabled(self.tensors[0].device.type):
            out = plain.run(*self.tensors, self.heads)
            if out is not None:
                return out
        laid = self._lay_out(self.tensors)
        return self.heads.joined(
            attend(
                *laid, potential=self.potential, normalizer=self.normalizer, support=self._support_of_heads()
            )
        )

    def weighed(self, dropout: float) -> tuple[Tensor, Tensor]:
        """Outputs, and weights (batch, heads, m, n) of which some are dropped: the whole matrix is held,
        as in eager attention.
        """
        laid = self._lay_out(self._in_one_dtype())
        problem = pose_tensors(*laid, self.potential, self.normalizer, self._support_of_heads(), None)
        weights = dropped_weights(problem, dropout).to(laid[2].dtype)
        values = problem.values  # grouped as the weights are, where heads could not be divided
        return self.heads.joined(weights @ values), self.heads.joined(weights)

    def statistics(self) -> RowStatistics:
        """Row statistics (batch, heads, m), a block of rows at a time."""
        query, key, _ = (t.detach() for t in self._lay_out(self._in_one_dtype()))
        found = row_statistics(
            Attention(self.potential, normalizer=self.normalizer, support=self._support_of_heads()),
            query,
            key,
        )
        return RowStatistics(
            *(self.heads.joined(getattr(found, name)) for name in RowStatistics.__dataclass_fields__)
        )

    def _lay_out(self, tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return self.heads.queries(tensors[0]), self.heads.keys(tensors[1]), self.heads.keys(tensors[2])

    def _support_of_heads(self) -> Support:
        return Where(self.heads.pairs(self.support.mask)) if isinstance(self.support, Where) else self.support

    def _in_one_dtype(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors in one dtype, which autocast leaves open."""
        query, key, value = self.tensors
        if not torch.is_autocast_enabled(query.device.type):
            return query, key, value
        low = torch.get_autocast_dtype(query.device.type)
        return query.to(low), key.to(low), value.to(low)
