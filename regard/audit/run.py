"""audit: find the attention of a model, declare it, prove the declaration on the audited inputs, and measure it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.audit.adapters import Adapter, adapter_of
from regard.audit.adapters.base import NotCovered
from regard.audit.checks import Check
from regard.audit.checks import checks as all_checks
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
    checks: Sequence[Check] | None = None,
    name: str = "model",
    progress: Progress | None = None,
) -> Report:
    """Measure every attention head of a loaded model on these inputs: texts (with a tokenizer) or keyword arguments of the model."""
    columns = all_checks() if checks is None else tuple(checks)
    items: list[Any] = list(inputs)
    calls = [_call(item, tokenizer, index) for index, item in enumerate(items)]
    if not calls:
        raise ArgumentError("inputs", "are empty", "give at least one text")
    layers = [Layer(path, index, module, adapter) for index, (path, module, adapter) in enumerate(_known(model))]
    for index, call in enumerate(calls):
        with _captured(model, [layer.path for layer in layers]) as captured:
            model(**call)
        for layer in layers:
            if progress is not None:
                progress(layer.path, index * len(layers) + layer.index, len(calls) * len(layers))
            layer.measure(model, captured.get(layer.path), columns, index)
    unknown = [Missing(path, kind, "no adapter knows this kind of attention") for path, kind in _unknown(model, layers)]
    return Report(
        model=name,
        kind=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        inputs=[item if isinstance(item, str) else f"input {index}" for index, item in enumerate(items)],
        layers=len(layers) + len(unknown),
        columns=[Column(c.name, c.title, c.meaning, c.kind, c.high_is_alarming) for c in columns],
        heads=[head for layer in layers for head in layer.heads(columns)],
        missing=unknown + [Missing(layer.path, type(layer.module).__name__, layer.reason) for layer in layers if layer.reason],
    )


@dataclass
class Layer:
    """One attention module while it is measured: its numbers for each input, or the reason it is not covered."""

    path: str
    index: int
    module: nn.Module
    adapter: Adapter
    reason: str = ""
    worst: float = 0.0
    values: dict[str, list[Tensor]] = field(default_factory=dict)

    def measure(self, model: nn.Module, call: Call | None, columns: Sequence[Check], index: int) -> None:
        """Declare the module, compare with what it did, and measure; the first failure is final."""
        if self.reason:
            return
        try:
            site = self._site(model, call)
            gap = site.disagreement()
        except (NotCovered, ArgumentError) as reason:
            self.reason = str(reason)
            return
        if not gap <= TOLERANCE:
            self.reason = f"the declaration differs from the module's own output by {gap:.1e} (relative) on input {index}"
            return
        self.worst = max(self.worst, gap)
        for check in columns:
            self.values.setdefault(check.name, []).append(check.measure(site))

    def heads(self, columns: Sequence[Check]) -> Iterator[Head]:
        """The combined numbers of each head; none where the layer is not covered."""
        if self.reason:
            return
        combined = {check.name: check.combine(torch.stack(self.values[check.name])) for check in columns}
        for head in range(len(next(iter(combined.values()), ()))):
            yield Head(self.path, self.index, head, self.worst, {name: float(numbers[head]) for name, numbers in combined.items()})

    def _site(self, model: nn.Module, call: Call | None) -> Site:
        if call is None:
            raise NotCovered("the module was not called on this input")
        attention, points = self.adapter.declare(self.module, call.arguments, call.options)
        projection = self.adapter.output_projection(model, self.path, self.module)
        return Site(self.path, self.index, attention, points, projection, self.adapter.own_output(self.module, call.output))


@dataclass(frozen=True)
class Call:
    """What a module was called with, and what it returned."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    output: Any


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


def _known(model: nn.Module) -> Iterator[tuple[str, nn.Module, Adapter]]:
    """The modules that an adapter knows, in the order of the model."""
    for path, module in model.named_modules():
        adapter = adapter_of(module)
        if adapter is not None:
            yield path, module, adapter


def _unknown(model: nn.Module, layers: list[Layer]) -> Iterator[tuple[str, str]]:
    """Modules that call themselves attention, and are neither known nor wrap or sit inside what is known."""
    for path, module in model.named_modules():
        related = any(path in ("", k.path) or k.path.startswith(f"{path}.") or path.startswith(f"{k.path}.") for k in layers)
        if "attention" in type(module).__name__.lower() and not related:
            yield path, type(module).__name__


@contextmanager
def _captured(model: nn.Module, paths: list[str]) -> Iterator[dict[str, Call]]:
    """Record the call and the output of each module while the model runs, without dropout and without a graph."""
    calls: dict[str, Call] = {}

    def recorder(path: str) -> Callable[..., None]:
        def record(module: nn.Module, arguments: Any, options: Any, output: Any) -> None:
            calls[path] = Call(arguments, options, output)

        return record

    training = model.training
    model.eval()
    handles = [model.get_submodule(path).register_forward_hook(recorder(path), with_kwargs=True) for path in paths]
    try:
        with torch.no_grad():
            yield calls
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
