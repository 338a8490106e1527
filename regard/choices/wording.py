"""Words for candidates and numbers."""

from __future__ import annotations

import math
from typing import Any

from regard.compression.candidates import (
    Candidate,
    Features,
    LowRank,
    Merged,
    Nystrom,
    Quantized,
    Recent,
    TopK,
)
from regard.normalizers import Elu


def named(candidate: Candidate) -> str:
    """A candidate in a word or two."""
    if isinstance(candidate, Features):
        return "elu features" if isinstance(candidate.feature_map, Elu) else "random features"
    for kind, name in NAMES.items():
        if isinstance(candidate, kind):
            number = next(value for value in vars(candidate).values() if isinstance(value, int))
            return name.format(number)
    return type(candidate).__name__


NAMES = {
    Recent: "last {}",
    TopK: "largest {}",
    Merged: "{} atoms",
    Nystrom: "{} landmarks",
    LowRank: "rank {}",
    Quantized: "{} bits",
}


def shown_part(value: Any) -> str:
    """A part as a percentage of two digits."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    percent = 100 * float(value)
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.2g} %"
