"""What the command line prints: progress on stderr, answers on stdout,
both plain where there is no terminal.
"""

from __future__ import annotations

import os
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from regard._printable import printable
from regard.audits.checks import Check, Column
from regard.audits.checks.base import HEAD, STACK, STATUSES
from regard.audits.compare import Comparison
from regard.audits.findings import ALARMING, NOTABLE, NOTE
from regard.audits.report import Report, Row
from regard.audits.screen import Block, screen
from regard.audits.series import Series, Track
from regard.audits.series_page import verdict
from regard.audits.words import counted

SHOWN = (
    "head_branch_constant",
    "attention_branch_constant",
    "mlp_branch_constant",
    "block_constant",
    "largest_logit",
    "entropy",
    "qk_norm",
    "ov_norm",
)
"""Columns in the order in which they get a place on a narrow screen; the report has all."""
BORDER = 3
"""How much wider than its cells a column is."""
LINES = 30.0
"""Seconds between lines of progress where there is no terminal."""
WIDTH = 120
"""How wide lines are where there is no terminal."""
BLOCKWISE = (
    "the model would fill the memory of this machine, so it is read block by block, and checks that need "
    "all blocks at once are left out "
    "(--no-low-memory loads it whole)"
)
QUANTIZED = (
    "the weights are quantized, so they are turned into matrices block by block, and checks that need all "
    "blocks at once are left out (--no-low-memory lets transformers load them)"
)
"""Said where that is decided for the user."""
STYLES = {ALARMING: "bold red", NOTABLE: "yellow", NOTE: "dim"}


class PlainConsole(Console):
    """A console on which text is printable: names and texts of strangers do not command the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The parts of anything that is printed; what moves the cursor is rich's own."""
        for part in super().render(renderable, options):
            yield part if part.control else Segment(printable(part.text), part.style)


def output() -> Console:
    """Where answers go."""
    return _console(stderr=False)


def messages() -> Console:
    """Where progress and remarks go."""
    return _console(stderr=True)


def _console(stderr: bool) -> Console:
    found = PlainConsole(stderr=stderr, highlight=False)
    wide = found.is_terminal or "COLUMNS" in os.environ
    return found if wide else PlainConsole(stderr=stderr, highlight=False, width=WIDTH)


def say(console: Console, sentence: str, style: str = "") -> None:
    """A sentence as it is: brackets in it are no markup; a terminal wraps it, a file gets one line."""
    console.print(Text(sentence, style=style), soft_wrap=not console.is_terminal)


class Bars:
    """Progress of the whole and of the part it is at, with the time that is left; a line now and then where
    there is no terminal.

    sizes: how many steps each part has; a part is all weights, or an input, or a checkpoint of a series. One
    part is the whole, and has one bar.
    """

    def __init__(
        self, console: Console, sizes: Sequence[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sizes = tuple(sizes)
        self._console, self._clock = console, clock
        self._start = self._said = self._since = clock()
        self._done = 0
        self._progress = Progress(
            SpinnerColumn("dots" if console.encoding.startswith("utf") else "line"),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._whole = self._progress.add_task("the whole", total=None)
        self._part: tuple[int, TaskID] | None = None

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show where the audit is."""
        if not self._console.is_terminal:
            self._log(what, done, total)
        self._progress.update(self._whole, completed=done, total=total)
        if len(self._sizes) == 1:
            self._progress.update(self._whole, description=what)
        elif done < total:
            number, within, size = part(done, self._sizes)
            self._progress.update(self._task(number, what, size), completed=within, description=what)

    def _log(self, what: str, done: int, total: int) -> None:
        """A line for pipes and the logs of a cluster, at most every half minute."""
        now = self._clock()
        if done != self._done:
            self._done, self._since = done, now
        if done >= total or now - self._said < LINES:
            return
        self._said, taken = now, now - self._start
        rest = taken * (total - done) / done if done else 0.0
        left = (
            f", about {_duration(rest)} left" if rest > now - self._since else ""
        )  # else this step is longer
        say(self._console, f"{done} of {total} steps after {_duration(taken)}{left}: {what}")

    def _task(self, number: int, what: str, size: int) -> TaskID:
        """The bar of a part; a new one for a new part, so that its clock starts anew."""
        if self._part is None or self._part[0] != number:
            if self._part is not None:
                self._progress.remove_task(self._part[1])
            self._part = number, self._progress.add_task(what, total=size)
        return self._part[1]


def _duration(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def part(done: int, sizes: Sequence[int]) -> tuple[int, int, int]:
    """After `done` steps: which part it is, how much of that is done, and how much it is."""
    for number, size in enumerate(sizes):
        if done < size:
            return number, done, size
        done -= size
    return len(sizes), 0, 0


def show(report: Report, paths: Sequence[Path], console: Console, seconds: float | None = None) -> None:
    """The first screen of a report, a table of layers where only weights were read, and where the rest is.

    seconds: how long the audit took. It is not part of the report, which is the same in every run.
    """
    found = screen(report)
    time_taken = [] if seconds is None else [_taken(seconds)]
    say(console, "   ".join([report.name, *found.facts, *time_taken]), "bold")
    if report.partial:
        say(console, f"Partial: {report.partial}.", STYLES[NOTABLE])
    say(console, "")
    style = "" if found.level == NOTE else STYLES[found.level]
    say(console, " ".join([found.verdict, *found.actions]), style)
    for block in found.blocks:
        say(console, "")
        show_block(block, console)
    if not report.inputs:
        show_layers(report, console)
    say(console, "")
    for sentence in found.closing:
        say(console, sentence, "dim")
    show_paths(paths, console)


def _taken(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def show_block(block: Block, console: Console) -> None:
    """A block of the first screen: its title, and its lines with their numbers under its headings."""
    start = max([len(line.label) for line in block.lines if line.cells], default=0) + 4
    rows = [block.headings, *(line.cells for line in block.lines)]
    widths = [max(len(row[k]) for row in rows if k < len(row)) for k in range(max(map(len, rows)))]
    title, kind = block.title.upper(), "" if block.kind == block.title.lower() else block.kind
    how = ": ".join(part for part in (kind, block.how) if part)
    margin = max(start, len(title)) + 2
    for k, part in enumerate(_wrapped(how, console, margin) or [""]):
        heading = Text(f"{'' if k else title:{margin if how else 0}}", style="bold")
        console.print(heading.append(part, style="not bold"), soft_wrap=not console.is_terminal)
    aligned = [f"{{:{'>' if block.headings else '<'}{width}}}" for width in widths]
    if block.headings:
        say(console, " " * start + _cells(block.headings, aligned))
    for line in block.lines:
        if not line.cells:
            for k, part in enumerate(_wrapped(line.label, console, 4)):
                say(console, f"{'    ' if k else '  '}{part}")
            continue
        text = f"  {line.label:{start - 2}}{_cells(line.cells, aligned)}"
        fits = len(text) + 2 + len(line.note) <= console.width
        say(console, f"{text}  {line.note}".rstrip() if fits else text.rstrip())
        for part in [] if fits else _wrapped(line.note, console, start):
            say(console, " " * start + part)


def _wrapped(text: str, console: Console, indent: int) -> list[str]:
    return textwrap.wrap(text, max(console.width - indent, 20))


def _cells(cells: Sequence[str], aligned: Sequence[str]) -> str:
    return "  ".join(form.format(cell) for cell, form in zip(cells, aligned, strict=False))


def show_layers(report: Report, console: Console) -> None:
    """A table of the layers, and the columns for which the screen is too narrow."""
    table, hidden = layer_table(report, console.width)
    if len(table.columns) > 1 and table.rows:  # checks that measure no layer leave it empty
        console.print(table)
    if hidden:
        count = f"{len(hidden)} {counted(len(hidden), 'column')} hidden"
        say(console, f"… {count}: {', '.join(column.title for column in hidden)} (report.html has all)")


def show_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    bold: Sequence[int] = (),
) -> None:
    """A table where the screen is wide enough for every number; else row by row, so that none is cut."""
    cells = [columns, *rows]
    widths = [max(_longest(row[place]) for row in cells) for place in range(len(columns))]
    if sum(widths) + 3 * len(columns) + 1 > console.width:
        say(console, title, "italic")
        for number, row in enumerate(rows):
            pairs = [f"{name} {value}" for name, value in zip(columns[1:], row[1:], strict=True) if value]
            say(console, row[0], "bold" if number in bold else "")
            for line in textwrap.wrap("; ".join(pairs), max(console.width - 4, 20), break_long_words=False):
                say(console, f"    {line}")
        return
    table = Table(title=Text(title), title_justify="left")
    for place, name in enumerate(columns):
        numeric = all(_is_number(row[place]) for row in rows)
        table.add_column(Text(name), justify="right" if numeric else "left", no_wrap=True)
    for number, row in enumerate(rows):
        table.add_row(*map(Text, row), style="bold" if number in bold else "")
    console.print(table)


def _longest(cell: str) -> int:
    return max(map(len, cell.splitlines()), default=0)


def _is_number(cell: str) -> bool:
    return not cell or cell[0] in "+-0123456789"


def show_paths(paths: Sequence[Path], console: Console) -> None:
    """Where the files are."""
    if paths:
        say(console, "Written: " + ", ".join(str(path) for path in paths))


def layer_table(report: Report, width: int) -> tuple[Table, list[Column]]:
    """For each layer the median of its heads and the head to look at first, or its own number; and the
    columns for which the screen is too narrow.
    """
    columns = [column for name in SHOWN if report.ranked(name) for column in [report.column(name)] if column]
    layers = sorted({row.layer for row in report.rows if row.scope != STACK})
    own = [[row for row in report.rows if row.layer == layer and row.scope != STACK] for layer in layers]
    table = Table(
        title="Median over the heads of each layer (the head to look at first: its value)",
        title_justify="left",
        caption_justify="left",
    )
    cells = {column: [_cell(column, rows) for rows in own] for column in columns}
    left = width - len("layer") - BORDER - 1
    roomy = sum(_needed([column.title, *cells[column]]) for column in columns) <= left
    shown, hidden = [list(map(str, layers))], []
    table.add_column("layer", justify="right", no_wrap=True)
    for column in columns:
        words = [column.title] if roomy else column.title.split()
        needed = _needed([*words, *cells[column]])
        if needed > left:
            hidden.append(column)
            continue
        left -= needed
        title = textwrap.fill(column.title, needed - BORDER, break_long_words=False)
        table.add_column(Text(title), justify="right", no_wrap=True)
        shown.append(cells[column])
    table.caption = _statuses([column for column in columns if column not in hidden])
    for line in zip(*shown, strict=True):
        table.add_row(*line)
    return table, hidden


def _statuses(columns: Sequence[Column]) -> str:
    """Where the numbers of columns are from: which are run, measured, searched or proved."""
    titles = {kind: [column.title for column in columns if column.kind == kind] for kind in STATUSES}
    return " ".join(f"{kind.capitalize()}: {', '.join(own)}." for kind, own in titles.items() if own)


def _needed(texts: Sequence[str]) -> int:
    """How wide a column of these texts is, with its border."""
    return max(map(len, texts)) + BORDER


def _cell(column: Column, rows: list[Row]) -> str:
    numbers = {
        row.head: value
        for row in rows
        for value in [row.values.get(column.name)]
        if value is not None and value == value
    }
    if not numbers:
        return "–"
    if column.scope != HEAD:
        return f"{next(iter(numbers.values())):.3g}"
    worst = (min if column.high_is_alarming is False else max)(numbers, key=numbers.__getitem__)
    return f"{statistics.median(numbers.values()):.3g} ({worst}: {numbers[worst]:.3g})"


def show_series(found: Series, paths: Sequence[Path], console: Console, shown: int = 10) -> None:
    """The heads that grow fastest, for each column."""
    say(console, f"{found.kind}: {' → '.join(found.names)}")
    say(console, verdict(found).text)
    for entry in found.missing:
        say(console, f"Not covered: {entry.site} ({entry.kind}): {entry.reason}.")
    for column in found.columns:
        ranked = found.ranked(column.name)
        if not ranked:
            say(console, f"{column.title}: not known for any head in all checkpoints.")
            continue
        ahead = sum(track.fast for track in ranked)
        run = "runs" if ahead == 1 else "run"
        what = f"{column.title} ({column.kind})"
        say(console, f"{what}: {ahead} of {len(ranked)} heads {run} ahead of the median head.")
        title = f"{column.title}: the heads that grow fastest"
        rows = [_track_cells(track, found.names) for track in ranked[:shown]]
        bold = [number for number, track in enumerate(ranked[:shown]) if track.fast]
        show_table(
            console, title, ("head", "first", "last", "log(last/first)", "steepest step", "into"), rows, bold
        )
    show_paths(paths, console)


def _track_cells(track: Track, names: Sequence[str]) -> tuple[str, ...]:
    """A head along a series: where it is, its ends, its growth, and its steepest step."""
    step = track.steepest
    growth = (f"{track.growth:+.3f}", f"{track.steps[step]:+.3f}", names[step + 1])
    return track.label, f"{track.values[0]:.4g}", f"{track.values[-1]:.4g}", *growth


def show_comparison(found: Comparison, console: Console, shown: int = 3) -> None:
    """What changed, column by column, and the rows that changed most."""
    say(console, f"{found.names[0]} → {found.names[1]}")
    for sentence in [
        *found.remarks,
        *(f"Newly covered: {site}." for site in found.gained),
        *(f"No longer covered: {site}." for site in found.lost),
    ]:
        say(console, f"• {sentence}")
    changed = [column for column in found.columns if found.changed(column.name)]
    if not changed:
        count = len(found.columns)
        none = f"No number changed in {count} {counted(count, 'column')}."
        say(console, none if count else "No number can be compared.")
        return
    rows = []
    for column in changed:
        moved = found.changed(column.name)
        words = [f"{c.row.label} {c.before:.4g} → {c.after:.4g}" for c in moved[:shown]]
        rows.append((column.title, f"{len(moved)} of {len(found.changes[column.name])}", "\n".join(words)))
    title = "What changed; the largest changes first, relative to the column's median"
    show_table(console, title, ("column", "changed", "largest changes"), rows)


def show_checks(known: Sequence[Check], console: Console) -> None:
    """The checks by name, with their questions."""
    table = Table.grid(padding=(0, 2))
    for check in known:
        needs = "weights" if check.of_site is None and check.of_input is None else "texts"
        table.add_row(check.name, needs, Text(check.question))
    console.print(table)
