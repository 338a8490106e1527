"""Trainings under a promise: every checkpoint proves it again."""

import json

import pytest

from regard.errors import ArgumentError
from regard.training import Diverged, Recipe, Text, Training, loop
from tests.training.command import DATA, SHORT, TINY, status

pytest.importorskip("typer")
pytest.importorskip("safetensors")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "milton.txt"
    path.write_text(DATA.read_text()[:6_000])
    return path


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(loop, "SAMPLED", SHORT)


def test_every_checkpoint_proves_the_promise(text, tmp_path, capsys):
    out = tmp_path / "run"
    assert status("--data", text, "--out", out, *TINY, "--promise", "3", "--learning-rate", "0.5") == 0
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 4, 8]
    assert all(2.9 <= line["certificate"] <= 3 * (1 + 1e-6) for line in lines)
    assert "the promise is kept: the constant is proved to be at most " in capsys.readouterr().out


def test_without_a_promise_there_is_none(text, tmp_path):
    out = tmp_path / "run"
    assert status("--data", text, "--out", out, *TINY) == 0
    assert json.loads((out / "history.jsonl").read_text().splitlines()[0])["certificate"] is None


def test_a_promise_that_is_broken_stops_the_training(text, tmp_path, monkeypatch):
    recipe = Recipe(steps=2, width=16, layers=1, heads=1, context=16, batch=2, every=1, promise=2.0)
    training = Training.start(Text.read(text), recipe, tmp_path / "run")
    monkeypatch.setattr("regard.nn.promises.SLACK", -0.5)
    with pytest.raises(Diverged, match="the promise 2 is broken"):
        list(training.events())


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_promises_that_are_none(value):
    with pytest.raises(ArgumentError, match="--promise"):
        Recipe(promise=value)


def test_another_promise_is_another_training(text, tmp_path):
    out = tmp_path / "run"
    assert status("--data", text, "--out", out, *TINY, "--promise", "3") == 0
    with pytest.raises(ArgumentError, match="--promise"):
        Training.resume(out, {"promise": 4.0})
