"""What each module of a model did on one input, and the maps of sequences that modules are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.audits.adapters.base import Call

Function = Callable[[Tensor], Tensor]


class _Enough(Exception):
    """Raised inside a model once the output that was asked for is there."""


def capture(model: nn.Module, options: dict[str, Any], paths: Sequence[str]) -> dict[str, Call]:
    """The first call and its output of each of these modules while the model runs,
    and how often it was called.
    """
    calls: dict[str, Call] = {}

    def recorder(path: str) -> Callable[..., None]:
        def record(module: nn.Module, arguments: Any, options: Any, output: Any) -> None:
            known = calls.get(path)
            calls[path] = (
                Call(arguments, options, output) if known is None else replace(known, times=known.times + 1)
            )

        return record

    handles = [_module(model, path).register_forward_hook(recorder(path), with_kwargs=True) for path in paths]
    with quiet(model), _hooks(handles), torch.no_grad():
        model(**options)
    return calls


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Without dropout, caches of keys, and fused paths that pass hooks by."""
    modes, fast = (
        [(module, module.training) for module in model.modules()],
        torch.backends.mha.get_fastpath_enabled(),
    )
    caching = _caching(model)
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        torch.backends.mha.set_fastpath_enabled(fast)
        for config in caching:
            config.use_cache = True


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
    """What a module acted on: its first tensor argument."""
    values = [*call.arguments, *call.options.values()]
    return next(value for value in values if isinstance(value, Tensor))


def tokens_in(call: Call) -> Tensor:
    """The one sequence (n, d) that entered a module, whether batches come first or second."""
    found = first_tensor(call)
    return found.reshape(-1, found.shape[-1])


def output_tensor(output: Any) -> Tensor:
    """The tokens (n, e) that a module returned, alone or first of several."""
    found = output[0] if isinstance(output, (tuple, list)) else output
    found = found if isinstance(found, Tensor) else found.last_hidden_state
    return found.reshape(-1, found.shape[-1])


def replay(model: nn.Module, trace: dict[str, Call], paths: Sequence[str]) -> Function:
    """A function that calls the captured modules again, one after the other, with their captured arguments
    but on other tokens: (n, d) to (n, e).
    """

    def run(x: Tensor) -> Tensor:
        with quiet(model):
            for path in paths:
                arguments, options = _with_tokens(trace[path].arguments, trace[path].options, x)
                x = output_tensor(_module(model, path)(*arguments, **options))
        return x

    return run


def _with_tokens(
    arguments: tuple[Any, ...], options: dict[str, Any], x: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with x in place of its first tensor; where a sequence is compared with itself,
    in each of those places.
    """
    old = first_tensor(Call(arguments, options, None))
    new = x.reshape(*old.shape[:-1], x.shape[-1])
    return tuple(new if v is old else v for v in arguments), {
        k: new if v is old else v for k, v in options.items()
    }


def passage(model: nn.Module, options: dict[str, Any], start: str, end: str) -> Function:
    """The tokens that enter the module `start` to the tokens that leave the module `end`,
    the rest of the model as it is.
    """

    def run(x: Tensor) -> Tensor:
        found: list[Tensor] = []

        def enter(module: nn.Module, arguments: Any, named: Any) -> Any:
            return _with_tokens(arguments, named, x)

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            found.append(output_tensor(output))
            raise _Enough

        handles = [
            _module(model, start).register_forward_pre_hook(enter, with_kwargs=True),
            _module(model, end).register_forward_hook(leave),
        ]
        with quiet(model), _hooks(handles):
            try:
                model(**options)
            except _Enough:
                return found[0]
        raise RuntimeError(f"the model did not call {end}")

    return run
