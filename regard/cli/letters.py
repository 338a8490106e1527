"""Letters that a terminal without UTF-8 does not have, and what stands for them there."""

from __future__ import annotations

import codecs
import io
import unicodedata

STAND_INS = {
    "•": "*",
    "·": "*",
    "→": "->",
    "←": "<-",
    "–": "-",
    "—": "-",
    "−": "-",
    "×": "x",
    "≤": "<=",
    "≥": ">=",
    "≈": "~",
    "±": "+-",
    "…": "...",
    "“": '"',
    "”": '"',
    "‘": "'",
    "’": "'",
    "α": "alpha",
    "β": "beta",
    "ε": "epsilon",
    "λ": "lambda",
    "µ": "u",
    "μ": "u",
    "σ": "sigma",
    "τ": "tau",
    "∞": "inf",
    "√": "sqrt",
    "░": ".",
    "▒": ":",
    "▓": "=",
}
BARS = "▁▂▃▄▅▆▇█"
"""Heights of a bar from low to high, and their stand-ins."""
LOW_TO_HIGH = "_.-:=+*#"


def without_errors(stream: io.TextIOWrapper) -> None:
    """Let a stream write letters that its encoding does not have by others that look like them."""
    codecs.register_error("regard", _replace)
    stream.reconfigure(errors="regard")


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(stand_in, error.object[error.start : error.end])), error.end


def stand_in(letter: str) -> str:
    """ASCII for a letter; a question mark where nothing looks like it."""
    if letter in STAND_INS:
        return STAND_INS[letter]
    if letter in BARS:
        return LOW_TO_HIGH[BARS.index(letter)]
    if "─" <= letter <= "╿":  # lines of boxes and bars
        return "|" if letter in "│┃║" else "-" if letter in "─━═╸╺" else "+"
    if "▀" <= letter <= "▟":  # other blocks
        return "#"
    if "⠀" <= letter <= "⣿":  # the dots of a spinner
        return "."
    plain = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
    return plain or "?"
