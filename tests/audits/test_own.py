"""What regard trained, regard audits: a training, one of its checkpoints, a series of them,
a model saved alone.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

import regard
from regard import nn
from regard.audits.checkpoint import find
from regard.audits.load import tokenizer_of
from regard.audits.own import inside
from regard.cli import main
from regard.errors import ArgumentError
from regard.training import Recipe, Text, Training

RECIPE = Recipe(width=16, layers=2, heads=2, context=16, batch=4, steps=4, every=2, learning_rate=0.01)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("training")
    (directory / "text.txt").write_text(
        "the quick brown fox jumps over the lazy dog, and the cat sat on the mat; " * 15
    )
    for _ in Training.start(Text.read(directory / "text.txt"), RECIPE, directory / "run").events():
        pass
    return directory / "run"


def called(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["regard", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


def test_the_newest_checkpoint_is_taken(run):
    assert inside(run) == run / "step-000004" / "model"
    assert inside(run / "step-000002") == run / "step-000002" / "model"
    assert find(str(run)).name == "step-000004"


def test_a_training_is_audited_on_texts(run, tmp_path, monkeypatch, capsys):
    asked = ("--checks", "rows,influence,words", "--out", tmp_path)
    assert called(monkeypatch, "audit", run, "--text", "the cat sat on the dog", *asked) == 0, (
        capsys.readouterr().err
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(site["heads"], site["covered"]) for site in report["coverage"]] == [(2, True), (2, True)]
    assert "".join(report["inputs"][0]["tokens"]) == "the cat sat on the dog"
    assert report["tables"]["words"][0]["changes"]


def test_a_text_in_other_characters_is_refused(run, tmp_path, monkeypatch, capsys):
    assert called(monkeypatch, "audit", run, "--text", "the cat & the dog", "--out", tmp_path / "report") == 2
    assert "--text: holds '&', which the model was not trained on" in capsys.readouterr().err


def test_checkpoints_are_a_series(run, tmp_path, monkeypatch, capsys):
    assert called(monkeypatch, "track", run / "step-000002", run / "step-000004", "--out", tmp_path) == 0
    series = json.loads((tmp_path / "series.json").read_text())
    assert [Path(str(name)).name for name in series["checkpoints"]] == ["step-000002", "step-000004"]
    assert "QK norm" in capsys.readouterr().out


def test_weights_alone(run, tmp_path, monkeypatch, capsys):
    """The norms are those of the loaded model."""
    assert called(monkeypatch, "audit", run, "--weights-only", "--out", tmp_path) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    model = nn.load(run / "step-000004" / "model").double()
    attention = model.decoder.layers[0].attention
    w_q, w_k, _ = attention.projection.weight.detach().mT.unflatten(-1, (6, 8)).movedim(-2, 0).split(2)
    expected = torch.linalg.matrix_norm(w_q @ w_k.mT / 8**0.5, 2)
    found = [
        row["values"]["qk_norm"]
        for row in report["rows"]
        if row.get("layer") == 0 and row.get("head") is not None
    ]
    torch.testing.assert_close(torch.tensor(found[:2], dtype=torch.float64), expected, rtol=1e-6, atol=0)


def test_a_model_alone_has_no_texts(tmp_path):
    """Without a training beside it nobody knows what its tokens stand for: the remedy is another way."""
    nn.save(nn.LanguageModel(nn.Design(8, 2), vocabulary=11, layers=1), tmp_path)
    with pytest.raises(ArgumentError, match=r"without the characters of a training.*\{'ids': ids\}"):
        tokenizer_of(find(str(tmp_path)))
    report = regard.audit(nn.load(tmp_path), [{"ids": torch.arange(6).unsqueeze(0)}])
    assert report.covered


def test_what_it_writes(run, monkeypatch, capsys):
    arguments = ("generate", run, "--prompt", "the ", "--tokens", "30", "--seed", "3")
    assert called(monkeypatch, *arguments) == 0
    first = capsys.readouterr().out
    assert first.startswith("the ")
    assert len(first) == len("the ") + 30 + 1
    called(monkeypatch, *arguments)
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{run}", "--prompt", "&"), "--prompt: holds '&'"),
        (("{run}", "--prompt", ""), "--prompt: is empty"),
        (("{empty}",), "is not a training directory"),
    ],
)
def test_what_cannot_be_written(run, tmp_path, monkeypatch, capsys, arguments, words):
    given = [argument.format(run=run, empty=tmp_path) for argument in arguments]
    assert called(monkeypatch, "generate", *given) == 2
    assert words in capsys.readouterr().err


def test_included_text_is_there():
    assert (
        Path(regard.__file__).parent.parent / "examples" / "data" / "paradise_lost.txt"
    ).stat().st_size > 300_000
