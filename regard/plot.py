"""Pictures of what regard found, with matplotlib: influence maps, ladders, head maps, spectra, laws.

Each function draws into the axes it is given, or into new ones, and returns them. The numbers are those of
reports and certificates; nothing is measured again.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.attention import Attention
from regard.audits.report import Report
from regard.certificate import Certificate, round_up
from regard.derive import Jacobian
from regard.derive.influence import names
from regard.errors import ArgumentError, MissingExtraError

INK, ACCENT = "#0a3154", "#a63c08"
NAMED = 40
"""Tokens up to which each is named at the axis."""
LINE = 38
"""Letters of the name of a theorem in one line."""
WRITTEN = 16
"""Heads up to which a map has its numbers written in."""


def influence(found: Tensor | Jacobian, tokens: Sequence[str] | None = None, *, axes: Any = None) -> Any:
    """How far each token (rows) is moved by each token (columns): |J_ij|₂, one map (m, n).

    Examples:
        >>> j = regard.linearize(regard.Attention(regard.Dot()), torch.randn(4, 3, dtype=torch.float64))
        >>> axes = regard.plot.influence(j, ["the", "cat", "sat", "down"])
        >>> len(axes.images), [label.get_text() for label in axes.get_xticklabels()][0]
        (1, 'the')
    """
    matrix = _matrix("found", found.influence() if isinstance(found, Jacobian) else found)
    axes = _axes(axes, _square(matrix))
    image = axes.imshow(matrix.numpy(), cmap="Oranges", vmin=0)
    _name(axes, tokens, tokens, matrix)
    axes.set(xlabel="a token moves", ylabel="how far tokens follow")
    axes.figure.colorbar(image, ax=axes, label="times as far")
    return axes


def laws(
    found: Tensor | Attention,
    x: Tensor | None = None,
    context: Tensor | None = None,
    *,
    tokens: Sequence[str] | None = None,
    axes: Any = None,
) -> Any:
    """Where each query looks: rows of weights (m, n), given or of an attention at x.

    Examples:
        >>> layer = regard.Attention(regard.Dot(), support=regard.Causal())
        >>> regard.plot.laws(layer, torch.randn(4, 3)).images[0].get_array().shape
        (4, 4)
    """
    if isinstance(found, Attention):
        if x is None:
            raise ArgumentError("x", "is missing", "give the points at which the attention is drawn")
        found = found.weights(x, context)
    matrix = _matrix("found", found)
    axes = _axes(axes, _square(matrix))
    image = axes.imshow(matrix.numpy(), cmap="Blues", vmin=0)
    _name(axes, tokens if context is None else None, tokens, matrix)
    axes.set(xlabel="key", ylabel="query")
    axes.figure.colorbar(image, ax=axes, label="weight")
    return axes


def head_laws(report: Report, site: str, head: int, *, input: int = 0, axes: Any = None) -> Any:
    """The rows of one head on one input, as the report keeps them.

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> report = regard.audit(model, torch.randn(1, 6, 8), checks=["rows"])
        >>> regard.plot.head_laws(report, "layers.0.self_attn", 0).images[0].get_array().shape
        (6, 6)
    """
    entry = _entry(report, "rows", site, input)
    kept = torch.tensor(entry["laws"], dtype=torch.float64)
    if not 0 <= head < len(kept):
        raise ArgumentError("head", f"is {head}", f"{site} has the heads 0 to {len(kept) - 1}")
    tokens = report.inputs[input].tokens
    axes = laws(kept[head], tokens=tokens if len(tokens) == kept.shape[-1] else None, axes=axes)
    axes.set_title(f"head {head} of {site}")
    return axes


def words(report: Report, *, input: int = 0, axes: Any = None) -> Any:
    """How much the output depends on each token of one input.

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> report = regard.audit(model, torch.randn(1, 6, 8), checks=["influence"])
        >>> len(regard.plot.words(report).patches)  # a bar for each token
        6
    """
    values = [
        math.nan if v is None else float(v) for v in _entry(report, "influence", "", input)["influence"]
    ]
    tokens = report.inputs[input].tokens
    labels = names(tokens if len(tokens) == len(values) else None, len(values))
    axes = _axes(axes, (max(4.0, 0.3 * len(values)), 3.0))
    axes.bar(range(len(values)), values, color=ACCENT)
    axes.set_xticks(range(len(values)), labels, rotation=90)
    axes.set(ylabel="influence", title=report.inputs[input].name[:60])
    return axes


def ladder(certificate: Certificate, *, axes: Any = None) -> Any:
    """What each theorem proves about one quantity, the smallest on top; infinities are left out.

    Examples:
        >>> layer, unit = regard.Attention(regard.Dot()), regard.Ball(1.0, tokens=4, width=2)
        >>> bound = regard.certify(layer, unit, regard.Frobenius())
        >>> axes = regard.plot.ladder(bound)
        >>> len(axes.patches) > 1  # a bar for each theorem
        True
    """
    rungs = sorted((certificate, *certificate.others), key=lambda rung: rung.value)
    finite = [rung for rung in rungs if math.isfinite(rung.value)]
    if not finite:
        raise ArgumentError("certificate", "is infinite", "certificate.ladder() says why no theorem applies")
    axes = _axes(axes, (8.0, 1.2 + 0.5 * len(finite)))
    places = range(len(finite))
    axes.barh(places, [rung.value for rung in finite], color=[ACCENT, *[INK] * (len(finite) - 1)])
    axes.set_yticks(places, [textwrap.fill(rung.theorem, LINE) for rung in finite])
    axes.invert_yaxis()
    if finite[-1].value > 30 * max(finite[0].value, 1e-300):
        axes.set_xscale("log")
    for place, rung in zip(places, finite, strict=True):
        axes.annotate(f" {round_up(rung.value)}", (rung.value, place), va="center")
    axes.margins(x=0.15)
    axes.set(xlabel=f"{certificate.quantity} ≤, in {certificate.norm!r}")
    return axes


def head_map(report: Report, column: str, *, axes: Any = None) -> Any:
    """One number of every head: a row for each layer, as on the report's page.

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> report = regard.audit(model, torch.randn(1, 6, 8), checks=["rows"])
        >>> regard.plot.head_map(report, "entropy").images[0].get_array().shape  # layers, heads
        (2, 2)
    """
    rows = [row for row in report.ranked(column) if row.scope == "head"]
    if not rows:
        raise ArgumentError("column", f"is {column!r}, which no head of this report has", _known(report))
    sites = [entry.site for entry in report.coverage if any(row.site == entry.site for row in rows)]
    grid = torch.full((len(sites), 1 + max(row.head for row in rows)), math.nan, dtype=torch.float64)
    for row in rows:
        grid[sites.index(row.site), row.head] = row.values[column]
    axes = _axes(axes, (1.5 + 0.6 * grid.shape[1], 1.2 + 0.45 * grid.shape[0]))
    shown = report.column(column)
    image = axes.imshow(grid.numpy(), cmap="Oranges", aspect="auto")
    axes.figure.colorbar(image, ax=axes)
    axes.set_yticks(range(len(sites)), sites)
    axes.set_xticks(range(grid.shape[1]))
    axes.set(xlabel="head", title=column if shown is None else shown.title)
    if grid.shape[1] <= WRITTEN:
        _write(axes, grid)
    return axes


def spectrum(found: Tensor | Jacobian, *, axes: Any = None) -> Any:
    """Singular values, the largest first, on a logarithmic scale.

    Examples:
        >>> axes = regard.plot.spectrum(torch.tensor([3.0, 2.0, 1.0]))
        >>> axes.get_yscale()
        'log'
    """
    values = torch.linalg.svdvals(found.dense()) if isinstance(found, Jacobian) else found
    values = values.detach().double().cpu()
    if values.ndim != 1:
        found_shape = f"has shape {list(values.shape)}"
        raise ArgumentError("found", found_shape, "give one list of singular values, or one Jacobian")
    values = values.sort(descending=True).values
    axes = _axes(axes, (5.0, 3.2))
    axes.plot(range(1, len(values) + 1), values.numpy(), marker="o", markersize=3, color=INK)
    if float(values[-1]) > 0:
        axes.set_yscale("log")
    axes.set(xlabel="number", ylabel="singular value")
    return axes


def _axes(axes: Any, size: tuple[float, float]) -> Any:
    if axes is not None:
        return axes
    try:
        from matplotlib import pyplot
    except ImportError:
        raise MissingExtraError("matplotlib", "plot") from None
    return pyplot.subplots(figsize=size, layout="constrained")[1]


def _matrix(name: str, found: Any) -> Tensor:
    if not isinstance(found, Tensor) or found.ndim != 2 or not found.numel():
        what = f"has shape {list(found.shape)}" if isinstance(found, Tensor) else f"is {found!r}"
        raise ArgumentError(name, what, "give one matrix (m, n): of a batch or of heads take one")
    return found.as_subclass(Tensor).detach().double().cpu()


def _square(matrix: Tensor) -> tuple[float, float]:
    side = [min(9.0, 1.5 + 0.28 * size) for size in matrix.shape]
    return max(4.0, side[1] + 1.0), max(3.0, side[0])


def _name(axes: Any, rows: Sequence[str] | None, columns: Sequence[str] | None, matrix: Tensor) -> None:
    if rows is not None and len(rows) == matrix.shape[0] <= NAMED:
        axes.set_yticks(range(matrix.shape[0]), names(rows, matrix.shape[0]))
    if columns is not None:
        labels = names(columns, matrix.shape[1])
        if len(labels) <= NAMED:
            axes.set_xticks(range(matrix.shape[1]), labels, rotation=90)


def _write(axes: Any, grid: Tensor) -> None:
    dark = float(grid.nan_to_num(-math.inf).max() + grid.nan_to_num(math.inf).min()) / 2
    for row, line in enumerate(grid.tolist()):
        for column, value in enumerate(line):
            if not math.isnan(value):
                color = "white" if value > dark else "black"
                axes.text(column, row, f"{value:.3g}", ha="center", va="center", color=color, fontsize=8)


def _entry(report: Report, table: str, site: str, input: int) -> dict[str, Any]:
    """One table of the report for one module and one input."""
    kept = report.tables.get(table, [])
    for entry in kept:
        if entry.get("site") == site and entry.get("input") == input:
            return entry
    known = sorted({(entry.get("site", ""), entry.get("input")) for entry in kept}, key=str)[:8]
    shown = ", ".join(f"{where or 'the model'} on input {number}" for where, number in known) or "nothing"
    found = f"has no {table} of {site or 'the model'} on input {input}"
    raise ArgumentError("report", found, f"it has {shown}")


def _known(report: Report) -> str:
    have = {name for row in report.heads for name, value in row.values.items() if not math.isnan(value)}
    return f"use {', '.join(sorted(have))}" if have else "audit with checks that measure heads"
