"""A directory has one audit at a time: the owner's process number is beside the results,
and only counts while that process lives.
"""

import os
import subprocess
import sys

import pytest

import regard as r
from regard.audits.store import OWNER, Store

SUBJECT = {"model": "a"}


@pytest.fixture
def units(tmp_path):
    """What an audit that was broken off leaves, with one result in it."""
    Store(tmp_path / "out" / ".units", SUBJECT).put("key", 1)
    return tmp_path / "out" / ".units"


@pytest.fixture
def other():
    """Another process that lives until the test is over."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate()


def gone():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_owner_is_written(units):
    assert (units / OWNER).read_text() == str(os.getpid())


@pytest.mark.parametrize("resume", [False, True])
def test_a_living_owner_is_not_disturbed(units, other, resume):
    (units / OWNER).write_text(str(other))
    before = contents(units)
    with pytest.raises(r.errors.ArgumentError) as caught:
        Store(units, SUBJECT, resume=resume)
    assert caught.value.argument == "--out"
    assert caught.value.found == f"{units.parent} is in use by another run (process {other})"
    assert caught.value.remedy.startswith("wait for it, or give another directory; if none is running")
    assert caught.value.remedy.endswith(f"delete {units}")
    assert contents(units) == before


def test_the_remedy_helps(units, other):
    """Process numbers are used again: what the error says to delete is what is in the way."""
    (units / OWNER).write_text(str(other))
    for path in units.iterdir():
        path.unlink()
    units.rmdir()
    assert len(Store(units, SUBJECT)) == 0


@pytest.mark.parametrize("resume", [False, True])
def test_an_owner_that_is_gone_is_succeeded(units, resume):
    (units / OWNER).write_text(str(gone()))
    assert ("key" in Store(units, SUBJECT, resume=resume)) is resume
    assert (units / OWNER).read_text() == str(os.getpid())


@pytest.mark.parametrize("resume", [False, True])
def test_the_same_process_goes_on(units, resume):
    assert ("key" in Store(units, SUBJECT, resume=resume)) is resume


@pytest.mark.parametrize("text", ["", "{ cut off", '"a word"', "0", "-1", "9" * 30])
def test_what_is_no_process_is_no_owner(units, text):
    (units / OWNER).write_text(text)
    assert Store(units, SUBJECT, resume=True).get("key") == 1


def test_without_an_owner(units):
    (units / OWNER).unlink()
    assert Store(units, SUBJECT, resume=True).get("key") == 1


def test_a_process_of_somebody_else_lives(units, monkeypatch):
    def denied(process, signal):
        raise PermissionError(1, "Operation not permitted")

    (units / OWNER).write_text(str(os.getpid() + 1))
    monkeypatch.setattr(os, "kill", denied)
    with pytest.raises(r.errors.ArgumentError, match="in use by another run"):
        Store(units, SUBJECT, resume=True)
