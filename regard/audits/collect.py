"""From the results of single places to a report."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

from regard._written import number
from regard.audits.checks.base import HEAD, LAYER, STACK, Column
from regard.audits.report import DECLARED, OBSERVED, Coverage, InputEntry, Report, Row, Skipped
from regard.audits.store import fingerprint

if TYPE_CHECKING:
    from torch import nn

    from regard.audits.checks import Check
    from regard.audits.inputs import Input
    from regard.audits.noticing import Noticed
    from regard.audits.places import Place
    from regard.audits.store import Store

PAIRS = "pairs"
"""The name of a result in the store: the answers to pairs of texts that the user gave."""
TWIN = "twin"
"""The name of a result in the store: what the same architecture has with random weights."""


class Measured(Protocol):
    """What a report is made from: an audit of a loaded model, or of a checkpoint by its weights."""

    name: str
    checks: tuple[Check, ...]
    inputs: list[Input]
    store: Store
    original: nn.Module
    seed: int

    @property
    def places(self) -> list[Place]:
        """Where attention is."""

    @property
    def model(self) -> nn.Module:
        """The model in the arithmetic of the audit."""

    @property
    def noticed(self) -> Noticed:
        """What was seen of attention while the model ran."""


def collect(run: Measured, partial: str) -> Report:
    """The report of what an audit has in its store."""
    gathering = _Gathering(run)
    coverage = gathering.coverage()
    covered = {entry.site for entry in coverage if entry.covered}
    known = {entry.site: entry for entry in coverage}
    rows = [row for row in gathering.rows() if row.scope == STACK or row.site in covered]
    twin = run.store.get(TWIN) or {}
    if "reason" in twin:
        gathering.skipped.append(Skipped("the untrained twin", "", None, twin["reason"]))
    return Report(
        model=_model(run),
        settings={
            "checks": [check.name for check in run.checks],
            "arithmetic": str(_arithmetic(run)),
            "quick": [check.name for check in run.checks if check.is_quick],
            "thorough": bool(getattr(run, "thorough", False)),
            "radius": _decision_seconds(run),
            "seed": run.seed,
            "every_word": bool(getattr(run, "every_word", False)),
            "pairs": fingerprint(*pairs) if (pairs := getattr(run, "pairs", ())) else "",
        },
        partial=partial,
        inputs=[_entry(item) for item in run.inputs],
        coverage=list(known.values()),
        columns=[column for check in run.checks for column in check.columns],
        rows=rows,
        tables=gathering.tables(covered),
        skipped=gathering.skipped,
        twin=twin.get("columns", {}),
    )


def _entry(item: Input) -> InputEntry:
    return InputEntry(item.name, item.tokens, item.cut, item.unknown, item.repair, item.random)


def _decision_seconds(run: Measured) -> float | None:
    """What the check `decision` would take on the first text; None where it was made or would be refused."""
    from regard.audits.checks.answer_radius import predicted_seconds

    made = any(check.name == "radius" for check in run.checks)
    if made or not run.inputs or getattr(run, "disk", None) is not None:
        return None
    return predicted_seconds(run.original, run.inputs[0])


class _Gathering:
    """Reads the store once, and keeps what could not be measured."""

    def __init__(self, run: Measured) -> None:
        from regard.audits.answers import input_key, site_key, weights_key

        self.run, self.skipped = run, []  # type: Measured, list[Skipped]
        store = run.store
        self.weights = [(place, store.get(weights_key(place))) for place in run.places]
        self.sites = [
            (item, place, store.get(site_key(item, place))) for item in run.inputs for place in run.places
        ]
        self.observed = {place.name for _, place, unit in self.sites if unit and unit.get("observed")}
        self.wholes = [(item, store.get(input_key(item))) for item in run.inputs]
        padding = [(item.index, unit["padding"]) for item, unit in self.wholes if unit and "padding" in unit]
        self.skipped += [Skipped("padding", "", index, reason) for index, reason in padding]

    def coverage(self) -> list[Coverage]:
        """Every attention module of the model: covered, or why not."""
        from regard.audits.places import unknown

        entries = [self._coverage(place) for place in self.run.places]
        covered = {entry.site for entry in entries if entry.covered}
        for item, place, unit in self.sites:
            if unit and unit.get("absent") and place.name in covered:
                reason = "this input does not reach it"
                self.skipped.append(Skipped("every check", place.name, item.index, reason))
        return entries + [
            Coverage(path, -1, kind, 0, False, self._nothing_seen(path), math.nan, "")
            for path, kind in unknown(self.run.original, self.run.places)
        ]

    def _nothing_seen(self, path: str) -> str:
        """Why nothing is known about a module that calls itself attention."""
        called = self.run.noticed.called
        if called and path not in called:
            return "it was not called on these inputs: give one that reaches it"
        return "no adapter knows this kind of attention, and it was not seen to compute any"

    def _coverage(self, place: Place) -> Coverage:
        found = [unit for _, own, unit in self.sites if own is place and unit is not None]
        alone = next(unit for own, unit in self.weights if own is place)
        measured = [unit for unit in found if "reason" not in unit]
        observed = next((unit["observed"] for unit in measured if "observed" in unit), "")
        units = found if observed else [*found, alone]
        reasons = [
            unit["reason"]
            for unit in units
            if unit is not None and "reason" in unit and not (measured and unit.get("absent"))
        ]
        worst = max((number(unit["disagreement"]) for unit in measured), default=math.nan)
        heads = measured[0]["heads"] if measured else _head_count(alone)
        if any(check.of_site for check in self.run.checks) and not found:
            reasons.append("not measured yet")
        block = place.block(self.run.original)
        return Coverage(
            place.name,
            place.layer,
            place.kind,
            heads,
            not reasons,
            next(iter(reasons), observed),
            worst,
            "" if block is None or not block.single else block.path,
            max((number(unit.get("rounding", 0.0)) for unit in measured), default=0.0),
            "" if reasons else OBSERVED if observed else DECLARED,
        )

    def rows(self) -> list[Row]:
        """One row for each head, layer and stack."""
        found: dict[tuple[str, str, int], dict[str, list[float]]] = {}
        columns = {column.name: column for check in self.run.checks for column in check.columns}
        places = {place.name: place.layer for place in self.run.places}
        for where, index, results in self._results():
            for check, answer in results.items():
                if "reason" in answer:
                    self.skipped.append(Skipped(check, where, index, answer["reason"]))
                for name, value in (answer.get("numbers") or {}).items():
                    _place(found, columns[name], where, index, value, len(self.run.inputs))
        return [
            Row(scope, site, places.get(site, -1), head, _combined(values, columns), values)
            for (scope, site, head), values in sorted(
                found.items(), key=lambda pair: (pair[0][0], places.get(pair[0][1], -1), pair[0][2])
            )
        ]

    def _results(self) -> list[tuple[str, int | None, dict[str, Any]]]:
        weights = [
            (place.name, None, unit["results"])
            for place, unit in self.weights
            if unit and "results" in unit and place.name not in self.observed
        ]
        sites = [
            (place.name, item.index, unit["results"])
            for item, place, unit in self.sites
            if unit and "results" in unit
        ]
        wholes = [("", item.index, unit["results"]) for item, unit in self.wholes if unit]
        pairs = self.run.store.get(PAIRS)
        return [*weights, *sites, *wholes, *([("", None, pairs["results"])] if pairs else [])]

    def tables(self, covered: set[str]) -> dict[str, list[dict[str, Any]]]:
        """What checks found beyond numbers, by the name of the check."""
        found: dict[str, list[dict[str, Any]]] = {}
        for where, index, results in self._results():
            for check, answer in results.items():
                if answer.get("table") is not None and (where in covered or not where):
                    found.setdefault(check, []).append({"site": where, "input": index, **answer["table"]})
        return found


def _place(found: Any, column: Column, where: str, index: int | None, value: Any, inputs: int) -> None:
    """Put numbers of one place and input where their rows are."""
    if column.scope == STACK:
        entries = [((STACK, stack, -1), one) for stack, one in value.items()]
    elif column.scope == HEAD:
        entries = [((HEAD, where, head), one) for head, one in enumerate(value)]
    else:
        entries = [((LAYER, where, -1), value)]
    for key, one in entries:
        numbers = found.setdefault(key, {}).setdefault(
            column.name, [math.nan] * (1 if index is None else inputs)
        )
        numbers[0 if index is None else index] = number(one)


def _combined(values: dict[str, list[float]], columns: dict[str, Column]) -> dict[str, float]:
    return {name: columns[name].combined(numbers) for name, numbers in values.items()}


def _head_count(unit: Any) -> int:
    """How many heads the weights of a layer have, where an input did not say it."""
    for answer in ((unit or {}).get("results") or {}).values():
        for value in (answer.get("numbers") or {}).values():
            if isinstance(value, list):
                return len(value)
    return 0


def _model(run: Measured) -> dict[str, Any]:
    parameters = list(run.original.parameters())
    own = {id(p) for place in run.places for p in run.original.get_submodule(place.path).parameters()}
    return {
        "name": run.name,
        "kind": type(run.original).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "attention_parameters": sum(p.numel() for p in parameters if id(p) in own),
        "dtype": str(parameters[0].dtype).removeprefix("torch.") if parameters else "",
    }


def _arithmetic(run: Measured) -> str:
    """Declarations and certificates are in float64; the modules run in this, where there are inputs."""
    if not run.inputs:
        return "float64"
    return str(next(run.model.parameters()).dtype).removeprefix("torch.")
