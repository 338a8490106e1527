"""Text of strangers, before it is printed or becomes part of a page."""

from __future__ import annotations

import re
from typing import Any

_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What commands a terminal, reverses the direction of text, or is half of a character."""


def printable(text: str) -> str:
    """Return the text with a replacement character for everything that would command a terminal."""
    return _COMMANDS.sub("\N{REPLACEMENT CHARACTER}", text)


def printable_values(value: Any) -> Any:
    """Return plain values with every text in them printable, keys too."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_values(key): printable_values(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable_values(part) for part in value]
    return value
