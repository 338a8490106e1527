"""The command line on narrow screens, without UTF-8, without its extras, and when it is interrupted."""

import dataclasses
import importlib.metadata
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import regard as r
from regard.audits.checks import checks
from regard.audits.screen import screen as first_screen
from regard.audits.series import Series, Track
from regard.audits.terminal import SHOWN, show, show_series, show_table
from regard.cli.application import application
from regard.cli.doctor import doctor
from regard.cli.letters import stand_in, without_errors
from regard.cli.overview import COMMANDS, plain_help
from tests.audits.checkpoints import ENVIRONMENT, regard
from tests.audits.test_page import made

ROOT = Path(__file__).parents[2]
CELLS = [("a head of a layer with a long name", "1234.5678", "+0.123", "checkpoint-100000")] * 3


SHOWN_COLUMNS = [column for check in checks() for column in check.columns if column.name in SHOWN]


def screen(width):
    return Console(file=io.StringIO(), width=width, highlight=False)


def columns():
    return tuple(column for check in checks() for column in check.columns if column.name == "qk_norm")


@pytest.mark.parametrize("width", [30, 60, 80, 200])
def test_no_number_is_cut(width):
    console = screen(width)
    show_table(console, "A title", ("head", "first", "growth", "into"), CELLS, bold=[0])
    text = console.file.getvalue()
    assert "…" not in text
    assert all(text.count(cell) == 3 for cell in CELLS[0][1:])


@pytest.mark.parametrize("width", [60, 160])
def test_a_series_on_a_narrow_screen(width):
    values = (1.0, 2.345678, 12345.678)
    tracks = tuple(Track("qk_norm", "encoder.layer.1.attention.self", 1, h, values) for h in range(2))
    found = Series("BertModel", ("step-1000", "step-2000", "step-3000"), columns(), tracks, ())
    console = screen(width)
    show_series(found, [], console)
    text = console.file.getvalue()
    assert "…" not in text
    assert text.count("1.235e+04") >= 2
    assert text.count(f"{math.log(12345.678):+.3f}") == 2


@pytest.mark.parametrize("width", [30, 45, 60, 80, 120, 200])
def test_a_column_that_does_not_fit_is_announced(width):
    """Of weights alone, each column of the table is in it, or is named below it; and no number is cut."""
    report = dataclasses.replace(made(), inputs=[], tables={})
    console = screen(width)
    show(report, [], console)
    table, _, below = console.file.getvalue().partition("└")
    table = table[table.index("┏") :]
    (line,) = re.findall(r"… (\d+ columns? hidden: .*) \(report.html has all\)", below, re.DOTALL) or [""]
    hidden = [column.title for column in SHOWN_COLUMNS if column.title in " ".join(line.split())]
    shown = [column for column in SHOWN_COLUMNS if column.title not in hidden]
    assert bool(line) == bool(hidden)
    if hidden:
        noun = "column" if len(hidden) == 1 else "columns"
        assert f"{len(hidden)} {noun} hidden" in line
    first = table[: table.index("┡")]
    assert len(re.findall("┳", first)) == len(shown)
    assert all(word in first for column in shown for word in column.title.split())
    assert max(map(len, table.splitlines())) <= width


@pytest.mark.parametrize("width", [80, 120])
def test_the_first_screen_fits(width):
    """Every block with its numbers, in the order of the page; the longest lines are wrapped."""
    report = made()
    console = Console(file=io.StringIO(), width=width, highlight=False, force_terminal=True, no_color=True)
    show(report, [], console)
    text = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())
    assert max(map(len, text.splitlines())) <= width
    found = first_screen(report)
    places = [text.index(block.title.upper()) for block in found.blocks]
    assert places == sorted(places)
    assert all(cell in text for block in found.blocks for line in block.lines for cell in line.cells)
    assert " ".join(found.verdict.split()) in " ".join(text.split())


@pytest.mark.parametrize("width", [60, 200])
def test_the_screen_says_where_each_number_is_from(width):
    """Each column that is shown is named below the table: run, measured, searched or proved."""
    console = screen(width)
    show(dataclasses.replace(made(), inputs=[], tables={}), [], console)
    below = " ".join(console.file.getvalue().partition("└")[2].split("…")[0].split())
    statuses = dict(re.findall(r"(Run|Measured|Searched|Proved): ([^.]*)\.", below))
    count = console.file.getvalue().partition("┡")[0].count("┳")
    assert sum(titles.count(",") + 1 for titles in statuses.values()) == count
    kinds = {column.title: column.kind.capitalize() for column in SHOWN_COLUMNS}
    for kind, titles in statuses.items():
        assert {kinds[title] for title in titles.split(", ")} == {kind}


def test_letters_without_utf8():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    without_errors(stream)
    stream.write("• a → b ≤ 3 × 10² █░ ━┃ é ☃")
    stream.flush()
    assert raw.getvalue() == b"* a -> b <= 3 x 102 #. -| e ?"
    assert [stand_in(bar) for bar in "▁▄█"] == ["_", ":", "#"]


def run_with(tmp_path, module, code, *arguments):
    """`python -m regard` where a module that it needs does something else."""
    (tmp_path / f"{module}.py").write_text(code)
    path = f"{tmp_path}:{ROOT}"
    command = [sys.executable, "-m", "regard", *arguments]
    return subprocess.run(command, env={"PYTHONPATH": path, "PATH": ""}, capture_output=True, text=True)


def test_an_interrupt_while_torch_is_imported_is_one_line(tmp_path):
    done = run_with(tmp_path, "torch", "raise KeyboardInterrupt", "--help")
    assert (done.stdout, done.stderr) == ("", "regard: stopped\n")
    assert done.returncode != 0


def test_an_interrupt_while_commands_are_imported_is_one_line(tmp_path):
    done = run_with(tmp_path, "typer", "raise KeyboardInterrupt", "cost")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "regard: stopped\n")


def test_help_without_the_extra(tmp_path):
    missing = "raise ImportError('no typer', name='typer')"
    done = run_with(tmp_path, "typer", missing, "--help")
    assert done.returncode == 0, done.stderr
    assert all(f"  {one.name}" in done.stdout for group in COMMANDS.values() for one in group)
    assert "pip install 'regard[audit]'" in done.stdout
    for command, extra in (("audit", "audit"), ("cost", "cli"), ("nonsense", "cli")):
        done = run_with(tmp_path, "typer", missing, command, "--help")
        said = f"regard: typer is not installed; it comes with: pip install 'regard[{extra}]'\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def listed(help_text):
    """The lines about commands: from the first use to the line about extras."""
    return help_text.partition("Look:")[2].partition("In brackets")[0].split("\n")


def test_help_is_the_same_without_the_extra():
    assert listed(regard("--help", COLUMNS="80").stdout) == listed(plain_help())
    assert len(listed(plain_help())) > 10
    named = {one.name for group in COMMANDS.values() for one in group}
    assert named == {one.name for one in application().registered_commands}


HIDING = """
import contextlib, io, json, sys
for name in ("jinja2", "transformers", "safetensors", "ot"):
    sys.modules[name] = None
from regard.cli import main
found = {}
for name in sys.argv[1:]:
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["regard", name, *(["x"] if name == "generate" else [])]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as done:
            found[name] = (done.code, out.getvalue(), err.getvalue())
print(json.dumps(found))
"""


def test_a_command_without_its_packages_is_one_line(tmp_path):
    """Where only the extra of the command line is installed; commands that need no more start."""
    commands = {one.name: one for group in COMMANDS.values() for one in group}
    done = subprocess.run(
        [sys.executable, "-c", HIDING, *commands],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == list(commands)
    for name, (code, out, err) in found.items():
        command = commands[name]
        if command.packages:
            remedy = f"it comes with: pip install 'regard[{command.extra}]'"
            assert (code, out, err) == (2, "", f"regard: {command.packages[0]} is not installed; {remedy}\n")
        else:
            assert "is not installed" not in err
    assert found["doctor"][0] == found["cost"][0] == 0
    assert "regard decide cannot start without jinja2, safetensors." in found["doctor"][1]
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_says_what_is_missing(monkeypatch, capsys):
    """Versions, devices and extras, on one screen."""
    monkeypatch.setenv("COLUMNS", "80")
    installed = importlib.metadata.version

    def version(name):
        if name in ("gguf", "transformers"):
            raise importlib.metadata.PackageNotFoundError
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    doctor()
    said = capsys.readouterr().out
    for words in (f"regard {r.__version__}", f"torch {torch.__version__}", "Python 3", "device  cpu"):
        assert words in said
    assert "extra   gguf       missing: gguf (checkpoints in GGUF)" in said
    assert "extra   audit      missing: transformers (models" in said
    assert "Every command can start." in said
    assert "pip install 'regard[audit,gguf" in said
    assert len(said.splitlines()) <= 24
    doctor(json_=True)
    found = json.loads(capsys.readouterr().out)
    assert found["extras"]["audit"] == ["transformers"]
    assert found["commands"]["audit"] == []

    def nothing(name):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "requires", nothing)
    doctor()
    assert "a source tree that is not installed, so its extras are not known" in capsys.readouterr().out


def test_help_loads_no_transformers():
    """Nor does anything that only looks at arguments."""
    program = (
        "import sys; from regard.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('transformers' in sys.modules, file=sys.stderr)"
    )
    for arguments in (["--help"], ["audit", "--help"], ["audit", "--list-checks"], ["doctor"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True
        )
        assert done.stderr.splitlines()[-1] == "False", (arguments, done.stderr)
