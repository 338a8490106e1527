"""direct: the fused kernel at once, where a declaration leaves nothing to decide.

Small calls are what inference and tests are made of, and there a plan costs more than the kernel. The
conditions here are those under which the plan would make this very call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard._transforms import is_only_run
from regard.compute.kernel.call import LEAST_WIDTH
from regard.normalizers import Normalizer, Softmax
from regard.potentials import Dot, Potential
from regard.supports import Causal, Full, Support

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def direct(
    q: Tensor, k: Tensor, v: Tensor, potential: Potential, normalizer: Normalizer, support: Support
) -> Tensor | None:
    """softmax(scale · q kᵀ) v for plain tensors (B, H, tokens, width) of one dtype on a CPU; else None."""
    scale = _scale(potential, normalizer, q)
    kind = type(support)
    if scale is None or (kind is not Full and kind is not Causal) or not _is_plain(q, k, v):
        return None
    return _kernel(q, k, v, 0.0, kind is Causal, scale=scale)[0]


def _scale(potential: Potential, normalizer: Normalizer, q: Tensor) -> float | None:
    """The factor of q·k where scores are a bare product, and that factor is a positive number."""
    if type(potential) is not Dot or type(normalizer) is not Softmax or type(q) is not Tensor:
        return None
    if not (potential.w_q is potential.w_k is potential.b_q is potential.b_k is None):
        return None
    factor, temperature = potential.factor(q.shape[-1]), normalizer.temperature
    if isinstance(factor, Tensor) or isinstance(temperature, Tensor) or factor <= 0:
        return None
    return float(factor / temperature)


def _is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes them as they are, and nobody asks for derivatives or records a program."""
    if not (type(q) is type(k) is type(v) is Tensor) or not is_only_run(q, k, v):
        return False
    shape, kind = k.shape, q.dtype
    return (
        len(q.shape) == len(shape) == 4
        and q.shape[:2] == shape[:2]
        and q.shape[3] == shape[3] >= LEAST_WIDTH
        and v.shape == shape
        and kind == k.dtype == v.dtype
        and kind in _FLOATING
        and q.device.type == k.device.type == v.device.type == "cpu"
        and q.stride(3) == k.stride(3) == v.stride(3) == 1
        and q.numel() > 0
        and shape[2] > 0
        and not torch.is_autocast_enabled("cpu")
    )
