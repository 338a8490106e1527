"""A directory has one audit at a time: its owner holds a lock that ends with the process, however that ends,
and says beside the results who it is.
"""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict

import pytest

import regard as r
from regard.audits import owning
from regard.audits.owning import OWNER, Hold, Owner, succession
from regard.audits.store import Store
from tests.ranks import run_processes

SUBJECT = {"model": "a"}
HOLD = """
import sys
from pathlib import Path
from regard.audits.owning import Hold, Owner
hold = Hold(Path(sys.argv[1]), Owner(since="noon", group=sys.argv[2]))
print("held", flush=True)
input()
"""


@pytest.fixture
def units(tmp_path):
    """What an audit that was broken off leaves, with one result in it."""
    directory = tmp_path / "out" / ".units"
    Store(directory, SUBJECT).put("key", 1)
    left = Owner(gone(), since="yesterday")
    (directory / OWNER).write_text(json.dumps(asdict(left)))
    return directory


@pytest.fixture
def held(units):
    """The same, held by another process until the test is over."""
    command = [sys.executable, "-c", HOLD, str(units), "group"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    yield process
    process.communicate()


@pytest.fixture
def without_locks(monkeypatch):
    """A file system that knows no locks."""
    monkeypatch.setattr(owning, "_lock", lambda file: None)


def gone():
    """The number of a process that has ended."""
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    return process.pid


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def owner(units):
    return json.loads((units / OWNER).read_text())


def test_the_owner_is_written(units):
    store = Store(units, SUBJECT)
    assert (owner(units)["process"], owner(units)["host"]) == (os.getpid(), socket.gethostname())
    store.remove()
    assert not units.exists()


def test_a_living_owner_is_not_disturbed_and_a_dead_one_succeeded(units, held):
    before = contents(units)
    for resume in (False, True):
        with pytest.raises(r.errors.ArgumentError) as caught:
            Store(units, SUBJECT, resume=resume)
        who = f"process {held.pid} on {socket.gethostname()}, since noon"
        assert caught.value.argument == "--out"
        assert caught.value.found == f"{units.parent} is in use by another run ({who})"
        remedy = f"wait for it, or give another directory; if it is no longer running, delete {units}"
        assert caught.value.remedy == remedy
    assert contents(units) == before
    assert Store(units, SUBJECT, resume=True, group="group").get("key") == 1  # of the same group: let in
    held.send_signal(signal.SIGKILL)
    held.wait()
    found = Store(units, SUBJECT, resume=True)
    assert found.get("key") == 1
    assert succession(found.predecessor, True) == f"results of a run that has ended ({who}) are taken up"
    assert succession(found.predecessor, False).endswith("are deleted, since --resume is not given")


@pytest.mark.parametrize("resume", [False, True])
def test_an_owner_that_is_gone_is_succeeded(units, resume):
    found = Store(units, SUBJECT, resume=resume)
    assert ("key" in found) is resume
    assert found.predecessor.since == "yesterday"
    assert owner(units)["process"] == os.getpid()


@pytest.mark.parametrize("resume", [False, True])
def test_the_same_process_goes_on(units, resume):
    first = Store(units, SUBJECT, resume=True)
    second = Store(units, SUBJECT, resume=resume)
    assert ("key" in second) is resume
    assert second.predecessor is None
    assert "key" in first


def test_a_group_that_tries_again_goes_on(units):
    """Only with the same subject, and only where the group itself was here."""
    Store(units, SUBJECT, resume=True, group="job").put("more", 2)
    assert Store(units, SUBJECT, group="job").keys() == {"key", "more"}
    assert Store(units, {"model": "b"}, group="job").keys() == set()
    Store(units, SUBJECT, group="job").put("more", 2)
    assert Store(units, SUBJECT, group="another").keys() == set()


def test_results_of_nobody_knows_what_are_not_taken_up(units):
    (units / "subject").unlink()
    with pytest.raises(r.errors.ArgumentError, match=r"of another run \(changed: model\)"):
        Store(units, SUBJECT, resume=True)
    assert (units / "key.json").exists()


@pytest.mark.parametrize("text", ["", "{ cut off", '"a word"', "0", '{"process": 1}', "[]"])
def test_what_is_no_process_is_no_owner(units, text):
    (units / OWNER).write_text(text)
    assert Store(units, SUBJECT, resume=True).get("key") == 1


def test_without_an_owner(units):
    (units / OWNER).unlink()
    assert Store(units, SUBJECT, resume=True).get("key") == 1


@pytest.mark.parametrize(
    ("process", "host", "taken"),
    [(os.getppid(), socket.gethostname(), True), (1, "elsewhere", True), (0, socket.gethostname(), False)],
)
def test_a_file_system_without_locks(units, without_locks, process, host, taken):
    """There a process that lives counts, and one on another machine may live."""
    (units / OWNER).write_text(json.dumps(asdict(Owner(process, host))))
    if taken:
        with pytest.raises(r.errors.ArgumentError, match="in use by another run"):
            Store(units, SUBJECT, resume=True)
    else:
        assert Store(units, SUBJECT, resume=True).get("key") == 1


def test_an_ended_process_on_a_file_system_without_locks(units, without_locks):
    assert Store(units, SUBJECT, resume=True).get("key") == 1
    (units / OWNER).write_text(json.dumps(asdict(Owner(10**30))))  # nobody has such a number
    assert Store(units, SUBJECT, resume=True).get("key") == 1


def test_a_process_of_somebody_else_lives(monkeypatch):
    def denied(process, signal):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", denied)
    assert Owner(os.getpid() + 1).may_live()


def test_one_of_many_gets_it(tmp_path):
    """Processes that come at once to a directory that is not there, or whose owner removes it meanwhile."""
    codes = run_processes(_contend, 6, tmp_path / "a" / ".units")
    assert codes == [0] * 6
    assert not (tmp_path / "a" / ".units").exists()
    assert len((tmp_path / "a" / "log").read_text().split()) >= 6


def _contend(rank, world, directory):
    """Hold and remove many times; while it is held, nobody else is there."""
    inside = directory.parent / "inside"
    held = 0
    for _ in range(2000):
        try:
            hold = Hold(directory, Owner())
        except r.errors.ArgumentError as error:
            if "in use by another run (process" not in str(error):
                os._exit(3)
            continue
        try:
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            os._exit(4)
        inside.unlink()
        hold.remove_empty()
        held += 1
        if held == 20:
            with (directory.parent / "log").open("a") as log:
                log.write(f"{rank} ")
            os._exit(0)
    os._exit(0 if held else 5)
