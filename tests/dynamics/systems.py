"""Small systems with known answers."""

import math

import torch
from torch import Tensor

import regard as r
from regard.normalizers import Exponential

D = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def on_sphere(n: int, d: int, seed: int = 0) -> Tensor:
    x = normal(n, d, seed=seed)
    return x / x.norm(dim=-1, keepdim=True)


def sa(beta: float) -> r.Attention:
    """Self-attention with softmax."""
    return r.Attention(r.Dot(scale=beta))


def usa(beta: float) -> r.Attention:
    """Self-attention with the kernel itself."""
    return r.Attention(r.Dot(scale=beta), normalizer=Exponential())


def with_common_cosine(n: int, rho: float) -> Tensor:
    """n unit vectors in dimension n, each two of them with the cosine rho."""
    gram = torch.full((n, n), rho, dtype=D) + (1 - rho) * torch.eye(n, dtype=D)
    return torch.linalg.cholesky(gram)


def quantiles(count: int, variance: float = 1.0) -> Tensor:
    """A normal law as equally likely points (count, 1)."""
    levels = (torch.arange(count, dtype=D) + 0.5) / count
    return (math.sqrt(2 * variance) * torch.erfinv(2 * levels - 1)).unsqueeze(-1)
