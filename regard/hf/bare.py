"""One token after another, as models generate: nothing is posed where torch's own call is the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._transforms import is_only_run
from regard.hf.arguments import HARMLESS
from regard.normalizers import Normalizer, Softmax

SILENT = frozenset(("dropout", "softcap", "position_bias", "s_aux", "output_attentions", "sliding_window"))
"""Arguments that change nothing where they are None, False or zero."""
KNOWN = SILENT | {"scaling", "is_causal"} | HARMLESS.keys()


def run_bare(
    normalizer: Normalizer,
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    options: Mapping[str, Any],
) -> Tensor | None:
    """Outputs (batch, heads, m, e) of softmax of scaled dot products, under no mask, a causal order or a mask
    of booleans; None where it takes more to say what a call means.
    """
    query, key, value = tensors
    if not isinstance(normalizer, Softmax) or isinstance(normalizer.temperature, Tensor):
        return None
    if normalizer.temperature != 1.0 or not is_only_run(*tensors):
        return None
    if any(name not in KNOWN or (name in SILENT and _says(said)) for name, said in options.items()):
        return None
    asked = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if asked is None else asked)
    causal = causal and mask is None and query.shape[2] > 1
    if (causal and query.shape[2] != key.shape[2]) or torch.is_autocast_enabled(query.device.type):
        return None
    if mask is not None and not _is_mask(mask, query, key):
        return None
    scale, grouped = options.get("scaling"), query.shape[1] != key.shape[1]
    if scale is not None and not scale > 0:
        return None
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _says(value: Any) -> bool:
    """Whether an argument asks for something."""
    return value is not None and (isinstance(value, Tensor) or bool(value))


def _is_mask(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether it says of each pair whether it is seen."""
    return (
        isinstance(mask, Tensor)
        and mask.dtype == torch.bool
        and mask.ndim == 4
        and mask.shape[0] in (1, query.shape[0])
        and mask.shape[1] in (1, query.shape[1])
        and mask.shape[2:] == (query.shape[2], key.shape[2])
    )
