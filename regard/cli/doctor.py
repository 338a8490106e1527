"""regard doctor: versions, extras and devices, and what is missing for which command."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
import re
import textwrap
from typing import TYPE_CHECKING, Any

from regard.cli.options import Json, print_json
from regard.cli.overview import AUDIT, CLI, COMMANDS

if TYPE_CHECKING:
    from rich.console import Console

HELP = """Versions, extras and devices, and what is missing for which command.

Nothing is downloaded, and no model is read. The output belongs into every report of a problem.

\b
Examples
  regard doctor                                           one screen
  regard doctor --json                                    the same for a program

\b
Exit status
  0 always
"""
EXTRAS = {
    CLI: "the command line",
    AUDIT: "models of transformers, and pages",
    "demo": "all-MiniLM-L6-v2, the model without MODEL",
    "gguf": "checkpoints in GGUF",
    "fast": "faster sums over many particles",
    "plot": "regard.plot",
    "notebook": "reports as tables of pandas",
    "trainer": "callbacks for the Trainer of transformers",
    "lightning": "callbacks for Lightning",
}
"""The extras for users, and what each is for."""
GIGA = 1e9


def doctor(json_: Json = False) -> None:
    """Print what there is, and what is missing."""
    from regard.audits.terminal import output

    found = findings()
    if json_:
        print_json(found)
    else:
        _show(found, output())


def findings() -> dict[str, Any]:
    """Versions, packages that are missing by command and by extra, and devices, as plain values."""
    import torch

    from regard import __version__

    needed = _packages()
    versions = {name: _version(name) for name in dict.fromkeys(n for names in needed.values() for n in names)}
    return {
        "regard": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "packages": {name: version for name, version in versions.items() if version},
        "extras": {extra: [n for n in names if not versions[n]] for extra, names in needed.items()},
        "commands": {
            one.name: [name for name in one.packages if importlib.util.find_spec(name) is None]
            for group in COMMANDS.values()
            for one in group
        },
        "devices": _devices(),
    }


def _packages() -> dict[str, list[str]]:
    """The distributions of each extra, by what the installed package declares."""
    try:
        declared = importlib.metadata.requires("regard") or []
    except importlib.metadata.PackageNotFoundError:  # a source tree that is not installed
        return {}
    pattern = re.compile(r"\s*([\w.-]+).*;.*extra == ['\"]([\w-]+)['\"]")
    pairs = [match.groups() for one in declared for match in [pattern.match(one)] if match]
    return {extra: [name for name, other in pairs if other == extra] for extra in EXTRAS}


def _version(name: str) -> str:
    """The version of a distribution; empty where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _devices() -> dict[str, str]:
    """The devices that torch can use, by the name that --device takes."""
    import torch

    from regard._allocation import memory
    from regard.audits.words import counted

    room, cores, threads = memory(), os.cpu_count() or 1, torch.get_num_threads()
    size = "" if math.isinf(room) else f", {room / GIGA:.1f} GB of memory"
    found = {
        "cpu": f"{cores} {counted(cores, 'core')}, {threads} {counted(threads, 'thread')} of torch{size}"
    }
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        found[f"cuda:{number}"] = f"{about.name}, {about.total_memory / GIGA:.1f} GB of memory"
    if torch.backends.mps.is_available():
        found["mps"] = "the GPU of this Mac"
    return found


def _show(found: dict[str, Any], console: Console) -> None:
    """One screen."""
    from rich.table import Table
    from rich.text import Text

    from regard.audits.terminal import say

    packages = [("torch", found["torch"]), *found["packages"].items()]
    say(console, f"regard {found['regard']}   Python {found['python']}   {found['system']}", "bold")
    joined = ", ".join(f"{name}\N{NO-BREAK SPACE}{version}" for name, version in packages)
    for line in textwrap.wrap(joined, console.width, break_on_hyphens=False):
        say(console, line.replace("\N{NO-BREAK SPACE}", " "))
    table = Table.grid(padding=(0, 2))
    for device, about in found["devices"].items():
        table.add_row("device", device, Text(about))
    for extra, missing in found["extras"].items():
        state = Text(f"missing: {', '.join(missing)}", "yellow") if missing else Text("installed")
        table.add_row("extra", extra, Text.assemble(state, f" ({EXTRAS[extra]})"))
    console.print(table)
    for sentence in _sentences(found):
        say(console, sentence)


def _sentences(found: dict[str, Any]) -> list[str]:
    """Which commands cannot start, and how the missing extras are installed."""
    stuck = {name: missing for name, missing in found["commands"].items() if missing}
    said = [f"regard {name} cannot start without {', '.join(missing)}." for name, missing in stuck.items()]
    lacking = [extra for extra, missing in found["extras"].items() if missing]
    if not found["extras"]:
        said.append("regard runs from a source tree that is not installed, so its extras are not known.")
    if lacking:
        said.append(f"Install what you need of the missing extras: pip install 'regard[{','.join(lacking)}]'")
    return said if stuck else ["Every command can start.", *said]
