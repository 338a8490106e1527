"""regard track: how each head changes over the checkpoints of one training run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.audit import Way, find_checks, on_texts, status
from regard.cli.directories import default_directory, refuse_other, source_of
from regard.cli.options import (
    Checks,
    Device,
    Json,
    Open,
    OutByModel,
    Seed,
    Text,
    TextFile,
    announce,
    open_page,
    print_json,
)
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.audits.checkpoint import Checkpoint
    from regard.audits.checks import Check
    from regard.audits.series import Series
    from regard.cli.audit import AnyAudit

HELP = """How each head changes over the checkpoints of one training run.

MODEL A, B, C, ... are two or more checkpoints in their order: directories or hub ids. They are compared by
their weights, and with --text or --text-file by their attention rows on these texts too. Code in a
checkpoint is never run.

The report is written to --out, which is track-<first>-to-<last> unless you name one: series.html to read,
series.json with every number. A directory with the report of another series is refused.

\b
Examples
  regard track ./step-1000 ./step-2000 ./step-3000  by the weights alone
  regard track ./step-* --text "A text."            the logits on a text, too
  regard track ./step-* --open                      the page in the browser

\b
Exit status
  0 done   2 wrong arguments or files   130 stopped by Ctrl-C
"""


def track(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="Directories or hub ids, in order.", show_default=False),
    ] = None,
    text: Text = None,
    text_file: TextFile = None,
    checks: Checks = None,
    device: Device = "cpu",
    seed: Seed = None,
    out: OutByModel = None,
    open_: Open = False,
    json_: Json = False,
) -> None:
    """Check every argument before the work begins, then do it."""
    from regard._files import check_writable
    from regard.audits import terminal
    from regard.audits.inputs import read_texts
    from regard.audits.load import device_of
    from regard.audits.series import save

    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        found = "starts several processes, and a series is tracked by one"
        raise ArgumentError("torchrun", found, "start the command without it")
    if models is None or len(models) < 2:
        found = "is one checkpoint" if models else "is missing"
        raise ArgumentError("MODEL", found, "give two or more, in order; regard audit MODEL is for one")
    texts = read_texts(text or [], text_file or [])
    asked = find_checks("weights,rows" if texts and checks is None else checks, alone=not texts)
    out = default_directory("track", models) if out is None else out
    refuse_other(out / "series.json", models)
    check_writable(out)
    way = Way(out, device_of(device), seed=seed or 0)
    series = _series(models, texts, asked, way)
    paths = save(series, out)
    if json_:
        print_json(series.to_dict())
        announce(paths, json_=True)
    else:
        terminal.show_series(series, paths, terminal.output())
    if open_:
        open_page(out / "series.html")


def _series(models: Sequence[str], texts: list[str], asked: list[Check], way: Way) -> Series:
    """Audit each checkpoint, one in memory at a time, and join the reports."""
    from regard.audits import terminal
    from regard.audits.checkpoint import find
    from regard.audits.series import series

    with status("looking at the checkpoints"):
        found = [find(model) for model in models]
    reports = []
    for checkpoint in found:
        with status(f"loading {checkpoint.name}"):
            run = _audit_of(checkpoint, texts, asked, way)
        sizes = [len(run.places), *(len(run.places) + 1 for _ in run.inputs)]
        with terminal.Bars(terminal.messages(), sizes) as bars:
            run.measure(bars)
        reports.append(run.report())
    whole = series(reports, _distinct([checkpoint.name for checkpoint in found], models))
    return replace(whole, source=source_of(models))


def _audit_of(checkpoint: Checkpoint, texts: list[str], asked: list[Check], way: Way) -> AnyAudit:
    """The audit of a checkpoint: on texts where there are any, or by its weights."""
    from regard.audits.weights import WeightAudit

    if texts:
        return on_texts(checkpoint, texts, asked, way)
    return WeightAudit(checkpoint, checks=asked, device=way.device, seed=way.seed)


def _distinct(short: Sequence[str], long: Sequence[str]) -> Sequence[str]:
    """Short names, where these tell the models apart."""
    return short if len(set(short)) == len(set(long)) else long
