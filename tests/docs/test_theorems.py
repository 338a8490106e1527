"""The pages of theorems say what the code says, and nothing they point to is missing."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import regard

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "theorems"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_theorems", ROOT / "docs" / "make_theorems.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_what_the_script_writes(make: ModuleType) -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in PAGES.glob("*.md")}
    expected = make.pages()
    assert sorted(written) == sorted(expected), "run python docs/make_theorems.py"
    stale = [name for name, text in expected.items() if written[name] != text]
    assert not stale, "run python docs/make_theorems.py"


def test_every_theorem_is_in_the_index_once(make: ModuleType) -> None:
    listed = re.findall(r"^\| \[(\w+)\]", make.index(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(regard.theorems.THEOREMS)


def test_links_lead_somewhere() -> None:
    for path in PAGES.glob("*.md"):
        for target in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
            assert (PAGES / target).exists(), f"{path.name} points to {target}"


def test_pictures_are_those_of_the_script(make: ModuleType) -> None:
    assert {path.stem for path in (PAGES / "pictures").glob("*.svg")} == set(make.PICTURES)
    assert set(make.PICTURES) <= set(regard.theorems.THEOREMS)


@pytest.mark.parametrize("name", sorted(regard.theorems.THEOREMS))
def test_formulas_survive_markdown(name: str, make: ModuleType) -> None:
    """Dollars and braces come in pairs, and no backslash stands before a sign that Markdown would take for
    its own.
    """
    theorem = regard.theorems.THEOREMS[name]
    for text in (make.prose(theorem.statement), make.prose(theorem.proof)):
        pieces = text.replace("$$", "$").split("$")
        assert len(pieces) % 2 == 1
        for formula in pieces[1::2]:
            assert formula.count("{") == formula.count("}")
            assert not re.search(r"\\[!-/:-@\[-`{-~]", formula)
            assert "<" not in formula
            assert "*" not in formula


def test_accents_of_the_bibliography(make: ModuleType) -> None:
    assert "Valérie Castin, Pierre Ablin and Gabriel Peyré" in make.reference("castin2024")
    assert not re.search(r"[{}\\$]", "".join(make.reference(key) for key in make.bibliography()))
