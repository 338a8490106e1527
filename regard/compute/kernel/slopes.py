"""Causal biases that fall with distance, -m (i - j): only keys inside a block need one for each pair.

For queries low, low + 1, ... the keys before the block have the bias m (j - low) of their own, and the row
the constant m (i - low), which a softmax does not see. Counted from the block, near keys keep all their
digits. Where there are fewer keys than queries, the last key is what is counted from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._types import Scalar, over_scores
from regard.compute.kernel.tiles import Tiling, as_four_dimensions
from regard.potentials import Alibi, Potential, Scaled
from regard.supports import Causal

ROWS = 192
"""Queries in a block: the fewest for which the kernel takes its larger steps."""
PAIRS = 1 << 21
"""Biases on pairs that a block may hold, all heads together."""


@dataclass(frozen=True)
class Part:
    """Queries `rows` against keys `columns`, with a bias (B, H, 1 or rows, columns), or in causal order.

    offset (B, H, rows): what the scores of a row are larger here than they should be, in a part that comes
    after another of the same rows.
    """

    rows: slice
    columns: slice
    bias: Tensor | None = None
    causal: bool = False
    offset: Tensor | None = None


def slope_of(tiling: Tiling) -> Scalar | None:
    """m, where all that a tiling adds to scores is -m (i - j) in the past, and tokens stand in order."""
    if not tiling.in_order or type(tiling.support) is not Causal or not tiling.residues:
        return None
    total: Scalar = 0.0
    for residue in tiling.residues:
        slope = _slope(residue.potential)
        if slope is None:
            return None
        total = total + slope
    return total


def _slope(potential: Potential) -> Scalar | None:
    if isinstance(potential, Alibi):
        return potential.slope
    if not isinstance(potential, Scaled):
        return None
    inner = _slope(potential.potential)
    return None if inner is None else inner * potential.factor


def cut(tiling: Tiling, slope: Scalar, dtype: torch.dtype) -> Iterator[Part]:
    """Each block of queries against its own keys, and then against the keys before it."""
    queries, keys = tiling.query_marks.shape[-1], tiling.key_marks.shape[-1]
    assert tiling.heads is not None
    heads = torch.Size(tiling.heads)
    several = slope.numel() if isinstance(slope, Tensor) else 1
    rows = ROWS if several * ROWS**2 <= PAIRS else ROWS // 2
    places = torch.arange(max(queries, rows), dtype=dtype, device=tiling.key_marks.device)
    steps = as_four_dimensions((over_scores(slope) * places.unsqueeze(-2)).to(dtype), heads, False)
    own = as_four_dimensions(_past(slope, places[: min(rows, queries)]).to(dtype), heads, False)
    for low in range(0, queries, rows):
        high, before = min(low + rows, queries), min(low, keys)
        if low < keys:
            stop = min(high, keys)
            yield Part(slice(low, high), slice(low, stop), own[..., : high - low, : stop - low])
        if before:
            far = -steps[..., 1 : before + 1].flip(-1)
            offset = steps[..., 0, low - before : high - before]
            yield Part(slice(low, high), slice(0, before), far, offset=offset)


def _past(slope: Scalar, places: Tensor) -> Tensor:
    """-m (i - j) where j is not after i, else minus infinity."""
    distance = places.unsqueeze(-1) - places
    later = torch.zeros_like(distance).masked_fill_(distance < 0, -torch.inf)
    return (-over_scores(slope) * distance).add_(later)
