"""The fused kernel as a differentiable function: softmax(scale · q kᵀ + bias) v and its log-sum-exp, O(n) memory in every derivative."""

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
from regard.compute.aten import Call, pull_kernel, run_kernel
from regard.compute.products import Products
from regard.compute.sweep import Plan, leading, one_by_one, sweep, where
from regard.compute.tiles import Tiling, four

LEAST_WIDTH = 16
"""Narrower heads are padded: the kernel is faster and more accurate on full vectors."""


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
        return pull_kernel(self.call, self.arguments[3] is not None, *self.arguments, out, lse, by_out, None)


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


class _TracedFlash(torch.autograd.Function):
    """The kernel on 4-D inputs; the bias and the log-sum-exp are differentiable too. In this form torch.compile can trace it."""

    @staticmethod
    def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return run_kernel(call, q, k, v, bias)

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
        pull = pull_kernel if torch.compiler.is_compiling() else _Pull.apply
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
        return pull_kernel(call, by_bias, *tensors)

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
