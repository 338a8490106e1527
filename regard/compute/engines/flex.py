"""FlexAttention: torch's compiled score modifications and block masks, where torch supports them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard._object import tensors_in
from regard._refused import Refused
from regard._transforms import is_recorded, moves
from regard.compute.elementwise import Element, adds, by_element, sees
from regard.compute.engine import Engine, Plan, Prediction, count_pairs, register, working_dtype
from regard.compute.engines.tiled import Tiled
from regard.compute.problem import Problem
from regard.compute.selection import select
from regard.normalizers import Softmax
from regard.potentials import SoftCap
from regard.potentials.reductions import Reduction, Residue, reduce
from regard.supports import Full

LEAST_WIDTH = 16
"""Narrower heads are padded: compiled kernels take no fewer columns."""
BLOCK = 128
"""Queries, and keys, of a block that a block mask leaves out or takes whole."""


@register
@dataclass(frozen=True, eq=False, repr=False)
class Flex(Engine):
    """A dot product with biases on keys and on pairs of positions under any support, and a soft cap around
    it, compiled.

    On a CPU it has no backward pass and must be asked for by name.

    Examples:
        >>> layer, x = regard.Attention(regard.Dot(), support=regard.Window(2, 0)), torch.randn(16, 16)
        >>> regard.explain(layer, x, engine=regard.engines.Flex()).engine.name  # asked for by name
        'flex'
    """

    compiled: bool = True
    name: ClassVar[str] = "flex"
    rank: ClassVar[int] = 20

    def plan(self, problem: Problem) -> FlexPlan | Refused:
        """A dot product with biases, the cap around it, and what a pair adds and hides."""
        if not isinstance(problem.normalizer, Softmax):
            return Refused(
                f"FlexAttention normalizes by softmax, not by {type(problem.normalizer).__name__}."
            )
        form = _reduce_inside(problem)
        if isinstance(form, Refused):
            return form
        refused = _why_not(problem, form)
        if refused is not None:
            return refused
        exact = problem.to(working_dtype(problem.dtype))
        form = form if exact is problem else _reduce_inside(exact)
        assert isinstance(form, Reduction)
        cap = float(exact.potential.cap) if isinstance(exact.potential, SoftCap) else None
        seen = None if isinstance(exact.support, Full) else sees.one(exact.support, exact.batch_shape)
        added = tuple(adds.one(residue.potential, exact.batch_shape) for residue in form.residues)
        for part in (seen, *added):
            if isinstance(part, Refused):
                return part
        return FlexPlan(self, problem, exact, form.folded(), cap, self.compiled, seen, added)

    def offer(self, problem: Problem) -> FlexPlan | Refused:
        """On a CPU, only a caller who asks for it by name gets it."""
        if problem.device.type == "meta":
            return Refused("it runs nothing on a device without memory.")
        if problem.device.type == "cpu":
            why = "on a CPU it compiles for seconds and has no backward pass; ask for it with engine=Flex()."
            return Refused(why)
        if is_recorded(problem.values):
            return Refused("its block mask is made while a program runs, and this one is only recorded.")
        return self.plan(problem)


@dataclass(frozen=True, eq=False, repr=False)
class FlexPlan(Plan):
    """One call of FlexAttention.

    What is decided here: the dtype, that of the problem `exact`; the dot product and its biases (`form`,
    scale 1); the soft cap around it; whether the call is compiled; which pairs are seen, None for all; and
    what pairs of positions add, residue by residue.
    """

    exact: Problem
    form: Reduction
    cap: float | None
    compiled: bool
    seen: Element | None
    added: tuple[Element, ...]

    def run(self) -> Tensor:
        return self._restore(self._call(False))

    def free_energy(self) -> Tensor:
        return self.run_with_free_energy()[1]

    def run_with_free_energy(self) -> tuple[Tensor, Tensor]:
        exact = self.exact
        if exact.device.type == "cpu" and self.compiled:  # torch compiles no log-sum-exps there
            return self.run(), select(self.problem, Tiled()).free_energy()
        assert isinstance(exact.normalizer, Softmax)
        out, found = self._call(True)
        level = found.lse.reshape(*exact.batch_shape, exact.query_count)
        return self._restore(out), float(exact.normalizer.temperature) * level

    def _restore(self, out: Tensor) -> Tensor:
        """Outputs of a flat batch in the caller's shape and dtype."""
        exact = self.exact
        kept = out.narrow(-1, 0, exact.values.shape[-1])
        return kept.reshape(*exact.batch_shape, exact.query_count, -1).to(self.problem.dtype)

    def _call(self, with_levels: bool) -> Any:
        from torch.nn.attention.flex_attention import AuxRequest, flex_attention

        exact, form, batch = self.exact, self.form, self.exact.batch_shape
        tensors = (_at_least(t, LEAST_WIDTH) for t in (form.queries, form.keys, exact.values))
        q, k, v = (t.expand(*batch, -1, -1).reshape(-1, *t.shape[-2:]).unsqueeze(1) for t in tensors)
        call: Any = torch.compile(flex_attention) if self.compiled else flex_attention
        mask = None if self.seen is None else self._block_mask(self.seen)
        wanted = AuxRequest(lse=True) if with_levels else None
        modify = self._modification(q)
        return call(q, k, v, score_mod=modify, block_mask=mask, scale=1.0, return_aux=wanted)

    def predict(self) -> Prediction:
        problem, width = self.problem, self.form.queries.shape[-1]
        flops = count_pairs(problem) * (2 * width + 2 * problem.values.shape[-1] + 5)
        capped = "" if self.cap is None else f", capped at {self.cap:g}"
        masked = "" if self.seen is None else ", with a block mask"
        how = f"a compiled dot product of width {width}{capped}{masked}"
        return Prediction(flops, 4.0 * 64 * problem.key_count, how)

    def _modification(self, like: Tensor) -> Any:
        """The score of a pair from its dot product: biases, the cap, temperature, counts."""
        exact, form, cap, batch = self.exact, self.form, self.cap, self.exact.batch_shape
        assert isinstance(exact.normalizer, Softmax)
        temperature = float(exact.normalizer.temperature)
        bias, counts, rows = (
            (torch.zeros(size) if t is None else t).to(like).expand(*batch, -1).reshape(-1, size)
            for t, size in (
                (form.key_bias, exact.key_count),
                (exact.log_counts, exact.key_count),
                (form.row_bias and form.row_bias(), exact.query_count),
            )
        )
        pairs = [_on_pairs(r, element, batch) for r, element in zip(form.residues, self.added, strict=True)]

        def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            score = score + bias[b, j] + rows[b, i]
            for pair in pairs:
                score = score + pair(b, i, j)
            score = score if cap is None else cap * torch.tanh(score / cap)
            return score / temperature + counts[b, j]

        return modify

    def _block_mask(self, seen: Element) -> Any:
        """Which blocks of pairs are seen in part and which as a whole, found by rows of blocks."""
        from torch.nn.attention.flex_attention import BlockMask

        exact, batch = self.exact, self.exact.batch_shape
        own, other = (by_element(marks, 1, batch) for marks in (exact.rows(), exact.columns()))
        in_order = exact.in_order()

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Any:
            return seen(b, i, j) if in_order else seen(b, own(b, i), other(b, j))

        some, whole = (
            torch.stack(rows, -2).expand(*batch, -1, -1).reshape(-1, 1, len(rows), rows[0].shape[-1])
            for rows in zip(*_rows_of_blocks(exact), strict=True)
        )
        partly = (some & ~whole).to(torch.int32)
        wholly, lengths = whole.to(torch.int32), (exact.query_count, exact.key_count)
        taken = (_count(partly), _order(partly), _count(wholly), _order(wholly))
        return BlockMask.from_kv_blocks(*taken, BLOCK_SIZE=BLOCK, mask_mod=mask, seq_lengths=lengths)


def _at_least(t: Tensor, width: int) -> Tensor:
    """Zeros on the right, up to a width."""
    return t if t.shape[-1] >= width else torch.nn.functional.pad(t, (0, width - t.shape[-1]))


def _count(blocks: Tensor) -> Tensor:
    """How many blocks of a row are taken."""
    return blocks.sum(-1, dtype=torch.int32)


def _order(blocks: Tensor) -> Tensor:
    """The blocks of a row, those that are taken first."""
    return blocks.argsort(dim=-1, descending=True, stable=True).to(torch.int32)


def _rows_of_blocks(problem: Problem) -> list[tuple[Tensor, Tensor]]:
    """For each row of blocks, which hold a pair that is seen, and of which all pairs are: (..., columns)."""
    rows, columns, keys = problem.rows(), problem.columns(), problem.key_count
    missing = -keys % BLOCK
    found = []
    for low in range(0, problem.query_count, BLOCK):
        allowed = problem.support.allows(rows[..., low : low + BLOCK], columns)
        allowed = allowed.expand(*allowed.shape[:-2], rows[..., low : low + BLOCK].shape[-1], keys)
        blocks = torch.nn.functional.pad(allowed, (0, missing)).unflatten(-1, (-1, BLOCK))
        found.append((blocks.any(-1).any(-2), blocks.all(-1).all(-2)))
    return found


def _on_pairs(residue: Residue, element: Element, batch: torch.Size) -> Any:
    """What a residue adds to query i and key j, whose positions are its features."""
    own, other = (by_element(f.squeeze(-1), 1, batch) for f in (residue.queries, residue.keys))
    return lambda b, i, j: element(b, own(b, i), other(b, j))


def _why_not(problem: Problem, form: Reduction) -> Refused | None:
    """What torch does not do."""
    moving = any(moves(t) for t in pytree.tree_leaves(problem) if isinstance(t, Tensor))
    if problem.device.type == "cpu" and moving:
        return Refused("FlexAttention has no derivatives on a CPU; detach the inputs or use torch.no_grad().")
    if any(moves(t) for t in tensors_in(form.residues)):
        return Refused("a bias on pairs that is learned gets its gradient in the other engines.")
    if problem.device.type == "cpu" and problem.dtype == torch.float64:
        return Refused("FlexAttention has no float64 on a CPU.")
    if 0 in (problem.query_count, problem.key_count):
        return Refused("FlexAttention takes no empty inputs.")
    return None


def _reduce_inside(problem: Problem) -> Reduction | Refused:
    """The scores as a dot product with biases, inside of a soft cap where there is one."""
    potential = problem.potential
    if isinstance(potential, SoftCap) and isinstance(potential.cap, Tensor):
        return Refused("a compiled score modification takes a cap that is a number.")
    if isinstance(problem.normalizer, Softmax) and isinstance(problem.normalizer.temperature, Tensor):
        return Refused("a compiled score modification takes a temperature that is a number.")
    inner = potential.potential if isinstance(potential, SoftCap) else potential
    return reduce.one(inner, problem.queries, problem.keys, False)
