"""torch's public door, F.scaled_dot_product_attention, as it is used on every device but the CPU.

It picks the fused kernel of the device as long as there is no mask. So a bias on keys rides in a feature
column of its own, ones in q against the bias in k, and widths are padded to multiples of eight. Its backward
pass is torch's; what torch has no derivative for (the second order, batches of cotangents) and the
log-sum-exps, which it hides, are computed block by block in plain torch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._transforms import batches_gradients, is_only_run
from regard.compute.kernel.blocks import Parts, attend_online
from regard.compute.kernel.tiles import PAIRS, Tiling, as_four_dimensions, rows_per_tile
from regard.normalizers import Softmax
from regard.potentials import Dot
from regard.supports import Causal, Full

Arguments = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Queries, keys and values (..., tokens, ·) and the bias on keys (..., n), -inf for keys that are hidden."""

MULTIPLE = 8
"""Widths that fused kernels take as they are."""


def attend_by_door(arguments: Arguments, causal: bool, scale: float) -> Tensor:
    """softmax(scale · q kᵀ + bias) v, (..., m, e); zero for a query that sees nothing.

    causal needs as many queries as keys, in one order.
    """
    if torch.compiler.is_compiling() or is_only_run(*arguments):
        return _call(arguments, causal, scale)
    out: Tensor = _Door.apply(causal, scale, *arguments)
    return out


def log_sum_exp_by_blocks(arguments: Arguments, causal: bool, scale: float) -> Tensor:
    """The log-sum-exps (..., m) of the same scores, with derivatives of every order."""
    q, k, v, bias = arguments
    return _attend_by_blocks((q, k, v[..., :0], bias), causal, scale)[1]


class _Door(torch.autograd.Function):
    """The door with a backward pass of every order: the first is torch's own."""

    @staticmethod
    def forward(ctx: Any, causal: bool, scale: float, *arguments: Tensor | None) -> Tensor:
        leaves = tuple(
            None if t is None else t.detach().requires_grad_(needed)
            for t, needed in zip(arguments, ctx.needs_input_grad[2:], strict=True)
        )
        with torch.enable_grad():
            out = _call(leaves, causal, scale)  # type: ignore[arg-type]
        ctx.how, ctx.inner = (causal, scale), (leaves, out)
        ctx.present = [t is not None for t in arguments]
        ctx.save_for_backward(*(t for t in arguments if t is not None))
        return out.detach()

    @staticmethod
    @batches_gradients
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, ...]:
        leaves, out = ctx.inner
        again = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
        if again:
            saved = iter(ctx.saved_tensors)
            with torch.enable_grad():
                # views, since one argument may be a function of another: a bias of the keys
                leaves = tuple(_view(next(saved)) if there else None for there in ctx.present)
                out = _attend_by_blocks(leaves, *ctx.how)[0]
        needed = ctx.needs_input_grad[2:]
        moving = [t for t, need in zip(leaves, needed, strict=True) if need]
        pulled = torch.autograd.grad(
            out, moving, by_out, retain_graph=True, create_graph=torch.is_grad_enabled(), allow_unused=True
        )
        found = iter(pulled)
        return None, None, *(next(found) if need else None for need in needed)


def _view(t: Tensor) -> Tensor:
    return t.view_as(t)


def _attend_by_blocks(arguments: Arguments, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps in plain torch."""
    q, k, v = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in arguments[:3])
    counts = None if arguments[3] is None else arguments[3].to(q.dtype).unsqueeze(-1)
    parts = Parts(Dot(scale=scale), Softmax(), q, k, counts, v)
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    rows = max(1, rows_per_tile(max(1, batch.numel()), k.shape[-2], 1, PAIRS))
    own, other = (torch.arange(t.shape[-2], device=q.device) for t in (q, k))
    out, level = attend_online(parts, Tiling(Causal() if causal else Full(), own, other, rows, True))
    return out.to(arguments[2].dtype), level


def _call(arguments: Arguments, causal: bool, scale: float) -> Tensor:
    """One call of the door, without a mask."""
    q, k, v, bias = arguments
    batch = torch.broadcast_shapes(
        q.shape[:-2], k.shape[:-2], v.shape[:-2], *([] if bias is None else [bias.shape[:-1]])
    )
    wide_q, wide_k = (q, k) if bias is None else _add_columns(q, k, bias / scale)
    width = -(-max(wide_q.shape[-1], v.shape[-1], 1) // MULTIPLE) * MULTIPLE
    q4, k4, v4 = (as_four_dimensions(_pad(t, width), batch, True) for t in (wide_q, wide_k, v))
    out = F.scaled_dot_product_attention(q4, k4, v4, is_causal=causal, scale=scale)
    out = out.narrow(-1, 0, v.shape[-1]).reshape(*batch, q.shape[-2], v.shape[-1])
    return out if bias is None else out.masked_fill(_empty(bias, causal).unsqueeze(-1), 0.0)


def _add_columns(q: Tensor, k: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with columns whose products are the bias.

    A key that is hidden has a bias so low that its weight is zero; a half precision takes three columns, each
    with the digits that the ones before it left.
    """
    kind = q.dtype
    low = -0.5 * torch.finfo(kind).max if kind == torch.float16 else -1e30
    rest = torch.where(bias == -math.inf, low, bias)
    columns = [rest.to(kind)]
    if kind.itemsize < 4:
        rest = rest.detach().to(torch.float32)
        for _ in range(2):
            rest = rest - columns[-1].detach().to(torch.float32)
            columns.append(rest.to(kind))
    added = torch.stack(columns, -1)
    lead = torch.broadcast_shapes(k.shape[:-1], added.shape[:-1])
    ones = torch.ones(*q.shape[:-1], len(columns), dtype=kind, device=q.device)
    return torch.cat([q, ones], -1), torch.cat(
        [k.expand(*lead, k.shape[-1]), added.expand(*lead, len(columns))], -1
    )


def _empty(bias: Tensor, causal: bool) -> Tensor:
    """True for queries that see no key with mass, (..., m or 1)."""
    levels = bias.detach()
    return (levels.cummax(-1).values if causal else levels.amax(-1, keepdim=True)) == -math.inf


def _pad(t: Tensor, width: int) -> Tensor:
    return t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1]))
