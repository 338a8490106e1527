"""Watch: notices every computation of attention while a model runs, and in which module it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from regard.audits.watching.fused import FUNCTIONS, fused_sight
from regard.audits.watching.interface import interface_watched
from regard.audits.watching.product import Weights
from regard.audits.watching.seen import Sight


@dataclass(eq=False)
class Pass:
    """One call of a module while it runs: which one it is of all calls of that module, and the weights that
    are about in it.
    """

    path: str
    turn: int
    call: tuple[tuple[Any, ...], dict[str, Any]]
    weights: Weights = field(default_factory=Weights)


@dataclass(eq=False)
class Noticed:
    """Attention in a module: the modules that are running, the innermost last, and what was noticed."""

    passes: tuple[Pass, ...]
    sight: Sight


class Watch:
    """What was noticed so far, in order."""

    def __init__(self) -> None:
        self.noticed: list[Noticed] = []
        self._passes: list[Pass] = []
        self._turns: dict[str, int] = {}
        self._inside: list[list[Sight]] = []

    @property
    def called(self) -> frozenset[str]:
        """The paths of all modules that were called."""
        return frozenset(self._turns)

    def enter(self, path: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A module is called."""
        turn = self._turns.get(path, 0)
        self._turns[path] = turn + 1
        self._passes.append(Pass(path, turn, (arguments, options)))

    def leave(self) -> None:
        """The innermost module returns."""
        self._passes.pop()

    def around(self, run: Callable[[], Any], make: Callable[[Any, list[Sight]], Sight]) -> Any:
        """Run a call that is attention as a whole: what is noticed meanwhile is inside of it."""
        self._inside.append([])
        try:
            result = run()
        finally:
            inside = self._inside.pop()
        self._add(make(result, inside))
        return result

    def look(self, function: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        """A function of torch was called, and gave this result."""
        if function in FUNCTIONS:
            self._add(fused_sight(arguments, options, result))
            return
        for running in reversed(self._passes[-2:]):  # a softmax may be a module of its own
            running.weights.follow(function, arguments, options, result)
        for depth in (1, 2):  # and so may a product
            passes = self._passes[: len(self._passes) - depth + 1]
            sight = passes[-1].weights.product(function, arguments, result) if passes else None
            if sight is not None:
                self._add(sight, passes)
                return

    def _add(self, sight: Sight, passes: Sequence[Pass] | None = None) -> None:
        if self._inside:
            self._inside[-1].append(sight)
        else:
            self.noticed.append(Noticed(tuple(self._passes if passes is None else passes), sight))


class _Mode(TorchFunctionMode):
    """Shows every function of torch to a watch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, function: Any, types: Sequence[type], arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        if function is F.multi_head_attention_forward:  # Python, and the mode is off inside of it
            with _shown(self._watch):
                return function(*arguments, **options)
        result = function(*arguments, **options)
        self._watch.look(function, arguments, options, result)
        return result


@contextmanager
def _shown(watch: Watch) -> Iterator[None]:
    """While inside, what torch's own multi-head attention is made of is shown to a watch."""
    parts = [(F, "scaled_dot_product_attention"), (F, "softmax"), (torch, "bmm")]
    own = [getattr(home, name) for home, name in parts]
    for (home, name), function in zip(parts, own, strict=True):
        setattr(home, name, _show(watch, function))
    try:
        yield
    finally:
        for (home, name), function in zip(parts, own, strict=True):
            setattr(home, name, function)


def _show(watch: Watch, function: Any) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        watch.look(function, arguments, options, result)
        return result

    return call


@contextmanager
def watching(modules: dict[str, nn.Module]) -> Iterator[Watch]:
    """While inside, a watch of these modules by their paths; no hook remains, whatever happens."""
    watch = Watch()
    with ExitStack() as stack:
        for path, module in modules.items():
            stack.callback(module.register_forward_pre_hook(_entering(watch, path), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(lambda *_: watch.leave(), always_call=True).remove)
        if "transformers" in sys.modules:  # else nothing in the model is from there
            stack.enter_context(interface_watched(watch.around))
        stack.enter_context(_Mode(watch))
        yield watch


def _entering(watch: Watch, path: str) -> Callable[..., None]:
    def enter(module: nn.Module, arguments: Any, options: Any) -> None:
        watch.enter(path, arguments, options)

    return enter
