"""docs/columns.md: every column of the audit, from what the code says of itself.

python docs/make_columns.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script, the root of the repository is not on the path

from regard.audits.checks import checks  # noqa: E402
from regard.audits.checks.base import STATUSES  # noqa: E402

PAGE = ROOT / "docs" / "columns.md"
NOTICE = "<!-- written by docs/make_columns.py: change the check's file and run it again -->"
BAR = "\\|"
LOOK = {True: "large", False: "small", None: "–"}


def text() -> str:
    """The page: a section for each question, a row for each column."""
    parts = [
        NOTICE,
        "# The columns of an audit",
        "Each question is a check, named on the command line with `--checks`; each column has a number for "
        "every head, layer or stack of "
        "layers. The status is one of four words: "
        + "; ".join(f"*{word}* ({meaning.replace(';', ',')})" for word, meaning in STATUSES.items())
        + ". “Look at” says which end deserves a look; “inputs” how the numbers of several inputs become "
        "one; “beside” which column a number is compared with, over the inputs that have both.",
    ]
    for check in checks():
        rows = [
            f"| `{c.name}` | {c.title} | {c.meaning.replace('|', BAR)} | {c.kind or '–'} | {c.scope} | "
            f"{LOOK[c.high_is_alarming]} | {c.over} | {f'`{c.beside}`' if c.beside else '–'} |"
            for c in check.columns
        ]
        head = [
            "| column | on the page | what it is | status | for each | look at | inputs | beside |",
            "|---|---|---|---|---|---|---|---|",
        ]
        parts += [f"## `{check.name}`: {check.question}", "\n".join([*head, *rows])]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
    print(f"{sum(len(check.columns) for check in checks())} columns in {PAGE.relative_to(ROOT)}")
