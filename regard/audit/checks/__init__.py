"""Checks: one file for each column of the report. They load themselves."""

from __future__ import annotations

import importlib
import pkgutil

from regard.audit.checks.base import Check, checks

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Check", "checks"]
