"""Norms of Jacobians at a point, exact or from below, by a way that shares nothing with the theorems;
and declarations to try them on.
"""

import math

import torch

import regard as r

D = torch.float64


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(g, *shape, scale=1.0):
    return scale * torch.randn(*shape, generator=g, dtype=D)


def jacobian(function, x):
    """(n, e, n, d)."""
    return torch.func.jacrev(function)(x)


def frobenius_norm(function, x):
    """Exact."""
    block = jacobian(function, x)
    return float(torch.linalg.matrix_norm(block.reshape(block.shape[0] * block.shape[1], -1), 2))


def entry_max_norm(function, x):
    """Exact."""
    return float(jacobian(function, x).abs().sum((-2, -1)).max())


def token_max_norm(function, x):
    """From below: max over rows and unit vectors e of Σ_j |J_ijᵀe|,
    by alternating steps from several starts.
    """
    best, block = 0.0, jacobian(function, x)
    for row in block:  # (e, n, d)
        for start in torch.eye(row.shape[0], dtype=D):
            e = start
            for _ in range(12):
                pulled = torch.einsum("end,e->nd", row, e)
                best = max(best, float(pulled.norm(dim=-1).sum()))
                moved = torch.einsum(
                    "end,nd->e", row, pulled / pulled.norm(dim=-1, keepdim=True).clamp_min(1e-300)
                )
                e = moved / moved.norm().clamp_min(1e-300)
    return best


def worked():
    """Tokens, scores and values given by sines."""
    x = torch.tensor([[math.sin(1 + 3 * i + j) for j in range(3)] for i in range(4)], dtype=D)
    a = torch.tensor([[math.cos(2 + 3 * i + j) / 2 for j in range(3)] for i in range(3)], dtype=D)
    w = torch.tensor([[math.sin(3 + 2 * (3 * i + j)) for j in range(3)] for i in range(3)], dtype=D)
    return x, a, w


def bilinear_attention(g, d, e, support=None, scale=1.0, bias=True, normalizer=None):
    """Dot products with projections of another width, biases everywhere, and rectangular values."""
    c = 3
    b = [normal(g, c) if bias else None for _ in range(2)]
    potential = r.Dot(normal(g, d, c, scale=scale), normal(g, d, c), b_q=b[0], b_k=b[1])
    return r.Attention(
        potential, r.Linear(normal(g, d, e), normal(g, e)), normalizer or r.Softmax(), support or r.Full()
    )


def in_ball(g, n, d, radius, center=None):
    x = normal(g, n, d)
    x = radius * x / x.norm(dim=-1, keepdim=True) * (1 - 1e-12)
    return x if center is None else x + center


SUPPORTS = [r.Full(), r.Causal(), r.Window(1, 1)]
