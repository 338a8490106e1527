"""Matrices that a checkpoint stores as small integers or floats with scales beside them, as matrices again.

fp8 in blocks (`weight_scale_inv`), fp8 and int8 by rows or as a whole (`weight_scale`), int8 of bitsandbytes
(`SCB`), and GPTQ (`qweight`, `qzeros`, `scales`, `g_idx`). Other forms are not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from regard.audits.adapters.base import NotCovered

Reader = Callable[[str], Tensor]
WEIGHT = "weight"
PACKED = "qweight"
NARROW = {torch.int8, torch.float8_e4m3fn, torch.float8_e5m2}
BLOCK = (128, 128)
"""Entries that share a scale, where the config does not say."""
LARGEST = 127.0
"""An entry of bitsandbytes of this size is the scale of its row."""


def packed_names(keys: Iterable[str]) -> dict[str, str]:
    """The names that packed matrices would have: `x.weight` for `x.qweight`."""
    return {f"{key.removesuffix(PACKED)}{WEIGHT}": key for key in keys if key.endswith(f".{PACKED}")}


def beside(name: str, keys: Iterable[str]) -> list[str]:
    """The tensors that say what a stored matrix means."""
    known, stem = set(keys), name.removesuffix(WEIGHT)
    candidates = (f"{name}_scale_inv", f"{name}_scale", f"{name}_zero_point", f"{stem}SCB")
    return [key for key in candidates if name.endswith(WEIGHT) and key in known]


def matrix(name: str, stored: Tensor, scales: dict[str, Tensor], settings: dict[str, Any]) -> Tensor:
    """The matrix that is stored; itself where nothing stands beside it."""
    if stored.dtype not in NARROW or not scales:
        return stored
    wide = stored.to(torch.float32)
    for key, scale in scales.items():
        if key.endswith("_zero_point"):
            wide = wide - scale.to(torch.float32)
    for key, scale in scales.items():
        if key.endswith("SCB"):
            return wide * (scale.to(torch.float32) / LARGEST).unsqueeze(-1)
        if key.endswith("_scale_inv"):
            down, across = settings.get("weight_block_size") or BLOCK
            return wide * _blocks(name, scale.to(torch.float32), stored.shape, (down, across))
        if key.endswith("_scale"):
            return wide * scale.to(torch.float32)
    return stored


def _blocks(name: str, scales: Tensor, shape: torch.Size, sides: tuple[int, int]) -> Tensor:
    """A scale for each entry, from one for each block; the last blocks may be cut off."""
    if scales.ndim != 2:
        return scales
    if any(-(-size // side) != count for size, side, count in zip(shape, sides, scales.shape, strict=True)):
        found = f"{list(scales.shape)} scales for {list(shape)} entries in blocks of {list(sides)}"
        raise NotCovered(f"{name} has {found}")
    spread = scales.repeat_interleave(sides[0], 0).repeat_interleave(sides[1], 1)
    return spread[: shape[0], : shape[1]]


def unpacked(name: str, read: Reader, settings: dict[str, Any]) -> Tensor:
    """The matrix (out, in) of GPTQ: scale · (q - zero) with a scale and a zero for each group of inputs.

    Before its second format zeros are stored less one.
    """
    bits, stem = settings.get("bits"), name.removesuffix(WEIGHT)
    if settings.get("quant_method") != "gptq" or bits not in (2, 4, 8):
        method = f"{settings.get('quant_method')} of {bits} bits"
        raise NotCovered(f"{name} is packed by {method}, which is not known here")
    stored, zeros, scales = (read(f"{stem}{part}") for part in (PACKED, "qzeros", "scales"))
    weights = _unpack(stored.mT, bits).mT  # (in, out)
    lowest = _unpack(zeros, bits)[:, : weights.shape[-1]]
    if settings.get("checkpoint_format") != "gptq_v2":
        lowest = lowest + 1
    groups = read(f"{stem}g_idx").long()
    wide = scales.to(torch.float32)
    return (wide[groups] * (weights - lowest[groups])).mT.contiguous()


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Small integers (..., n · 32/bits) from 32-bit ones (..., n), lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    found = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return found.flatten(-2).to(torch.float32)
