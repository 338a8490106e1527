"""The two matrices of a head, W_Q W_Kᵀ (which keys it attends to) and W_V W_O (what it adds), and the
bound that both give for any input.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.attention import Attention
from regard.audits.adapters.base import Matrices
from regard.audits.adapters.declaration import potential_of
from regard.audits.adapters.rotary import Turning
from regard.audits.checks.base import (
    HEAD,
    MEASURED,
    PROVED,
    Check,
    Column,
    Result,
    Weights,
    as_list,
    register,
)
from regard.audits.narrowing import MARGIN, narrow_head
from regard.audits.site import in_double
from regard.domains import Ball, Whole
from regard.lookups import Linear
from regard.maps import Normalize
from regard.norms import TokenMax
from regard.potentials import NormedDot
from regard.proofs import certify
from regard.proofs.imaging import image
from regard.proofs.normed_scores import largest_score
from regard.proofs.subject import single_heads

ANY = Turning(torch.zeros(1), 1.0)
"""Rotary positions: bounds use that they turn queries and keys, and never by how much."""
NEAR = 10
"""Within how many radii of zero the center of a ball must be for the rounding of a basis to be small
beside its radius.
"""
PROBES = 8
"""At how many places of a ball scores are compared before the basis is changed."""
__all__ = [
    "MARGIN",
    "NEAR",
    "any_input_bounds",
    "carrying_norms",
    "comparing_norms",
    "product_norm",
    "spectra",
]


def spectra(weights: Weights) -> Result:
    """|scale · W_Q W_Kᵀ|₂ and |W_V W_O|₂ for each head, with the gain of the norm before and without, and the
    bound of its constant that needs no input.
    """
    own, found = weights.matrices, {}
    for name, norm in (("", weights.entering), ("_alone", None)):
        found[f"ov_norm{name}"] = carrying_norms(own, norm)
        if own.potential is None:
            found[f"qk_norm{name}"] = comparing_norms(own, norm)
    numbers = {name: as_list(norms) for name, norms in found.items()}
    if isinstance(own.potential, NormedDot):
        numbers["score_limit"] = score_limits(own.potential, own)
    return Result({**numbers, "any_input_bound": any_input_bounds(weights)})


def comparing_norms(own: Matrices, norm: Normalize | None) -> Tensor:
    """|scale · W_Q W_Kᵀ|₂ of each head, of what a norm makes of tokens before its gain."""
    w_q, w_k = (_spread(_folded(w, norm), len(own.w_o)) for w in (own.w_q, own.w_k))
    return abs(own.scale) * product_norm(w_q, w_k.mT)


def carrying_norms(own: Matrices, norm: Normalize | None) -> Tensor:
    """|W_V W_O|₂ of each head, of what a norm makes of tokens before its gain."""
    return product_norm(_spread(_folded(own.w_v, norm), len(own.w_o)), own.w_o)


def score_limits(potential: NormedDot, own: Matrices) -> list[float]:
    """What no score of each head can exceed; NaN where queries or keys pass no norm."""
    heads = single_heads(in_double(Attention(potential, Linear(own.w_v, own.b_v))))
    found = [largest_score(head.potential) for head in heads if isinstance(head.potential, NormedDot)]
    cap = math.inf if own.softcap is None else own.softcap
    return [math.nan if limit is None else min(float(limit), cap) for limit in found]


def _folded(matrix: Tensor, norm: Normalize | None) -> Tensor:
    """A projection (..., d, c) of γ x̂, as one of x̂; a norm that centers has nothing along (1, ..., 1)."""
    if norm is None:
        return matrix
    matrix = matrix.double()
    scaled = matrix if norm.weight is None else norm.weight.to(matrix).unsqueeze(-1) * matrix
    return scaled - scaled.mean(-2, keepdim=True) if norm.centered else scaled


def any_input_bounds(weights: Weights) -> list[float]:
    """The constant of each head in TokenMax norm on the ball that holds every output of the norm it reads;
    NaN where it reads no norm.

    Masks and biases by position are left out: no bound in this norm depends on them.
    """
    if weights.entering is None:
        return [math.nan] * len(weights.matrices.w_o)
    ball = _ball_of(in_double(weights.entering))
    return [_on_ball(head, ball) for head in single_heads(_heads_of(weights.matrices, weights.turned))]


def _heads_of(own: Matrices, turned: bool) -> Attention:
    """The heads of a layer as far as weights say them."""
    attention: Attention = in_double(
        Attention(potential_of(own, ANY if turned else None), Linear(own.w_v, own.b_v))
    )
    return attention


def _ball_of(norm: Normalize) -> Ball:
    """A ball that holds every output of a norm layer.

    It is the same for every eps; with none, a constant token has no output.
    """
    found = image(norm if norm.eps else norm.replace(eps=1.0), Whole())
    assert isinstance(found, Ball)
    assert norm.weight is not None
    return found if found.center is not None else Ball(found.radius, torch.zeros_like(norm.weight))


def _on_ball(head: Attention, ball: Ball) -> float:
    """A bound on a ball, in the coordinates the head reads: the projected ball is not larger."""
    assert ball.center is not None
    if float(ball.center.norm()) > NEAR * ball.radius:
        return certify(head, ball, TokenMax()).value
    narrow = narrow_head(head, _probes(ball.center, float(ball.radius)))
    return narrow.margin * certify(narrow.head, Ball(ball.radius, narrow.points[0]), TokenMax()).value


def _probes(center: Tensor, radius: float) -> Tensor:
    """The center of a ball and points on its boundary."""
    drawn = torch.randn(PROBES, len(center), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.cat([center.unsqueeze(0), center + radius * drawn / drawn.norm(dim=-1, keepdim=True)])


def product_norm(left: Tensor, right: Tensor) -> Tensor:
    """The spectral norm of left (..., d, c) @ right (..., c, e) from c × c matrices:
    |QR S| = |R Lᵀ| with triangular factors.
    """
    first = torch.linalg.qr(left.double(), mode="r")[1]
    second = torch.linalg.qr(right.double().mT, mode="r")[1]
    return torch.linalg.matrix_norm(first @ second.mT, 2)


def _spread(grouped: Tensor, heads: int) -> Tensor:
    """Grouped keys or values, once for each head that uses them."""
    return grouped.repeat_interleave(heads // len(grouped), 0)


register(
    Check(
        "weights",
        "How strongly can a head's weights compare tokens and pass them on?",
        (
            Column(
                "qk_norm",
                "QK norm",
                "Largest singular value of W_Q W_Kᵀ, with the scale and with the gain of the norm that the "
                "head reads: how fast scores can grow with what that norm makes of the tokens. The matrices "
                "alone where no norm is known. With rotary positions it is that of two tokens at the same "
                "position.",
                MEASURED,
                HEAD,
                True,
                "only",
            ),
            Column(
                "ov_norm",
                "OV norm",
                "Largest singular value of W_V W_O, with the gain of the norm that the head reads: how "
                "strongly a key's content enters the output of the layer.",
                MEASURED,
                HEAD,
                True,
                "only",
            ),
            Column(
                "qk_norm_alone",
                "QK norm, matrices alone",
                "The same without the gain of the norm before.",
                MEASURED,
                HEAD,
                None,
                "only",
            ),
            Column(
                "ov_norm_alone",
                "OV norm, matrices alone",
                "The same without the gain of the norm before.",
                MEASURED,
                HEAD,
                None,
                "only",
            ),
            Column(
                "score_limit",
                "largest possible score",
                "A certificate: no query and key of the head have a larger score, whatever the input, "
                "because both pass through a norm layer inside the module (biases by position are "
                "not counted). "
                "Heads whose queries and keys pass through none have QK norms instead.",
                PROVED,
                HEAD,
                None,
                "only",
            ),
            Column(
                "any_input_bound",
                "proved for any input",
                "A certificate in TokenMax norm (the token that moves most, before and after, in exact "
                "arithmetic): whatever the input of "
                "the model, its number of tokens and its mask, the head before its output projection "
                "amplifies no change of what it reads "
                "by more, because the norm layer it reads keeps every token in one ball. It is very loose. "
                "Empty where the head reads no "
                "norm layer that is known.",
                PROVED,
                HEAD,
                None,
                "only",
            ),
        ),
        of_weights=spectra,
        order=10,
    )
)
