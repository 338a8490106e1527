"""cheaper.html and cheaper.json: which cheaper attention is good enough, layer by layer, as one page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from regard._files import write_together, writing
from regard._pages import content_hash, environment, markup
from regard._written import plain
from regard.audits.page import TEMPLATES as REPORT
from regard.choices.found import Applied, Found, LayerFound
from regard.choices.wording import shown_part

TEMPLATES = Path(__file__).parent / "templates"
SHADES = 10

READING = (
    "Each layer was tested with queries of the text. A third of the queries fits a candidate, a third "
    "calibrates it, and errors are measured on the other third: relative to the layer's output, after its "
    "output projection. The number in a cell is calibrated: 95 % of fresh queries like these stay below it. "
    "It is no proof, and the error can be larger on another kind of text.",
    "In a decoder the first half of the text is the context that is made smaller, and the queries are those "
    "of the second half; attention among these tokens is left exact. In an encoder all tokens are queries, "
    "and all are the context.",
    "Memory counts the bits that are kept of a context's keys and values, relative to {baseline}. "
    "Candidates that need more than that are not shown. “largest” keeps all keys and values, and reads few "
    "values.",
    "The whole model was run with a choice in every layer at once, so that errors of early layers reach the "
    "later ones.",
)
SPEAKING = (
    "KL is the divergence of the exact next-token distribution from the changed one, on positions that no "
    "candidate was fitted to."
)


def save(found: Found, directory: Path, command: str = "") -> list[Path]:
    """Write cheaper.html and cheaper.json, both or neither, and give their paths."""
    texts = {
        "cheaper.html": html(found, command),
        "cheaper.json": json.dumps(plain(found.written()), indent=1, ensure_ascii=False),
    }
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        write_together({directory / name: text.encode() for name, text in texts.items()})
    return [directory / name for name in texts]


def html(found: Found, command: str = "") -> str:
    """The whole page as text."""
    style = "".join(
        path.read_text(encoding="utf-8") for path in (REPORT / "report.css", TEMPLATES / "cheaper.css")
    )
    speaks = any(one.divergence is not None for one in found.applied)
    reading = (*READING, SPEAKING) if speaks else READING
    style += "".join(f".shade-{k} {{ --s: {k / SHADES}; }}\n" for k in range(SHADES + 1))
    return str(
        environment(TEMPLATES)
        .get_template("cheaper.html.j2")
        .render(
            found=found,
            sentences=found.sentences(),
            tables=[_table(found, *one) for one in TABLES],
            rows=[_applied(one) for one in found.applied],
            speaks=speaks,
            reading=[one.format(baseline=found.baseline) for one in reading],
            command=command,
            style=markup(style),
            style_hash=content_hash(style),
        )
    )


TABLES = (
    (
        "quantile",
        "Calibrated error",
        "95 % of fresh queries stay below it; a frame marks the recommended choice.",
    ),
    (
        "divergence",
        "Divergence of the attention weights",
        "KL of the cheap row of attention weights from the exact one, in nats.",
    ),
    (
        "proved",
        "Proved",
        "The largest bound over the test queries, where it is informative.",
    ),
)
"""A number of choices, its title and an explanation."""


def _table(found: Found, measure: str, title: str, note: str) -> dict[str, Any] | None:
    """One number of every layer and of the candidates that have it; None where none has it."""
    names = [name for name in found.candidates if any(_has(layer, name, measure) for layer in found.layers)]
    if not names:
        return None
    both = zip(found.layers, found.recommended, strict=True)
    rows = [_row(found, layer, name, (measure, names)) for layer, name in both]
    return {"title": title, "note": note, "candidates": names, "rows": rows}


def _has(layer: LayerFound, name: str, measure: str) -> bool:
    value = ((layer.choices or {}).get(name) or {}).get(measure)
    return value is not None and not math.isnan(value)


def _row(
    found: Found, layer: LayerFound, recommended: str | None, shown: tuple[str, list[str]]
) -> dict[str, Any]:
    measure, names = shown
    cells = [_cell(found, (layer.choices or {}).get(name), measure) for name in names]
    for cell, name in zip(cells, names, strict=True):
        cell["best"] = name == recommended
    return {
        "layer": layer.layer,
        "path": layer.path,
        "refused": layer.refused,
        "cells": cells,
        "recommended": recommended or "exact",
        "mixed": layer.mixed,
    }


def _cell(found: Found, numbers: dict[str, Any] | None, measure: str) -> dict[str, Any]:
    if numbers is None or numbers.get("refused"):
        return {
            "number": "–",
            "shade": 0,
            "why": "" if numbers is None else numbers["refused"],
            "deep": False,
        }
    value = numbers.get(measure)
    if value is None:
        return {"number": "–", "shade": 0, "why": "", "deep": False}
    shade = _shade(float(value), found.error) if measure == "quantile" else 0
    number = f"{value:.2g}" if measure == "divergence" else shown_part(value)
    why = f"memory {shown_part(numbers['memory'])}, error {shown_part(numbers['error'])}"
    return {"number": number, "shade": shade, "why": why, "deep": shade > SHADES // 2}


def _shade(value: float, error: float) -> int:
    """Nothing within the error, dark from ten times as much."""
    return 0 if value <= error else min(SHADES, 1 + round((SHADES - 1) * math.log10(value / error)))


def _applied(one: Applied) -> dict[str, Any]:
    spread = "" if one.deviation is None else f" ± {one.deviation:.1g}"
    return {
        "name": one.name,
        "memory": shown_part(one.memory),
        "divergence": "–" if one.divergence is None else f"{one.divergence:.3g}{spread}",
        "agreement": shown_part(one.agreement),
        "moved": shown_part(one.moved),
        "exact": one.exact,
    }
