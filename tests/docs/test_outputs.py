"""What a page says is printed is printed: the text blocks of some pages, line by line."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from tests.docs.test_snippets import ROOT, blocks

PAGES = {"certificates": 20, "index": 4, "recipes": 3, "limits": 4, "comparisons": 1}
"""Pages, and how many lines of output they show at least."""


@pytest.mark.parametrize("name", PAGES)
def test_the_page_prints_what_it_shows(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    program = tmp_path / "page.py"
    program.write_text("\n".join(source for _, source in blocks(text)), encoding="utf-8")
    torch.manual_seed(0)
    runpy.run_path(str(program))
    printed = set(capsys.readouterr().out.splitlines())
    shown = [
        line
        for block in re.findall(r"^```text\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]
    assert len(shown) >= PAGES[name]
    assert not [line for line in shown if line.strip() != "..." and line not in printed]
