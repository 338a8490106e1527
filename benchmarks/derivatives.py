"""Derivatives: forward mode, double backward, Jacobian norms and influence maps."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from benchmarks.measure import Contender

Shape = tuple[int, int, int, int]


def _normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def forward_mode(shape: Shape) -> dict[str, Contender]:
    """Tangents of q, k and v at once; linearize keeps what the forward pass leaves."""
    q, k, v = (_normal(*shape, seed=s) for s in range(3))
    tangents = tuple(_normal(*shape, seed=s) for s in range(3, 6))
    kept: list[regard.derive.Jacobian] = []

    def product() -> Tensor:
        if not kept:
            kept.append(regard.linearize(regard.Attention(regard.Dot()), q))
        return kept[0].mv(tangents[0])

    def forward() -> Tensor:
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, k, v)

    return {
        "sdpa": forward,
        "linearize(Dot).mv": product,
        "jvp(attend)": lambda: torch.func.jvp(regard.attend, (q, k, v), tangents)[1],
        "jvp(naive)": lambda: torch.func.jvp(_naive, (q, k, v), tangents)[1],
    }


def double_backward(shape: Shape) -> dict[str, Contender]:
    """A gradient penalty: the loss is the square of a gradient."""
    q, k, v = (_normal(*shape, seed=s).requires_grad_() for s in range(3))
    upstream = _normal(*shape, seed=3)

    def penalty(attention: Callable[..., Tensor]) -> Tensor:
        gradients = torch.autograd.grad(attention(q, k, v), (q, k, v), upstream, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), (q, k, v))[0]

    return {
        "sdpa forward + backward": lambda: torch.autograd.grad(
            F.scaled_dot_product_attention(q, k, v), (q, k, v), upstream
        )[0],
        "attend double backward": lambda: penalty(regard.attend),
        "naive double backward": lambda: penalty(_naive),
    }


def head_norm(shape: Shape) -> dict[str, Contender]:
    """One head with random projections N(0, 1/d) on tokens of length √d: the norm of its Jacobian to a
    residual.

    In float64 where the dense Jacobian could still be formed, in float32 where it could not.
    """
    n, d = shape[2:]
    kind = torch.float64 if n < 1000 else torch.float32
    x = F.normalize(_normal(n, d, dtype=kind), dim=-1) * math.sqrt(d)
    w = [_normal(d, d, seed=s, dtype=kind) / math.sqrt(d) for s in range(1, 4)]
    attention = regard.Attention(regard.Dot(w[0], w[1]), regard.Linear(w[2]))
    q, k, v = ((x @ z).reshape(1, 1, n, d) for z in w)

    def forward() -> Tensor:
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, k, v)

    def norm(tolerance: float) -> Tensor:
        return _value(
            regard.linearize(attention, x).norm(
                tolerance=tolerance, generator=torch.Generator().manual_seed(0)
            )
        )

    return {
        "sdpa": forward,
        "linearize().norm() to 1e-2": lambda: norm(1e-2),
        "linearize().norm() to 1e-3": lambda: norm(1e-3),
    }


def layer_influence(shape: Shape) -> dict[str, Contender]:
    """A layer of twelve heads of width 32 on (n, 384) tokens, float32: all n² block norms of each head."""
    n, d, heads = shape[2], shape[3], 12
    w = [_normal(heads, d, d // heads, seed=s) / math.sqrt(d) for s in range(1, 4)]
    attention = regard.Attention(regard.Dot(w[0], w[1]), regard.Linear(w[2]))
    x = F.normalize(_normal(n, d), dim=-1) * math.sqrt(d)
    return {
        "linearize().influence()": lambda: regard.linearize(attention, x).influence(),
        "linearize().norm() of each head": lambda: _value(
            regard.linearize(attention, x.expand(heads, n, d)).norm(tolerance=1e-3)
        ),
    }


def _value(estimate: regard.derive.Estimate | regard.derive.UpperEstimate) -> Tensor:
    return estimate.value
