"""The derivative of heads that are joined and mixed, from that of their attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard._heads import mix_heads
from regard.certificate import Hypothesis
from regard.derive.graph import check_vector, nudge_tensor
from regard.derive.jacobian import Jacobian


class HeadsJacobian(Jacobian):
    """x ↦ Σ_h f_h(x) w_o[h] at one sequence: J = Σ_h w_oᵀ[h] J_h; what is added to the sum does not move."""

    def __init__(self, heads: Jacobian, w_o: Tensor, b_o: Tensor | None) -> None:
        several = (
            heads.value.shape[-3] if heads.value.ndim > 2 and len(w_o) == 1 else len(w_o)
        )  # one projection may be that of all heads
        self._heads, self._w_o, self._b_o = heads, w_o.detach().expand(several, -1, -1).clone(), b_o
        self.point, self.batch_shape = heads.point, torch.Size()
        value = mix_heads(heads.value, self._w_o)
        self.value = value if b_o is None else value + b_o.detach()

    def trusted(self) -> tuple[Hypothesis, ...]:
        return self._heads.trusted()

    def mv(self, tangent: Tensor) -> Tensor:
        return mix_heads(self._heads.mv(tangent), self._w_o)

    def rmv(self, cotangent: Tensor) -> Tensor:
        check_vector("cotangent", cotangent, self.shape_out)
        return self._heads.rmv((cotangent @ self._w_o.mT).sum_to_size(self._heads.shape_out))

    def second(self, tangent: Tensor) -> Tensor:
        return mix_heads(self._heads.second(tangent), self._w_o)

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        return (
            (rows, self._w_o.mT[:, None, None].matmul(blocks).sum(0)) for rows, blocks in self._heads.rows()
        )

    def block(self, i: int, j: int) -> Tensor:
        return (self._w_o.mT @ self._heads.block(i, j)).sum(0)

    def in_double(self) -> Jacobian:
        return HeadsJacobian(
            self._heads.in_double(), self._w_o.double(), None if self._b_o is None else self._b_o.double()
        )

    def nudge(self, relative: float, generator: torch.Generator) -> Jacobian:
        return HeadsJacobian(
            self._heads.nudge(relative, generator), nudge_tensor(self._w_o, relative, generator), self._b_o
        )
