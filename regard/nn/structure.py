"""Whether a module is what it was built as: the same parts with the same settings,
and nothing put in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard._object import Object
from regard._written import write_object
from regard.nn.mechanism import Mechanism
from regard.proofs.intact import FORWARD_HOOKS, hooked, replaced_methods

HOOKS = (*FORWARD_HOOKS, "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def undrawn() -> Iterator[None]:
    """Modules that are built here hold no numbers: nothing is drawn and nothing takes memory."""
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """Normal numbers for a tensor that holds none would only load torch's compiler, which takes a second."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is nn.init.normal_:
            return options["tensor"]
        return function(*arguments, **(options or {}))


def changes(made: nn.Module, model: nn.Module) -> list[str]:
    """How a model differs from one that was just made: in its tensors' names and shapes, its parts,
    their settings; what was put in.
    """
    return differences(made.state_dict(), model.state_dict()) or [*_other_parts(made, model)]


def differences(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """What is missing, what is too much, and what has another shape or another kind of numbers."""
    wrong = [f"lacks {name}" for name in sorted(wanted.keys() - found.keys())]
    wrong += [f"holds {name}, which the model does not have" for name in sorted(found.keys() - wanted.keys())]
    for name in sorted(found.keys() & wanted.keys()):
        own, other = wanted[name], found[name]
        if other.shape != own.shape:
            wrong.append(f"holds {name} as {list(other.shape)}, not {list(own.shape)}")
        elif other.dtype.is_floating_point != own.dtype.is_floating_point:
            wrong.append(f"holds {name} in {other.dtype}, not {own.dtype}")
    return wrong


def intrusions(model: nn.Module) -> Iterator[str]:
    """Parts with hooks or replaced methods, which may compute anything; hooks of regard's monitor only read,
    and do not count.
    """
    for name, part in model.named_modules():
        where = f"in {name}" if name else "of its own"
        methods = replaced_methods(part)
        if methods:
            yield f"has another {methods[0]} {where}"
        if hooked(part, HOOKS):
            yield f"has hooks {where}"


def _other_parts(made: nn.Module, model: nn.Module) -> Iterator[str]:
    wanted, found = (dict(whole.named_modules(remove_duplicate=False)) for whole in (made, model))
    for name in sorted(wanted.keys() ^ found.keys()):
        yield f"has a part {name}" if name in found else f"lacks the part {name}"
    for name in [name for name in found if name in wanted]:
        yield from _other_settings(name, wanted[name], found[name])
    yield from intrusions(model)


def _other_settings(name: str, wanted: nn.Module, found: nn.Module) -> Iterator[str]:
    where = f" in {name}" if name else ""
    if type(found) is not type(wanted):
        yield f"has a {_class(found)}{where}, not a {_class(wanted)}"
        return
    own, other = _settings(wanted), _settings(found)
    for key in [key for key in own if key not in other or write_object(other[key]) != write_object(own[key])]:
        yield f"has {key}={other.get(key)!r}{where}, not {own[key]!r}"


def _class(part: nn.Module) -> str:
    return f"{type(part).__module__}.{type(part).__name__}"


def _settings(part: nn.Module) -> dict[str, Any]:
    """The attributes of a part that are no tensors and no parts."""
    if isinstance(part, Mechanism):
        return {"mechanism": _without_numbers(part.value())}
    public = {
        name: value for name, value in vars(part).items() if not name.startswith("_") and name != "training"
    }
    return {name: value for name, value in public.items() if _is_setting(value)}


def _is_setting(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tuple, Object)) or callable(value)


def _without_numbers(value: Any) -> Any:
    """A declaration without its tensors, which are compared by name and shape and may have been learned."""
    return pytree.tree_map(lambda leaf: None if isinstance(leaf, Tensor) else leaf, value)
