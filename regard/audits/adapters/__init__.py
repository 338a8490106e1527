"""Adapters: one file for each family of models; each turns an attention module into a declaration.

They load themselves.
"""

from __future__ import annotations

import importlib
import pkgutil

from regard.audits.adapters.base import (
    Adapter,
    Block,
    Call,
    Declared,
    Matrices,
    NotCovered,
    adapter_of,
    adapters,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Adapter", "Block", "Call", "Declared", "Matrices", "NotCovered", "adapter_of", "adapters"]
