"""The page of guaranteed networks prints what it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.test_snippets import ROOT, blocks

PAGE = ROOT / "docs" / "guaranteed.md"


def test_the_ladder_of_a_promise_that_cannot_be_kept(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "page"}
    for _, source in blocks(text)[:3]:  # up to the ladder
        exec(compile(source, str(PAGE), "exec"), names)
    (shown,) = re.findall(r"^```text\n(promise: .*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert shown in capsys.readouterr().out


def test_pictures_are_there() -> None:
    for picture in re.findall(r"\]\((pictures/[^)]*)\)", PAGE.read_text(encoding="utf-8")):
        assert Path(ROOT / "docs" / picture).stat().st_size > 1000
