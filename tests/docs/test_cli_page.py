"""The page of the command line is what the commands print."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("typer")
ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_script_writes():
    spec = importlib.util.spec_from_file_location("make_cli", ROOT / "docs" / "make_cli.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.text(), "run python docs/make_cli.py"
