"""A cost in words and columns: units that people read, and the rows of a table."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from regard.errors import MissingExtraError

if TYPE_CHECKING:
    from regard.costs.account import Cost, Part

THOUSANDS = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
COLUMNS = ("part", "forward", "training", "share", "softmax", "bytes", "parameters")
"""What stands above the rows."""


def count(value: float) -> str:
    """A number with three digits or more and a letter for its thousands, e.g. 12.3 G."""
    return _with_unit(value, 1000, THOUSANDS)


def memory(value: float) -> str:
    """Bytes in binary units, e.g. 12.3 MiB."""
    return _with_unit(value, 1024, BINARY)


def _with_unit(value: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while value >= 0.9995 * base and power + 1 < len(units):
        value, power = value / base, power + 1
    digits = 0 if power == 0 and value == int(value) else 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {units[power]}".strip()


def rows(cost: Cost) -> list[tuple[str, ...]]:
    """One row for each part, and their total."""
    found = [_row(part, cost.forward) for part in cost.parts]
    total = (
        "total",
        *map(count, (cost.forward, cost.training)),
        "100 %" if cost.forward else "",
        count(cost.softmax),
    )
    return [*found, (*total, memory(cost.moved), count(cost.parameters))]


def _row(part: Part, whole: int) -> tuple[str, ...]:
    share = f"{100 * part.matmul / whole:.1f} %" if part.matmul else ""
    flops = [count(value) if value else "" for value in (part.matmul, part.training)]
    softmax, moved = count(part.softmax) if part.softmax else "", memory(part.moved) if part.moved else ""
    return part.name, *flops, share, softmax, moved, count(part.parameters) if part.parameters else ""


def remarks(cost: Cost) -> list[str]:
    """What the table does not say: the approximation, masks, memory and the crossover."""
    return [_approximation(cost), *_masks(cost), _memory(cost), _crossover(cost)]


def _approximation(cost: Cost) -> str:
    ratio = (
        f" ({100 * cost.approximate_forward / cost.forward:.1f} % of the products)" if cost.forward else ""
    )
    return (
        f"approximation: 2 N tokens = {count(cost.approximate_forward)}, 6 N tokens = "
        f"{count(cost.approximate_training)}{ratio}"
    )


def _masks(cost: Cost) -> list[str]:
    if cost.visible == cost.forward:
        return []
    return [
        f"kernels that skip masked pairs: {count(cost.visible)} forward, {count(3 * cost.visible)} training"
    ]


def _memory(cost: Cost) -> str:
    return f"memory: weights {memory(cost.weights)}, kept for the backward pass {memory(cost.activations)}"


def _crossover(cost: Cost) -> str:
    if cost.crossover is None or cost.causal_crossover is None:
        return "crossover: none, attention does not grow with the square of the length here"
    masked = (
        ""
        if cost.visible == cost.forward
        else f", at {cost.causal_crossover:,.0f} where kernels skip the masked half"
    )
    return (
        f"crossover: pairs cost as much as the weights of the layers at T* = {cost.crossover:,.0f} "
        f"tokens{masked}"
    )


def lines(cost: Cost) -> list[str]:
    """A table in plain text."""
    body = [COLUMNS, *rows(cost)]
    widths = [max(len(row[column]) for row in body) for column in range(len(COLUMNS))]
    table = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in body
    ]
    sizes = f"{cost.sizes.batch} × {cost.sizes.tokens} tokens" + (
        f", context {cost.sizes.context}" if cost.sizes.context else ""
    )
    return [f"cost of {sizes}, in flops", *(line.rstrip() for line in table), *remarks(cost)]


def markup(cost: Cost) -> str:
    """The rows as a table for notebooks, the remarks below."""
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows(cost))
    said = "".join(f"<li>{escape(remark)}</li>" for remark in remarks(cost))
    return f"<div><table><tr>{head}</tr>{body}</table><ul>{said}</ul></div>"


NUMBERS = ("matmul", "training", "visible", "softmax", "moved", "parameters", "weights")
"""The numbers of a part, in flops, bytes and counts."""
TOTALS = (
    "forward", "training", "visible", "softmax", "moved", "parameters", "weights", "activations",
    "recomputed", "approximate_forward", "approximate_training", "crossover", "causal_crossover",
)  # fmt: skip
"""The numbers of the whole."""


def _parts(cost: Cost) -> list[dict[str, Any]]:
    return [{"part": part.name, **{name: getattr(part, name) for name in NUMBERS}} for part in cost.parts]


def written(cost: Cost) -> dict[str, Any]:
    """Sizes, totals and parts as plain values."""
    sizes = {"tokens": cost.sizes.tokens, "batch": cost.sizes.batch, "causal": cost.sizes.causal}
    return {**sizes, **{name: getattr(cost, name) for name in TOTALS}, "parts": _parts(cost)}


def frame(cost: Cost) -> Any:
    """A row for each part, in flops, bytes and counts."""
    try:
        import pandas
    except ImportError:
        raise MissingExtraError("pandas", "notebook") from None
    return pandas.DataFrame(_parts(cost))
