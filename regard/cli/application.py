"""All commands, and what `regard --help` says of them."""

from __future__ import annotations

from typing import Annotated

import typer

from regard.cli.audit import HELP as AUDIT_HELP
from regard.cli.audit import audit
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
from regard.cli.train import HELP as TRAIN_HELP
from regard.cli.train import train

HELP = """The mathematics of attention as working software.

\b
  regard audit                          audit a small real model (extra: demo)
  regard audit ./my-model               audit a model you have, on included sentences
  regard audit ./step-1000 ./step-2000  how each head moved over training
  regard compare old-report new-report  what changed between two audits
  regard checks                         what an audit can ask
  regard decide                         could a typo change this answer? proved, and attacked
  regard flow                           tokens under a layer that is repeated, as an animation
  regard flow --beta 4 --particles 300  particles that attend to each other, as an animation
  regard train --data my.txt            a small language model, its heads watched while it learns
  regard generate training              what it writes
  regard cost ./my-model --tokens 4096  flops, bytes and parameters, part by part

Each command explains itself: regard audit --help.
"""


def application() -> typer.Typer:
    """All commands."""
    found = typer.Typer(
        add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    found.callback(help=HELP)(_root)
    found.command("audit", help=AUDIT_HELP)(audit)
    found.command("compare")(compare)
    found.command("checks")(checks)
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
