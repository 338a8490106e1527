"""What each module of a model did on one input, and the maps of sequences that modules are there."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from regard.audits.adapters.base import Block, Call, NotCovered
from regard.audits.calling import called, fresh, moving_tensors, path_and_turn

Function = Callable[[Tensor], Tensor]
Leaves = dict[str, tuple[int, ...]]
"""By the names of calls, places among the leaves of their arguments."""


class _Enough(Exception):
    """Raised inside a model once the output that was asked for is there."""


def capture(model: nn.Module, options: dict[str, Any], names: Sequence[str]) -> dict[str, Call]:
    """Every call of these modules while the model runs, by name: the path for the first call of a module,
    `called` for others. A module may be named by any of its calls.
    """
    paths = list(dict.fromkeys(path_and_turn(name)[0] for name in names))
    with recording(model, paths) as calls, quiet(model), torch.no_grad():
        model(**fresh(options))
    return calls


@contextmanager
def recording(model: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, Call]]:
    """While inside, the calls of these modules are kept; no hook remains, whatever happens."""
    calls: dict[str, Call] = {}
    handles = []
    try:
        for path in paths:
            handles += _record(calls, path, _module(model, path))
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _record(calls: dict[str, Call], path: str, module: nn.Module) -> list[Any]:
    """Hooks that keep what the module at a path is called with, before it can change that, and returns."""
    entered: list[tuple[Any, Any]] = []
    turns = itertools.count()

    def enter(module: nn.Module, arguments: Any, options: Any) -> None:
        entered.append((fresh(arguments), fresh(options)))

    def leave(module: nn.Module, arguments: Any, options: Any, output: Any) -> None:
        calls[called(path, next(turns))] = Call(*entered.pop(), output)

    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, with_kwargs=True),
    ]


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Without dropout, caches of keys, and what passes hooks by: fused paths, and direct calls of forward."""
    modes, fast = (
        [(module, module.training) for module in model.modules()],
        torch.backends.mha.get_fastpath_enabled(),
    )
    caching = _caching(model)
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    for config in caching:
        config.use_cache = False
    changed = [module for module in model.modules() if "forward" not in vars(module)]
    for module in changed:
        vars(module)["forward"] = MethodType(_hooked(type(module)), module)
    try:
        yield
    finally:
        for module in changed:
            vars(module).pop("forward", None)
        for module, training in modes:
            module.training = training
        torch.backends.mha.set_fastpath_enabled(fast)
        for config in caching:
            config.use_cache = True


def _hooked(kind: type[nn.Module]) -> Callable[..., Any]:
    """The forward method of a class, which calls the module with its hooks where the model calls it as a
    method: `layer.forward(x)`.
    """

    @functools.wraps(kind.forward)
    def forward(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        if sys._getframe(1).f_code.co_filename == torch.nn.modules.module.__file__:
            return kind.forward(module, *arguments, **options)
        return nn.Module.__call__(module, *arguments, **options)

    return forward


def _caching(model: nn.Module) -> list[Any]:
    """The configurations that ask for a cache: a decoder inside a model may have its own."""
    found = {
        id(config): config
        for module in model.modules()
        if (config := getattr(module, "config", None)) is not None
    }
    return [config for config in found.values() if getattr(config, "use_cache", None)]


@contextmanager
def _hooks(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _module(model: nn.Module, path: str) -> nn.Module:
    return model.get_submodule(path) if path else model


def first_tensor(call: Call) -> Tensor:
    """What a module acted on: its first tensor of real numbers."""
    found = next(moving_tensors((call.arguments, call.options)), None)
    if found is None:
        raise NotCovered("a module was called without a tensor of real numbers")
    return found


def tokens_in(call: Call) -> Tensor:
    """The one sequence (n, d) that entered a module, whether batches come first or second."""
    found = first_tensor(call)
    return found.reshape(-1, found.shape[-1])


def output_tensor(output: Any) -> Tensor:
    """The tokens (n, e) that a module returned, alone or first of several."""
    found = next(moving_tensors(output), None)
    found = output.last_hidden_state if found is None else found
    return found.reshape(-1, found.shape[-1])


def call_again(module: nn.Module, call: Call, tokens: dict[Tensor, Tensor]) -> Any:
    """A module, called as it was but with other tensors in the place of some."""
    other = {id(old): new.reshape(*old.shape[:-1], new.shape[-1]) for old, new in tokens.items()}
    arguments, options = pytree.tree_map(
        lambda leaf: other.get(id(leaf), leaf), (fresh(call.arguments), fresh(call.options))
    )
    return module(*arguments, **options)


def entering(model: nn.Module, options: dict[str, Any], path: str) -> Tensor:
    """The tokens (n, d) that enter the first call of a module; the model stops there."""
    found: list[Tensor] = []

    def enter(module: nn.Module, arguments: Any, named: Any) -> None:
        found.append(tokens_in(Call(arguments, named, None)))
        raise _Enough

    handle = _module(model, path).register_forward_pre_hook(enter, with_kwargs=True)
    with quiet(model), _hooks([handle]), torch.no_grad():
        try:
            model(**fresh(options))
        except _Enough:
            return found[0]
    raise NotCovered(f"the model did not call {path}")


def replay(model: nn.Module, trace: dict[str, Call], names: Sequence[str]) -> Function:
    """A function that makes the captured calls again, one after the other, with their captured arguments
    but on other tokens: (n, d) to (n, e).
    """

    def run(x: Tensor) -> Tensor:
        with quiet(model):
            for name in names:
                module = _module(model, path_and_turn(name)[0])
                x = output_tensor(call_again(module, trace[name], {first_tensor(trace[name]): x}))
        return x

    return run


def branch(model: nn.Module, trace: dict[str, Call], block: Block, names: Sequence[str]) -> Function:
    """A branch of a block, or the end of one, as a function of the tokens that enter its first module."""
    if not block.through or tuple(names) == (block.path,):
        return replay(model, trace, names)
    module = _module(model, path_and_turn(block.path)[0])
    start, end = (path_and_turn(name)[0] for name in (names[0], names[-1]))
    leaves = {start: leaves_of(trace[names[0]], first_tensor(trace[names[0]]))}
    return _between(model, lambda: call_again(module, trace[block.path], {}), leaves, end)


def passage(model: nn.Module, options: dict[str, Any], leaves: Leaves, end: str) -> Function:
    """What a call returns as a function of the tokens at some leaves, the rest of the model as it is."""
    return _between(model, lambda: model(**fresh(options)), leaves, end)


def leaves_of(call: Call, tokens: Tensor) -> tuple[int, ...]:
    """Which leaves of the arguments of a call are these tokens: where a sequence is compared with itself,
    all of them.
    """
    rows = tokens.reshape(-1, tokens.shape[-1])

    def same(leaf: Any) -> bool:
        alike = isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.data_ptr() == tokens.data_ptr()
        return bool(alike and leaf.numel() == tokens.numel() and torch.equal(leaf.reshape(rows.shape), rows))

    leaves = pytree.tree_leaves((call.arguments, call.options))
    return tuple(place for place, leaf in enumerate(leaves) if leaf is tokens or same(leaf))


@contextmanager
def replaced(model: nn.Module, leaves: Leaves, x: Tensor) -> Iterator[None]:
    """While inside, calls are given other tokens at these leaves of their arguments."""

    def enter(places: tuple[int, ...], module: nn.Module, arguments: Any, named: Any) -> Any:
        flat, structure = pytree.tree_flatten((arguments, named))
        for place in places:
            flat[place] = x.reshape(*flat[place].shape[:-1], x.shape[-1])
        return pytree.tree_unflatten(flat, structure)

    handles: list[Any] = []
    with _hooks(handles):
        for name, places in leaves.items():
            path, turn = path_and_turn(name)
            hook = _only(turn, functools.partial(enter, places))
            handles.append(_module(model, path).register_forward_pre_hook(hook, with_kwargs=True))
        yield


def _between(model: nn.Module, call: Callable[[], Any], leaves: Leaves, end: str) -> Function:
    """The same in one call of the model or of a part of it, which stops after the call it ends with."""
    path, turn = path_and_turn(end)

    def run(x: Tensor) -> Tensor:
        found: list[Tensor] = []

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            found.append(output_tensor(output))
            raise _Enough

        handle = _module(model, path).register_forward_hook(_only(turn, leave))
        with _hooks([handle]), quiet(model), replaced(model, leaves, x):
            try:
                call()
            except _Enough:
                return found[0]
        raise NotCovered(f"{end} was not called as a module when the model ran again")

    return run


def _only(turn: int, hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that acts in one call of its module alone."""
    calls = itertools.count()
    return lambda *arguments: hook(*arguments) if next(calls) == turn else None
