"""FlexAttention: torch's compiled score modifications, where torch supports them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard._transforms import moves
from regard.compute.engine import Engine, Prediction, pairs, register, working_dtype
from regard.compute.problem import Problem
from regard.errors import RefusalError
from regard.normalizers import Softmax
from regard.potentials import Potential, SoftCap
from regard.potentials.reductions import Reduction, reduce
from regard.supports import Full


@register
@dataclass(frozen=True, eq=False, repr=False)
class Flex(Engine):
    """A dot product with key biases, and a soft cap around it, compiled. On a CPU it has no backward pass and must be asked for by name."""

    compiled: bool = True
    name: ClassVar[str] = "flex"
    rank: ClassVar[int] = 20

    def refuse(self, problem: Problem) -> str | None:
        if not isinstance(problem.normalizer, Softmax):
            return f"FlexAttention normalizes by softmax, not by {type(problem.normalizer).__name__}."
        form = _form(problem)
        if isinstance(form, str):
            return form
        if form.residues:
            return "position biases are cheaper in the other engines than as a compiled score modification."
        if not isinstance(problem.support, Full):
            return "masks are cheaper in the other engines than as a compiled block mask."
        moving = any(moves(t) for t in pytree.tree_leaves(problem) if isinstance(t, Tensor))
        if problem.device.type == "cpu" and moving:
            return "FlexAttention has no derivatives on a CPU; detach the inputs or use torch.no_grad()."
        if problem.device.type == "cpu" and problem.dtype == torch.float64:
            return "FlexAttention has no float64 on a CPU."
        if 0 in (problem.query_count, problem.key_count):
            return "FlexAttention takes no empty inputs."
        return None

    def only_by_name(self, problem: Problem) -> str | None:
        if problem.device.type != "cpu":
            return None
        return "on a CPU it compiles for seconds and has no backward pass; ask for it with engine=Flex()."

    def run(self, problem: Problem) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        exact = problem.to(working_dtype(problem.dtype))
        form, cap = _form(exact), _cap(exact.potential)
        assert isinstance(form, Reduction)
        assert isinstance(exact.normalizer, Softmax)
        form, batch = form.folded(), exact.batch_shape
        q, k, v = (t.expand(*batch, -1, -1).reshape(-1, *t.shape[-2:]).unsqueeze(1) for t in (form.queries, form.keys, exact.values))
        bias, counts, rows = (
            (torch.zeros(size) if t is None else t).to(q).expand(*batch, -1).reshape(-1, size)
            for t, size in (
                (form.key_bias, exact.key_count),
                (exact.log_counts, exact.key_count),
                (form.row_bias and form.row_bias(), exact.query_count),
            )
        )
        temperature = float(exact.normalizer.temperature)

        def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            score = score + bias[b, j] + rows[b, i]
            score = score if cap is None else cap * torch.tanh(score / cap)
            return score / temperature + counts[b, j]

        call: Any = torch.compile(flex_attention) if self.compiled else flex_attention
        out = call(q, k, v, score_mod=modify, scale=1.0)
        return out.squeeze(1).reshape(*batch, exact.query_count, exact.values.shape[-1]).to(problem.dtype)

    def free_energy(self, problem: Problem) -> Tensor:
        raise RefusalError("flex", ["a free energy is a log-sum-exp; the sdpa and tiled engines give it."])

    def predict(self, problem: Problem) -> Prediction:
        width = max(t.shape[-1] for t in pytree.tree_leaves(problem.queries))
        return Prediction(pairs(problem) * (2 * width + 2 * problem.values.shape[-1] + 5), 4.0 * 64 * problem.key_count)


def _form(problem: Problem) -> Reduction | str:
    inner = problem.potential.potential if isinstance(problem.potential, SoftCap) else problem.potential
    if isinstance(problem.potential, SoftCap) and isinstance(problem.potential.cap, Tensor):
        return "a compiled score modification takes a cap that is a number."
    if isinstance(problem.normalizer, Softmax) and isinstance(problem.normalizer.temperature, Tensor):
        return "a compiled score modification takes a temperature that is a number."
    return reduce.one(inner, problem.queries, problem.keys, False)


def _cap(potential: Potential) -> float | None:
    return float(potential.cap) if isinstance(potential, SoftCap) else None
