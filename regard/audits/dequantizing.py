"""Matrices that a checkpoint stores as small integers or floats with scales beside them, as matrices again.

fp8 in blocks (`weight_scale_inv`), fp8 and int8 as a whole, by rows, in groups of columns or in blocks
(`weight_scale`), int8 of bitsandbytes (`SCB`), and GPTQ (`qweight`, `qzeros`, `scales`, `g_idx`). Other forms
are not guessed.
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
ENDS = ("_scale", "_zero_point", "_g_idx")
"""What compressed-tensors puts beside a matrix: scales, zeros, and the group of each column."""
LARGEST = 127.0
"""An entry of bitsandbytes of this size is the scale of its row."""


def packed_names(keys: Iterable[str]) -> dict[str, str]:
    """The names that packed matrices would have: `x.weight` for `x.qweight`."""
    return {f"{key.removesuffix(PACKED)}{WEIGHT}": key for key in keys if key.endswith(f".{PACKED}")}


def beside(name: str, keys: Iterable[str]) -> list[str]:
    """The tensors that say what a stored matrix means."""
    known, stem = set(keys), name.removesuffix(WEIGHT)
    candidates = (f"{name}_scale_inv", *(f"{name}{end}" for end in ENDS), f"{stem}SCB")
    return [key for key in candidates if name.endswith(WEIGHT) and key in known]


def matrix(name: str, stored: Tensor, scales: dict[str, Tensor], settings: dict[str, Any]) -> Tensor:
    """The matrix that is stored; itself where nothing stands beside it."""
    if stored.dtype not in NARROW or not scales:
        return stored
    wide = stored.to(torch.float32)
    for key, scale in scales.items():
        if key.endswith("SCB"):
            return wide * (scale.to(torch.float32) / LARGEST).unsqueeze(-1)
        if key.endswith("_scale_inv"):
            down, across = settings.get("weight_block_size") or BLOCK
            return wide * _blocks(name, scale.to(torch.float32), stored.shape, (down, across))
    sizes, zeros, groups = (scales.get(f"{name}{end}") for end in ENDS)
    if sizes is None:
        return stored
    if zeros is not None:
        wide = wide - _each(name, zeros, stored.shape, groups, settings)
    return wide * _each(name, sizes, stored.shape, groups, settings)


def _each(
    name: str, numbers: Tensor, shape: torch.Size, groups: Tensor | None, settings: dict[str, Any]
) -> Tensor:
    """A number for each entry: from one for all, for a row, for a group of columns, or for a block."""
    found = numbers.to(torch.float32)
    if found.ndim == 2 and groups is not None and int(groups.min()) >= 0:  # -1 where none was made
        return found[:, groups.long()]
    if found.ndim < 2 or all(count in (1, size) for count, size in zip(found.shape, shape, strict=True)):
        return found
    if found.shape[0] == shape[0] and shape[1] % found.shape[1] == 0:
        return found.repeat_interleave(shape[1] // found.shape[1], 1)
    return _blocks(name, found, shape, _structure(name, settings))


def _structure(name: str, settings: dict[str, Any]) -> tuple[int, int]:
    """The sides of blocks that a config of compressed-tensors names."""
    for group in (settings.get("config_groups") or {}).values():
        sides = (group.get("weights") or {}).get("block_structure")
        if sides is not None:
            return int(sides[0]), int(sides[1])
    raise NotCovered(f"{name} has scales in blocks, and its config does not say in which")


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
    if not _has_plain_zeros(lowest, bits, settings):
        lowest = lowest + 1
    groups = read(f"{stem}g_idx").long()
    wide = scales.to(torch.float32)
    return (wide[groups] * (weights - lowest[groups])).mT.contiguous()


def _has_plain_zeros(zeros: Tensor, bits: int, settings: dict[str, Any]) -> bool:
    """Whether zeros are stored as they are: the second format, or files that do not name it and are
    symmetric, of which it shows, since then all zeros are in the middle.
    """
    if settings.get("checkpoint_format") == "gptq_v2":
        return True
    return bool(settings.get("sym")) and bool((zeros == 2 ** (bits - 1)).all())


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Small integers (..., n · 32/bits) from 32-bit ones (..., n), lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    found = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return found.flatten(-2).to(torch.float32)
