"""The fused kernel: softmax(scale · q kᵀ + bias) v with its log-sum-exp, O(n) memory, forward and backward.

torch's public door refuses a causal flag next to a mask, falls back to an m × n matrix where the mask wants a gradient, and hides
the log-sum-exp. The kernel behind it does all three; this file calls it and supplies the gradients it leaves out.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._object import Object
from regard.compute.blocks import replay
from regard.compute.tiles import Tiling
from regard.errors import RefusalError
from regard.normalizers.base import without_empty_rows, zero_where

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

LEAST_WIDTH = 16
"""Narrower heads are padded: the kernel is faster and more accurate on full vectors."""


COPIES = 1 << 21
"""Bytes of a widened copy up to which heads are taken together in the backward pass."""


def flash(
    q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None, tiling: Tiling | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs (..., m, e) and log-sum-exps (..., m); rows that see nothing have output zero and, as the kernel leaves it, log-sum-exp zero.

    q (..., m, c), k (..., n, c), v (..., n, e), key_bias (..., n). `causal` needs tokens in order; a tiling adds masks and
    biases on pairs, block by block, and then carries the causal mask itself.
    """
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2], () if key_bias is None else key_bias.shape[:-1])
    if q.shape[-2] == 0 or k.shape[-2] == 0 or math.prod(batch) == 0:
        return _nothing(q, k, v, batch)
    width = max(q.shape[-1], v.shape[-1], LEAST_WIDTH)
    arguments = [_four(_padded(t, width), batch, True) for t in (q, k, v)]
    bias = None if key_bias is None else _four(key_bias.unsqueeze(-2), batch, False)
    out, lse = _Flash.apply(*arguments, bias, tiling, causal and tiling is None, scale, tuple(batch))
    return out[..., : v.shape[-1]].reshape(*batch, q.shape[-2], v.shape[-1]), lse.reshape(*batch, q.shape[-2])


class _Flash(torch.autograd.Function):
    """The kernel on 4-D inputs; the bias and the log-sum-exp are differentiable too."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, tiling: Tiling | None, causal: bool, scale: float, batch: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        if tiling is None:
            out, lse = _forward(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
            return out, lse
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        for tile in tiling:
            mask = _mask(tiling, tile, bias, batch, q.dtype)
            part = _forward(q[:, :, tile.rows], k[:, :, tile.columns], v[:, :, tile.columns], 0.0, False, attn_mask=mask, scale=scale)
            out[:, :, tile.rows], lse[:, :, tile.rows] = part
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, bias, ctx.tiling, ctx.causal, ctx.scale, ctx.batch = inputs
        ctx.set_materialize_grads(False)
        ctx.has_bias = bias is not None
        ctx.save_for_backward(q, k, v, *output, *(() if bias is None else (bias,)))

    @staticmethod
    def backward(ctx: Any, by_out: Tensor | None, by_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        bias = rest[0] if ctx.has_bias else None
        if by_out is None and by_lse is None:
            return (None,) * 8
        by_out = torch.zeros_like(out) if by_out is None else by_out
        if torch.is_grad_enabled():  # a second derivative is wanted, which the kernel does not have
            by_lse = torch.zeros_like(lse) if by_lse is None else by_lse
            second = replay(
                lambda *t: _whole(ctx, *t), [q, k, v, *rest], list(ctx.needs_input_grad[: 4 if ctx.has_bias else 3]), (by_out, by_lse)
            )
            return (*second, *(None,) * (8 - len(second)))
        by_bias = bias is not None and ctx.needs_input_grad[3]
        by_out = by_out if by_out.stride(-1) == 1 else by_out.contiguous()
        if not by_bias and by_lse is None:
            return (*_plain_backward(ctx, by_out, q, k, v, out, lse, bias), *(None,) * 5)
        columns = torch.empty(*q.shape[:2], k.shape[-2], dtype=q.dtype, device=q.device)
        gradients = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        for heads in _few_heads(q, k, ctx.tiling is not None):
            some = (t[:, heads] for t in (q, k, v, out, by_out))
            wq, wk, wv, wide_out, by_wide = _with_spare_column(list(some), None if by_lse is None else by_lse[:, heads])
            part = None if bias is None else bias if bias.shape[1] == 1 else bias[:, heads]
            found = _plain_backward(ctx, by_wide, wq, wk, wv, wide_out, lse[:, heads], part)
            for gradient, one in zip(gradients, found, strict=True):
                gradient[:, heads] = one[..., : q.shape[-1]]
            columns[:, heads] = found[1][..., q.shape[-1]]
        d_bias = (columns / ctx.scale).unsqueeze(-2).sum_to_size(bias.shape) if by_bias and bias is not None else None
        return *gradients, d_bias, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        size = info.batch_size
        if arguments[4] is not None:  # blocks of masks differ from row to row: one sample at a time
            if _moves(arguments[4], in_dims[4]):
                raise RefusalError("engine sdpa", ["vmap over a support or a position bias is not possible; use batch dimensions."])
            samples = [
                _Flash.apply(*(_sample(a, d, s) for a, d in zip(arguments[:4], in_dims[:4], strict=True)), *arguments[4:])
                for s in range(size)
            ]
            return (torch.stack([o for o, _ in samples]), torch.stack([l for _, l in samples])), (0, 0)
        lead = [_leading(a, d, size) for a, d in zip(arguments[:4], in_dims[:4], strict=True)]
        rows = max(t.shape[1] for t in lead if t is not None)
        folded = [None if t is None else t.expand(size, rows, *t.shape[2:]).reshape(size * rows, *t.shape[2:]) for t in lead]
        out, lse = _Flash.apply(*folded, *arguments[4:])
        return (out.unflatten(0, (size, rows)), lse.unflatten(0, (size, rows))), (0, 0)


def _whole(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same attention from all pairs at once, in operations that autograd differentiates again."""
    scores = ctx.scale * (q @ k.mT)
    if ctx.tiling is not None:
        whole = ctx.tiling.replace(rows=q.shape[-2], in_order=False)
        bias = _mask(whole, next(iter(whole)), bias, ctx.batch, q.dtype)
    scores = scores if bias is None else scores + bias
    if ctx.causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(), -math.inf)
    scores, empty = without_empty_rows(scores)
    lse = scores.logsumexp(-1)
    return zero_where((scores - lse.unsqueeze(-1)).exp(), empty) @ v, lse


def _plain_backward(
    ctx: Any, by_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel's own gradients of q, k and v."""
    if ctx.tiling is not None:
        return _tiled_backward(ctx, by_out, q, k, v, out, lse, bias)
    dq, dk, dv = _backward(by_out, q, k, v, out, lse, 0.0, ctx.causal, attn_mask=bias, scale=ctx.scale)
    return dq, dk, dv


def _few_heads(q: Tensor, k: Tensor, whole: bool) -> list[slice]:
    """Heads, a few at a time, so that widened copies stay small; all at once where masks come by blocks, and in a traced graph."""
    heads = q.shape[1]
    if whole or torch.compiler.is_compiling():
        return [slice(0, heads)]
    size = q.shape[0] * max(q.shape[2], k.shape[2]) * (q.shape[3] + 16) * q.element_size()
    few = max(torch.get_num_threads(), COPIES // max(size, 1), 1)
    return [slice(low, min(low + few, heads)) for low in range(0, heads, few)]


def _tiled_backward(
    ctx: Any, by_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for tile in ctx.tiling:
        rows, columns = tile.rows, tile.columns
        mask = _mask(ctx.tiling, tile, bias, ctx.batch, q.dtype)
        some = (by_out[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns], out[:, :, rows], lse[:, :, rows].contiguous())
        dq[:, :, rows], by_k, by_v = _backward(*some, 0.0, False, attn_mask=mask, scale=ctx.scale)
        dk[:, :, columns] += by_k
        dv[:, :, columns] += by_v
    return dq, dk, dv


def _with_spare_column(tensors: list[Tensor], by_lse: Tensor | None) -> list[Tensor]:
    """One more column that makes the kernel compute what it leaves out.

    A column of ones in q makes the same column of dk the column sums of dS, the gradient of a key bias; a one in the
    output's gradient against -∂lse in the output adds the log-sum-exp's own gradient to every row of dS.
    """
    width = tensors[0].shape[-1]
    q, k, v, out, by_out = (_widened(t, 16 * (width // 16 + 1)) for t in tensors)
    q[..., width] = 1
    if by_lse is not None:
        out[..., width] = -torch.where(torch.isfinite(by_lse), by_lse, torch.zeros_like(by_lse)).to(out.dtype)
        by_out[..., width] = 1
    return [q, k, v, out, by_out]


def _widened(t: Tensor, width: int) -> Tensor:
    """A copy with zeros on the right; unlike a pad it writes each entry once."""
    wide = t.new_empty(*t.shape[:-1], width)
    wide[..., : t.shape[-1]] = t
    wide[..., t.shape[-1] :] = 0
    return wide


def _mask(tiling: Tiling, tile: Any, bias: Tensor | None, batch: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    own = tiling.bias(tile, dtype)
    own = None if own is None else _four(own, torch.Size(batch), False)
    if bias is None:
        return own
    some = bias[..., tile.columns]
    return some if own is None else own + some


def _padded(t: Tensor, width: int) -> Tensor:
    return t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1]))


def _four(t: Tensor, batch: torch.Size, expand: bool) -> Tensor:
    """(..., a, b) as (B, H, a, b); biases keep dimensions of size one, which the kernel broadcasts without a copy."""
    if len(batch) > 2:
        t = t.expand(*batch, *t.shape[-2:]).reshape(-1, batch[-1], *t.shape[-2:])
    else:
        t = t.reshape((1,) * (4 - t.ndim) + t.shape)
    if expand:
        two = (1,) * (2 - min(len(batch), 2)) + tuple(batch) if len(batch) <= 2 else t.shape[:2]
        t = t.expand(*two, *t.shape[-2:])
    return t if t.stride(-1) == 1 else t.contiguous()


def _nothing(q: Tensor, k: Tensor, v: Tensor, batch: torch.Size) -> tuple[Tensor, Tensor]:
    """No queries, or no keys: zeros that still belong to the graph."""
    out = (q[..., :1].sum(-1, keepdim=True) * 0).expand(*batch, q.shape[-2], v.shape[-1]) + 0 * (v.sum() + k.sum())
    return out, torch.full((*batch, q.shape[-2]), -math.inf, dtype=out.dtype, device=out.device)


def _sample(argument: Any, dim: int | None, index: int) -> Any:
    return argument if dim is None else argument.select(dim, index)


def _moves(value: Any, dims: Any) -> bool:
    """Whether any tensor inside an object is mapped over; `dims` has the object's shape with dimensions in place of tensors."""
    if isinstance(value, Object):
        return any(_moves(getattr(value, f.name), getattr(dims, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, tuple):
        return any(_moves(v, d) for v, d in zip(value, dims, strict=True))
    return isinstance(value, Tensor) and dims is not None


def _leading(t: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    if t is None:
        return None
    return t.movedim(dim, 0) if dim is not None else t.unsqueeze(0).expand(size, *t.shape)
