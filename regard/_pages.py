"""Pages that open from disk: one file each, which asks nothing of the network and runs no text as code."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from regard._printable import printable, printable_values
from regard.errors import MissingExtraError

UNSAFE = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}
"""Signs that could end a script element or a line of a script, as JSON writes them."""


def embedded(data: Any) -> str:
    """Plain values as JSON that no text can break out of."""
    clean = printable_values(data)
    return json.dumps(clean, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(UNSAFE)


def source_hash(text: str) -> str:
    """The source expression of a Content-Security-Policy that allows this text and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def content_hash(text: str) -> str:
    """The source expression as markup, for templates."""
    return markup(source_hash(text))


def markup(text: str) -> Any:
    """A text that is markup already, and is not escaped."""
    from markupsafe import Markup

    return Markup(text)


def environment(templates: Path) -> Any:
    """Templates in which every text is printable and escaped, and every name must be there."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise MissingExtraError("jinja2", "report") from error
    return Environment(
        loader=FileSystemLoader(templates),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,  # markup is our own
    )
