"""The fused kernel, for every potential that is a dot product plus a key bias."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from regard._object import tensors_in
from regard._refused import Refused
from regard._transforms import is_recorded, moves
from regard._types import over_rows, over_scores
from regard.compute.engine import (
    Engine,
    Plan,
    Prediction,
    count_pairs,
    find_empty_rows,
    register,
    working_dtype,
)
from regard.compute.kernel.aten import pull_with_biases
from regard.compute.kernel.call import Arguments, Call, lay_out
from regard.compute.kernel.door import attend_by_door, log_sum_exp_by_blocks
from regard.compute.kernel.flash import run_call, run_outputs
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

    On other devices than the CPU it goes through torch's public door, F.scaled_dot_product_attention, which
    takes the fused kernel of the device; public=True does so on a CPU too.

    Examples:
        >>> found = regard.explain(regard.Attention(regard.Gaussian()), torch.randn(8, 4)).engine
        >>> isinstance(found, regard.engines.Sdpa)  # Gaussian scores are a dot product plus a key bias
        True
    """

    public: bool = False
    name: ClassVar[str] = "sdpa"
    rank: ClassVar[int] = 10

    def plan(self, problem: Problem) -> FusedPlan | DoorPlan | Refused:
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
        public = self.public or (_is_other(problem) and not _is_recorded_with_mask(problem, parts, residues))
        if public and not _can_pass(problem):
            return Refused("torch's kernels on other devices have neither forward mode nor torch.func.")
        reduction, wide = _with_enough_digits(problem, reduction, parts, public)
        if wide is not problem:
            assert isinstance(wide.normalizer, Softmax)
            temperature = wide.normalizer.temperature
            residues = _temper_residues(reduction, temperature)
        queries, bias, scale = _temper(reduction, temperature)
        tiling = _tile(wide, parts, residues)
        kind = working_dtype(queries.dtype) if public else queries.dtype
        bias = _add_key_masks(wide, bias, () if tiling is not None else parts.padding, kind)
        if queries.shape[:-2] != problem.batch_shape:
            queries = queries.expand(*problem.batch_shape, -1, -1)
        keys, values = reduction.keys.to(queries.dtype), wide.values.to(queries.dtype)
        if public:
            form = reduction.replace(queries=queries, keys=keys, key_bias=bias, scale=scale)
            return self._open(problem, form, values, tiling, parts.causal)
        call, arguments = lay_out(queries, keys, values, bias, tiling, parts.causal, scale)
        return FusedPlan(self, problem, reduction, residues, call, arguments)

    def _open(
        self, problem: Problem, form: Reduction, values: Tensor, tiling: Tiling | None, causal: bool
    ) -> DoorPlan | Refused:
        """A call without a mask: what only some queries see is a bias on keys where there is one query."""
        bias, square = form.key_bias, problem.query_count == problem.key_count
        if tiling is not None and problem.query_count == 1:
            row = tiling.bias(Tile(slice(0, 1), slice(None)), working_dtype(form.queries.dtype))
            row = None if row is None else row.squeeze(-2)
            bias = row if bias is None else bias if row is None else bias + row
            return DoorPlan(self, problem, form.replace(key_bias=bias), values, False)
        if tiling is not None or (causal and not square):
            return Refused("a mask or a bias on pairs would keep torch from taking a fused kernel.")
        return DoorPlan(self, problem, form, values, causal)


@dataclass(frozen=True, eq=False, repr=False)
class DoorPlan(Plan):
    """One call of F.scaled_dot_product_attention without a mask.

    What is decided here: the dot product over temperature and the bias on keys (`form`), in the dtype of the
    run; the values in that dtype; and whether the kernel is told to be causal.
    """

    form: Reduction
    values: Tensor
    causal: bool

    def run(self) -> Tensor:
        arguments, scale = self._arguments()
        out = attend_by_door(arguments, self.causal, scale)
        return out.expand(*self.problem.batch_shape, -1, -1).to(self.problem.dtype)

    def free_energy(self) -> Tensor:
        arguments, scale = self._arguments()
        level = log_sum_exp_by_blocks(arguments, self.causal, scale)
        seen = level > -math.inf
        assert isinstance(self.problem.normalizer, Softmax)
        temperature = self.problem.normalizer.temperature
        energy = over_rows(temperature) * torch.where(seen, level, torch.zeros_like(level))
        energy = energy if self.form.row_bias is None else energy + self.form.row_bias()
        return energy.masked_fill(~seen, -math.inf)

    def predict(self) -> Prediction:
        problem, width = self.problem, self.form.queries.shape[-1] + (self.form.key_bias is not None)
        tokens = math.prod(problem.batch_shape) * (problem.query_count + 2 * problem.key_count)
        kind = str(self.form.queries.dtype).removeprefix("torch.")
        biased = " with the bias on keys in a column" if self.form.key_bias is not None else ""
        causal = ", causal" if self.causal else ""
        how = (
            f"torch's kernel of the device, a dot product of width {width} in {kind}{biased}{causal}, no mask"
        )
        share = 0.5 if self.causal else 1.0
        return Prediction(share * count_pairs(problem) * (4 * width + 5), 4.0 * tokens * width, how)

    def _arguments(self) -> tuple[Arguments, float]:
        form = self.form
        assert isinstance(form.scale, float)
        return (form.queries, form.keys, self.values, form.key_bias), form.scale


def _is_other(problem: Problem) -> bool:
    """Whether the kernel of the CPU is not there; on meta it has shapes."""
    return problem.device.type not in ("cpu", "meta")


def _is_recorded_with_mask(problem: Problem, parts: SupportParts, residues: tuple[Residue, ...]) -> bool:
    """Whether a program that is only recorded needs a mask, which it then writes down as a whole."""
    if not is_recorded(problem.values) or problem.query_count == 1:
        return False
    square = problem.query_count == problem.key_count
    return (parts.causal and not square) or _tile(problem, parts, residues) is not None


def _can_pass(problem: Problem) -> bool:
    """Whether torch differentiates its own kernels here: not for forward mode or torch.func."""
    if torch.compiler.is_compiling():
        return True
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


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
        return self.call.restore(run_outputs(self.call, self.arguments)).to(self.problem.dtype)

    def free_energy(self) -> Tensor:
        elsewhere = self._is_elsewhere()
        lse = self.log_sum_exp_elsewhere() if elsewhere else run_call(self.call, self.arguments)[1]
        return self._energy(lse)

    def run_with_free_energy(self) -> tuple[Tensor, Tensor]:
        if self._is_elsewhere():
            return self.run(), self.free_energy()
        out, lse = run_call(self.call, self.arguments)
        return self.call.restore(out).to(self.problem.dtype), self._energy(lse)

    def run_with_level(self, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        """What `pull_part` gets back is what the kernel gave, to the last digit, where these are all keys."""
        if self._is_elsewhere():
            return super().run_with_level(kind)
        out, lse = run_call(self.call, self.arguments)
        level, row = self.call.restore_rows(lse).to(kind), self._row_bias()
        level = level if row is None else level + row.to(kind)
        return self.call.restore(out).to(self.problem.dtype), self._without_empty_rows(level)

    def pull_part(
        self, whole: tuple[Tensor, Tensor], cotangents: tuple[Tensor, Tensor]
    ) -> list[tuple[Tensor, Tensor]] | None:
        """The kernel needs no more of other keys than what came out of all."""
        if self._is_elsewhere():
            return None
        q, k, v, bias = self.arguments
        (out, level), (by_out, by_level) = whole, cotangents
        row, key_bias = self._row_bias(), None if bias is None else bias.detach()
        level = level.masked_fill(level == -math.inf, 0.0)  # rows that see nothing at all
        level = level if row is None else level - row.detach()
        wide = torch.promote_types(q.dtype, torch.float32)
        outs = (self.call.lay_out_like(t.to(q.dtype), q) for t in (out, by_out))
        rows = (self.call.lay_out_rows(t.to(wide)) for t in (level, by_level))
        (out, by_out), (lse, by_lse) = outs, rows
        *gradients, by_keys, by_rows = pull_with_biases(
            self.call, (q.detach(), k.detach(), v.detach(), key_bias), out, lse, by_out, by_lse
        )
        found = list(zip((q, k, v), gradients, strict=True))
        if bias is not None:
            found.append((bias, by_keys.unsqueeze(-2).sum_to_size(bias.shape)))
        if row is not None:
            found.append((row, self.call.restore_rows(by_rows).sum_to_size(row.shape).to(row.dtype)))
        return [(t, gradient) for t, gradient in found if t.requires_grad]

    def _row_bias(self) -> Tensor | None:
        """The bias on rows over temperature."""
        if self.reduction.row_bias is None:
            return None
        assert isinstance(self.problem.normalizer, Softmax)
        found: Tensor = self.reduction.row_bias() / over_rows(self.problem.normalizer.temperature)
        return found

    def _energy(self, lse: Tensor) -> Tensor:
        """Free energies (..., m) from the log-sum-exps of the kernel."""
        problem = self.problem
        assert isinstance(problem.normalizer, Softmax)
        temperature = problem.normalizer.temperature
        energy = over_rows(temperature) * self.call.restore_rows(lse)
        energy = energy if self.reduction.row_bias is None else energy + self.reduction.row_bias()
        return self._without_empty_rows(energy)

    def _without_empty_rows(self, level: Tensor) -> Tensor:
        """-inf where a row sees nothing."""
        problem = self.problem
        if isinstance(problem.support, Full) and problem.log_counts is None:
            return level
        blocks = range(0, max(problem.query_count, 1), 256)
        empty = torch.cat([find_empty_rows(problem, slice(low, low + 256)) for low in blocks], -1)
        return level.masked_fill(empty, -math.inf)

    def predict(self) -> Prediction:
        problem, width, tiling = self.problem, self.arguments[0].shape[-1], self.call.tiling
        share = 0.5 if SupportParts.of(problem.support).causal else 1.0
        count = count_pairs(problem)
        tile = 0.0 if tiling is None else 4 * count / max(problem.query_count, 1) * 256
        rows = math.prod(problem.batch_shape) * problem.query_count
        return Prediction(share * count * (4 * width + 5), tile + 4.0 * rows * (width + 1), self._describe())

    def _is_elsewhere(self) -> bool:
        """Whether the program will run where this kernel is not: on another device, exported, or traced."""
        return _is_other(self.problem) or torch.compiler.is_exporting() or torch.jit.is_tracing()

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
    problem: Problem, reduction: Reduction, parts: SupportParts, public: bool
) -> tuple[Reduction, Problem]:
    """The reduction in the dtype of the run; the problem, in float64 where terms of a score cancel.

    Half precisions stay as they are unless there are biases, or a scale or temperature that the queries take;
    those need float32. In columns of their own counts have all digits of float32 beside half precisions.
    """
    kind = reduction.queries.dtype
    taken = (reduction.scale, problem.normalizer.temperature)  # type: ignore[attr-defined]
    counted = problem.log_counts is not None and not public
    biased = reduction.key_bias is not None or reduction.residues or counted
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
