"""The two matrices of a head: QK decides where it looks, OV what it moves."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.audit.checks.base import Check, register
from regard.audit.site import Site
from regard.lookups import Linear
from regard.potentials import Dot


def qk_norm(site: Site) -> Tensor:
    """|scale · W_Q W_Kᵀ|₂ for each head."""
    potential = site.attention.potential
    if not isinstance(potential, Dot) or potential.w_q is None or potential.w_k is None:
        return torch.full((site.heads,), float("nan"), dtype=torch.float64)
    scale = potential.factor(potential.w_q.shape[-1])
    return torch.as_tensor(scale, dtype=torch.float64).abs() * product_norm(potential.w_q, potential.w_k.mT)


def ov_norm(site: Site) -> Tensor:
    """|W_V W_O|₂ for each head."""
    lookup = site.attention.lookup
    if not isinstance(lookup, Linear):
        return torch.full((site.heads,), float("nan"), dtype=torch.float64)
    return product_norm(lookup.w_v, site.w_o)


def product_norm(left: Tensor, right: Tensor) -> Tensor:
    """The spectral norm of left (..., d, c) @ right (..., c, e) from c × c matrices: |QR S| = |R Lᵀ| with triangular factors."""
    first = torch.linalg.qr(left.double(), mode="r")[1]
    second = torch.linalg.qr(right.double().mT, mode="r")[1]
    return torch.linalg.matrix_norm(first @ second.mT, 2)


register(
    Check(
        name="qk_norm",
        title="spectral norm of W_Q W_Kᵀ (scaled)",
        meaning="Largest singular value of the matrix that compares queries with keys, with the scale included. "
        "It bounds how fast scores can grow.",
        measure=qk_norm,
        combine=lambda values: values[0],
        high_is_alarming=True,
    )
)
register(
    Check(
        name="ov_norm",
        title="spectral norm of W_V W_O",
        meaning="Largest singular value of the matrix that carries a key's content to the output of the layer.",
        measure=ov_norm,
        combine=lambda values: values[0],
        high_is_alarming=True,
    )
)
