"""Modules that compute what their class does: no subclass, replaced method, hook or random weight."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import isabstract
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere
from torch.nn.utils import parametrize

from regard.errors import ArgumentError
from regard.proofs.theorem import Refusal

METHODS = ("forward", "__call__", "_call_impl", "_wrapped_call_impl")
"""The methods that run a module."""
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""The hooks that may change a value."""
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""Modules that do nothing outside of training."""


def refuse_altered(module: nn.Module, kind: type[nn.Module]) -> None:
    """Refuse a module that may compute something other than `kind` does.

    Subclasses are refused unless `kind` is abstract. A parametrization is accepted where it gives the same
    weights twice.
    """
    found = parametrize.type_before_parametrizations(module)
    name, remedy = found.__name__, f"say what with @declare.rule({found.__name__})"
    own = [method for method in METHODS if getattr(found, method) is not getattr(kind, method)]
    own += replaced_methods(module)
    if own:
        why = f"it has a {own[0]} of its own"
        raise Refusal(f"{name} computes something other than {kind.__name__}, since {why}; {remedy}")
    if found is not kind and not isabstract(kind):
        raise Refusal(f"{name} is a subclass of {kind.__name__} and may compute something else; {remedy}")
    if hooked(module, FORWARD_HOOKS):
        raise Refusal(f"{name} has hooks, which may change what it computes; remove them first")
    if _foreign([*everywhere._global_forward_hooks.values(), *everywhere._global_forward_pre_hooks.values()]):
        raise Refusal("a global forward hook may change what every module computes; remove it first")
    _refuse_random_weights(module, name)


def parametrized(part: nn.Module) -> list[str]:
    """The names of the weights of a module that are computed whenever they are read."""
    found: Any = part.parametrizations if parametrize.is_parametrized(part) else ()
    return [*found]


def replaced_methods(part: nn.Module) -> list[str]:
    """The names of methods that a module has in addition to those of its class."""
    return [key for key in vars(part) if callable(getattr(type(part), key, None))]


def hooked(part: nn.Module, kinds: Sequence[str]) -> bool:
    """Whether a module has hooks other than regard's own, which only read."""
    return _foreign([hook for kind in kinds for hook in getattr(part, kind).values()])


def _foreign(hooks: list[object]) -> bool:
    return any(not str(getattr(hook, "__module__", "")).startswith("regard.") for hook in hooks)


def _refuse_random_weights(module: nn.Module, name: str) -> None:
    for weight in parametrized(module):
        if any(drops(part) for part in module.get_submodule(f"parametrizations.{weight}").modules()):
            raise in_training(f"the dropout of its parametrized {weight} is random")
        first, second = getattr(module, weight), getattr(module, weight)
        if _same(first, second):
            continue
        if module.training:
            raise in_training(f"each access to its parametrized {weight} gives other numbers")
        raise Refusal(
            f"each access to the parametrized {weight} of {name} gives other numbers; remove the "
            "parametrization with torch.nn.utils.parametrize.remove_parametrizations"
        )


def drops(part: nn.Module) -> bool:
    """Whether a module is a dropout that is active, so that it may change what it is given."""
    return isinstance(part, DROPOUTS) and part.training and part.p > 0


def _same(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)


def in_training(why: str) -> ArgumentError:
    """The error of a module that computes something else in training mode."""
    return ArgumentError("module", f"is in training mode: {why}", "call module.eval() first")
