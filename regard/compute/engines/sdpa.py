"""The fused kernel, for every potential that is a dot product plus a key bias."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.compute.engine import Engine, Prediction, pairs, register, row_empty
from regard.compute.flash import flash
from regard.compute.fused import FusedForm, fused_form, not_fused, reduction_of, residues, temperature_of, tiling_of
from regard.compute.problem import Problem, SupportParts
from regard.compute.tiles import Tiling
from regard.potentials.reductions import Reduction
from regard.supports import And, Full


@register
@dataclass(frozen=True, eq=False, repr=False)
class Sdpa(Engine):
    """torch's fused kernel (CPU flash): softmax of Dot, Bilinear, Gaussian, Cosine, Rotary of these, position biases, sums.

    Where terms of the score would cancel (a Gaussian much narrower than the points are spread) it computes in float64. That
    needs a look at the data, which is not possible under torch.compile and vmap; there it stays in the dtype of the inputs.
    """

    name: ClassVar[str] = "sdpa"
    rank: ClassVar[int] = 10

    def refuse(self, problem: Problem) -> str | None:
        return not_fused(problem)

    def run(self, problem: Problem) -> Tensor:
        return self._compute(problem)[0].to(problem.dtype)

    def free_energy(self, problem: Problem) -> Tensor:
        _, lse, reduction = self._compute(problem.change(values=problem.values[..., :1]))
        temperature = temperature_of(problem)
        energy = (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature) * lse
        energy = energy if reduction.row_bias is None else energy + reduction.row_bias()
        if isinstance(problem.support, Full) and problem.log_counts is None:
            return energy
        return energy.masked_fill(_empty_rows(problem), -math.inf)

    def predict(self, problem: Problem) -> Prediction:
        reduction = reduction_of(problem)
        width = max(reduction.queries.shape[-1], problem.values.shape[-1], 16)
        share = 0.5 if SupportParts.of(problem.support).causal else 1.0
        count = pairs(problem)
        tile = 0.0 if tiling_of(problem, reduction) is None else 4 * count / max(problem.query_count, 1) * 256
        return Prediction(share * count * (4 * width + 5), tile + 4.0 * math.prod(problem.batch_shape) * problem.query_count * (width + 1))

    def _compute(self, problem: Problem) -> tuple[Tensor, Tensor, Reduction]:
        form = fused_form(problem)
        if problem.device.type != "cpu":
            return *_elsewhere(form), form.reduction
        return *flash(form.queries, form.keys, form.values, form.bias, form.tiling, form.causal, form.scale), form.reduction


def _empty_rows(problem: Problem) -> Tensor:
    """Which queries see nothing, in blocks of rows."""
    return torch.cat([row_empty(problem, slice(low, low + 256)) for low in range(0, max(problem.query_count, 1), 256)], -1)


def _elsewhere(form: FusedForm) -> tuple[Tensor, Tensor]:
    """Other devices: torch's public door with one additive mask; the log-sum-exp is not available there."""
    problem = form.problem
    tiling = Tiling(
        And((problem.support,)), problem.rows(), problem.columns(), max(problem.query_count, 1), False, residues(problem, form.reduction)
    )
    mask = tiling.bias(next(iter(tiling)), form.queries.dtype)
    bias = form.bias
    mask = mask if bias is None else bias.unsqueeze(-2) if mask is None else mask + bias.unsqueeze(-2)
    out = F.scaled_dot_product_attention(form.queries, form.keys, form.values, attn_mask=mask, scale=form.scale)
    scores = form.scale * form.queries @ form.keys.mT
    return out, (scores if mask is None else scores + mask).logsumexp(-1)
