"""The common case by the shortest way: softmax of dot products goes to the fused kernel at once,
with the meaning that attend gives it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import _check
from regard._transforms import moves
from regard.compute.kernel.flash import flash
from regard.hf.heads import Heads
from regard.normalizers import Normalizer, Softmax
from regard.potentials import Dot, Potential
from regard.supports import Causal, Full, Support, Where


@dataclass(frozen=True)
class Plain:
    """softmax(scale · q kᵀ) v over what a causal flag and a boolean mask allow."""

    scale: float
    causal: bool
    mask: Tensor | None

    @staticmethod
    def of(potential: Potential, normalizer: Normalizer, support: Support, width: int) -> Plain | None:
        """The plain form of a declaration on heads of this width, None where it has none."""
        if (
            not isinstance(normalizer, Softmax)
            or isinstance(normalizer.temperature, Tensor)
            or not _is_dot(potential)
        ):
            return None
        if not isinstance(support, (Full, Causal, Where)):
            return None
        assert isinstance(potential, Dot)
        scale = float(potential.factor(width)) / normalizer.temperature
        return (
            None
            if scale <= 0
            else Plain(
                scale, isinstance(support, Causal), support.mask if isinstance(support, Where) else None
            )
        )

    def run(self, query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor | None:
        """Outputs (batch, heads, m, e) of tensors as modules give them;
        None where blocks of masks are needed.
        """
        if query.device.type != "cpu" or not any(moves(t) for t in (query, key, value)):
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                self.mask,
                is_causal=self.causal,
                scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        order = (self.causal, None) if self.mask is None else by_keys(self.mask)
        return None if order is None else self._differentiable((query, key, value), heads, *order)

    def _differentiable(
        self, tensors: tuple[Tensor, Tensor, Tensor], heads: Heads, causal: bool, seen: Tensor | None
    ) -> Tensor:
        """The kernel with derivatives of every order, which torch's scaled_dot_product_attention does not
        have.
        """
        query, key, value = heads.queries(tensors[0]), heads.keys(tensors[1]), heads.keys(tensors[2])
        bias = None if seen is None else query.new_zeros(seen.shape).masked_fill(~seen, -math.inf)
        bias = None if bias is None else heads.pairs(bias).squeeze(-2)
        return heads.joined(flash(query, key, value, bias, None, causal, self.scale)[0])


def by_keys(mask: Tensor) -> tuple[bool, Tensor | None] | None:
    """A mask (..., m, n) as an order and the keys (..., 1, n) that it leaves to everyone;
    None where it is more than that.
    """
    last = mask[..., -1:, :]
    if _check.holds((mask == last).all()):
        return False, last
    order = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    if mask.shape[-2] == mask.shape[-1] and _check.holds((mask == (last & order)).all()):
        return True, last
    return None


def _is_dot(potential: Potential) -> bool:
    if not isinstance(potential, Dot) or isinstance(potential.scale, Tensor):
        return False
    return all(part is None for part in (potential.w_q, potential.w_k, potential.b_q, potential.b_k))
