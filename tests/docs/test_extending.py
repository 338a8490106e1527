"""docs/extending.md shows each addition whole: one file for the noun, one for its test,
and nothing else is touched.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import regard
from tests.docs.test_snippets import ROOT, _nothing_stays_registered, blocks  # noqa: F401 (a fixture)

PACKAGE = Path(regard.__file__).parent
SECTIONS = ("A potential", "A normalizer", "A support", "A theorem", "A model family")
PROBES = (
    "x, u = ",
    "broken = ",
    "bound = ",
    "attack = ",
    "fixed = ",
    "found = ",
    "model = ",
    "report = ",
    "refused = ",
)
"""Assignments that only a test needs."""


def section(title: str) -> str:
    """The code of a section of the page."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    body = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return "\n\n".join(code for _, code in blocks(body))


def parted(code: str) -> tuple[str, str]:
    """What adds a noun, and what tests it."""
    noun, test = [], []
    for statement in ast.parse(code).body:
        text = ast.unparse(statement)
        adds = isinstance(statement, (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef))
        adds = (
            adds
            or text.startswith("register(")
            or (isinstance(statement, ast.Assign) and not text.startswith(PROBES))
        )
        (noun if adds else test).append(text)
    return "\n".join(noun), "\n".join(test)


def imports() -> str:
    """What the first section imports, for all."""
    return "\n".join(
        ast.unparse(s)
        for s in ast.parse(section(SECTIONS[0])).body
        if isinstance(s, (ast.Import, ast.ImportFrom))
    )


def state() -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in PACKAGE.rglob("*.py")}


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("added_noun", "added_test"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("title", SECTIONS)
def test_an_addition_is_one_file_and_its_test(title: str, room: Path) -> None:
    noun, test = parted(section(title))
    assert "check_" in test or "assert" in test
    before = state()
    (room / "added_noun.py").write_text(f"{imports()}\n{noun}\n", encoding="utf-8")
    (room / "added_test.py").write_text(f"{imports()}\nfrom added_noun import *\n{test}\n", encoding="utf-8")
    importlib.import_module("added_test")  # runs every check and every assertion of the section
    assert sorted(path.name for path in room.glob("*.py")) == ["added_noun.py", "added_test.py"]
    assert state() == before


def test_a_broken_noun_does_not_pass(room: Path) -> None:
    """The files really run: with the bias of keys forgotten, a law of the potential's own test breaks."""
    noun, test = parted(section("A potential"))
    assert "key_bias=keys[1].squeeze(-1)" in noun
    noun = noun.replace(", key_bias=keys[1].squeeze(-1)", "")
    (room / "added_noun.py").write_text(f"{imports()}\n{noun}\n", encoding="utf-8")
    (room / "added_test.py").write_text(f"{imports()}\nfrom added_noun import *\n{test}\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="the reduction to a dot product is exact"):
        importlib.import_module("added_test")
