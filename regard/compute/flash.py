"""The fused kernel: softmax(scale · q kᵀ + bias) v with its log-sum-exp, O(n) memory, forward and backward.

torch's public door refuses a causal flag next to a mask, falls back to an m × n matrix where the mask wants a gradient, and hides
the log-sum-exp. The kernel behind it does all three; this file calls it and supplies the gradients it leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._object import Object
from regard._transforms import forward_rule
from regard.compute.products import Products
from regard.compute.sweep import Plan, leading, one_by_one, sweep, where
from regard.compute.tiles import PAIRS, Tile, Tiling, four, rows_of
from regard.supports import Causal, Full

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
    batch = _batch(q, k, v, key_bias)
    if q.shape[-2] == 0 or k.shape[-2] == 0 or math.prod(batch) == 0:
        return _nothing(q, k, v, batch)
    laid = lay_out(q, k, v, key_bias, tiling, causal, scale)
    function = _TracedFlash if torch.compiler.is_compiling() else _Flash
    out, lse = function.apply(laid.call, *laid.arguments)
    return laid.unfold(out), lse.reshape(*batch, q.shape[-2])


def lay_out(q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None, tiling: Tiling | None, causal: bool, scale: float) -> LaidOut:
    """The tensors as the kernel takes them: four dimensions, one width; copies only where a batch has more than two dimensions."""
    batch = _batch(q, k, v, key_bias)
    width = max(q.shape[-1], v.shape[-1], LEAST_WIDTH)
    bias = None if key_bias is None else four(key_bias.unsqueeze(-2), batch, False)
    tiling = None if tiling is None else tiling.replace(heads=tuple(batch))
    q4, k4, v4 = (four(_padded(t, width), batch, True) for t in (q, k, v))
    return LaidOut(Call(tiling, causal and tiling is None, scale), (q4, k4, v4, bias), tuple(batch), v.shape[-1])


@dataclass(frozen=True, eq=False, repr=False)
class LaidOut(Object):
    """Arguments q, k, v (B, H, tokens, width) and bias (·, ·, 1, n) or None; `width` is that of the values before padding."""

    call: Call
    arguments: tuple[Tensor, Tensor, Tensor, Tensor | None]
    batch: tuple[int, ...]
    width: int

    def unfold(self, out: Tensor) -> Tensor:
        """Outputs in the caller's shape."""
        return out[..., : self.width].reshape(*self.batch, out.shape[-2], self.width)

    def fold(self, by_out: Tensor) -> Tensor:
        """Cotangents of outputs as the kernel takes them."""
        return four(_padded(by_out, self.arguments[0].shape[-1]), torch.Size(self.batch), True)

    def value(self) -> tuple[Tensor, Tensor]:
        """Outputs and log-sum-exps (B, H, m)."""
        out, lse = _Flash.apply(self.call, *self.arguments)
        return out, lse

    def push(self, out: Tensor, lse: Tensor, tangents: Sequence[Tensor | None]) -> Tensor:
        """Tangents of the outputs, from those of the arguments."""
        return push_through(self.call, self.arguments, out, lse, tangents)[0]

    def pull(self, out: Tensor, lse: Tensor, by_out: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the arguments, from cotangents of the outputs."""
        return _pull(self.call, self.arguments[3] is not None, *self.arguments, out, lse, by_out, None)


def push_through(
    call: Call, arguments: Sequence[Tensor | None], out: Tensor, lse: Tensor, tangents: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Tangents of outputs and log-sum-exps, from those of the arguments, with all that the kernel left."""
    q, k, v, bias = arguments
    assert q is not None
    assert k is not None
    assert v is not None
    kind = lse.dtype
    columns = [] if bias is None else [bias.mT.to(kind)]
    changes = [None if t is None else t.to(kind) if index < 3 else t.mT.to(kind) for index, t in enumerate(tangents)]
    products = Products(call.scale, bias is not None)
    tensors = [*(t.to(kind) for t in (q, k, v)), *columns]
    by_out, by_lse = products.push(tensors, out.to(kind), lse.unsqueeze(-1), changes, call.blocks(q, k))
    return by_out.to(out.dtype), by_lse.squeeze(-1)


@dataclass(frozen=True, eq=False, repr=False)
class Call(Object):
    """How the kernel is called; `tiling` brings masks and biases on pairs, block by block."""

    tiling: Tiling | None
    causal: bool
    scale: float

    def blocks(self, q: Tensor, k: Tensor) -> Tiling:
        """The tiling that derivatives use: small problems at once, large ones head by head, unless masks come by blocks."""
        if self.tiling is not None:
            return self.tiling
        heads, pairs = q.shape[:-2], q.shape[-2] * k.shape[-2]
        together = heads.numel() * pairs <= PAIRS
        rows = max(64, rows_of(heads.numel() if together else 1, k.shape[-2], 1))
        marks = (torch.arange(q.shape[-2], device=q.device), torch.arange(k.shape[-2], device=q.device))
        return Tiling(Causal() if self.causal else Full(), *marks, rows, True, batch=None if together else tuple(heads))


class _TracedFlash(torch.autograd.Function):
    """The kernel on 4-D inputs; the bias and the log-sum-exp are differentiable too. In this form torch.compile can trace it."""

    @staticmethod
    def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if call.tiling is None:
            out, lse = _forward(q, k, v, 0.0, call.causal, attn_mask=bias, scale=call.scale)
            return out, lse
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        for tile in call.tiling:
            mask = _mask(call, tile, bias, q.dtype)
            part = _forward(q[:, :, tile.rows], k[:, :, tile.columns], v[:, :, tile.columns], 0.0, False, attn_mask=mask, scale=call.scale)
            out[:, :, tile.rows], lse[:, :, tile.rows] = part
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.call, q, k, v, bias = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *output, *(() if bias is None else (bias,)))
        ctx.save_for_forward(q, k, v, *output, *(() if bias is None else (bias,)))

    @staticmethod
    def backward(ctx: Any, by_out: Tensor | None, by_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        bias = rest[0] if rest else None
        if by_out is None and by_lse is None:
            return (None,) * 5
        by_out = torch.zeros_like(out) if by_out is None else by_out
        by_bias = bias is not None and ctx.needs_input_grad[4]
        pull = _pull if torch.compiler.is_compiling() else _Pull.apply
        gradients = pull(ctx.call, by_bias, q, k, v, bias, out, lse, by_out, by_lse)
        return None, *gradients, *(None,) * (4 - len(gradients))


class _Flash(_TracedFlash):
    """With forward mode and vmap."""

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        with forward_rule(ctx) as (q, k, v, out, lse, *rest):
            return push_through(ctx.call, (q, k, v, rest[0] if rest else None), out, lse, tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: Call, *tensors: Tensor | None) -> tuple[tuple[Tensor, ...], Any]:
        if call.tiling is not None:  # blocks of masks differ from row to row: one sample at a time
            return one_by_one(_Flash, info.batch_size, in_dims, (call, *tensors))
        folded, unfold = _folded(tensors, in_dims[1:], info.batch_size)
        return unfold(_Flash.apply(call, *folded)), (0, 0)


class _Pull(torch.autograd.Function):
    """The backward pass of the kernel as a function of everything it reads, so that it has derivatives itself."""

    @staticmethod
    def forward(call: Call, by_bias: bool, *tensors: Any) -> tuple[Tensor, ...]:
        return _pull(call, by_bias, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, ctx.by_bias, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.present = tuple(t is not None for t in tensors)
        ctx.save_for_backward(*(t for t in tensors if t is not None))
        ctx.save_for_forward(*(t for t in tensors if t is not None))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        given = where([c is not None for c in cotangents])
        if not given:
            return (None,) * (2 + len(ctx.present))
        q, k, v, bias, out, lse, by_out, by_lse = _spread(ctx.present, ctx.saved_tensors)
        plan, arguments = _pull_plan(ctx, q, k, v, bias, out, lse, by_out, by_lse)
        pulls = [c.mT if i == 3 else c for i, c in enumerate(cotangents) if c is not None]
        pulled = plan.pulled(arguments, tuple(range(len(arguments))), given)
        *found, by_row, by_cotangent, by_level = sweep(pulled, ctx.call.blocks(q, k), [*arguments, *(c.to(lse.dtype) for c in pulls)])
        gradients = [
            *found[:3],
            found[3].mT if bias is not None else None,
            by_level * by_out,
            by_row.squeeze(-1),
            by_cotangent + by_level * out,
            None if by_lse is None else -by_level.squeeze(-1),
        ]
        tensors = (q, k, v, bias, out, lse, by_out, by_lse)
        return None, None, *(None if g is None or t is None else g.to(t.dtype) for g, t in zip(gradients, tensors, strict=True))

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        with forward_rule(ctx) as saved:
            q, k, v, bias, out, lse, by_out, by_lse = _spread(ctx.present, saved)
            plan, arguments = _pull_plan(ctx, q, k, v, bias, out, lse, by_out, by_lse)
            dq, dk, dv, dbias, d_out, d_lse, d_by_out, d_by_lse = tangents
            level = [(a * b).sum(-1, keepdim=True) for a, b in ((d_by_out, out), (by_out, d_out)) if a is not None and b is not None]
            level = level if d_by_lse is None else [*level, -d_by_lse.unsqueeze(-1)]
            changes = [dq, dk, dv, *(() if bias is None else (None if dbias is None else dbias.mT,))]
            changes += [None if d_lse is None else d_lse.unsqueeze(-1), d_by_out, sum(level[1:], level[0]) if level else None]
            pushed = plan.pushed(where([c is not None for c in changes]))
            found = sweep(pushed, ctx.call.blocks(q, k), [*arguments, *(c.to(lse.dtype) for c in changes if c is not None)])
            return tuple(f.mT.to(q.dtype) if i == 3 else f.to(q.dtype) for i, f in enumerate(found))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: Call, by_bias: bool, *tensors: Tensor | None) -> tuple[tuple[Tensor, ...], Any]:
        if call.tiling is not None:
            return one_by_one(_Pull, info.batch_size, in_dims, (call, by_bias, *tensors))
        folded, unfold = _folded(tensors, in_dims[2:], info.batch_size)
        results = unfold(_Pull.apply(call, by_bias, *folded))
        return results, (0,) * len(results)


def _pull_plan(ctx: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, lse: Any, by_out: Any, by_lse: Any) -> tuple[Plan, list[Tensor]]:
    """The backward pass as a plan with its arguments."""
    level = (by_out * out).sum(-1, keepdim=True).to(lse.dtype)
    level = level if by_lse is None else level - by_lse.unsqueeze(-1)
    columns = () if bias is None else (bias.mT,)
    arguments = [*(t.to(lse.dtype) for t in (q, k, v, *columns)), lse.unsqueeze(-1), by_out.to(lse.dtype), level]
    return Products(ctx.call.scale, bias is not None).pull(ctx.by_bias), arguments


def _spread(present: tuple[bool, ...], tensors: tuple[Tensor, ...]) -> list[Any]:
    remaining = iter(tensors)
    return [next(remaining) if there else None for there in present]


def _pull(
    call: Call,
    by_bias: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    by_out: Tensor,
    by_lse: Tensor | None,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and, if wanted, the bias, by the kernel."""
    by_out = by_out if by_out.stride(-1) == 1 else by_out.contiguous()
    if not by_bias and by_lse is None:
        return _plain_backward(call, by_out, q, k, v, out, lse, bias)
    columns = torch.empty(*q.shape[:2], k.shape[-2], dtype=q.dtype, device=q.device)
    gradients = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    for heads in _few_heads(q, k, call.tiling is not None):
        some = (t[:, heads] for t in (q, k, v, out, by_out))
        wq, wk, wv, wide_out, by_wide = _with_spare_column(list(some), None if by_lse is None else by_lse[:, heads])
        part = None if bias is None else bias if bias.shape[1] == 1 else bias[:, heads]
        found = _plain_backward(call, by_wide, wq, wk, wv, wide_out, lse[:, heads], part)
        for gradient, one in zip(gradients, found, strict=True):
            gradient[:, heads] = one[..., : q.shape[-1]]
        columns[:, heads] = found[1][..., q.shape[-1]]
    if not by_bias or bias is None:
        return gradients
    return *gradients, (columns / call.scale).unsqueeze(-2).sum_to_size(bias.shape)


def _plain_backward(
    call: Call, by_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel's own gradients of q, k and v."""
    if call.tiling is not None:
        return _tiled_backward(call, by_out, q, k, v, out, lse, bias)
    dq, dk, dv = _backward(by_out, q, k, v, out, lse, 0.0, call.causal, attn_mask=bias, scale=call.scale)
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
    call: Call, by_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    assert call.tiling is not None
    for tile in call.tiling:
        rows, columns = tile.rows, tile.columns
        mask = _mask(call, tile, bias, q.dtype)
        some = (by_out[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns], out[:, :, rows], lse[:, :, rows].contiguous())
        dq[:, :, rows], by_k, by_v = _backward(*some, 0.0, False, attn_mask=mask, scale=call.scale)
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


def _mask(call: Call, tile: Tile, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    assert call.tiling is not None
    own = call.tiling.bias(tile, dtype)
    if bias is None:
        return own
    some = bias[..., tile.columns]
    return some if own is None else own + some


def _batch(q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None) -> torch.Size:
    return torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2], () if key_bias is None else key_bias.shape[:-1])


def _padded(t: Tensor, width: int) -> Tensor:
    return t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1]))


def _nothing(q: Tensor, k: Tensor, v: Tensor, batch: torch.Size) -> tuple[Tensor, Tensor]:
    """No queries, or no keys: zeros that still belong to the graph."""
    out = (q[..., :1].sum(-1, keepdim=True) * 0).expand(*batch, q.shape[-2], v.shape[-1]) + 0 * (v.sum() + k.sum())
    return out, torch.full((*batch, q.shape[-2]), -math.inf, dtype=out.dtype, device=out.device)


def _folded(tensors: tuple[Tensor | None, ...], dims: tuple[Any, ...], size: int) -> tuple[list[Tensor | None], Callable[..., Any]]:
    """Mapped tensors (B, H, ...) with the mapped dimension inside the first one, and the way back for results."""
    lead = [None if t is None else leading(t, d, size) for t, d in zip(tensors, dims, strict=True)]
    rows = max(t.shape[1] for t in lead if t is not None)
    folded = [None if t is None else t.expand(size, rows, *t.shape[2:]).reshape(size * rows, *t.shape[2:]) for t in lead]
    return folded, lambda results: tuple(result.unflatten(0, (size, rows)) for result in results)
