"""docs/cli.md: the commands and their options, from `regard --help` and the help of each command.

python docs/make_cli.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script, the root of the repository is not on the path

import typer  # noqa: E402

from regard.cli.application import application  # noqa: E402
from regard.cli.overview import COMMANDS  # noqa: E402

PAGE = ROOT / "docs" / "cli.md"
NOTICE = "<!-- written by docs/make_cli.py: change the command's file and run it again -->"
WIDTH = 90


def text() -> str:
    """The page: the help of all commands, then that of each, in the order of use."""
    group = typer.main.get_command(application())
    parts = [
        NOTICE,
        "# The command line",
        "Every block on this page is printed by `--help`. Options of one name mean the same in all commands.",
        _block(group, "regard"),
    ]
    for use, commands in COMMANDS.items():
        parts.append(f"## {use}")
        for one in commands:
            parts += [f"### regard {one.name}", _block(group.commands[one.name], f"regard {one.name}")]
    return "\n\n".join(parts) + "\n"


def _block(command: typer.core.TyperCommand | typer.core.TyperGroup, name: str) -> str:
    """The help of a command as it is printed at a fixed width."""
    context = command.context_class(command, info_name=name, terminal_width=WIDTH, max_content_width=WIDTH)
    lines = [line.rstrip() for line in command.get_help(context).splitlines()]
    return "\n".join(["```text", *lines, "```"])


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
    print(f"{sum(map(len, COMMANDS.values()))} commands in {PAGE.relative_to(ROOT)}")
