"""Long work: interrupted, killed and continued audits end with the report of one that ran through."""

import json
import signal
import subprocess
import sys
import time

import pytest

import regard as r
from regard._files import check_writable
from regard.audits.store import Store, fingerprint
from tests.audits.checkpoints import ENVIRONMENT, regard, save

CHECKS = "weights,rows,constants,depth"
TEXTS = (
    "the cat sat on the mat",
    "a red dog",
    "cat",
    "the green house . the red house",
    "dogs sat on a mat",
    "a cat . a dog . a house",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("transformers")
    return save(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """The report of an audit that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole")
    done = regard(*arguments(model, out))
    assert done.returncode == 0, done.stderr
    return (out / "report.json").read_bytes()


def arguments(model, out):
    return [
        "audit",
        str(model),
        *(part for text in TEXTS for part in ("--text", text)),
        "--checks",
        CHECKS,
        "--out",
        str(out),
    ]


def broken_off(model, out, kind):
    """Start an audit, and send a signal once some of it is done."""
    command = [sys.executable, "-m", "regard", *arguments(model, out)]
    reset = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731 - background jobs inherit a deaf ear
    process = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=reset
    )
    units, limit = out / ".units", time.monotonic() + 120
    while len(list(units.glob("*.json"))) < 5 and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.002)
    process.send_signal(kind)
    output, errors = process.communicate(timeout=60)
    assert 5 <= len(list(units.glob("*.json"))) < 2 + 3 * len(TEXTS), (
        "the audit was over before it was broken off"
    )
    return process.returncode, output, errors


def test_killed_and_continued(model, whole, tmp_path):
    code, _, _ = broken_off(model, tmp_path, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert not (tmp_path / "report.json").exists()
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / ".units").glob("*.json")}
    (tmp_path / ".units" / sorted(kept)[0]).write_text(
        "{ cut off"
    )  # as a lost page of a disk leaves it: measured again
    done = regard(*arguments(model, tmp_path), "--resume")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.json").read_bytes() == whole
    assert not (tmp_path / ".units").exists()


def test_interrupted_and_continued(model, whole, tmp_path):
    """Ctrl-C leaves a report that says it is partial."""
    code, output, errors = broken_off(model, tmp_path, signal.SIGINT)
    assert code == 130, errors
    assert "Traceback" not in errors
    assert "This report is partial: stopped after" in output
    data = json.loads((tmp_path / "report.json").read_text())
    assert "--resume" in data["partial"]
    assert data["rows"]
    assert regard(*arguments(model, tmp_path), "--resume").returncode == 0
    assert (tmp_path / "report.json").read_bytes() == whole


def test_results_of_another_audit_are_kept_apart(model, tmp_path):
    broken_off(model, tmp_path, signal.SIGKILL)
    before = sorted(path.name for path in (tmp_path / ".units").iterdir())
    done = regard(*arguments(model, tmp_path), "--text", "another text", "--resume")
    assert done.returncode == 2
    assert "are of another run (changed: --text)" in done.stderr
    done = regard(*arguments(model, tmp_path), "--seed", 1, "--resume")
    assert "are of another run (changed: --seed)" in done.stderr
    assert sorted(path.name for path in (tmp_path / ".units").iterdir()) == before


def test_what_is_not_asked_for_is_not_continued(tmp_path):
    first = Store(tmp_path / "units", {"model": "a"})
    first.put("key", {"value": [1.0, float("inf"), float("nan")]})
    assert (
        Store(tmp_path / "units", {"model": "a"}, resume=True).get("key")
        == {"value": [1.0, "inf", None]}
        == first.get("key")
    )
    assert "key" not in Store(tmp_path / "units", {"model": "a"})
    first = Store(tmp_path / "units", {"model": "a"})
    first.put("key", 1)
    with pytest.raises(r.errors.ArgumentError, match=r"another run \(changed: model\)"):
        Store(tmp_path / "units", {"model": "b"}, resume=True)
    assert Store(tmp_path / "units", {"model": "a"}, resume=True).get("key") == 1
    first.remove()
    assert not (tmp_path / "units").exists()
    assert len(Store(tmp_path / "units", {"model": "b"}, resume=True)) == 0  # nothing there is nothing wrong


def test_fingerprints():
    assert fingerprint(["a"], {"b": 1.0}) == fingerprint(["a"], {"b": 1.0})
    assert fingerprint("ab", "c") != fingerprint("a", "bc")


def test_a_directory_is_tried_before_the_work(tmp_path):
    check_writable(tmp_path / "new" / "folder")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(r.errors.ArgumentError, match="cannot be written"):
        check_writable(tmp_path / "file" / "folder")
    with pytest.raises(r.errors.ArgumentError, match="cannot be written"):
        check_writable(tmp_path / "file")
