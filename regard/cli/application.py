"""All commands, and what `regard --help` says of them."""

from __future__ import annotations

from typing import Annotated

import typer

from regard.cli.audit import HELP as AUDIT_HELP
from regard.cli.audit import audit
from regard.cli.cheaper import HELP as CHEAPER_HELP
from regard.cli.cheaper import cheaper
from regard.cli.checks import checks
from regard.cli.compare import compare
from regard.cli.cost import HELP as COST_HELP
from regard.cli.cost import cost
from regard.cli.decide import HELP as DECIDE_HELP
from regard.cli.decide import decide
from regard.cli.flow import HELP as FLOW_HELP
from regard.cli.flow import flow
from regard.cli.generate import HELP as GENERATE_HELP
from regard.cli.generate import generate
from regard.cli.overview import HELP
from regard.cli.train import HELP as TRAIN_HELP
from regard.cli.train import train


def application() -> typer.Typer:
    """All commands."""
    found = typer.Typer(
        add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    found.callback(help=HELP)(_root)
    found.command("audit", help=AUDIT_HELP)(audit)
    found.command("compare")(compare)
    found.command("checks")(checks)
    found.command("cheaper", help=CHEAPER_HELP)(cheaper)
    found.command("cost", help=COST_HELP)(cost)
    found.command("decide", help=DECIDE_HELP)(decide)
    found.command("flow", help=FLOW_HELP)(flow)
    found.command("train", help=TRAIN_HELP)(train)
    found.command("generate", help=GENERATE_HELP)(generate)
    return found


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
