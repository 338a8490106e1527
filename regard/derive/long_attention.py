"""LongAttention: torch's own attention with derivatives of every order in O(n) memory, where inputs are long.

torch has second derivatives of its attention only where all weights are held at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.compute.tensors import attend
from regard.potentials import Dot
from regard.supports import Causal, Full, Support, Where

LARGE = 1 << 23
"""Weights that are held at once: 32 MiB in float32."""


class LongAttention(TorchFunctionMode):
    """While inside, calls of F.scaled_dot_product_attention with many weights are made by `attend`."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        if function is F.scaled_dot_product_attention:
            found = _attend(*arguments, **options)
            if found is not None:
                return found
        return function(*arguments, **options)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> Tensor | None:
    """The same outputs; None where there are few weights, or where the call says what `attend` does not."""
    few = math.prod(query.shape[:-1]) * key.shape[-2] < LARGE
    other = dropout_p > 0 or (attn_mask is not None and attn_mask.dtype != torch.bool)
    if few or other or query.dtype.itemsize < 4 or (is_causal and query.shape[-2] != key.shape[-2]):
        return None
    support: Support = Causal() if is_causal else Full() if attn_mask is None else Where(attn_mask)
    return attend(query, key, value, potential=Dot(scale=scale), support=support)
