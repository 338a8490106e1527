"""regard compare: what changed between two audits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.options import Json, print_json


def compare(
    before: Annotated[
        Path, typer.Argument(metavar="REPORT_A", help="A report.json, or the directory it is in.")
    ],
    after: Annotated[Path, typer.Argument(metavar="REPORT_B", help="Another, of the same architecture.")],
    json_: Json = False,
) -> None:
    """What changed between two audits: numbers by column, the heads that changed most, and coverage.

    Numbers that depend on the inputs are compared where both audits read the same inputs, and omitted
    elsewhere.
    """
    from regard.audits import terminal
    from regard.audits.compare import compare as compared
    from regard.audits.compare import read

    found = compared(read(before), read(after))
    if json_:
        print_json(found.to_dict())
    else:
        terminal.show_comparison(found, terminal.output())
