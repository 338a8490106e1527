"""Every module can be imported by its name, and no function or class stands where a module should."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import regard
from regard.errors import MissingExtraError

MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(regard.__path__, "regard.")
    if not found.name.endswith("__main__")
)
OPTIONAL = ("transformers", "typer", "rich", "jinja2", "safetensors", "ot", "plotly")


@pytest.mark.parametrize("name", MODULES)
def test_the_name_of_a_module_is_the_module(name: str) -> None:
    """`import regard.proofs.certification` and then `regard.proofs.certification` as an expression."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, MissingExtraError) or (error.name or "").split(".")[0] in OPTIONAL:
            pytest.skip(f"not installed: {error.name or error}")
        raise
    parent, _, last = name.rpartition(".")
    found = getattr(importlib.import_module(parent), last)
    assert isinstance(found, ModuleType), f"{name} is a module, and {parent} has {found!r} under that name"
    assert found is module


def test_no_public_name_is_the_name_of_a_module() -> None:
    """Except that regard exports modules as themselves."""
    modules = {found.name for found in pkgutil.iter_modules(regard.__path__)}
    assert not {
        name
        for name in regard.__all__
        if name in modules and not isinstance(getattr(regard, name), ModuleType)
    }


def test_verbs_and_modules_live_together() -> None:
    """In a fresh process, in the order in which users write it."""
    code = (
        "import regard, regard.proofs.certification, regard.costs.costing, regard.audits.run, "
        "regard.compute.engines;"
        "print(all(map(callable, (regard.certify, regard.cost, regard.audit))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
