"""The same map in other words, exactly."""

from __future__ import annotations

from typing import Any

import torch

from regard.lookups import Factored, Identity, Linear
from regard.maps import Residual
from regard.nonexpansive import Reflected
from regard.proofs.theorem import Refusal


def as_residual(map: Reflected, width: int) -> Residual:
    """x - c f(x) as x + f'(x), where f' has the values of f times -c, as a product that is not rounded."""
    lookup, attention = map.attention.lookup, map.attention
    made: Any
    if isinstance(lookup, Identity):
        made = Linear(_multiple(map, width))
    elif isinstance(lookup, Linear) and lookup.b_v is None:
        made = Factored(lookup.w_v.detach().double(), _multiple(map, lookup.w_v.shape[-1]))
    else:
        raise Refusal("values with a bias are not scaled without rounding; leave the bias out")
    return Residual(attention.replace(lookup=made))


def _multiple(map: Reflected, width: int) -> torch.Tensor:
    return -float(map.step) * torch.eye(width, dtype=torch.float64)
