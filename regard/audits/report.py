"""Report: what an audit found, as a value that is written as JSON and read back."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard._written import number, plain
from regard.audits.checks.base import HEAD, LAYER, STACK, Column
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.audits.findings import Finding
    from regard.audits.gate import Gate

SCHEMA = 6
TOLERANCE = 0.05
"""How much worse than in a baseline a number may be, as a share of it."""
DECLARED, OBSERVED = "declared", "observed"
"""How a layer is covered: as a declaration that was checked against the module, or as what it was seen to
compute.
"""


@dataclass(frozen=True)
class InputEntry:
    """One input: its text or a name, its tokens where they have names, whether it was cut to what the model
    takes, the share of its tokens that the tokenizer does not know and what makes it know them, and whether
    its tokens were drawn at random.
    """

    name: str
    tokens: list[str]
    cut: bool = False
    unknown: float = 0.0
    repair: str = ""
    random: bool = False


@dataclass(frozen=True)
class Coverage:
    """One attention module: covered, or the reason why not; how far its declaration is from it, relative,
    on the worst input.

    rounding: how far the module is from itself in float64, relative, where that had to be looked at.
    level: declared, or observed, and then the reason says which piece of it was not understood.
    """

    site: str
    layer: int
    kind: str
    heads: int
    covered: bool
    reason: str
    disagreement: float
    block: str
    rounding: float = 0.0
    level: str = ""


@dataclass(frozen=True)
class Row:
    """The numbers of one head, layer or stack of layers: combined,
    and for each input (one number where no input is needed).
    """

    scope: str
    site: str
    layer: int
    head: int
    values: dict[str, float]
    inputs: dict[str, list[float]]

    @property
    def label(self) -> str:
        """How a reader finds it: the module by its path, the head by its number, the stack by its name."""
        place = self.site or "the model"
        own = {HEAD: f"head {self.head} of {place}", LAYER: place, STACK: f"the stack {self.site}"}
        return own[self.scope] if self.site or self.scope == HEAD else "the model"


@dataclass(frozen=True)
class Skipped:
    """A check that could not be made somewhere, and why."""

    check: str
    site: str
    input: int | None
    reason: str


@dataclass(frozen=True, repr=False)
class Report:
    """The result of an audit. `partial` is empty, or says why the audit is not whole.

    twin: quantiles of columns of the same architecture with random weights, where it was measured.

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> report = regard.audit(model, torch.randn(1, 6, 8), checks=["rows"])  # a Report
        >>> [one.site for one in report.covered], report.partial
        (['layers.0.self_attn', 'layers.1.self_attn'], '')
        >>> regard.audits.Report.from_dict(report.to_dict()).to_dict() == report.to_dict()
        True
    """

    model: dict[str, Any]
    settings: dict[str, Any]
    partial: str
    inputs: list[InputEntry]
    coverage: list[Coverage]
    columns: list[Column]
    rows: list[Row]
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    twin: dict[str, list[float]] = field(default_factory=dict)

    @property
    def random_tokens(self) -> bool:
        """Whether inputs are random tokens, as the tokenizer knows none of the included texts."""
        return any(entry.random for entry in self.inputs)

    @property
    def unit(self) -> str:
        """What was changed in the texts: words, or tokens where no text has words (residues, atoms)."""
        found = {table["unit"] for table in self.tables.get("words", [])}
        return "token" if found == {"token"} else "word"

    @property
    def name(self) -> str:
        """The name of the model."""
        return str(self.model["name"])

    @property
    def heads(self) -> list[Row]:
        """The rows of heads."""
        return [row for row in self.rows if row.scope == HEAD]

    @property
    def layers(self) -> list[Row]:
        """The rows of layers."""
        return [row for row in self.rows if row.scope == LAYER]

    @property
    def stacks(self) -> list[Row]:
        """The rows of stacks of layers: an encoder, a decoder, the network."""
        return [row for row in self.rows if row.scope == STACK]

    @property
    def covered(self) -> list[Coverage]:
        """The attention modules that were measured."""
        return [entry for entry in self.coverage if entry.covered]

    @property
    def observed(self) -> list[Coverage]:
        """The attention modules that were measured without a declaration, each with the reason."""
        return [entry for entry in self.coverage if entry.level == OBSERVED]

    @property
    def missing(self) -> list[Coverage]:
        """The attention modules that were not, each with a reason."""
        return [entry for entry in self.coverage if not entry.covered]

    @property
    def measured(self) -> bool:
        """Whether there is a number at all."""
        return any(not math.isnan(value) for row in self.rows for value in row.values.values())

    def column(self, name: str) -> Column | None:
        """A column by its name."""
        return next((column for column in self.columns if column.name == name), None)

    def block(self, site: str) -> str:
        """The path of the block around an attention module; of that module where no block is known."""
        return next((entry.block for entry in self.coverage if entry.site == site and entry.block), site)

    def ranked(self, name: str) -> list[Row]:
        """The rows that have a column, in the order in which one should look at them."""
        column = self.column(name)
        if column is None:
            _refuse_unknown(name, self.columns)
        low_first = column is not None and column.high_is_alarming is False
        known = [row for row in self.rows if not math.isnan(row.values.get(name, math.nan))]
        return sorted(known, key=lambda row: row.values[name], reverse=not low_first)

    def together(self, row: Row, *names: str) -> tuple[list[float], list[int]]:
        """Return numbers of one row that may be compared, and the inputs that they are of.

        What is compared is combined alike: each number is over the inputs that have all of them, so it can
        differ from the one in `row.values`. Both lists are empty where no input has all of them.
        """
        columns = [column for name in names for column in [self.column(name)] if column is not None]
        if len({column.over for column in columns}) > 1:
            how = ", ".join(f"{column.name} the {column.over}" for column in columns)
            raise ArgumentError(
                "names", f"are combined differently ({how})", "compare what is combined alike"
            )
        numbers = [row.inputs.get(name, []) for name in names]
        inputs = [
            place
            for place in range(min(map(len, numbers)))
            if not any(math.isnan(own[place]) for own in numbers)
        ]
        if len(columns) < len(names) or not inputs:
            return [], []
        pairs = zip(columns, numbers, strict=True)
        return [column.combined(own[place] for place in inputs) for column, own in pairs], inputs

    def over(self, name: str, inputs: Sequence[int]) -> list[tuple[Row, float]]:
        """Return the rows that have a column on some inputs, with their numbers over these inputs alone.

        Numbers of weights are of every input.
        """
        column = self.column(name)
        if column is None:
            return []
        every = [(row, row.inputs.get(name, [])) for row in self.rows]
        own = [
            (row, column.combined(numbers if len(numbers) == 1 else [numbers[place] for place in inputs]))
            for row, numbers in every
            if numbers
        ]
        return [(row, value) for row, value in own if not math.isnan(value)]

    def summary(self) -> list[str]:
        """What a reader should know first, in sentences."""
        from regard.audits.summary import summary

        return summary(self)

    def findings(self) -> list[Finding]:
        """What deserves a look, why, and what can be done about it; the alarming first."""
        from regard.audits.findings import findings

        return findings(self)

    def gate(
        self,
        conditions: str | Sequence[str] = (),
        baseline: Report | str | PathLike[str] | None = None,
        tolerance: float = TOLERANCE,
    ) -> Gate:
        """Why this report fails, one sentence for each reason, and what could not be decided.

        conditions: such as "words.expansion>3": the report fails where the worst row fulfils one, or where
        the column has no number. baseline: an earlier report of the same architecture, or its file; the
        report fails where a number is worse by more than the tolerance, a share of the earlier number.
        """
        from regard.audits.gate import gate_of

        return gate_of(self, conditions, baseline, tolerance)

    def save(self, directory: str | Path) -> list[Path]:
        """Write report.json, report.html and card.md, all of them or none."""
        from regard.audits.page import save

        return save(self, Path(directory), "directory")

    def table(self, scope: str = HEAD) -> Any:
        """The rows of heads, layers or stacks as a pandas DataFrame, a column for each number."""
        from regard.audits.notebook import frame

        return frame(self, scope)

    def __repr__(self) -> str:
        from regard.audits.notebook import short

        return short(self)

    def _repr_html_(self) -> str:
        from regard.audits.notebook import markup

        return markup(self)

    def to_dict(self) -> dict[str, Any]:
        """Every number of the page, with the version of the schema."""
        from regard.audits.summary import sentences
        from regard.audits.yardstick import beside

        said = sentences(self)
        words = {
            "summary": [sentence.text for sentence in said],
            "facts": [sentence.facts for sentence in said],
            "findings": [dataclasses.asdict(finding) for finding in self.findings()],
            "yardstick": beside(self),
        }
        whole = dataclasses.asdict(self)
        for row, written in zip(self.rows, whole["rows"], strict=True):
            written["beside"] = self._beside(row)
        return plain({"schema": SCHEMA, **words, **whole})

    def _beside(self, row: Row) -> dict[str, dict[str, Any]]:
        """For each number of a row what it is compared with, both over the inputs that have both."""
        pairs = {
            column.name: (column.beside, *self.together(row, column.name, column.beside))
            for column in self.columns
            if column.beside and column.name in row.values
        }
        return {
            name: {"column": other, "value": values[0], "other": values[1], "inputs": inputs}
            for name, (other, values, inputs) in pairs.items()
            if inputs
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Report:
        """A report from its JSON."""
        if data.get("schema") != SCHEMA:
            raise ArgumentError(
                "report",
                f"has schema {data.get('schema')!r}",
                f"this version of regard reads schema {SCHEMA}, a number",
            )
        _consistent(data)
        return Report(
            model=data["model"],
            settings=data["settings"],
            partial=data["partial"],
            inputs=[InputEntry(**entry) for entry in data["inputs"]],
            coverage=[
                Coverage(**{**entry, **{name: number(entry[name]) for name in ("disagreement", "rounding")}})
                for entry in data["coverage"]
            ],
            columns=[Column(**column) for column in data["columns"]],
            rows=[_row(row) for row in data["rows"]],
            tables=data["tables"],
            skipped=[Skipped(**entry) for entry in data["skipped"]],
            twin=data.get("twin", {}),
        )


def _refuse_unknown(name: str, columns: list[Column]) -> None:
    """A column that no check has is a mistake, and not a column that was not asked for."""
    from regard.audits.checks import checks

    known = {column.name for check in checks() for column in check.columns} | {c.name for c in columns}
    if name not in known:
        near = difflib.get_close_matches(name, sorted(known), 3, 0.5) or sorted(known)
        raise ArgumentError("name", f"is {name!r}, which is not a column", f"use {', '.join(near)}")


def _consistent(data: dict[str, Any]) -> None:
    """A report that was changed by hand must not be taken for one without changes."""
    known, sites = (
        {column["name"] for column in data["columns"]},
        {entry["site"] for entry in data["coverage"]},
    )
    seen = [(row["scope"], row["site"], row["head"]) for row in data["rows"]]
    strange = sorted({name for row in data["rows"] for name in row["values"]} - known)
    lost = sorted({site for scope, site, _ in seen if scope != STACK} - sites)
    named = isinstance(data["model"], dict) and {"name", "kind", "parameters"} <= data["model"].keys()
    typed = named and all(isinstance(row["layer"], int) for row in data["rows"])
    if strange or lost or len(set(seen)) != len(seen) or not typed:
        what = f"the column {strange[0]}" if strange else f"the module {lost[0]}" if lost else "rows"
        raise ArgumentError("report", f"does not agree with itself ({what})", "run the audit again")


def _row(data: dict[str, Any]) -> Row:
    values = {name: number(value) for name, value in data["values"].items()}
    inputs = {name: [number(value) for value in numbers] for name, numbers in data["inputs"].items()}
    kept = {name: value for name, value in data.items() if name != "beside"}
    return Row(**{**kept, "values": values, "inputs": inputs})
