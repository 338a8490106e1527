"""audit: find the attention of a model, declare it, prove the declaration on the audited inputs, and measure it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.audit.adapters import Adapter, adapter_of
from regard.audit.adapters.base import NotCovered
from regard.audit.checks import Check, checks
from regard.audit.report import Column, Head, Missing, Report
from regard.audit.site import TOLERANCE, Site
from regard.errors import ArgumentError

Progress = Callable[[str, int, int], None]
"""Called with what is done now, how much is done, and how much there is."""


def included_sentences() -> list[str]:
    """The sentences that come with the package."""
    return (Path(__file__).parent / "sentences.txt").read_text(encoding="utf-8").splitlines()


def audit(
    model: nn.Module,
    inputs: Sequence[str] | Sequence[dict[str, Tensor]],
    *,
    tokenizer: Any = None,
    checks: Sequence[Check] = (),
    name: str = "model",
    progress: Progress | None = None,
) -> Report:
    """Measure every attention head of a loaded model on these inputs: texts (with a tokenizer) or keyword arguments of the model."""
    columns = tuple(checks) or _all_checks()
    items: list[Any] = list(inputs)
    calls = [_call(item, tokenizer, index) for index, item in enumerate(items)]
    if not calls:
        raise ArgumentError("inputs", "are empty", "give at least one text")
    found = [(path, module, adapter) for path, module in model.named_modules() if (adapter := adapter_of(module)) is not None]
    missing = {
        path: Missing(path, type(module).__name__, "no adapter knows this kind of attention")
        for path, module in _unknown(model, [p for p, _, _ in found])
    }
    values: dict[str, dict[str, list[Tensor]]] = {}
    worst: dict[str, float] = {}
    for index, call in enumerate(calls):
        with _captured(model, [path for path, _, _ in found]) as captured, torch.no_grad():
            model(**call)
        for layer, (path, module, adapter) in enumerate(found):
            if progress is not None:
                progress(path, index * len(found) + layer, len(calls) * len(found))
            if path in missing:
                continue
            try:
                site = _site(model, path, layer, module, adapter, captured.get(path))
            except NotCovered as reason:
                missing[path] = Missing(path, type(module).__name__, str(reason))
                continue
            gap = site.disagreement()
            if not gap <= TOLERANCE:
                missing[path] = Missing(
                    path,
                    type(module).__name__,
                    f"the declaration differs from the module's own output by {gap:.1e} (relative) on input {index}",
                )
                continue
            worst[path] = max(worst.get(path, 0.0), gap)
            store = values.setdefault(path, {check.name: [] for check in columns})
            for check in columns:
                store[check.name].append(check.measure(site))
    heads = [
        head
        for layer, (path, _, _) in enumerate(found)
        if path not in missing
        for head in _heads(path, layer, worst[path], values[path], columns)
    ]
    return Report(
        model=name,
        kind=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        inputs=[str(item) if isinstance(item, str) else f"input {index}" for index, item in enumerate(inputs)],
        layers=len(found),
        columns=[Column(c.name, c.title, c.meaning, c.kind, c.high_is_alarming) for c in columns],
        heads=heads,
        missing=list(missing.values()),
    )


def _all_checks() -> tuple[Check, ...]:
    return checks()


def _call(item: str | dict[str, Tensor], tokenizer: Any, index: int) -> dict[str, Any]:
    """Keyword arguments of the model for one input; a single text needs no padding and so no mask."""
    if not isinstance(item, str):
        return dict(item)
    if tokenizer is None:
        raise ArgumentError(
            "tokenizer", "is missing and the inputs are texts", "give the model's tokenizer, or inputs as dictionaries of tensors"
        )
    if not item.strip():
        raise ArgumentError("inputs", f"text {index} is empty", "remove it or write something")
    return {"input_ids": tokenizer(item, return_tensors="pt", truncation=True)["input_ids"]}


def _unknown(model: nn.Module, covered: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """Modules that call themselves attention, and are neither covered nor wrap or sit inside what is covered."""
    for path, module in model.named_modules():
        related = any(path == c or c.startswith(f"{path}.") or path.startswith(f"{c}.") or path == "" for c in covered)
        if "attention" in type(module).__name__.lower() and not related:
            yield path, module


@contextmanager
def _captured(model: nn.Module, paths: list[str]) -> Iterator[dict[str, tuple[Any, Any, Any]]]:
    """Record the call and the output of each module."""
    calls: dict[str, tuple[Any, Any, Any]] = {}

    def recorder(path: str) -> Callable[..., None]:
        def record(module: nn.Module, arguments: Any, options: Any, output: Any) -> None:
            calls[path] = (arguments, options, output)

        return record

    handles = [model.get_submodule(path).register_forward_hook(recorder(path), with_kwargs=True) for path in paths]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _site(model: nn.Module, path: str, layer: int, module: nn.Module, adapter: Adapter, call: tuple[Any, Any, Any] | None) -> Site:
    if call is None:
        raise NotCovered("the module was not called on this input")
    arguments, options, output = call
    attention, points = adapter.declare(module, arguments, options)
    return Site(path, layer, attention, points, adapter.output_projection(model, path, module), adapter.own_output(module, output))


def _heads(path: str, layer: int, gap: float, values: dict[str, list[Tensor]], columns: Sequence[Check]) -> Iterator[Head]:
    combined = {check.name: check.combine(torch.stack(values[check.name])) for check in columns}
    for head in range(len(next(iter(combined.values())))):
        yield Head(path, layer, head, gap, {name: float(numbers[head]) for name, numbers in combined.items()})
