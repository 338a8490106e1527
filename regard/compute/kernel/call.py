"""Call: how tensors are laid out for the fused kernel, and what the kernel is told beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import _check
from regard._object import Object
from regard.compute.kernel.tiles import PAIRS, Tiling, as_four_dimensions, rows_per_tile
from regard.supports import Causal, Full

LEAST_WIDTH = 16
"""Narrower heads are padded: the kernel is faster and more accurate on full vectors."""

Arguments = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Queries, keys and values (B, H, tokens, width), and the bias on keys (·, ·, 1, n) where there is one."""


@dataclass(frozen=True, eq=False, repr=False)
class Call(Object):
    """What the kernel is told beside its arguments.

    What is decided here: whether masks come as the kernel's causal flag, or block by block with the biases on
    pairs (`tiling`); the scale; and the batch shape and width of values in which the caller wants the
    outputs.
    """

    tiling: Tiling | None
    causal: bool
    scale: float
    batch: tuple[int, ...]
    width: int

    def blocks(self, q: Tensor, k: Tensor, most: int = PAIRS) -> Tiling:
        """The blocks of derivatives: those of the masks, else all heads or, if they are large, one.

        most: pairs in a block; under a causal mask fewer rows leave out more keys.
        """
        if self.tiling is not None:
            return self.tiling
        heads, pairs = q.shape[:-2], q.shape[-2] * k.shape[-2]
        together = heads.numel() * pairs <= PAIRS
        rows = max(
            64,
            rows_per_tile(heads.numel() if together else 1, k.shape[-2], 1, PAIRS if self.causal else most),
        )
        marks = (torch.arange(q.shape[-2], device=q.device), torch.arange(k.shape[-2], device=q.device))
        support = Causal() if self.causal else Full()
        return Tiling(support, *marks, rows, True, batch=None if together else tuple(heads))

    def restore(self, out: Tensor) -> Tensor:
        """Outputs of the kernel (B, H, m, ·) in the caller's shape (..., m, e)."""
        if out.shape[-1] == self.width and len(self.batch) == 2:
            return out
        return out[..., : self.width].reshape(*self.batch, out.shape[-2], self.width)

    def restore_rows(self, lse: Tensor) -> Tensor:
        """Numbers of rows (B, H, m) in the caller's shape (..., m)."""
        return lse.reshape(*self.batch, lse.shape[-1])

    def lay_out_rows(self, rows: Tensor) -> Tensor:
        """Numbers of rows (..., m) as the kernel takes them, (B, H, m)."""
        return as_four_dimensions(rows.unsqueeze(-1), torch.Size(self.batch), True).squeeze(-1).contiguous()

    def lay_out_like(self, out: Tensor, q: Tensor) -> Tensor:
        """Cotangents of outputs (..., m, e) as the kernel takes them, beside its queries q."""
        return as_four_dimensions(_pad(out, q.shape[-1]), torch.Size(self.batch), True)


def lay_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_bias: Tensor | None,
    tiling: Tiling | None,
    causal: bool,
    scale: float,
) -> tuple[Call, Arguments]:
    """The call, and the tensors as the kernel takes them: four dimensions, one width.

    Tensors are copied only where they are padded or a batch has more than two dimensions.

    q (..., m, c), k (..., n, c), v (..., n, e), key_bias (..., n). `causal` needs tokens in order; a tiling
    adds masks and biases on pairs, block by block, and then carries the causal mask itself.
    """
    biased = () if key_bias is None else key_bias.shape[:-1]
    batch = _check.broadcast("q, k, v and key_bias", q.shape[:-2], k.shape[:-2], v.shape[:-2], biased)
    width = max(q.shape[-1], v.shape[-1], LEAST_WIDTH)
    bias = None if key_bias is None else as_four_dimensions(key_bias.unsqueeze(-2), batch, False)
    tiling = None if tiling is None else tiling.replace(heads=tuple(batch))
    q4, k4, v4 = (as_four_dimensions(_pad(t, width), batch, True) for t in (q, k, v))
    return Call(tiling, causal and tiling is None, scale, tuple(batch), v.shape[-1]), (q4, k4, v4, bias)


def _pad(t: Tensor, width: int) -> Tensor:
    """Zeros on the right, up to a width."""
    return t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1]))
