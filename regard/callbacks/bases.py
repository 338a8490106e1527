"""The classes of other packages that callbacks derive from."""

from __future__ import annotations

import importlib
from typing import Any


def base(modules: tuple[str, ...], name: str) -> Any:
    """A class by its name, from the first of these modules that is there; `object` where none is."""
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except ImportError:
            continue
    return object
