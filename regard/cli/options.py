"""Options that several commands share: each has one name, one meaning and one help text, defined here."""

from __future__ import annotations

import json
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

Text = Annotated[
    list[str] | None,
    typer.Option("--text", metavar="STRING", help="One text; may be repeated.", show_default=False),
]
TextFile = Annotated[
    list[Path] | None,
    typer.Option(
        "--text-file",
        metavar="FILE",
        help="A file with one text per line; may be repeated.",
        show_default=False,
    ),
]
Pairs = Annotated[
    Path | None,
    typer.Option(
        "--pairs",
        metavar="FILE",
        help="A file with one changed text per line: original, TAB, changed.",
        show_default=False,
    ),
]
Out = Annotated[Path, typer.Option("--out", metavar="DIRECTORY", help="The directory for the report.")]
OutByModel = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIRECTORY", help="The directory for the report.", show_default="<command>-<model>"
    ),
]
OutIfGiven = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIRECTORY",
        help="The directory for the report; without it nothing is written.",
        show_default=False,
    ),
]
Open = Annotated[bool, typer.Option("--open", help="Open the page in the browser when it is written.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on stdout, instead of the summary.")
]
Checks = Annotated[
    str | None,
    typer.Option(
        "--checks",
        metavar="NAMES",
        help="Names of checks, separated by commas.",
        show_default="all that need no name",
    ),
]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="The device: cpu, cuda or mps.")]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        min=0,
        max=2**63 - 1,
        metavar="N",
        help="Seed of all random numbers: the same seed gives the same result.",
        show_default="0",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue where an interrupted run stopped.")]


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout, in ASCII, which every stream and every reader takes."""
    from regard._written import plain

    print(json.dumps(plain(value), indent=1))


def announce(paths: Sequence[Path], *, json_: bool = False, open_: bool = False) -> None:
    """Print the paths of the written files, on stderr where stdout is for JSON; open the first of them."""
    from regard.audits.terminal import messages, output, say

    say(messages() if json_ else output(), f"written: {', '.join(map(str, paths))}")
    if open_:
        open_page(paths[0])


def open_page(path: Path) -> None:
    """Open a page in the browser; without a browser, a line on stderr names the page."""
    page = path.resolve().as_uri()
    if not webbrowser.open(page):
        print(f"--open: no browser was found; open {page}", file=sys.stderr)
