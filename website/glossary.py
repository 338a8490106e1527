"""Hover texts, from the table of docs/glossary.md."""

from __future__ import annotations

import re
from functools import cache

from website.repository import ROOT

PAGE = ROOT / "docs" / "glossary.md"
ROW = re.compile(r"^\| \*\*(?P<word>[^*|]+)\*\* \| (?P<meaning>[^|]+) \|$", flags=re.MULTILINE)


@cache
def words() -> dict[str, str]:
    """Words with a hover text, and the text without marks."""
    return {
        found["word"]: re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", found["meaning"])
        for found in ROW.finditer(PAGE.read_text(encoding="utf-8"))
    }


def hover_texts() -> str:
    """As abbreviations of Markdown, to stand at the end of a page."""
    return "\n\n" + "\n".join(f"*[{word}]: {meaning}" for word, meaning in words().items()) + "\n"
