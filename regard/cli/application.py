"""All commands, and what `regard --help` prints."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from regard.cli.audit import HELP as AUDIT_HELP
from regard.cli.audit import audit
from regard.cli.cheaper import HELP as CHEAPER_HELP
from regard.cli.cheaper import cheaper
from regard.cli.compare import compare
from regard.cli.cost import HELP as COST_HELP
from regard.cli.cost import cost
from regard.cli.decide import HELP as DECIDE_HELP
from regard.cli.decide import decide
from regard.cli.doctor import HELP as DOCTOR_HELP
from regard.cli.doctor import doctor
from regard.cli.flow import HELP as FLOW_HELP
from regard.cli.flow import flow
from regard.cli.generate import HELP as GENERATE_HELP
from regard.cli.generate import generate
from regard.cli.overview import ENDING, EXTRAS, HELP, refuse_without_packages, rows
from regard.cli.simulate import HELP as SIMULATE_HELP
from regard.cli.simulate import simulate
from regard.cli.track import HELP as TRACK_HELP
from regard.cli.track import track
from regard.cli.train import HELP as TRAIN_HELP
from regard.cli.train import train


class Grouped(TyperGroup):
    """The commands, listed by use."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of use."""
        return [name.strip() for _, commands in rows() for name, _ in commands]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """A section for each use."""
        for use, commands in rows():
            with formatter.section(use):
                formatter.write_dl(commands)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The extras, and where more help is."""
        for paragraph in (EXTRAS, ENDING):
            formatter.write_paragraph()
            for line in paragraph.splitlines():
                formatter.write(f"{line}\n")


def application() -> typer.Typer:
    """All commands."""
    found = typer.Typer(
        cls=Grouped,
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    found.callback(help=HELP)(_root)
    for command, text in (
        (audit, AUDIT_HELP),
        (track, TRACK_HELP),
        (decide, DECIDE_HELP),
        (compare, None),
        (cheaper, CHEAPER_HELP),
        (cost, COST_HELP),
        (flow, FLOW_HELP),
        (simulate, SIMULATE_HELP),
        (train, TRAIN_HELP),
        (generate, GENERATE_HELP),
        (doctor, DOCTOR_HELP),
    ):
        more = {"allow_extra_args": command is audit}  # which names the command for several models
        found.command(command.__name__, help=text, context_settings=more)(_with_packages(command))
    return found


def _with_packages(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which names a package that it lacks before it does anything."""

    @wraps(command)
    def run(**options: Any) -> None:
        refuse_without_packages(command.__name__)
        command(**options)

    return run


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=lambda asked: _version(asked)
        ),
    ] = False,
) -> None:
    return None


def _version(asked: bool) -> None:
    if asked:
        from regard import __version__

        print(__version__)
        raise typer.Exit
