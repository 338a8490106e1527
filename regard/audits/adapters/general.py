"""Modules that no family's adapter knows: seen to compute attention, and read by their structure."""

from __future__ import annotations

from torch import nn

from regard.audits.adapters.base import Adapter, Block, Call, Declared, Matrices, NotCovered


class General(Adapter):
    """A module that is known by nothing but that it was seen to compute attention."""

    def declare(self, model: nn.Module, path: str, module: nn.Module, call: Call) -> Declared:
        raise NotCovered(f"no adapter knows {type(module).__name__}")

    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        raise NotCovered(f"no adapter knows {type(module).__name__}")

    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        return None

    def parameters(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
        return ()
