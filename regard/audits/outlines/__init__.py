"""Outlines: what modules a model of transformers is made of, from its config alone and without transformers.

An outline has the names, the classes' names, the shapes and the numbers that adapters read, and computes
nothing. Where a config says something that is not known here there is none, and transformers is asked.
"""

from __future__ import annotations

import importlib
import pkgutil

from regard.audits.outlines.base import Outline, outline_of, outlined

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Outline", "outline_of", "outlined"]
