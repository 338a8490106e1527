"""Words for candidates and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


NOTHING = "–"
"""A cell without a number."""
NAMES = {
    Recent: "last {}",
    TopK: "largest {}",
    Merged: "{} atoms",
    Nystrom: "{} landmarks",
    LowRank: "rank {}",
    Quantized: "{} bits",
}


def shown_part(value: Any) -> str:
    """A fraction as a percentage of two digits; what is more than the whole is only that."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    percent = 100 * float(value)
    if round(percent) > 100:
        return "> 100 %"
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.2g} %"


def filled(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """The columns in which some row has a number or a word, and the rows of these columns."""
    kept = [place for place in range(len(columns)) if any(row[place] not in ("", NOTHING) for row in rows)]
    return [columns[place] for place in kept], [[row[place] for place in kept] for row in rows]
