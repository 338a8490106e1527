"""Adapter: what a family of models must say about its attention modules. Classes are known by name, so nothing is imported for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from regard.attention import Attention

_adapters: dict[str, Adapter] = {}


class NotCovered(Exception):
    """Raised by an adapter that meets something it does not know; the message is the reason the report gives."""


class Adapter(ABC):
    """How one attention module becomes a declaration."""

    @abstractmethod
    def declare(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Attention, Tensor]:
        """The declaration, and the points (batch, 1, n, d) it acts on, from the module and the call that was captured."""

    @abstractmethod
    def own_output(self, module: nn.Module, output: Any) -> Tensor:
        """The module's own output as (batch, heads, n, e)."""

    @abstractmethod
    def output_projection(self, model: nn.Module, name: str, module: nn.Module) -> Tensor:
        """w_o (heads, e, d): how each head's output enters the layer's."""


def register(*class_names: str, adapter: Adapter) -> None:
    """Make an adapter known for attention modules with these class names."""
    for name in class_names:
        if name in _adapters:
            raise ValueError(f"there is an adapter for {name} already")
        _adapters[name] = adapter


def adapter_of(module: nn.Module) -> Adapter | None:
    """The adapter for a module, by the name of its class."""
    return _adapters.get(type(module).__name__)


def adapters() -> dict[str, Adapter]:
    """All adapters by class name."""
    return dict(_adapters)


def refuse_unknown(options: dict[str, Any], known: set[str]) -> None:
    """An argument that changes attention and that nobody here understands must not be ignored."""
    unknown = sorted(key for key, value in options.items() if key not in known and value is not None)
    if unknown:
        raise NotCovered(f"the module was called with {', '.join(unknown)}, which this adapter does not know")
