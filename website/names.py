"""The public names: which module has them, where they are written, what theorems and pages say of them."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from tests.docs.test_snippets import blocks

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {
    "Declare": "attention measure kernel potentials normalizers supports lookups moments normed tilt maps "
    "parameters",
    "Run": "compute engines costs compression",
    "Differentiate and prove": "derive proofs certificate domains norms transport theorems",
    "Train and trust": "nn nonexpansive lipschitz_norm fixed_point training callbacks",
    "Move": "dynamics flows",
    "Trained models": "audits decisions choices hf plot",
    "Extend": "testing errors",
}
"""The modules of the reference, by what one does with them."""


@dataclass(frozen=True)
class Name:
    """A public name: its module, the value, and other modules that have it too."""

    module: str
    name: str
    value: Any = field(repr=False)
    also: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def defined(self) -> str:
        """Where it is written, as griffe says it."""
        home = getattr(self.value, "__module__", None)
        known = isinstance(home, str) and home.startswith("regard") and hasattr(self.value, "__qualname__")
        return f"{home}.{self.value.__qualname__}" if known else self.path

    @property
    def said(self) -> str:
        """What it says of itself: a docstring, or the text below the line that makes a value."""
        if hasattr(self.value, "__qualname__"):
            return inspect.getdoc(self.value) or ""
        found = _assigned(self.name, self.value)
        return "" if found is None else found[2]

    @property
    def sentence(self) -> str:
        """The first paragraph of that, on one line."""
        return " ".join(self.said.split("\n\n")[0].split())

    @property
    def place(self) -> tuple[str, int] | None:
        """The file, from the root, and the line."""
        if not hasattr(self.value, "__qualname__"):
            found = _assigned(self.name, self.value)
            return None if found is None else (found[0].relative_to(ROOT).as_posix(), found[1])
        module = sys.modules.get(getattr(self.value, "__module__", None) or "")
        file = Path(getattr(module, "__file__", None) or "/").resolve()
        if not file.is_relative_to(ROOT / "regard"):
            return None
        line = lines(file).get(getattr(self.value, "__qualname__", ""))
        return None if line is None else (file.relative_to(ROOT).as_posix(), line)


@cache
def lines(file: Path) -> dict[str, int]:
    """Where the classes and functions of a file begin."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name: node.lineno for node in tree.body if isinstance(node, kinds)}


def _assigned(name: str, value: Any) -> tuple[Path, int, str] | None:
    """Where a value gets its name: the file, the line, and the text below it."""
    for module in [one for key, one in sys.modules.items() if key.startswith("regard")]:
        file = Path(getattr(module, "__file__", None) or "/").resolve()
        if vars(module).get(name) is value and file.is_relative_to(ROOT / "regard"):
            found = assignments(file).get(name)
            if found is not None:
                return file, *found
    return None


@cache
def assignments(file: Path) -> dict[str, tuple[int, str]]:
    """Names that a file assigns, each with its line and the text below it."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    found = {}
    for node, below in zip(body, [*body[1:], None], strict=True):
        goal = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(goal, ast.Name):
            text = below.value if isinstance(below, ast.Expr) else None
            said = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
            found[goal.id] = (node.lineno, inspect.cleandoc(said))
    return found


def modules() -> list[str]:
    return [f"regard.{name}" for names in ROOMS.values() for name in names.split()]


def public(module: ModuleType) -> list[str]:
    """What a module offers: its __all__, or what is written in it."""
    found = vars(module).get("__all__")
    if found is not None:
        return list(found)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


@cache
def names() -> tuple[Name, ...]:
    """Every public name once, in the order of the rooms; the first room that has a value keeps it."""
    kept: dict[int, Name] = {}
    for home in [*modules(), "regard"]:
        module = importlib.import_module(home)
        for name in public(module):
            value = getattr(module, name)
            if isinstance(value, ModuleType | TypeVar):
                continue
            before = kept.get(id(value))
            kept[id(value)] = (
                Name(home, name, value)
                if before is None
                else Name(before.module, before.name, value, (*before.also, f"{home}.{name}"))
            )
    return tuple(kept.values())


@cache
def theorems_about() -> dict[str, list[str]]:
    """Names of types and functions, and the theorems whose page names them as what asks for them."""
    found: dict[str, list[str]] = {}
    for page in sorted((ROOT / "docs" / "theorems").glob("*.md")):
        asked = page.read_text(encoding="utf-8").partition("## In the code")[2]
        for name in set(re.findall(r"`(?:regard\.)?(?:\w+\.)*(\w+)`", asked)):
            found.setdefault(name, []).append(page.stem)
    return found


@cache
def pages_about() -> dict[str, list[str]]:
    """Paths of public names, and the pages whose code uses them."""
    found: dict[str, list[str]] = {}
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        used = set().union(*(used_in(source) for _, source in blocks(text)))
        for path in used:
            found.setdefault(path, []).append(page.stem)
    return found


def used_in(source: str) -> set[str]:
    """Paths that begin with regard in a piece of code, written out or imported."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("regard"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            if re.fullmatch(r"regard(\.\w+)+", path):
                found.add(path)
    return found
