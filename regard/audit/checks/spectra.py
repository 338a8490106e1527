"""The two matrices of a head: QK decides where it looks, OV what it moves."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.audit.checks.base import EXACT, HEAD, Check, Column, Result, Weights, listed, register


def spectra(weights: Weights) -> Result:
    """|scale · W_Q W_Kᵀ|₂ and |W_V W_O|₂ for each head."""
    own = weights.matrices
    heads = len(own.w_o)
    qk = abs(own.scale) * product_norm(_spread(own.w_q, heads), _spread(own.w_k, heads).mT)
    return Result({"qk_norm": listed(qk), "ov_norm": listed(product_norm(_spread(own.w_v, heads), own.w_o))})


def product_norm(left: Tensor, right: Tensor) -> Tensor:
    """The spectral norm of left (..., d, c) @ right (..., c, e) from c × c matrices: |QR S| = |R Lᵀ| with triangular factors."""
    first = torch.linalg.qr(left.double(), mode="r")[1]
    second = torch.linalg.qr(right.double().mT, mode="r")[1]
    return torch.linalg.matrix_norm(first @ second.mT, 2)


def _spread(grouped: Tensor, heads: int) -> Tensor:
    """Grouped keys or values, once for each head that uses them."""
    return grouped.repeat_interleave(heads // len(grouped), 0)


register(
    Check(
        "weights",
        "How strongly can the weights of a head compare and carry?",
        (
            Column(
                "qk_norm",
                "QK norm",
                "Largest singular value of W_Q W_Kᵀ with the scale included: how fast scores can grow with the tokens. "
                "Rotations of positions do not change it.",
                EXACT,
                HEAD,
                True,
                "only",
            ),
            Column(
                "ov_norm",
                "OV norm",
                "Largest singular value of W_V W_O: how strongly a key's content enters the output of the layer.",
                EXACT,
                HEAD,
                True,
                "only",
            ),
        ),
        of_weights=spectra,
        order=10,
    )
)
