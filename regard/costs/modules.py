"""The cost of modules of torch: they run on tensors without memory, and each matrix product is booked to a
part by the module and the order in which it happens.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from regard.costs.account import (
    EMBEDDING,
    FEED_FORWARD,
    HEAD,
    MIXING,
    NORMALIZATION,
    OTHER,
    OUTPUT,
    PAIRS,
    PROJECTIONS,
    SCORES,
    SOFTMAX,
    Cost,
    Ledger,
    Part,
    causal_pairs,
    size,
)
from regard.costs.costing import Inputs, assess
from regard.costs.sizes import Sizes
from regard.costs.trace import KERNELS, SOFTMAXES, Event, Trace, following, storage, without_memory
from regard.errors import ArgumentError

FUSED = "fused"
"""The label of kernels that hold scores and mixing."""
SOURCES, TARGETS = {"source", "src"}, {"target", "tgt"}
"""What modules call the sequence that is encoded, and the one that looks at it."""
_aten: Any = torch.ops.aten


@assess.rule(nn.Module)
def _assess(module: nn.Module, sizes: Sizes, inputs: Inputs | None) -> Cost:
    """Run the module on tensors without memory, and book each event with its part."""
    with without_memory(), _silent():
        run = _run(module, sizes, inputs)
    labels = Labels(run.trace.events).found()
    ledger = Ledger(sizes, square=sizes.context is None)
    for event, label in zip(run.trace.events, labels, strict=True):
        _book(event, label, sizes, ledger)
    _own(module, run, labels, ledger)
    return Cost(sizes, ledger.cost().parts, sum(run.kept.values()), ledger.square)


@contextmanager
def _silent() -> Iterator[None]:
    """Without torch's log of operations that fail on shapes: here these are guesses of inputs that did not
    fit, or errors that are raised anyway.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@dataclass
class Run:
    """A module's run without memory: its events, and the bytes of each storage that its backward pass
    needs.
    """

    trace: Trace
    kept: dict[int, int] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)

    def keep(self, tensor: Tensor) -> Tensor:
        """Note what autograd saves, unless it is a parameter or a constant."""
        if self.trace.varies(tensor):
            self.kept[storage(tensor)] = tensor.untyped_storage().nbytes()
            self.alive.append(tensor)
        return tensor


def _run(module: nn.Module, sizes: Sizes, inputs: Inputs | None) -> Run:
    """The first guess of inputs that the module takes, or the given ones;
    what it says of the last is what is reported.
    """
    problem: Exception | None = None
    for args, kwargs in [_arguments(inputs)] if inputs is not None else _guesses(module, sizes):
        try:
            return _call(module, args, kwargs)
        except Exception as error:  # a module is anything, and raises anything
            problem = problem or error
    said = (
        "no inputs could be guessed"
        if problem is None
        else f"{type(problem).__name__}: {_first_line(problem)}"
    )
    remedy = (
        "give inputs=(tensor, ...) or inputs={name: tensor} that it takes; what depends on the values of "
        "tokens cannot be counted"
    )
    raise ArgumentError(
        "inputs", f"{type(module).__name__} could not be run on shapes alone ({said})", remedy
    ) from problem


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
    state = {name: _shadow(tensor) for name, tensor in _state(module)}
    names = {storage(state[name]): name for name, _ in module.named_parameters()}
    run = Run(Trace((args, kwargs), names))
    hooks = torch.autograd.graph.saved_tensors_hooks(run.keep, lambda tensor: tensor)
    with torch.enable_grad(), hooks, _evaluating(module), following(run.trace, module), run.trace:
        torch.func.functional_call(module, state, args, kwargs)
    return run


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Without dropout, which decides by chance what runs; afterwards each module is as it was."""
    before = [(inner, inner.training) for inner in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for inner, training in before:
            inner.training = training


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _shadow(tensor: Tensor) -> Tensor:
    """A tensor of that shape and dtype on the CPU, without memory."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype)
    return made.requires_grad_(isinstance(tensor, nn.Parameter) and tensor.dtype.is_floating_point)


def _arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    shadows = pytree.tree_map(
        lambda t: torch.empty(t.shape, dtype=t.dtype) if isinstance(t, Tensor) else t, inputs
    )
    return ((), dict(shadows)) if isinstance(inputs, Mapping) else (tuple(shadows), {})


def _guesses(module: nn.Module, sizes: Sizes) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Token numbers where there are embeddings, then vectors: one sequence,
    and one more for each argument without a default.
    """
    lengths = _lengths(module, sizes)
    if "decoder_input_ids" in inspect.signature(module.forward).parameters:
        source, target = (
            torch.zeros(sizes.batch, length, dtype=torch.long)
            for length in (sizes.context or sizes.tokens, sizes.tokens)
        )
        yield (), {"input_ids": source, "decoder_input_ids": target}
    numbers = tuple(torch.zeros(sizes.batch, length, dtype=torch.long) for length in lengths)
    vectors = _vectors(module, sizes, lengths)
    embeds = any("Embedding" in type(inner).__name__ for inner in module.modules())
    alone: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (guess, {}) for guess in ([numbers, vectors] if embeds else [vectors, numbers]) if guess
    ]
    beside = _beside(module, sizes, vectors)
    yield from [*beside, *alone] if sizes.context is not None else [*alone, *beside]


def _beside(
    module: nn.Module, sizes: Sizes, vectors: tuple[Tensor, ...]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Vectors with a context, for modules in which a context is optional."""
    context = inspect.signature(module.forward).parameters.get("context")
    if not vectors or context is None or context.default is inspect.Parameter.empty:
        return []
    return [
        (
            vectors,
            {
                "context": vectors[0].new_empty(
                    sizes.batch, sizes.context or sizes.tokens, vectors[0].shape[-1]
                )
            },
        )
    ]


def _vectors(module: nn.Module, sizes: Sizes, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Sequences of vectors, tokens first where the attention of torch wants them so;
    none where no width is known.
    """
    width = sizes.width or _width(module)
    if width is None:
        return ()
    first = any(
        isinstance(inner, nn.MultiheadAttention) and not inner.batch_first for inner in module.modules()
    )
    shapes = [(length, sizes.batch, width) if first else (sizes.batch, length, width) for length in lengths]
    kind = next(
        (p.dtype for p in module.parameters() if p.dtype.is_floating_point), torch.get_default_dtype()
    )
    return tuple(torch.empty(shape, dtype=kind) for shape in shapes)


def _lengths(module: nn.Module, sizes: Sizes) -> list[int]:
    """Of each argument without a default: tokens of the one that looks, the first or the target of a
    source; the others are looked at.
    """
    names = _required(module)
    looking = (
        next((index for index, name in enumerate(names) if name in TARGETS), 0) if SOURCES & {*names} else 0
    )
    return [
        sizes.tokens if index == looking else sizes.context or sizes.tokens
        for index in range(max(1, len(names)))
    ]


def _required(module: nn.Module) -> list[str]:
    """The arguments that have no default."""
    arguments = inspect.signature(module.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        one.name for one in arguments if one.kind in positional and one.default is inspect.Parameter.empty
    ]


def _width(module: nn.Module) -> int | None:
    """The width of the vectors that a module takes, by the first of its modules that says so."""
    for inner in module.modules():
        if isinstance(inner, nn.Linear):
            return inner.in_features
        if isinstance(inner, nn.MultiheadAttention):
            return inner.embed_dim
        if isinstance(inner, (nn.LayerNorm, nn.RMSNorm)):
            return int(inner.normalized_shape[-1])
    return next((p.shape[-1] for p in module.parameters()), None)


@dataclass
class Labels:
    """Which part each event belongs to.

    A product of two things that depend on the input is attention: scores before a softmax, mixing after.
    Products with weights inside the module of the scores and before them are projections, the first after
    mixing is the output. The rest is feed-forward inside the layers (the numbered modules that hold
    attention), before them embedding, and after them the head.
    """

    events: Sequence[Event]
    labels: list[str] = field(default_factory=list)

    def found(self) -> list[str]:
        """One label for each event."""
        normalized, mixed, last = False, False, 0
        for index, event in enumerate(self.events):
            label = self._label(event, normalized, mixed)
            self.labels.append(label)
            if label in (SCORES, FUSED):
                self._project(last, index)
            if label in (MIXING, FUSED):
                last, mixed, normalized = index, True, False
            mixed = mixed and label != OUTPUT
            normalized = event.operation in SOFTMAXES or (normalized and label != SCORES)
        self._outside()
        return self.labels

    def _label(self, event: Event, normalized: bool, mixed: bool) -> str:
        if event.operation in KERNELS:
            return FUSED
        if event.operation is _aten.embedding:
            return EMBEDDING
        if event.operation in SOFTMAXES:
            return SOFTMAX_EVENT
        if event.varying == 0 or (event.varying > 1 and event.rows == event.columns == 1):
            return (
                OTHER  # of constants, such as angles of positions; or of one pair, which only tells a shape
            )
        if event.varying > 1:
            return MIXING if normalized else SCORES
        return OUTPUT if mixed else FEED_FORWARD

    def _project(self, first: int, here: int) -> None:
        for index in range(first, here):
            if self.labels[index] == FEED_FORWARD and _inside(
                self.events[index].path, self.events[here].path
            ):
                self.labels[index] = PROJECTIONS

    def _outside(self) -> None:
        places = [index for index, label in enumerate(self.labels) if label in (FUSED, SCORES)]
        layers = {found.group() for index in places if (found := LAYER.match(self.events[index].path))}
        if not layers:
            return
        for index, label in enumerate(self.labels):
            if label == FEED_FORWARD and not any(_inside(self.events[index].path, layer) for layer in layers):
                self.labels[index] = EMBEDDING if index < places[0] else HEAD if index > places[-1] else label


SOFTMAX_EVENT = "softmax"
LAYER = re.compile(r"(?:.*\.)?\d+(?=\.|$)")
"""The numbered module that holds a path, e.g. model.layers.3 of model.layers.3.self_attn."""


def _inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _book(event: Event, label: str, sizes: Sizes, ledger: Ledger) -> None:
    if label == FUSED:
        seen = _visible(event, sizes, event.causal)
        mixing, half = event.flops - event.scores, event.moved // 2
        softmax = SOFTMAX * event.batch * event.rows * event.columns
        ledger.book(Part(SCORES, event.scores, seen(event.scores), softmax, moved=half))
        ledger.book(Part(MIXING, mixing, seen(mixing), moved=event.moved - half))
    elif label == SOFTMAX_EVENT:
        ledger.book(Part(SCORES, softmax=SOFTMAX * event.batch * event.rows * event.columns))
    elif event.flops:
        visible = _visible(event, sizes, False)(event.flops) if label in PAIRS else event.flops
        ledger.book(Part(label, event.flops, visible, moved=event.moved + event.fixed))


def _visible(event: Event, sizes: Sizes, causal: bool) -> Any:
    """What remains of the flops of all pairs; masks that are tensors are not read,
    so they count as seen unless the sizes say causal.
    """
    rows, columns = (
        (event.rows, event.columns) if event.operation in KERNELS else (sizes.tokens, sizes.tokens)
    )
    if not (causal if sizes.causal is None else sizes.causal) or rows == 1:
        return lambda flops: flops
    return lambda flops: flops * causal_pairs(rows, columns) // (rows * columns)


def _own(module: nn.Module, run: Run, labels: Sequence[str], ledger: Ledger) -> None:
    """Each parameter with the first part that reads it; what no product reads goes with its module,
    or is a norm or a table.
    """
    events = reversed(list(zip(run.trace.events, labels, strict=True)))  # the first reader is written last
    readers = {name: label for event, label in events for name in event.weights}
    owners = {name.rpartition(".")[0]: label for name, label in readers.items()}
    for name, parameter in module.named_parameters():
        label = (
            readers.get(name)
            or owners.get(name.rpartition(".")[0])
            or (NORMALIZATION if parameter.ndim == 1 else OTHER)
        )
        ledger.book(Part(label, parameters=parameter.numel(), weights=size(parameter)))


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[
        :200
    ]
