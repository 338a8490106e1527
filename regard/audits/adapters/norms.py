"""Norm layers as values, exactly; what is not known here is not a norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.audits.adapters.inner_norms import read_norm
from regard.maps import Normalize
from regard.proofs.modules import eps_of

SCALED = (
    "LlamaRMSNorm",
    "MistralRMSNorm",
    "Qwen2RMSNorm",
    "ArceeRMSNorm",
    "MinistralRMSNorm",
    "T5LayerNorm",
    "MT5LayerNorm",
)
"""Classes of transformers that are x · weight / √(mean x² + variance_epsilon)."""
SHIFTED = ("GemmaRMSNorm", "Gemma2RMSNorm")
"""Classes of transformers that are x · (1 + weight) / √(mean x² + eps)."""


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm layer that is known here, whatever its numbers.

    Subclasses may compute something else, so they are not.
    """
    if type(module) in (nn.LayerNorm, nn.RMSNorm):
        return len(module.normalized_shape) == 1  # type: ignore[arg-type]
    return type(module).__module__.startswith("transformers.") and type(module).__name__ in SCALED + SHIFTED


def normalize_of(module: nn.Module) -> Normalize | None:
    """The norm layer as a value in float64; None for everything else."""
    if not is_norm(module):
        return None
    own: Any = module
    if type(module).__name__ in SCALED:
        return Normalize(float(own.variance_epsilon), own.weight.detach().double(), centered=False)
    if type(module).__name__ in SHIFTED:
        return Normalize(float(own.eps), 1.0 + own.weight.detach().double(), centered=False)
    return _of_torch(module)


def any_normalize(module: nn.Module) -> Normalize | None:
    """The same, and norms of one dimension that no table names, read by what they do."""
    if is_norm(module) or any(part.is_meta for part in module.parameters()):
        return normalize_of(module)
    found = read_norm("", module)
    if found is None or found.gain is None or found.gain.ndim != 1:
        return None
    return Normalize(found.eps, found.gain, found.shift, found.centered)


def _of_torch(module: Any) -> Normalize:
    """torch's own norms of one dimension; without parameters the weight is one, which says the width."""
    weight = torch.ones(module.normalized_shape) if module.weight is None else module.weight.detach()
    if type(module) is nn.RMSNorm:
        return Normalize(eps_of(module), weight.double(), centered=False)
    bias: Tensor | None = module.bias
    return Normalize(float(module.eps), weight.double(), None if bias is None else bias.detach().double())
