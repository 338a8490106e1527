"""All commands, by use, with the extra that each needs; this file needs only Python."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

from regard.errors import MissingExtraError

HELP = "The mathematics of attention as working software."
CLI, AUDIT = "cli", "audit"
"""Extras: of the command line alone, and of everything that reads models or writes pages."""


class Command(NamedTuple):
    """A command: its name, what it shows, the extra that brings all it may need, and the packages without
    which it cannot start.
    """

    name: str
    what: str
    extra: str = AUDIT
    packages: tuple[str, ...] = ("jinja2",)


COMMANDS = {
    "Look": (
        Command("audit", "how regular the attention of a model is, head by head"),
        Command("track", "how each head changes over checkpoints"),
        Command("decide", "whether a typo changes the answer of a model", packages=("jinja2", "safetensors")),
        Command("compare", "the differences between two audits", CLI, ()),
    ),
    "Change": (Command("cheaper", "cheaper attention, layer by layer", packages=("jinja2", "transformers")),),
    "Count": (Command("cost", "flops, bytes and parameters of a model, term by term", CLI, ()),),
    "Explore": (
        Command("flow", "tokens under a layer that is repeated, as an animation"),
        Command("simulate", "particles that attend to each other, as an animation"),
        Command("train", "train a small language model and watch its heads", packages=("safetensors",)),
        Command("generate", "text of a model that regard train made", packages=("safetensors",)),
    ),
    "Help": (Command("doctor", "versions, extras and devices, and what is missing", CLI, ()),),
}
ENDING = """Each command has its own help: regard audit --help. An error that regard did not
foresee has exit status 3 and names a log with the traceback."""
EXTRAS = f"""In brackets: the extra with the packages that the command needs.
  pip install 'regard[{CLI}]'     the command line, without models and pages
  pip install 'regard[{AUDIT}]'   everything above
regard doctor prints what is installed."""


def extra_of(name: str) -> str:
    """The extra that a command needs; that of the command line for any other word."""
    return next((one.extra for group in COMMANDS.values() for one in group if one.name == name), CLI)


def rows() -> list[tuple[str, list[tuple[str, str]]]]:
    """The groups in order, each with its commands, in one width, and what they show."""
    wide = max(len(one.name) for group in COMMANDS.values() for one in group)
    return [
        (use, [(f"{one.name:<{wide}}", f"{one.what} [{one.extra}]") for one in group])
        for use, group in COMMANDS.items()
    ]


def plain_help() -> str:
    """The help of all commands, for a Python that has only torch."""
    groups = [
        "\n".join([f"{use}:", *(f"  {name}  {what}" for name, what in commands)]) for use, commands in rows()
    ]
    usage = "Usage: regard COMMAND ..."
    missing = "The packages of the command line are not installed here."
    return "\n\n".join([usage, HELP, *groups, EXTRAS, missing]) + "\n"


def refuse_without_packages(name: str) -> None:
    """Raise where a package is not installed without which a command cannot start."""
    packages = next(one.packages for group in COMMANDS.values() for one in group if one.name == name)
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, extra_of(name))
