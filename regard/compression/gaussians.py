"""gaussian_form: dot products are Gaussian attention to a reweighted context."""

from __future__ import annotations

import math

from torch import Tensor

from regard.attention import Attention, as_measure
from regard.errors import ArgumentError
from regard.measure import Measure
from regard.potentials import Dot, Gaussian


def gaussian_form(attention: Attention, context: Measure | Tensor) -> tuple[Attention, Measure]:
    """The same attention with scores -|q - k|²/2b², to the context with the weights e^{|k|²/2b²}: q·k/b² =
    -|q - k|²/2b² + |k|²/2b², up to what is constant in a row; b² is one over the scale.

    Examples:
        >>> x, layer = torch.randn(5, 2), regard.Attention(regard.Dot())
        >>> near, context = regard.compression.gaussian_form(layer, x)
        >>> torch.allclose(near(x, context), layer(x), atol=1e-5)
        True
    """
    potential, keys = attention.potential, as_measure("context", context)
    if not isinstance(potential, Dot):
        name = type(potential).__name__
        raise ArgumentError("attention", f"has the potential {name}", "the identity is about Dot scores")
    width = keys.dimension if potential.w_k is None else potential.w_k.shape[-1]
    scale = potential.factor(width)
    if isinstance(scale, Tensor) or scale <= 0:
        raise ArgumentError("attention", f"has the scale {scale!r}", "give one positive scale for all heads")
    same = Gaussian(potential.w_q, potential.w_k, 1 / math.sqrt(scale), potential.b_q, potential.b_k)
    projected = keys.points if potential.w_k is None else keys.points @ potential.w_k
    projected = projected if potential.b_k is None else projected + potential.b_k.unsqueeze(-2)
    if projected.ndim > keys.points.ndim:
        keys = Measure(keys.points.expand(*projected.shape[:-1], -1), keys.log_weights, keys.marks)
    return attention.replace(potential=same), keys.reweight(0.5 * scale * projected.square().sum(-1))
