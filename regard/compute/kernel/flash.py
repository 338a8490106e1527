"""The fused kernel as a function with derivatives of every order, in O(n) memory.

It gives softmax(scale · q kᵀ + bias) v and the log-sum-exps of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard._transforms import batches_gradients, duals_of, forward_rule, is_only_run, on_plain_tensors
from regard.compute.kernel.aten import pull_kernel, run_kernel
from regard.compute.kernel.call import Arguments, Call, lay_out
from regard.compute.kernel.products import Products
from regard.compute.kernel.rows import PAIRS_IN_PLACE
from regard.compute.kernel.sweep import Sweep, map_one_by_one, move_to_front, places_of, sum_blocks
from regard.compute.kernel.tiles import Tiling


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_bias: Tensor | None,
    tiling: Tiling | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Outputs (..., m, e) and log-sum-exps (..., m), from the arguments of `lay_out`.

    Rows that see nothing have output zero and, as the kernel leaves it, log-sum-exp zero.
    """
    call, arguments = lay_out(q, k, v, key_bias, tiling, causal, scale)
    out, lse = run_call(call, arguments)
    return call.restore(out), call.restore_rows(lse)


def run_call(call: Call, arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Outputs (B, H, m, width) and log-sum-exps (B, H, m), differentiable to any order."""
    q, k, v, _ = arguments
    if 0 in (*q.shape[:-1], k.shape[-2]):
        return _run_nothing(q, k, v)
    if is_only_run(*arguments):
        return run_kernel(call, *arguments)
    function = _TracedFlash if torch.compiler.is_compiling() else _Flash
    out, lse = function.apply(call, *arguments)
    return out, lse


def run_outputs(call: Call, arguments: Arguments) -> Tensor:
    """Outputs alone. Under one level of forward mode and nothing else, values and tangents are computed
    together: both need the weights.
    """
    found = None if 0 in (*arguments[0].shape[:-1], arguments[1].shape[-2]) else duals_of(*arguments)
    if found is None:
        return run_call(call, arguments)[0]
    (q, k, v, bias), (by_q, by_k, by_v, by_bias) = found.primals, found.tangents
    assert q is not None
    assert k is not None
    assert v is not None
    with on_plain_tensors():
        blocks = call.blocks(q, k, PAIRS_IN_PLACE)
        if blocks.batch is None or q.dtype.itemsize < 4:
            pair = None
        else:
            columns = [] if bias is None else [bias.mT]
            changes = [by_q, by_k, by_v, None if by_bias is None else by_bias.mT]
            pair = Products(call.scale, bias is not None).run_and_push([q, k, v, *columns], changes, blocks)
    return run_call(call, arguments)[0] if pair is None else forward_ad.make_dual(*pair)


def push_through(
    call: Call,
    arguments: Sequence[Tensor | None],
    out: Tensor,
    lse: Tensor,
    tangents: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Tangents of outputs and log-sum-exps, from those of the arguments, with all that the kernel left."""
    q, k, v, bias = arguments
    assert q is not None
    assert k is not None
    assert v is not None
    kind = lse.dtype
    columns = [] if bias is None else [bias.mT.to(kind)]
    changes = [
        None if t is None else t.to(kind) if index < 3 else t.mT.to(kind) for index, t in enumerate(tangents)
    ]
    products = Products(call.scale, bias is not None)
    tensors = [*(t.to(kind) for t in (q, k, v)), *columns]
    blocks = call.blocks(q, k, PAIRS_IN_PLACE)
    by_out, by_lse = products.push(tensors, out.to(kind), lse.unsqueeze(-1), changes, blocks)
    return by_out.to(out.dtype), by_lse.squeeze(-1)


class _TracedFlash(torch.autograd.Function):
    """The kernel with a backward pass, also for the bias and the log-sum-exp.

    torch.compile cannot trace functions that have forward mode or vmap rules; it traces this one.
    """

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
    @batches_gradients
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
    """The same with forward mode and vmap."""

    @staticmethod
    @batches_gradients
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        with forward_rule(ctx) as (q, k, v, out, lse, *rest):
            return push_through(ctx.call, (q, k, v, rest[0] if rest else None), out, lse, tangents)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], call: Call, *tensors: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Any]:
        if call.tiling is not None:  # blocks of masks differ from row to row: one sample at a time
            return map_one_by_one(_Flash, info.batch_size, in_dims, (call, *tensors))
        folded, unfold = _fold_mapped(tensors, in_dims[1:], info.batch_size)
        return unfold(_Flash.apply(call, *folded)), (0, 0)


class _Pull(torch.autograd.Function):
    """The backward pass as a function of everything it reads, so that it has derivatives itself."""

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
    @batches_gradients
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        given = places_of([c is not None for c in cotangents])
        if not given:
            return (None,) * (2 + len(ctx.present))
        q, k, v, bias, out, lse, by_out, by_lse = _put_back_absent(ctx.present, ctx.saved_tensors)
        sweep, arguments = _backward_sweep(ctx, q, k, v, bias, out, lse, by_out, by_lse)
        pulls = [c.mT if i == 3 else c for i, c in enumerate(cotangents) if c is not None]
        pulled = sweep.reverse_derivative(arguments, tuple(range(len(arguments))), given)
        *found, by_row, by_cotangent, by_level = sum_blocks(
            pulled, ctx.call.blocks(q, k), [*arguments, *(c.to(lse.dtype) for c in pulls)]
        )
        gradients = [
            *found[:3],
            found[3].mT if bias is not None else None,
            by_level * by_out,
            by_row.squeeze(-1),
            by_cotangent + by_level * out,
            None if by_lse is None else -by_level.squeeze(-1),
        ]
        tensors = (q, k, v, bias, out, lse, by_out, by_lse)
        return (
            None,
            None,
            *(
                None if g is None or t is None else g.to(t.dtype)
                for g, t in zip(gradients, tensors, strict=True)
            ),
        )

    @staticmethod
    @batches_gradients
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        with forward_rule(ctx) as saved:
            q, k, v, bias, out, lse, by_out, by_lse = _put_back_absent(ctx.present, saved)
            sweep, arguments = _backward_sweep(ctx, q, k, v, bias, out, lse, by_out, by_lse)
            dq, dk, dv, dbias, d_out, d_lse, d_by_out, d_by_lse = tangents
            level = [
                (a * b).sum(-1, keepdim=True)
                for a, b in ((d_by_out, out), (by_out, d_out))
                if a is not None and b is not None
            ]
            level = level if d_by_lse is None else [*level, -d_by_lse.unsqueeze(-1)]
            changes = [dq, dk, dv, *(() if bias is None else (None if dbias is None else dbias.mT,))]
            changes += [
                None if d_lse is None else d_lse.unsqueeze(-1),
                d_by_out,
                sum(level[1:], level[0]) if level else None,
            ]
            pushed = sweep.forward_derivative(places_of([c is not None for c in changes]))
            found = sum_blocks(
                pushed,
                ctx.call.blocks(q, k),
                [*arguments, *(c.to(lse.dtype) for c in changes if c is not None)],
            )
            return tuple(f.mT.to(q.dtype) if i == 3 else f.to(q.dtype) for i, f in enumerate(found))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], call: Call, by_bias: bool, *tensors: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Any]:
        if call.tiling is not None:
            return map_one_by_one(_Pull, info.batch_size, in_dims, (call, by_bias, *tensors))
        folded, unfold = _fold_mapped(tensors, in_dims[2:], info.batch_size)
        results = unfold(_Pull.apply(call, by_bias, *folded))
        return results, (0,) * len(results)


def _backward_sweep(
    ctx: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, lse: Any, by_out: Any, by_lse: Any
) -> tuple[Sweep, list[Tensor]]:
    """The backward pass as a sweep with its arguments."""
    level = (by_out * out).sum(-1, keepdim=True).to(lse.dtype)
    level = level if by_lse is None else level - by_lse.unsqueeze(-1)
    columns = () if bias is None else (bias.mT,)
    arguments = [
        *(t.to(lse.dtype) for t in (q, k, v, *columns)),
        lse.unsqueeze(-1),
        by_out.to(lse.dtype),
        level,
    ]
    return Products(ctx.call.scale, bias is not None).pull(ctx.by_bias), arguments


def _put_back_absent(present: tuple[bool, ...], tensors: tuple[Tensor, ...]) -> list[Any]:
    """The tensors with None where none was given."""
    remaining = iter(tensors)
    return [next(remaining) if there else None for there in present]


def _run_nothing(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """No queries, or no keys: zeros that still belong to the graph."""
    out = (q[..., :1].sum(-1, keepdim=True) * 0).expand(*q.shape[:-1], v.shape[-1]) + 0 * (v.sum() + k.sum())
    return out, torch.full(q.shape[:-1], -math.inf, dtype=out.dtype, device=out.device)


def _fold_mapped(
    tensors: tuple[Tensor | None, ...], dims: tuple[Any, ...], size: int
) -> tuple[list[Tensor | None], Callable[..., Any]]:
    """Tensors (B, H, ...) under vmap as (size · B, H, ...), and the function that takes results back."""
    lead = [None if t is None else move_to_front(t, d, size) for t, d in zip(tensors, dims, strict=True)]
    rows = max(t.shape[1] for t in lead if t is not None)
    folded = [
        None if t is None else t.expand(size, rows, *t.shape[2:]).reshape(size * rows, *t.shape[2:])
        for t in lead
    ]
    return folded, lambda results: tuple(result.unflatten(0, (size, rows)) for result in results)
