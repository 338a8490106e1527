"""The table of a measurement: a line for each layer, with the head that is largest, or of least entropy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from regard._written import number

COLUMNS: tuple[tuple[str, str, Callable[..., float]], ...] = (
    ("qk_norm", "QK norm", max),
    ("ov_norm", "OV norm", max),
    ("entropy", "least entropy", min),
    ("max_logit", "largest logit", max),
)
MISSING = "-"


def as_text(entry: dict[str, Any], reasons: dict[str, str]) -> str:
    """A measurement as text; what was not measured is said below it."""
    loss = "" if entry.get("loss") is None else f", loss {number(entry['loss']):.4f}"
    rows = [["layer", *(title for _, title, _ in COLUMNS), "Jacobian norm"]]
    rows += [[path, *_cells(numbers)] for path, numbers in entry["layers"].items()]
    return "\n".join(
        [
            f"step {entry['step']}{loss}",
            *align(rows),
            *(f"not measured: {path}: {why}" for path, why in reasons.items()),
        ]
    )


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, each column as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _cells(numbers: dict[str, Any]) -> list[str]:
    jacobian = numbers.get("jacobian_norm")
    return [
        *(_cell(numbers.get(name), worst) for name, _, worst in COLUMNS),
        MISSING if jacobian is None else f"≥ {number(jacobian):.3g}",
    ]


def _cell(values: list[Any] | None, worst: Callable[..., float]) -> str:
    """The worst head, the first that is not finite before all others."""
    if values is None:
        return MISSING
    found = [number(value) for value in values]
    broken = [head for head, value in enumerate(found) if not math.isfinite(value)]
    head = broken[0] if broken else found.index(worst(found))
    return f"{found[head]:.3g} (head {head})"
