"""Gauss transforms as differentiable functions: every derivative is such a sum with other strengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard._transforms import forward_rule
from regard.compute.fourier.series import Series
from regard.compute.fourier.transforms import Transform


def gauss_transform(x: Tensor, y: Tensor, strengths: Tensor, transform: Transform, series: Series) -> Tensor:
    """Σ_j e^{-|x_i - y_j|²/2} f_j, (b, m, c), with derivatives of every order that are such sums again."""
    return _Convolve.apply(x, y, strengths, transform, series)


def gauss_fields(x: Tensor, y: Tensor, weights: Tensor, transform: Transform, series: Series) -> Tensor:
    """D(x) = Σ_j w_j e^{-|x - y_j|²/2} and ∇D = Σ_j w_j (y_j - x) e^{-|x - y_j|²/2}, (b, m, 1 + d)."""
    return _Fields.apply(x, y, weights, transform, series)


class _Convolve(torch.autograd.Function):
    """∂_x e^{-|x-y|²/2} = (y - x) e^{-|x-y|²/2}: every derivative is the same sum with other strengths."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, strengths: Tensor, transform: Transform, series: Series) -> Tensor:
        return transform.convolve(x, y, strengths, series)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, y, strengths, ctx.transform, ctx.series = inputs
        ctx.save_for_backward(x, y, strengths)
        ctx.save_for_forward(x, y, strengths)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, y, strengths = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        return (*_pull(x, y, strengths, gradient, needed, ctx.transform, ctx.series), None, None)

    @staticmethod
    def jvp(ctx: Any, by_x: Tensor | None, by_y: Tensor | None, by_f: Tensor | None, *_: Any) -> Tensor:
        with forward_rule(ctx) as (x, y, strengths):
            return _push(x, y, strengths, by_x, by_y, by_f, ctx.transform, ctx.series)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _fold(_Convolve, info.batch_size, in_dims, inputs)


class _Fields(torch.autograd.Function):
    """[D, ∇D] = [K w, K(w y) - x K w], with the derivatives of the right side."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, weights: Tensor, transform: Transform, series: Series) -> Tensor:
        return transform.fields(x, y, weights, series)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, y, weights, ctx.transform, ctx.series = inputs
        ctx.save_for_backward(x, y, weights)
        ctx.save_for_forward(x, y, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, y, weights = ctx.saved_tensors
        mass, slope = gradient[..., :1], gradient[..., 1:]
        strengths = torch.cat([weights.unsqueeze(-1), weights.unsqueeze(-1) * y], -1)
        sums = torch.cat([mass - (slope * x).sum(-1, keepdim=True), slope], -1)
        by_x, by_y, by_f = _pull(x, y, strengths, sums, (True, True, True), ctx.transform, ctx.series)
        assert by_x is not None
        assert by_y is not None
        assert by_f is not None
        density = gauss_transform(x, y, weights.unsqueeze(-1), ctx.transform, ctx.series)
        by_weights = by_f[..., 0] + (by_f[..., 1:] * y).sum(-1)
        by_y = by_y + weights.unsqueeze(-1) * by_f[..., 1:]
        return by_x - slope * density, by_y, by_weights, None, None

    @staticmethod
    def jvp(ctx: Any, by_x: Tensor | None, by_y: Tensor | None, by_w: Tensor | None, *_: Any) -> Tensor:
        with forward_rule(ctx) as (x, y, weights):
            w = weights.unsqueeze(-1)
            strengths = torch.cat([w, w * y], -1)
            changes = [None if by_w is None else torch.cat([by_w.unsqueeze(-1), by_w.unsqueeze(-1) * y], -1)]
            changes += [None if by_y is None else torch.cat([torch.zeros_like(w), w * by_y], -1)]
            present = [change for change in changes if change is not None]
            by_f = sum(present[1:], present[0]) if present else None
            moved = _push(x, y, strengths, by_x, by_y, by_f, ctx.transform, ctx.series)
            slope = moved[..., 1:] - x * moved[..., :1]
            if by_x is not None:
                slope = slope - by_x * gauss_transform(x, y, w, ctx.transform, ctx.series)
            return torch.cat([moved[..., :1], slope], -1)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _fold(_Fields, info.batch_size, in_dims, inputs)


def _pull(
    x: Tensor,
    y: Tensor,
    strengths: Tensor,
    gradient: Tensor,
    needed: tuple[bool, ...],
    transform: Transform,
    series: Series,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The reverse derivatives of Σ_j k_ij f_j along g: with respect to x, y and f.

    Σ_j k_ij (g_i·f_j)(y_j - x_i) ,  Σ_i k_ij (g_i·f_j)(x_i - y_j) ,  Σ_i k_ij g_i .
    """
    width, by_x, by_y, by_f = strengths.shape[-1], None, None, None
    if needed[0]:
        sums = gauss_transform(x, y, _with_moments(strengths, y), transform, series)
        by_x = _contract_moments(gradient, sums, x, width)
    if needed[1] or needed[2]:
        back = _with_moments(gradient, x) if needed[1] else gradient
        sums = gauss_transform(y, x, back, transform, series)
        by_f = sums[..., :width]
        by_y = _contract_moments(strengths, sums, y, width) if needed[1] else None
    return by_x, by_y, by_f


def _with_moments(strengths: Tensor, points: Tensor) -> Tensor:
    """f_j and f_j y_j side by side, (b, n, c + c·d)."""
    return torch.cat([strengths, (strengths.unsqueeze(-1) * points.unsqueeze(-2)).flatten(-2)], -1)


def _contract_moments(factor: Tensor, sums: Tensor, points: Tensor, width: int) -> Tensor:
    """Σ_c g_ic (Σ_j k_ij f_jc y_j - x_i Σ_j k_ij f_jc)."""
    first = sums[..., width:].unflatten(-1, (width, -1))
    moved = (factor.unsqueeze(-1) * first).sum(-2)
    return moved - points * (factor * sums[..., :width]).sum(-1, keepdim=True)


def _push(
    x: Tensor,
    y: Tensor,
    strengths: Tensor,
    by_x: Tensor | None,
    by_y: Tensor | None,
    by_f: Tensor | None,
    transform: Transform,
    series: Series,
) -> Tensor:
    """The change of Σ_j k_ij f_j: Σ_j k_ij (f'_j + f_j (y_j - x_i)·(x'_i - y'_j))."""
    width, changed = strengths.shape[-1], torch.zeros((), dtype=x.dtype, device=x.device)
    if by_x is not None:
        sums = gauss_transform(x, y, _with_moments(strengths, y), transform, series)
        first = sums[..., width:].unflatten(-1, (width, -1))
        along = (first * by_x.unsqueeze(-2)).sum(-1)
        changed = changed + along - sums[..., :width] * (x * by_x).sum(-1, keepdim=True)
    if by_y is not None:
        own = strengths * (y * by_y).sum(-1, keepdim=True)
        moments = (strengths.unsqueeze(-1) * by_y.unsqueeze(-2)).flatten(-2)
        sums = gauss_transform(x, y, torch.cat([own, moments], -1), transform, series)
        first = sums[..., width:].unflatten(-1, (width, -1))
        changed = changed - sums[..., :width] + (first * x.unsqueeze(-2)).sum(-1)
    if by_f is not None:
        changed = changed + gauss_transform(x, y, by_f, transform, series)
    return changed


def _fold(function: Any, size: int, in_dims: tuple[int | None, ...], inputs: Any) -> tuple[Tensor, int]:
    """A batch under vmap as a batch of problems."""
    *tensors, transform, series = inputs
    whole = [
        (t.unsqueeze(0).expand(size, *t.shape) if dim is None else t.movedim(dim, 0)).flatten(0, 1)
        for t, dim in zip(tensors, in_dims[:3], strict=True)
    ]
    found = function.apply(*whole, transform, series)
    return found.unflatten(0, (size, -1)), 0
