"""FlexAttention: torch's compiled score modifications, where torch supports them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard._refused import Refused
from regard._transforms import moves
from regard.compute.engine import Engine, Plan, Prediction, count_pairs, register, working_dtype
from regard.compute.problem import Problem
from regard.errors import RefusalError
from regard.normalizers import Softmax
from regard.potentials import SoftCap
from regard.potentials.reductions import Reduction, reduce
from regard.supports import Full


@register
@dataclass(frozen=True, eq=False, repr=False)
class Flex(Engine):
    """A dot product with key biases, and a soft cap around it, compiled.

    On a CPU it has no backward pass and must be asked for by name.
    """

    compiled: bool = True
    name: ClassVar[str] = "flex"
    rank: ClassVar[int] = 20

    def plan(self, problem: Problem) -> FlexPlan | Refused:
        """A dot product with biases, and the cap around it."""
        if not isinstance(problem.normalizer, Softmax):
            return Refused(
                f"FlexAttention normalizes by softmax, not by {type(problem.normalizer).__name__}."
            )
        form = _reduce_inside(problem)
        if isinstance(form, Refused):
            return form
        if form.residues:
            return Refused(
                "position biases are cheaper in the other engines than as a compiled score modification."
            )
        if not isinstance(problem.support, Full):
            return Refused("masks are cheaper in the other engines than as a compiled block mask.")
        moving = any(moves(t) for t in pytree.tree_leaves(problem) if isinstance(t, Tensor))
        if problem.device.type == "cpu" and moving:
            return Refused(
                "FlexAttention has no derivatives on a CPU; detach the inputs or use torch.no_grad()."
            )
        if problem.device.type == "cpu" and problem.dtype == torch.float64:
            return Refused("FlexAttention has no float64 on a CPU.")
        if 0 in (problem.query_count, problem.key_count):
            return Refused("FlexAttention takes no empty inputs.")
        exact = problem.to(working_dtype(problem.dtype))
        form = form if exact is problem else _reduce_inside(exact)
        assert isinstance(form, Reduction)
        cap = float(exact.potential.cap) if isinstance(exact.potential, SoftCap) else None
        return FlexPlan(self, problem, exact, form.folded(), cap, self.compiled)

    def offer(self, problem: Problem) -> FlexPlan | Refused:
        """On a CPU, only a caller who asks for it by name gets it."""
        if problem.device.type == "meta":
            return Refused("it runs nothing on a device without memory.")
        if problem.device.type != "cpu":
            return self.plan(problem)
        return Refused(
            "on a CPU it compiles for seconds and has no backward pass; ask for it with engine=Flex()."
        )


@dataclass(frozen=True, eq=False, repr=False)
class FlexPlan(Plan):
    """One call of FlexAttention.

    What is decided here: the dtype, that of the problem `exact`; the dot product and its biases (`form`,
    scale 1); the soft cap around it; and whether the call is compiled.
    """

    exact: Problem
    form: Reduction
    cap: float | None
    compiled: bool

    def run(self) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        exact, form, cap, batch = self.exact, self.form, self.cap, self.exact.batch_shape
        assert isinstance(exact.normalizer, Softmax)
        tensors = (form.queries, form.keys, exact.values)
        q, k, v = (t.expand(*batch, -1, -1).reshape(-1, *t.shape[-2:]).unsqueeze(1) for t in tensors)
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
        return (
            out.squeeze(1).reshape(*batch, exact.query_count, exact.values.shape[-1]).to(self.problem.dtype)
        )

    def free_energy(self) -> Tensor:
        raise RefusalError("flex", ["a free energy is a log-sum-exp; the sdpa and tiled engines give it."])

    def predict(self) -> Prediction:
        problem, width = self.problem, self.form.queries.shape[-1]
        flops = count_pairs(problem) * (2 * width + 2 * problem.values.shape[-1] + 5)
        capped = "" if self.cap is None else f", capped at {self.cap:g}"
        return Prediction(
            flops, 4.0 * 64 * problem.key_count, f"a compiled dot product of width {width}{capped}"
        )


def _reduce_inside(problem: Problem) -> Reduction | Refused:
    """The scores as a dot product with biases, inside of a soft cap where there is one."""
    potential = problem.potential
    if isinstance(potential, SoftCap) and isinstance(potential.cap, Tensor):
        return Refused("a compiled score modification takes a cap that is a number.")
    if isinstance(problem.normalizer, Softmax) and isinstance(problem.normalizer.temperature, Tensor):
        return Refused("a compiled score modification takes a temperature that is a number.")
    inner = potential.potential if isinstance(potential, SoftCap) else potential
    return reduce.one(inner, problem.queries, problem.keys, False)
