"""The command line: parse, call, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from regard.errors import ArgumentError, MissingExtraError, RegardError

if TYPE_CHECKING:
    from rich.console import Console

    from regard.audit import Report

try:
    import typer
except ImportError:  # pragma: no cover - without the extra there is no command line
    typer = None  # type: ignore[assignment]


def main() -> None:
    """The entry point: errors that regard raises become one line and exit status 2."""
    if typer is None:
        sys.exit(str(MissingExtraError("typer", "cli")))
    try:
        _application()()
    except RegardError as error:
        sys.exit(f"regard: {error}")


def _application() -> typer.Typer:
    application = typer.Typer(add_completion=False, no_args_is_help=True, help="The mathematics of attention as working software.")
    application.command("audit")(audit)
    application.callback()(_root)
    return application


def _root() -> None:
    """The mathematics of attention as working software.

    Start with: regard audit (a report of a small real model), or regard audit PATH_TO_MODEL --text FILE.
    """


def audit(
    model: Annotated[
        str | None, typer.Argument(help="A model directory or a hub id; nothing means all-MiniLM-L6-v2 (extra: demo).", show_default=False)
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A file with one text a line; nothing means the included sentences.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Where report.html and report.json go.")] = Path("audit-report"),
) -> None:
    """How regular is the attention of a trained model? Writes report.html and report.json and prints a table."""
    from rich.console import Console

    from regard.audit import audit as run
    from regard.audit import included_sentences
    from regard.audit.load import load

    console = Console()
    texts = included_sentences() if text is None else _lines(text)
    with console.status("loading the model"):
        loaded, tokenizer, name = load(model)
    with _bar(console) as bar:
        task = bar.add_task("auditing", total=None)
        report = run(
            loaded,
            texts,
            tokenizer=tokenizer,
            name=name,
            progress=lambda what, done, total: bar.update(task, completed=done, total=total, description=what),
        )
    paths = report.save(out)
    show(report, console)
    console.print("written: " + ", ".join(str(path) for path in paths))
    if report.missing and not report.heads:
        sys.exit(1)


def _bar(console: Console):  # type: ignore[no-untyped-def]
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console, transient=True
    )


def _lines(path: Path) -> list[str]:
    """The texts of a file, one a line."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ArgumentError("--text", f"{path} cannot be read ({error.strerror})", "give a text file") from error
    except UnicodeDecodeError:
        raise ArgumentError("--text", f"{path} is not UTF-8 text", "give a text file, one text a line") from None
    texts = [line for line in lines if line]
    if not texts:
        raise ArgumentError("--text", f"{path} has no text in it", "write one text a line")
    return texts


def show(report: Report, console: Console) -> None:
    """The report as a table: for each layer its median, and the head to look at."""
    import statistics

    from rich.table import Table

    table = Table(title=f"{report.model}: median by layer, and the head to look at first", title_justify="left")
    table.add_column("layer", justify="right")
    for column in report.columns:
        table.add_column(column.title, justify="right")
    for layer in sorted({h.layer for h in report.heads}):
        cells = []
        for column in report.columns:
            numbers = {h.head: h.values[column.name] for h in report.heads if h.layer == layer}
            worst = (max if column.high_is_alarming else min)(numbers, key=numbers.__getitem__)
            cells.append(f"{statistics.median(numbers.values()):.3g}  (head {worst}: {numbers[worst]:.3g})")
        table.add_row(str(layer), *cells)
    console.print(table)
    for sentence in report.summary():
        console.print(f"• {sentence}", highlight=False, markup=False)
