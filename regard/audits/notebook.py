"""A report in a notebook: a short text, a few lines of markup, and a table."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from regard.audits.checks.base import HEAD, LAYER, STACK
from regard.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    from regard.audits.report import Report

WIDTH = 300
"""How many letters a sentence of the short form has at most."""
STYLE = "text-align:left;padding:.2rem .8rem .2rem 0;border-top:1px solid #8886"


def short(report: Report) -> str:
    """What was audited, the verdict, and how to see more."""
    from regard.audits.screen import screen

    seen = screen(report)
    inputs = f"{len(report.inputs)} inputs" if report.inputs else "weights alone"
    if not report.coverage:
        return f"Report({report.name!r}: no attention found, so nothing was measured)"
    heads = sum(entry.heads for entry in report.covered)
    text = (
        f"Report({report.name!r}: {len(report.covered)} of {len(report.coverage)} attention layers, "
        f"{heads} heads, {inputs}; {seen.verdict})"
    )
    return f"{text}\nSee .summary(), .findings(), .table(), .save(directory)"


def markup(report: Report) -> str:
    """The verdict, the sentences, and the main numbers, escaped."""
    from regard.audits.card import figures
    from regard.audits.screen import screen

    seen = screen(report)
    said = "".join(f"<li>{escape(_cut(sentence))}</li>" for sentence in report.summary())
    numbers = "".join(
        f"<tr>{_cell(one.words)}{_cell(one.shown)}{_cell(one.status)}{_cell(one.place)}</tr>"
        for one in figures(report)
    )
    table = f'<table style="border-collapse:collapse">{numbers}</table>' if numbers else ""
    title = f"{escape(seen.mark)} {escape(report.name)}: {escape(seen.verdict)}"
    return f"<div><p><b>{title}</b></p><ul>{said}</ul>{table}</div>"


def _cell(text: str) -> str:
    return f'<td style="{STYLE}">{escape(text)}</td>'


def _cut(sentence: str) -> str:
    return sentence if len(sentence) <= WIDTH else f"{sentence[: WIDTH - 1]}…"


def frame(report: Report, scope: str) -> Any:
    """The rows of one scope as a pandas DataFrame."""
    if scope not in (HEAD, LAYER, STACK):
        raise ArgumentError("scope", f"is {scope!r}", f"use {HEAD!r}, {LAYER!r} or {STACK!r}")
    try:
        import pandas
    except ImportError:
        raise MissingExtraError("pandas", "notebook") from None
    rows = [row for row in report.rows if row.scope == scope]
    return pandas.DataFrame([{"site": row.site, "head": row.head, **row.values} for row in rows])
