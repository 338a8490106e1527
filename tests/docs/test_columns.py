"""The page of columns says what the code says."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_script_writes():
    spec = importlib.util.spec_from_file_location("make_columns", ROOT / "docs" / "make_columns.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.text(), "run python docs/make_columns.py"
