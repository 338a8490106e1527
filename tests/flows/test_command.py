"""regard flow and regard simulate as a user meets them: whole pages, one-line errors, a kill and a resumed
run.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from regard.cli import main
from regard.dynamics import resume
from regard.flows import Recipe
from tests.audits.checkpoints import ENVIRONMENT, save

pytest.importorskip("typer")
pytest.importorskip("jinja2")
pytest.importorskip("safetensors")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command in this process: exit status, what went to stdout and to stderr."""

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["regard", *map(str, arguments)])
        capsys.readouterr()
        status = 0
        try:
            main()
        except SystemExit as done:
            status = done.code or 0
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return called


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "--beta", "inf"), "--beta: is inf"),
        (("simulate", "--particles", "0"), "--particles: is 0; give 1 or more"),
        (("simulate", "--dimension", "1"), "--dimension: is 1"),
        (("simulate", "--step", "-1"), "--step: is -1.0; give a positive number"),
        (("simulate", "--scheme", "magic"), "--scheme: is magic"),
        (("simulate", "--noise", "0.1"), "--noise: is 0.1 with heun"),
        (("simulate", "--phase", "delta"), "--phase: is delta; give beta or gamma"),
        (("simulate", "--phase", "beta", "--noise", "0.1"), "--noise: is given with --phase"),
        (
            ("simulate", "--phase", "beta", "--resume"),
            "--resume: is given with --phase",
        ),
        (("simulate", "--phase", "beta", "--save"), "--save: is given with --phase; it takes"),
        (("flow", "--steps", "0", "--layer", "1"), "--steps: is 0; give one or more"),
        (("flow", "--text", __file__), "--text: is "),
        (("flow", "/no/such/path"), "MODEL: there is nothing at /no/such/path"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(run, tmp_path, arguments, message):
    status, out, err = run(*arguments, "--out", tmp_path / "out")
    assert (status, out, len(err.splitlines())) == (2, "", 1), err
    assert message in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("flow", "--beta", "4"),
        ("flow", "--phase", "beta"),
        ("flow", "--resume"),
        ("flow", "--seed", "1"),
        ("simulate", "--layer", "1"),
        ("simulate", "--text", "a text"),
    ],
)
def test_each_command_has_its_own_options(run, tmp_path, arguments):
    status, out, err = run(*arguments, "--out", tmp_path / "out")
    assert (status, out) == (2, "")
    assert f"No such option: {arguments[1]}" in err
    assert not (tmp_path / "out").exists()


def test_a_simulation(run, tmp_path):
    options = ("--beta", 3, "--particles", 30, "--until", 1, "--frames", 4, "--save", "--out", tmp_path)
    status, out, err = run("simulate", *options)
    assert status == 0, err
    assert "30 particles, softmax weights with β = 3: 20 evaluations of attention" in err
    assert "never falls between frames" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "flow.html",
        "flow.json",
        "trajectory.safetensors",
    ]
    data = json.loads((tmp_path / "flow.json").read_text())
    assert data["recipe"]["beta"] == 3.0
    assert data["times"] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert data["columns"][0]["name"] == "energy"
    page = (tmp_path / "flow.html").read_text()
    assert "regard simulate --beta 3" in page
    assert "softmax weights" in page
    assert not re.search(r"\bU?SA\b|energy\(", page + out + err)
    status, printed, err = run("simulate", *options, "--json")
    assert (status, json.loads(printed)) == (0, data)
    assert "written: " in err


@pytest.mark.parametrize(
    "options", [("--unnormalized", "--step", "0.01"), ("--scheme", "dormand-prince"), ("--dimension", "5")]
)
def test_other_models_schemes_and_dimensions(run, tmp_path, options):
    status, _, err = run(
        "simulate", "--beta", 1, "--particles", 9, "--until", 0.5, "--frames", 2, *options, "--out", tmp_path
    )
    assert status == 0, err
    energies = json.loads((tmp_path / "flow.json").read_text())["panels"][0]["values"]["energy"]
    assert energies == sorted(energies)


def test_layers_of_a_model(run, tmp_path):
    pytest.importorskip("transformers")
    model = save(tmp_path / "tiny")
    options = ("--layer", 1, "--layer", 0, "--steps", 2, "--text", "the cat sat on a mat .")
    status, out, err = run("flow", model, *options, "--out", tmp_path / "out")
    assert status == 0, err
    assert out.startswith("Observed on one text of ")
    data = json.loads((tmp_path / "out" / "flow.json").read_text())
    assert [panel["name"] for panel in data["panels"]] == ["layer 1", "layer 0"]
    assert data["times"] == [0, 1, 2]
    (tmp_path / "text.txt").write_text("the cat sat\non a mat .")
    joined = ("--layer", 1, "--layer", 0, "--steps", 2, "--text-file", tmp_path / "text.txt", "--json")
    assert json.loads(run("flow", model, *joined, "--out", tmp_path / "out")[1]) == data
    status, _, err = run("flow", model, "--layer", 9, "--out", tmp_path / "other")
    assert (status, "--layer: is 9" in err) == (2, True)
    assert not (tmp_path / "other").exists()


def test_the_phase_diagram(run, tmp_path):
    status, out, err = run("simulate", "--phase", "beta", "--particles", 100, "--until", 5, "--out", tmp_path)
    assert status == 0, err
    assert "Predicted as n grows: tokens meet where γ < 1/(1 − ρ)" in out
    data = json.loads((tmp_path / "flow.json").read_text())
    assert (data["axis"], len(data["share"]), len(data["share"][0])) == ("beta", 40, 40)


LONG = ("--beta", "3", "--particles", "60", "--until", "4", "--step", "0.005", "--frames", "60")
NOISY = ("--scheme", "euler", "--noise", "0.2", "--save")


def started(out, *more):
    command = [sys.executable, "-m", "regard", "simulate", *LONG, *NOISY, "--out", str(out), *more]
    return subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no kill -9")
def test_a_killed_simulation_goes_on_bit_for_bit(run, tmp_path):
    process = started(tmp_path / "killed")
    frames = tmp_path / "killed" / ".frames"
    try:
        while (
            len(list(frames.glob("frame-*.json"))) < 5 or not (frames / "trajectory-0.safetensors").exists()
        ):
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    kept = len(list(frames.glob("frame-*.json")))
    assert 5 <= kept < 61
    assert not (tmp_path / "killed" / "flow.html").exists()
    status, _, err = run("simulate", *LONG, *NOISY, "--beta", 2, "--resume", "--out", tmp_path / "killed")
    assert status == 2
    assert "of another run (changed: --beta)" in err
    assert run("simulate", *LONG, *NOISY, "--resume", "--out", tmp_path / "killed")[0] == 0
    assert run("simulate", *LONG, *NOISY, "--out", tmp_path / "whole")[0] == 0
    first, second = (json.loads((tmp_path / name / "flow.json").read_text()) for name in ("killed", "whole"))
    assert first == second
    map = Recipe(beta=3.0).attention()
    states = [resume(tmp_path / name / "trajectory.safetensors", map).at(4.0) for name in ("killed", "whole")]
    assert torch.equal(*states)
    assert not frames.exists()
