"""The fused kernel, for every potential that is a dot product plus a key bias."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._object import tensors_in
from regard._refused import Refused
from regard._transforms import moves
from regard._types import over_scores
from regard.compute.engine import (
    Engine,
    Plan,
    Prediction,
    count_pairs,
    find_empty_rows,
    register,
    working_dtype,
)
from regard.compute.kernel.call import Arguments, Call, lay_out
from regard.compute.kernel.flash import run_call
from regard.compute.kernel.tiles import Tile, Tiling, rows_per_tile
from regard.compute.precision import loses_digits
from regard.compute.problem import Problem, SupportParts
from regard.normalizers import Softmax
from regard.potentials import Scaled
from regard.potentials.reductions import Reduction, Residue, reduce
from regard.supports import Full


@register
@dataclass(frozen=True, eq=False, repr=False)
class Sdpa(Engine):
    """torch's fused kernel: softmax of Dot, Bilinear, Gaussian, Cosine, Rotary, position biases, sums.

    Where terms of the score would cancel (a Gaussian much narrower than the points are spread) it computes in
    float64. That needs a look at the data, which is not possible under torch.compile and vmap; there it stays
    in the dtype of the inputs.
    """

    name: ClassVar[str] = "sdpa"
    rank: ClassVar[int] = 10

    def plan(self, problem: Problem) -> FusedPlan | Refused:
        """Scores as scale · q·k + bias, with enough digits, laid out for the kernel."""
        if not isinstance(problem.normalizer, Softmax):
            return Refused(
                f"the fused kernel normalizes by softmax, not by {type(problem.normalizer).__name__}."
            )
        parts = SupportParts.of(problem.support)
        reduction = reduce.one(problem.potential, problem.queries, problem.keys, parts.causal)
        if isinstance(reduction, Refused):
            return reduction
        temperature = problem.normalizer.temperature
        residues = _temper_residues(reduction, temperature)
        if any(moves(t) for t in tensors_in(residues)):
            return Refused("the fused kernel gives no derivative to a bias on pairs of positions.")
        reduction, wide = _with_enough_digits(problem, reduction, parts)
        if wide is not problem:
            assert isinstance(wide.normalizer, Softmax)
            temperature = wide.normalizer.temperature
            residues = _temper_residues(reduction, temperature)
        queries, bias, scale = _temper(reduction, temperature)
        tiling = _tile(wide, parts, residues)
        bias = _add_key_masks(wide, bias, () if tiling is not None else parts.padding, queries.dtype)
        if queries.shape[:-2] != problem.batch_shape:
            queries = queries.expand(*problem.batch_shape, -1, -1)
        keys, values = reduction.keys.to(queries.dtype), wide.values.to(queries.dtype)
        call, arguments = lay_out(queries, keys, values, bias, tiling, parts.causal, scale)
        return FusedPlan(self, problem, reduction, residues, call, arguments)


@dataclass(frozen=True, eq=False, repr=False)
class FusedPlan(Plan):
    """One call of the fused kernel: softmax(scale · q kᵀ + bias) v.

    What is decided here: the reduction of the scores in the dtype of the run, the biases on pairs over
    temperature (`residues`), how the kernel is called, and the tensors that it takes.
    """

    reduction: Reduction
    residues: tuple[Residue, ...]
    call: Call
    arguments: Arguments

    def run(self) -> Tensor:
        if self._is_elsewhere():
            return self.run_elsewhere().to(self.problem.dtype)
        return self.call.restore(run_call(self.call, self.arguments)[0]).to(self.problem.dtype)

    def free_energy(self) -> Tensor:
        elsewhere = self._is_elsewhere()
        lse = self.log_sum_exp_elsewhere() if elsewhere else run_call(self.call, self.arguments)[1]
        return self._energy(lse)

    def run_with_free_energy(self) -> tuple[Tensor, Tensor]:
        if self._is_elsewhere():
            return self.run(), self.free_energy()
        out, lse = run_call(self.call, self.arguments)
        return self.call.restore(out).to(self.problem.dtype), self._energy(lse)

    def _energy(self, lse: Tensor) -> Tensor:
        """Free energies (..., m) from the log-sum-exps of the kernel."""
        problem = self.problem
        assert isinstance(problem.normalizer, Softmax)
        temperature = problem.normalizer.temperature
        energy = (
            temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
        ) * self.call.restore_rows(lse)
        energy = energy if self.reduction.row_bias is None else energy + self.reduction.row_bias()
        if isinstance(problem.support, Full) and problem.log_counts is None:
            return energy
        blocks = range(0, max(problem.query_count, 1), 256)
        empty = torch.cat([find_empty_rows(problem, slice(low, low + 256)) for low in blocks], -1)
        return energy.masked_fill(empty, -math.inf)

    def predict(self) -> Prediction:
        problem, width, tiling = self.problem, self.arguments[0].shape[-1], self.call.tiling
        share = 0.5 if SupportParts.of(problem.support).causal else 1.0
        count = count_pairs(problem)
        tile = 0.0 if tiling is None else 4 * count / max(problem.query_count, 1) * 256
        rows = math.prod(problem.batch_shape) * problem.query_count
        return Prediction(share * count * (4 * width + 5), tile + 4.0 * rows * (width + 1), self._describe())

    def _is_elsewhere(self) -> bool:
        """Whether the program will run where this kernel is not: on another device, exported, or traced."""
        return self.problem.device.type != "cpu" or torch.compiler.is_exporting() or torch.jit.is_tracing()

    def run_elsewhere(self) -> Tensor:
        """Through torch's public door, with one additive mask."""
        q, k, v, _ = self.arguments
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._whole_mask(), scale=self.call.scale)
        return self.call.restore(out)

    def log_sum_exp_elsewhere(self) -> Tensor:
        """The log-sum-exps (B, H, m), which the public door does not give: from all scores at once."""
        q, k, _, _ = self.arguments
        scores, mask = self.call.scale * q @ k.mT, self._whole_mask()
        return (scores if mask is None else scores + mask).logsumexp(-1)

    def _whole_mask(self) -> Tensor | None:
        """Masks and all biases on keys and pairs as one additive mask (B, H, m, n)."""
        problem, (q, _, _, bias) = self.problem, self.arguments
        marks = (problem.rows(), problem.columns())
        rows = max(problem.query_count, 1)
        tiling = Tiling(problem.support, *marks, rows, False, self.residues, heads=self.call.batch)
        mask = tiling.bias(Tile(slice(None), slice(None)), q.dtype)
        return mask if bias is None else bias if mask is None else mask + bias

    def _describe(self) -> str:
        q, _, _, bias = self.arguments
        parts = [
            "a dot product",
            *(["a bias on keys"] if bias is not None else []),
            *(["biases on pairs"] if self.residues else []),
        ]
        tiling = self.call.tiling
        masks = "" if tiling is None else f", masks in blocks of {tiling.rows} queries"
        causal = ", causal" if self.call.causal else ""
        kind = str(q.dtype).removeprefix("torch.")
        return f"{' plus '.join(parts)} of width {q.shape[-1]} in {kind}{causal}{masks}"


def _temper(reduction: Reduction, temperature: Any) -> tuple[Tensor, Tensor | None, float]:
    """Queries, bias on keys and scale of the scores over temperature; the scale is a positive number."""
    scale, queries, bias = reduction.scale, reduction.queries, reduction.key_bias
    if isinstance(scale, Tensor) or isinstance(temperature, Tensor):
        queries, scale = queries * over_scores(scale) / over_scores(temperature), 1.0
    else:
        scale = scale / temperature
    if scale <= 0:  # the kernel masks before it scales, and finds the gradient of a bias over the scale
        queries, scale = (-queries, -scale) if scale < 0 else (queries * 0, 1.0)
    if bias is not None:
        bias = bias / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)
    return queries, bias, float(scale)


def _temper_residues(reduction: Reduction, temperature: Any) -> tuple[Residue, ...]:
    """The biases on pairs over temperature."""
    return tuple(Residue(Scaled(r.potential, 1 / temperature), r.queries, r.keys) for r in reduction.residues)


def _with_enough_digits(
    problem: Problem, reduction: Reduction, parts: SupportParts
) -> tuple[Reduction, Problem]:
    """The reduction in the dtype of the run; the problem, in float64 where terms of a score cancel.

    Half precisions stay as they are unless there are biases, or a scale or temperature that the queries take;
    those need float32.
    """
    kind = reduction.queries.dtype
    taken = (reduction.scale, problem.normalizer.temperature)  # type: ignore[attr-defined]
    biased = reduction.key_bias is not None or reduction.residues or problem.log_counts is not None
    if biased or any(isinstance(t, Tensor) for t in taken):
        kind = working_dtype(kind)
    if kind == torch.float32 and loses_digits(reduction):
        problem = problem.to(torch.float64)
        return reduce.one(problem.potential, problem.queries, problem.keys, parts.causal), problem
    kind = working_dtype(problem.dtype) if kind == torch.float64 else kind
    if kind != reduction.queries.dtype:
        bias = None if reduction.key_bias is None else reduction.key_bias.to(kind)
        reduction = reduction.replace(
            queries=reduction.queries.to(kind), keys=reduction.keys.to(kind), key_bias=bias
        )
    return reduction, problem


def _tile(problem: Problem, parts: SupportParts, residues: tuple[Residue, ...]) -> Tiling | None:
    """Blocks of rows, where the mask or the bias is more than a causal flag and a bias on keys."""
    if not parts.rest and not residues and (not parts.causal or problem.in_order()):
        return None
    first = problem.support.allows(problem.rows()[..., :1], problem.columns()[..., :1])
    masked = problem.batch_shape if residues else first.shape[:-2]  # one mask serves all heads, a bias one
    most = min(max(32, rows_per_tile(max(1, math.prod(masked)), problem.key_count, 1)), 256)
    marks = (problem.rows(), problem.columns())
    tiling = Tiling(problem.support, *marks, most, problem.in_order(), residues)
    return tiling if residues or not problem.in_order() else _narrowed(tiling)


def _narrowed(tiling: Tiling) -> Tiling:
    """The same with blocks that end where documents end, or with fewer rows a block where they see fewer
    keys together, as in a window.
    """
    count = tiling.query_marks.shape[-1]
    seams = _apart([seam for seam in tiling.support.seams() if seam < count], LEAST_ROWS)
    if seams:
        return tiling.replace(seams=seams)
    middle = count // 2

    def work(rows: int) -> float:
        seen = tiling.columns_of(middle // rows * rows, middle // rows * rows + rows - 1)
        return (seen.stop - seen.start) * (1 + 16 / rows)

    return tiling.replace(rows=min((tiling.rows, 128, 64, 32), key=lambda rows: work(min(rows, tiling.rows))))


LEAST_ROWS = 64
"""Rows of a block below which a call of the kernel costs more than the keys that it leaves out."""


def _apart(places: list[int], least: int) -> tuple[int, ...]:
    """Some of the places, at least so far from each other and from 0."""
    kept: list[int] = []
    for place in places:
        if place >= least + (kept[-1] if kept else 0):
            kept.append(place)
    return tuple(kept)


def _add_key_masks(
    problem: Problem, bias: Tensor | None, paddings: tuple[Any, ...], dtype: torch.dtype
) -> Tensor | None:
    """All that depends on the key alone, (..., n): bias, log-counts, and -inf on keys that paddings hide."""
    if problem.log_counts is not None:
        counts = problem.log_counts.to(dtype)
        bias = counts if bias is None else bias + counts
    if paddings:
        allowed = torch.ones_like(problem.columns(), dtype=torch.bool)
        for padding in paddings:
            allowed = allowed & padding.allows_keys(problem.columns())
        start = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device) if bias is None else bias
        bias = start.masked_fill(~allowed, -math.inf)
    return None if bias is None else bias.to(dtype)
