"""Report: what an audit found, as a value; as JSON, as one self-contained page, and as a table in the terminal."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError, MissingExtraError

SCHEMA = 1


@dataclass(frozen=True)
class Column:
    """One measured quantity: what it is and what kind of number."""

    name: str
    title: str
    meaning: str
    kind: str
    high_is_alarming: bool


@dataclass(frozen=True)
class Head:
    """One head: where it is, how well its declaration matches the module, and its numbers."""

    site: str
    layer: int
    head: int
    disagreement: float
    values: dict[str, float]


@dataclass(frozen=True)
class Missing:
    """An attention module that the audit does not cover, and why."""

    site: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The result of an audit."""

    model: str
    kind: str
    parameters: int
    inputs: list[str]
    layers: int
    columns: list[Column]
    heads: list[Head]
    missing: list[Missing]

    def to_dict(self) -> dict[str, Any]:
        """Every number of the page, with the version of the schema."""
        plain = dataclasses.asdict(self)
        for head in plain["heads"]:  # JSON has no NaN: a check that does not apply is null
            head["values"] = {name: value if math.isfinite(value) else None for name, value in head["values"].items()}
        return {"schema": SCHEMA, **plain, "summary": self.summary()}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Report:
        """A report from its JSON."""
        if data.get("schema") != SCHEMA:
            raise ArgumentError("report", f"has schema {data.get('schema')!r}", f"this version of regard reads schema {SCHEMA}")
        plain = {key: data[key] for key in ("model", "kind", "parameters", "inputs", "layers")}
        return Report(
            **plain,
            columns=[Column(**c) for c in data["columns"]],
            heads=[
                Head(**{**h, "values": {name: math.nan if value is None else value for name, value in h["values"].items()}})
                for h in data["heads"]
            ],
            missing=[Missing(**m) for m in data["missing"]],
        )

    def summary(self) -> list[str]:
        """What a reader should know first, in sentences."""
        covered = len({h.site for h in self.heads})
        worst = max((h.disagreement for h in self.heads), default=0.0)
        equal = f"each declaration equals the module's own output to {worst:.0e}" if self.heads else "nothing was measured"
        sentences = [
            f"{covered} of {covered + len(self.missing)} attention layers are covered: {len(self.heads)} heads, "
            f"written (layer, head), on {len(self.inputs)} inputs; {equal}."
        ]
        sentences += [f"Not covered: {m.site} ({m.kind}): {m.reason}." for m in self.missing]
        for column in self.columns:
            ranked = self.ranked(column)
            if ranked:
                typical = statistics.median(h.values[column.name] for h in ranked)
                first = ", ".join(f"({h.layer}, {h.head}) {h.values[column.name]:.3g}" for h in ranked[:3])
                word = "Largest" if column.high_is_alarming else "Smallest"
                sentences.append(f"{word} {column.title}: {first}; the median is {typical:.3g}.")
        return sentences

    def ranked(self, column: Column) -> list[Head]:
        """Heads in the order in which one should look at them."""
        finite = [h for h in self.heads if math.isfinite(h.values[column.name])]
        return sorted(finite, key=lambda h: h.values[column.name], reverse=column.high_is_alarming)

    def save(self, directory: Path) -> list[Path]:
        """Write report.json and report.html, each at once or not at all."""
        page = self.html()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            paths = [directory / "report.json", directory / "report.html"]
            write_atomically(paths[0], json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False))
            write_atomically(paths[1], page)
        except OSError as error:
            raise ArgumentError(
                "--out", f"{directory} cannot be written ({error.strerror})", "give a directory you may write to"
            ) from error
        return paths

    def html(self) -> str:
        """One page that needs nothing else: no scripts from elsewhere, no network."""
        try:
            import jinja2
        except ImportError:
            raise MissingExtraError("jinja2", "report") from None
        loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
        environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
        return environment.get_template("report.html.j2").render(report=self, tables=[self._table(c) for c in self.columns])

    def _table(self, column: Column) -> dict[str, Any]:
        """A layer × head map of one column, with a shade in [0, 1] for each cell: dark is where to look."""
        finite = [h.values[column.name] for h in self.heads if math.isfinite(h.values[column.name])]
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        rows: dict[int, list[dict[str, Any]]] = {}
        for head in self.heads:
            value = head.values[column.name]
            share = (value - low) / (high - low) if high > low and math.isfinite(value) else 0.0
            rows.setdefault(head.layer, []).append(
                {"head": head, "value": value, "shade": round(share if column.high_is_alarming else 1 - share, 3)}
            )
        return {"column": column, "rows": rows, "heads": max((len(cells) for cells in rows.values()), default=0)}


def write_atomically(path: Path, text: str) -> None:
    """The whole text or the old file: written beside it, then moved."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
