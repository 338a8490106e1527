"""The page: a report as one self-contained file that opens from disk,
asks nothing of the network and runs no text as code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard._files import write_together, writing
from regard._pages import content_hash, embedded, environment, markup
from regard._written import plain
from regard.audits.card import markdown, place_in_words, three_digits
from regard.audits.checks import checks
from regard.audits.checks.base import STATUSES
from regard.audits.findings import Finding, findings
from regard.audits.report import Report, Row
from regard.audits.screen import every_change, screen
from regard.audits.yardstick import comparisons

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Omission:
    """A check that could not be made, why, and everywhere that was so."""

    check: str
    reason: str
    where: str


def html(report: Report) -> str:
    """The whole page as text."""
    return _page(report, report.to_dict())


def _page(report: Report, data: dict[str, Any]) -> str:
    style, script = _asset("report.css"), _asset("report.js")
    return str(
        _template().render(
            report=report,
            summary=data["summary"],
            findings=findings(report),
            screen=screen(report),
            changes=every_change(report),
            heads=sum(entry.heads for entry in report.covered),
            skipped=omissions(report),
            comparisons=comparisons(report),
            statuses=STATUSES,
            data=markup(embed(data)),
            style=markup(style),
            style_hash=content_hash(style),
            script=markup(script),
            script_hash=content_hash(script),
        )
    )


def save(report: Report, directory: Path, argument: str = "--out") -> list[Path]:
    """Write report.json, report.html and card.md, all of them or none, and return their paths; errors name
    the argument.
    """
    data = report.to_dict()
    written = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    texts = {"report.json": written, "report.html": _page(report, data), "card.md": markdown(report)}
    with writing(directory, argument):
        directory.mkdir(parents=True, exist_ok=True)
        write_together({directory / name: text.encode() for name, text in texts.items()})
    return [directory / name for name in texts]


def embed(data: dict[str, Any]) -> str:
    """A report and the questions that its columns answer, as JSON that no text can break out of."""
    questions = [
        {"name": check.name, "question": check.question, "columns": [c.name for c in check.columns]}
        for check in checks()
    ]
    whole = {**data, "checks": questions, "statuses": STATUSES}
    return embedded(whole)


def omissions(report: Report) -> list[Omission]:
    """Checks that could not be run, one entry for each reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for entry in report.skipped:
        place = entry.site or "the model"
        found.setdefault((entry.check, entry.reason), []).append(
            place if entry.input is None else f"{place}, input {entry.input + 1}"
        )
    return [Omission(check, reason, _enumerate(where)) for (check, reason), where in found.items()]


def _enumerate(places: Sequence[str], most: int = 4) -> str:
    more = f"; and {len(places) - most} more" if len(places) > most else ""
    return "; ".join(places[:most]) + more


def place(row: Row | Finding) -> str:
    """The address of a head, a layer or a stack on the page."""
    if row.head >= 0:
        return f"#head-{row.layer}-{row.head}"
    return f"#layer-{row.layer}" if row.layer >= 0 else "#depth"


def raw(value: float) -> str:
    """A number as JavaScript prints it, for those who read the page by machine."""
    return "NaN" if math.isnan(value) else json.dumps(plain(value)).strip('"')


def _asset(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _template() -> Any:
    found = environment(TEMPLATES)
    found.filters |= {
        "shown": three_digits,
        "spoken": place_in_words,
        "place": place,
        "raw": raw,
    }
    return found.get_template("report.html.j2")
