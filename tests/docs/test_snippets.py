"""The pages are programs: every python block of README.md and docs/*.md runs, in order,
in one namespace for each page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from regard.audits.adapters.base import _adapters, _packages
from regard.proofs.theorem import THEOREMS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITHOUT_CODE: frozenset[str] = frozenset({"docs/cli.md", "docs/columns.md", "docs/coverage.md"})
"""Pages that may have no python block, by their path from the root, e.g. "docs/history.md"."""

PRINTED = {
    "README.md": 1,
    "docs/certificates.md": 20,
    "docs/index.md": 4,
    "docs/recipes.md": 3,
    "docs/limits.md": 4,
    "docs/comparisons.md": 1,
    "docs/papers.md": 13,
    "docs/outline.md": 4,
}
"""Pages whose text blocks are what their code prints, and how many lines of it they show at least."""

FENCE = re.compile(r"^ {0,3}(?P<mark>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)$")


def blocks(text: str) -> list[tuple[int, str]]:
    """The python blocks of a page, each with the number of its first line."""
    found: list[tuple[int, str]] = []
    mark, language, start, lines = "", "", 0, []
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if not mark and fence:
            mark, language, start, lines = fence["mark"], (fence["info"].split() or [""])[0], number + 1, []
        elif mark and fence and fence["mark"].startswith(mark) and not fence["info"].strip():
            if language == "python":
                found.append((start, "\n".join(lines) + "\n"))
            mark = ""
        elif mark:
            lines.append(line)
    assert not mark, f"the block that starts at line {start} is not closed"
    return found


def shown(text: str) -> list[str]:
    """The lines of output that a page shows."""
    found = re.findall(r"^```text\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [line for block in found for line in block.splitlines() if line.strip() != "..."]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_blocks_are_found_with_their_lines() -> None:
    text = (
        "a\n```python\nx = 1\n```\n```text\nno\n```\n````md\n```python\nno\n```\n````\n```python\ny = 2\n\n"
        "z = 3\n```\n"
    )
    assert blocks(text) == [(3, "x = 1\n"), (14, "y = 2\n\nz = 3\n")]


def test_pages_listed_without_code_have_none() -> None:
    for name in WITHOUT_CODE:
        assert ROOT / name in PAGES, f"{name} is listed in WITHOUT_CODE and is no page"
        assert not blocks((ROOT / name).read_text(encoding="utf-8")), (
            f"{name} has code now: take it off the list"
        )


@pytest.fixture(autouse=True)
def _nothing_stays_registered() -> Iterator[None]:
    """A page may show how to add a theorem or a family; what follows does not know them."""
    registries: tuple[dict[str, Any], ...] = (THEOREMS, _adapters, _packages)
    known = [dict(registry) for registry in registries]
    yield
    for registry, before in zip(registries, known, strict=True):
        for name in registry.keys() - before.keys():
            del registry[name]


@pytest.mark.parametrize("page", [pytest.param(page, id=name_of(page)) for page in PAGES])
def test_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And prints what it says it prints."""
    text = page.read_text(encoding="utf-8")
    if not text.strip():
        pytest.skip(f"{name_of(page)} is empty")
    found = blocks(text)
    assert found or name_of(page) in WITHOUT_CODE, (
        f"{name_of(page)} has no python block and is not listed in WITHOUT_CODE"
    )
    # A module of its own: classes that a page defines find their namespace, as they would in a file.
    module = ModuleType("page_" + re.sub(r"\W", "_", page.stem))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.manual_seed(0)
    for line, source in found:
        # Blank lines before the block make line numbers those of the page.
        exec(compile("\n" * (line - 1) + source, str(page), "exec", dont_inherit=True), module.__dict__)
    if name_of(page) in PRINTED:
        printed = set(capsys.readouterr().out.splitlines())
        assert len(shown(text)) >= PRINTED[name_of(page)]
        assert not [line for line in shown(text) if line not in printed]
