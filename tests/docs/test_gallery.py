"""The gallery: each picture has the command that makes it, and what is printed there is what it prints."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as xml
from types import ModuleType

import pytest

from regard.cli import main
from regard.flows import Recipe, Simulation
from tests.docs.test_snippets import ROOT

pytest.importorskip("typer")
pytest.importorskip("jinja2")
PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_gallery", ROOT / "docs" / "make_gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def section(command: str) -> str:
    """What the page says of a command."""
    return next(part for part in PAGE.split("\n## ") if f"```sh\n{command}\n```" in part)


def test_each_picture_has_its_command(script: ModuleType) -> None:
    for name, (command, _) in script.COMMANDS.items():
        assert f"](pictures/flow-{name}.png)" in section(command)
        assert (script.PICTURES / f"flow-{name}.png").stat().st_size > 10_000
    assert PAGE.count("```sh") == len(script.COMMANDS)


@pytest.mark.parametrize("name", ["circle", "phase"])
def test_commands_print_what_the_page_shows(
    name: str,
    script: ModuleType,
    tmp_path: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, _ = script.COMMANDS[name]
    monkeypatch.setattr(sys, "argv", [*command.split(), "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as done:
        main()
    assert not done.value.code
    printed = capsys.readouterr()
    (shown,) = re.findall(r"```text\n(.*?)```", section(command), flags=re.DOTALL)
    assert not [line for line in shown.splitlines() if line not in (printed.out + printed.err).splitlines()]


def test_the_animation_moves_without_a_script(script: ModuleType) -> None:
    simulation = Simulation(Recipe(particles=9, until=1.0, frames=3))
    simulation.run()
    picture = xml.fromstring(script.animated(simulation.report()))
    moving = picture.findall(".//{*}animate")
    assert len(moving) == 2 * 9
    assert all(len(one.attrib["values"].split(";")) == 4 for one in moving)
    assert "script" not in script.animated(simulation.report())
    kept = xml.parse(ROOT / "docs" / "pictures" / "flow-circle.svg").getroot()
    assert len(kept.findall(".//{*}animate")) == 2 * 100
