"""What a page says is printed is printed: the text blocks of docs/certificates.md, line by line."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from tests.docs.test_snippets import ROOT, blocks

PAGE = ROOT / "docs" / "certificates.md"


def test_the_page_prints_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
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
    assert len(shown) > 20
    assert not [line for line in shown if line.strip() != "..." and line not in printed]
