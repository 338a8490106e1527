"""A bias that is given pair by pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard import _check
from regard._types import Features
from regard.parameters import parameter
from regard.potentials import Potential
from regard.potentials.reductions import Reduction, Residue, reduce


@dataclass(frozen=True, eq=False, repr=False)
class PairBias(Potential):
    """a = bias[..., s, t] for the query with mark s and the key with mark t;
    one row of bias serves every query.
    """

    positional: ClassVar[bool] = True
    bias: Tensor = parameter(rank=2)

    def __post_init__(self) -> None:
        _check.floating("bias", self.bias)

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        kind = torch.promote_types(x.dtype, torch.float32)  # holds every position below 2²⁴
        return x_marks.unsqueeze(-1).to(kind), y_marks.unsqueeze(-1).to(kind)

    def pair(self, queries: Features, keys: Features) -> Tensor:
        rows = (
            self.bias if self.bias.shape[-2] == 1 else self.bias.index_select(-2, queries.squeeze(-1).long())
        )
        return rows.index_select(-1, keys.squeeze(-1).long()).expand(
            *self.bias.shape[:-2], queries.shape[-2], keys.shape[-2]
        )


@reduce.rule(PairBias)
def _pair_bias(potential: PairBias, queries: Tensor, keys: Tensor, causal: bool) -> Reduction:
    return Reduction(queries[..., :0], keys[..., :0], residues=(Residue(potential, queries, keys),))
