"""Formulas for torch's FlopCounterMode, which has none for fused attention on a CPU and for the fused
layers of torch.nn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register_flop_formulas() -> None:
    """Make FlopCounterMode count fused attention on a CPU, as it does on other devices: masked pairs
    included, scores twice in training.

    So are the fused layers that torch.nn runs where nothing wants a gradient. Calling it twice changes
    nothing, and a formula that torch itself has is left alone.

    Examples:
        >>> from torch.utils.flop_counter import FlopCounterMode
        >>> regard.costs.register_flop_formulas()
        >>> q = torch.randn(1, 2, 32, 16)
        >>> with FlopCounterMode(display=False) as counter:
        ...     _ = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        >>> counter.get_total_flops() == 2 * 2 * 2 * 32 * 32 * 16
        True
    """
    from torch.utils import flop_counter

    aten = torch.ops.aten
    formulas: dict[Any, Callable[..., int]] = {
        aten._scaled_dot_product_flash_attention_for_cpu: _forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
        aten._native_multi_head_attention: _multi_head,
        aten._transformer_encoder_layer_fwd: _encoder_layer,
    }
    for kernel, formula in formulas.items():
        if kernel not in flop_counter.flop_registry:
            flop_counter.register_flop_formula(kernel, get_raw=True)(formula)


def _forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    from torch.utils.flop_counter import sdpa_flop_count

    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _backward(by_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    from torch.utils.flop_counter import sdpa_backward_flop_count

    return int(sdpa_backward_flop_count(by_out.shape, query.shape, key.shape, value.shape))


def _multi_head(query: Tensor, key: Tensor, value: Tensor, width: int, *_: Any, **__: Any) -> int:
    """Projections of queries, keys and values, scores, mixing and output, of one width."""
    sizes = list(zip(_lengths(query), _lengths(key), strict=True))
    return sum(2 * width**2 * (2 * m + 2 * n) + 4 * m * n * width for m, n in sizes)


def _encoder_layer(source: Tensor, width: int, *rest: Any, **_: Any) -> int:
    """Attention and the two products of a feed-forward layer,
    whose weights are the twelfth and the fourteenth of the rest.
    """
    weights = rest[12].numel() + rest[14].numel()
    return _multi_head(source, source, source, width) + 2 * sum(_lengths(source)) * weights


def _lengths(x: Tensor) -> list[int]:
    """The length of each sequence of a batch, which may be nested."""
    if x.is_nested:
        return [int(length) for length in x._nested_tensor_size()[:, 0]]
    return [x.shape[-2]] * x.shape[:-2].numel()
