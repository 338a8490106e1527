"""The call of a module made once more: on other tokens, and with other tokens where layers inside of it take
theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from regard.audits.adapters.base import Call, NotCovered
from regard.audits.adapters.norms import any_normalize
from regard.audits.calling import called
from regard.audits.capture import call_again, quiet
from regard.audits.watching.places import Spot, spots
from regard.audits.watching.seen import Sight
from regard.audits.watching.watch import watching

Enter = Callable[[str, Tensor], Tensor]
"""From the call of a layer, by name, and the tokens that it was given to those that it is given now."""


@dataclass(eq=False)
class Rerun:
    """sight: the attention that is meant; output: what the module returned; entered, left: the tokens of each
    layer inside, by its call.
    """

    sight: Sight
    output: Any
    entered: dict[str, Tensor] = field(default_factory=dict)
    left: dict[str, Tensor] = field(default_factory=dict)


def rerun(
    model: nn.Module, call: Call, spot: Spot, tokens: dict[Tensor, Tensor], enter: Enter | None = None
) -> Rerun:
    """The call with other tensors in the place of some arguments, and of what layers take."""
    module = model.get_submodule(spot.path)
    entered: dict[str, Tensor] = {}
    left: dict[str, Tensor] = {}
    with quiet(model), ExitStack() as stack:
        if enter is not None:
            for path, layer in _layers(module).items():
                names = map(partial(called, path), itertools.count())
                for handle in _hooked(layer, names, enter, entered, left):
                    stack.callback(handle.remove)
        watch = stack.enter_context(watching(dict(module.named_modules())))
        output = call_again(module, call, tokens)
    sight = spots(watch.noticed).get(Spot("", 0, spot.part))
    if sight is None:
        raise NotCovered("the module computes its attention differently when it is called again")
    return Rerun(sight, output, entered, left)


def _layers(module: nn.Module) -> dict[str, nn.Module]:
    """The linear layers and norms inside of a module."""
    inside = {path: layer for path, layer in module.named_modules() if path}
    leaves = {path for path, layer in inside.items() if not list(layer.children())}
    norms = {path for path in leaves if any_normalize(inside[path]) is not None}
    return {path: layer for path, layer in inside.items() if is_linear(layer) or path in norms}


def is_linear(layer: nn.Module) -> bool:
    """Whether a module is a matrix, and may make queries, keys or values."""
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def _hooked(
    layer: nn.Module, names: Any, enter: Enter, entered: dict[str, Tensor], left: dict[str, Tensor]
) -> list[Any]:
    running: list[str] = []

    def before(module: nn.Module, arguments: Any) -> Any:
        running.append(next(names))
        if not arguments or not isinstance(arguments[0], Tensor):
            return None
        entered[running[-1]] = enter(running[-1], arguments[0])
        return entered[running[-1]], *arguments[1:]

    def after(module: nn.Module, arguments: Any, output: Any) -> None:
        name = running.pop()
        if isinstance(output, Tensor):
            left[name] = output

    return [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
