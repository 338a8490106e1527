"""Checks: one file for each question; each registers its columns when it is loaded."""

from __future__ import annotations

import importlib
import pkgutil

from regard.audits.checks.base import Check, Column, checks

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Check", "Column", "checks"]
