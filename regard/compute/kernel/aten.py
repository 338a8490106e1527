"""torch's fused CPU kernel as it is: how it is called, and the gradients that it leaves out.

The public door refuses a causal flag next to a mask, falls back to an m × n matrix where the mask wants a
gradient, and hides the log-sum-exp. The kernel behind it does all three.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.compute.kernel.call import Arguments, Call
from regard.compute.kernel.slopes import Part, cut, slope_of
from regard.compute.kernel.tiles import Tile

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

VECTOR = 8
"""Widths that are a multiple of it have no odd end: 72 takes 1.15 of the time of 64, 65 takes 1.21."""
COPIES = 1 << 20
"""Bytes of a widened copy up to which heads are taken together in the backward pass."""


def run_kernel(call: Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps."""
    if call.tiling is None:
        out, lse = _forward(q, k, v, 0.0, call.causal, attn_mask=bias, scale=call.scale)
        return out, lse
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    seen: slice | None = None
    for part in _parts(call, bias, q.dtype):
        rows, columns = part.rows, part.columns
        some = (q[:, :, rows], k[:, :, columns], v[:, :, columns])
        found, energy = _forward(*some, 0.0, part.causal, attn_mask=part.bias, scale=call.scale)
        energy = energy if part.offset is None else energy - part.offset
        if rows == seen:
            share = torch.sigmoid(energy - lse[:, :, rows]).unsqueeze(-1)
            found = torch.lerp(out[:, :, rows], found, share)
            energy = torch.logaddexp(energy, lse[:, :, rows])
        out[:, :, rows], lse[:, :, rows], seen = found, energy, rows
    return out, lse


def pull_kernel(
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
        return _run_backward(call, by_out, q, k, v, out, lse, bias)
    *gradients, columns, _ = pull_with_biases(call, (q, k, v, bias), out, lse, by_out, by_lse)
    if not by_bias or bias is None:
        return tuple(gradients)
    return *gradients, columns.unsqueeze(-2).sum_to_size(bias.shape)


def pull_with_biases(
    call: Call, arguments: Arguments, out: Tensor, lse: Tensor, by_out: Tensor, by_lse: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, and of biases on all keys (B, H, n) and all rows (B, H, m), by the kernel."""
    q, k, v, bias = arguments
    gradients = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)]
    biases = [torch.empty(t.shape[:-1], dtype=t.dtype, device=t.device) for t in (k, q)]
    width = q.shape[-1]
    for heads in _groups_of_heads(q, k, call.tiling is not None):
        some = (t[:, heads] for t in (q, k, v, out, by_out))
        wq, wk, wv, wide_out, by_wide = _add_spare_columns(
            list(some), None if by_lse is None else by_lse[:, heads]
        )
        part = None if bias is None else bias if bias.shape[1] == 1 else bias[:, heads]
        found = _run_backward(call, by_wide, wq, wk, wv, wide_out, lse[:, heads], part)
        for gradient, one in zip(gradients, found, strict=True):
            gradient[:, heads] = one[..., :width]
        biases[0][:, heads] = found[1][..., width] / call.scale
        biases[1][:, heads] = found[0][..., width + 1] / call.scale
    return *gradients, *biases


def _run_backward(
    call: Call, by_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel's own gradients of q, k and v."""
    if call.tiling is not None:
        return _run_backward_by_blocks(call, by_out, q, k, v, out, lse, bias)
    dq, dk, dv = _backward(by_out, q, k, v, out, lse, 0.0, call.causal, attn_mask=bias, scale=call.scale)
    return dq, dk, dv


def _groups_of_heads(q: Tensor, k: Tensor, whole: bool) -> list[slice]:
    """Slices of heads, few at a time so that widened copies stay small.

    All at once where masks come by blocks (`whole`), and in a traced graph.
    """
    heads = q.shape[1]
    if whole or torch.compiler.is_compiling():
        return [slice(0, heads)]
    size = q.shape[0] * max(q.shape[2], k.shape[2]) * (q.shape[3] + 16) * q.element_size()
    few = max(torch.get_num_threads(), COPIES // max(size, 1), 1)
    return [slice(low, min(low + few, heads)) for low in range(0, heads, few)]


def _run_backward_by_blocks(
    call: Call, by_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for part in _parts(call, bias, q.dtype):
        rows, columns = part.rows, part.columns
        level = lse[:, :, rows] if part.offset is None else lse[:, :, rows] + part.offset
        some = (
            by_out[:, :, rows],
            q[:, :, rows],
            k[:, :, columns],
            v[:, :, columns],
            out[:, :, rows],
            level.contiguous(),
        )
        by_q, by_k, by_v = _backward(*some, 0.0, part.causal, attn_mask=part.bias, scale=call.scale)
        dq[:, :, rows] += by_q
        dk[:, :, columns] += by_k
        dv[:, :, columns] += by_v
    return dq, dk, dv


def _parts(call: Call, bias: Tensor | None, dtype: torch.dtype) -> Iterator[Part]:
    """The blocks of a tiling, with what the kernel is told of each."""
    assert call.tiling is not None
    slope = slope_of(call.tiling) if bias is None else None
    if slope is not None:
        yield from cut(call.tiling, slope, dtype)
        return
    for tile in call.tiling:
        if bias is None and call.tiling.is_past(tile):
            yield Part(tile.rows, tile.columns, causal=True)
        else:
            yield Part(tile.rows, tile.columns, _mask(call, tile, bias, dtype))


def _add_spare_columns(tensors: list[Tensor], by_lse: Tensor | None) -> list[Tensor]:
    """More columns that make the kernel compute what it leaves out.

    A column of ones in q makes the same column of dk the column sums of dS, the gradient of a key bias, and
    one in k makes a column of dq its row sums; a one in the output's gradient against -∂lse in the output
    adds the log-sum-exp's own gradient to every row of dS.
    """
    width = tensors[0].shape[-1]
    q, k, v, out, by_out = (_widen(t, VECTOR * ((width + 1) // VECTOR + 1)) for t in tensors)
    q[..., width] = 1
    k[..., width + 1] = 1
    if by_lse is not None:
        out[..., width] = -torch.where(torch.isfinite(by_lse), by_lse, torch.zeros_like(by_lse)).to(out.dtype)
        by_out[..., width] = 1
    return [q, k, v, out, by_out]


def _widen(t: Tensor, width: int) -> Tensor:
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
