"""Rotary positions of a module: frequencies from the model,
checked against the cosines and sines it was called with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.audits.adapters.base import NotCovered
from regard.audits.adapters.masks import Allowed, row_parts, rows_of
from regard.audits.adapters.surroundings import ancestors


@dataclass(frozen=True)
class Turning:
    """frequencies (f,) turn the first 2f coordinates of queries and keys; scaling: a factor on both."""

    frequencies: Tensor
    scaling: float


def turning_of(model: nn.Module, path: str, prefix: str = "") -> Turning:
    """The nearest rotary embedding above a module; prefix names one of several kinds of layers."""
    name = f"{prefix}inv_freq"
    for above in ancestors(path):
        for child in model.get_submodule(above).children():
            frequencies = dict(child.named_buffers(recurse=False)).get(name)
            if frequencies is not None:
                return Turning(frequencies.detach(), float(getattr(child, f"{prefix}attention_scaling")))
    raise NotCovered(f"no module above it holds {name}, the frequencies of its rotary positions")


def fold_scale(turning: Turning, scale: float, width: int) -> float:
    """The scale of the scores with the factor on queries and keys;
    it cannot be told apart where only some coordinates turn.
    """
    if turning.scaling == 1.0:
        return scale
    if 2 * turning.frequencies.shape[-1] != width:
        raise NotCovered(
            "its rotary positions scale some coordinates and not others, which no single scale expresses"
        )
    return scale * turning.scaling**2


def check_turning(turning: Turning, embeddings: Any, positions: Tensor) -> None:
    """The cosines and sines of the call must be those of the frequencies;
    dynamic rotary positions change them.
    """
    if not isinstance(embeddings, tuple) or len(embeddings) != 2:
        raise NotCovered("the module was called without the cosines and sines of its rotary positions")
    angle = torch.cat([positions.unsqueeze(-1).double() * turning.frequencies.double()] * 2, -1)
    for found, wanted in zip(embeddings, (angle.cos(), angle.sin()), strict=True):
        same = found.shape[-1] == angle.shape[-1]
        if not same or float((found.double() / turning.scaling - wanted).abs().max()) > rounding(
            found.dtype, angle
        ):
            raise NotCovered(
                "its rotary positions differ from the model's frequencies at 0, 1, 2, ... or the given "
                "position_ids"
            )


def rounding(dtype: torch.dtype, angle: Tensor) -> float:
    """How far a cosine may be off: models compute angles in float32, whatever they are cast to afterwards."""
    single = torch.finfo(torch.float32).eps
    return 2 * max(torch.finfo(dtype).eps, single) + 2 * single * float(angle.abs().max())


def marks_of(positions: Tensor, allowed: Allowed) -> Tensor | None:
    """Positions (batch, n) as marks; None where every pair that is allowed is as far apart as 0, 1, 2,
    ... say.
    """
    index = torch.arange(positions.shape[-1], device=positions.device)
    shift = positions - index  # equal for two tokens whose distance is that of their places
    if bool((shift == shift[..., :1]).all()):
        return None
    for rows in row_parts(allowed.shape):
        distorted = (shift[..., rows].unsqueeze(-1) != shift.unsqueeze(-2)).unsqueeze(1)
        if bool((distorted & rows_of(allowed, rows)).any()):
            return positions
    return None


def positions_of(options: dict[str, Any], points: Tensor) -> Tensor:
    """The positions (batch, n) of a call on points (batch, n, d): position_ids, or 0, 1, 2, ..."""
    batch, tokens = points.shape[:2]
    given = options.get("position_ids")
    positions = torch.arange(tokens, device=points.device) if given is None else given.detach()
    if positions.shape[-1] != tokens or positions.ndim > 2:
        raise NotCovered(f"position_ids have shape {list(positions.shape)} for {tokens} tokens")
    return positions.expand(batch, tokens)
