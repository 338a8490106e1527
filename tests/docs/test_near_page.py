"""Every equation that the code near an input names is on its page, and the other way round."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def numbers(text):
    return set(re.findall(r"\(N(\d+)\)", text))


def test_code_and_page_name_the_same_equations():
    code = "".join(path.read_text() for path in (ROOT / "regard" / "proofs" / "near").glob("*.py"))
    defined = set(re.findall(r"^- \*\*\(N(\d+)\)\*\*", (ROOT / "docs" / "near.md").read_text(), flags=re.M))
    assert numbers(code) == defined
