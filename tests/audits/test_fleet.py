"""One audit by several processes: the report of one, to the last byte, whoever dies on the way."""

import os
import signal
import socket
import sys
import time

import pytest
import torch
import torch.distributed as dist

import regard as r
from regard.audits import fleet as room
from regard.audits import meeting, page
from regard.audits.fleet import Alone, Fleet, joined
from regard.audits.launching import launch
from regard.audits.meeting import Meeting
from regard.audits.steps import Step
from tests.audits import fleet
from tests.ranks import run_processes

pytest.importorskip("jinja2")
DIFFERENT = (
    "--text: of rank 1 differs from that of rank 0; give all ranks the same arguments, files (copies "
    "with their times) and settings"
)
FILES = ("report.json", "report.html", "card.md")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The report of one process."""
    return written(lambda run: run.measure(), tmp_path_factory.mktemp("whole"))


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def written(measure, folder):
    """The report of an audit in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    audit = fleet.audit()
    measure(audit)
    torch.set_num_threads(threads)
    page.save(audit.report(), folder)
    return contents(folder)


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


def measured(folder, rank):
    """What a rank has put into the store."""
    return (folder / f"done {rank}").read_text().split()


def run(folder, world, server, **faults):
    faults = {int(rank.removeprefix("rank")): fault for rank, fault in faults.items()}
    return run_processes(fleet.rank, world, server.port, folder, faults)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_report_is_that_of_one_process(world, whole, server, tmp_path):
    assert run(tmp_path, world, server) == [0] * world
    assert contents(tmp_path / "out") == whole
    shares = [measured(tmp_path, rank) for rank in range(world)]
    keys = [step.key for step in fleet.audit().steps()]
    assert sorted(key for share in shares for key in share) == sorted(keys), "every step is done once"
    assert world == 1 or all(shares), "everybody works"
    assert not (tmp_path / "out" / ".units").exists()


def test_steps_can_be_done_in_any_order(whole, tmp_path):
    """Texts that alternate, and the last first; one text at a time is in memory."""

    def shuffled(audit):
        made, make = [], audit._scene
        audit._scene = lambda item: made.append(item.index) or make(item)
        steps = audit.steps()
        for step in [*steps[::-2], *steps[-2::-2]]:
            step.do()
        assert made == [1, 0, 1, 0]

    assert written(shuffled, tmp_path) == whole


def test_a_step_has_random_numbers_of_its_own():
    drawn = []
    step = Step("", "", lambda: drawn.append(torch.rand(4).tolist()))
    torch.manual_seed(7)
    step.do()
    outside = torch.rand(4).tolist()
    step.do()
    assert drawn[0] == drawn[1] != outside
    torch.manual_seed(7)
    assert torch.rand(4).tolist() == outside


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_killed_in_the_middle_of_a_step(lost, whole, server, tmp_path):
    """Its silence is noticed, another does its step, and the next rank reports where it was the first."""
    codes = run(tmp_path, 2, server, **{f"rank{lost}": fleet.KILLED})
    assert codes[lost] == -signal.SIGKILL
    assert codes[1 - lost] == 0
    assert contents(tmp_path / "out") == whole
    assert not (tmp_path / "out" / ".units").exists()


def test_a_rank_that_stands_still_and_wakes_when_all_is_over(whole, server, tmp_path):
    """It finds neither its step nor the store, and goes without a word."""
    over = (tmp_path / "out" / FILES[-1]).exists
    pid = os.fork()
    if pid == 0:  # wakes it
        deadline = time.monotonic() + 60
        while not over() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(int((tmp_path / fleet.STOPS).read_text()), signal.SIGCONT)
        os._exit(0)
    assert run(tmp_path, 2, server, rank1=fleet.STOPS) == [0, 0]
    os.waitpid(pid, 0)
    assert contents(tmp_path / "out") == whole


@pytest.mark.parametrize(
    ("fault", "messages"),
    [
        (
            fleet.DIFFERS,
            [DIFFERENT, DIFFERENT],
        ),
        (
            fleet.FAILS,
            [
                "rank 1: stopped (MODEL: cannot be read; repair it); correct it there: all ranks stop",
                "MODEL: cannot be read; repair it",
            ],
        ),
    ],
)
def test_what_is_wrong_with_one_rank_is_an_error_on_all(fault, messages, server, tmp_path):
    assert run(tmp_path, 2, server, rank1=fault) == [2, 2]
    assert [(tmp_path / f"error {rank}").read_text() for rank in range(2)] == messages
    assert not (tmp_path / "out").exists()


def test_workers_that_are_started_here(whole, tmp_path, monkeypatch):
    """One is killed in the middle of a step; the others are told at once, and the lock stays theirs."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    said = []
    command = [sys.executable, "-m", "tests.audits.fleet", str(tmp_path), "1"]
    assert launch(command, 2, tmp_path / "out" / ".units", False, said.append) == 0
    assert contents(tmp_path / "out") == whole
    killed = (tmp_path / fleet.KILLED).read_text()
    assert said == [f"worker 1 (process {killed}) was ended by SIGKILL: the others take over its work"]
    assert not (tmp_path / "out" / ".units").exists()


def test_workers_that_are_all_killed(tmp_path):
    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    with pytest.raises(r.errors.ArgumentError, match=r"all 2 workers were ended by a signal \(SIGKILL\)"):
        launch(command, 2, tmp_path / ".units", False, lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_workers_end_together(tmp_path, monkeypatch):
    """One gives up: whoever does not hear of it is ended; the exit status is the one that was chosen."""
    monkeypatch.setattr("regard.audits.launching.END_WITHIN", 0.2)
    program = "import os, sys, time; time.sleep(60) if os.environ['RANK'] == '1' else sys.exit(3)"
    assert launch([sys.executable, "-c", program], 2, tmp_path / ".units", False, lambda line: None) == 3


def test_torchrun_starts_the_ranks_again(whole, tmp_path):
    """The agent of torchrun ends all workers when one dies; the second time they go on with what is there."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = LaunchConfig(
        1,
        1,
        2,
        rdzv_backend="static",  # as torchrun does by itself: one meeting place for all attempts
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": 0, "timeout": 60},
        max_restarts=1,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    assert set(elastic_launch(config, fleet.restarted)(str(tmp_path)).values()) == {0}
    assert contents(tmp_path / "out") == whole
    assert [(tmp_path / f"tries {rank}").read_text() for rank in range(2)] == ["xx", "xx"]
    done = measured(tmp_path, 0) + measured(tmp_path, 1)
    assert sorted(done) == sorted({*done}), "nothing was done twice"


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}, {"RANK": "3"}])
def test_a_world_of_one_is_a_plain_run(variables):
    with joined(variables) as team:
        assert type(team) is Alone


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": None}, "RANK: is not set, and WORLD_SIZE says that there are several processes; start the"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR: is not set"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT: is 'http', which is not a number"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE: is '-2', which is not a number"),
        ({"RANK": "2"}, "RANK: is 2 in a world of 2"),
        ({"MASTER_PORT": "9"}, "MASTER_ADDR, MASTER_PORT: no meeting was found at 127.0.0.1:9"),
    ],
)
def test_a_group_that_is_not_there(changed, message, monkeypatch):
    monkeypatch.setattr(meeting, "COME_WITHIN", 0.2)
    usual = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    variables = {name: text for name, text in {**usual, **changed}.items() if text is not None}
    with pytest.raises(r.errors.ArgumentError) as caught, joined(variables):
        raise AssertionError
    assert str(caught.value).startswith(message)


def test_a_rank_that_never_comes(server, monkeypatch):
    monkeypatch.setattr(meeting, "COME_WITHIN", 0.3)
    here = Meeting(server, 0, 2)
    with here.alive():
        assert here.gather("subject", "mine") == {0: "mine"}
    assert here.gone() == {1}


@pytest.mark.parametrize(
    ("rank", "variables", "raised"),
    [
        (0, {room.GROUP: "group"}, r.errors.ArgumentError),
        (1, {room.GROUP: "group"}, SystemExit),
        (1, {}, r.errors.ArgumentError),
    ],
)
def test_who_says_an_error(rank, variables, raised, server):
    """Every rank of torchrun; of the workers that are started here, the first."""
    usual = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place = {"MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with pytest.raises(raised) as caught, joined({**usual, **place, **variables}):
        raise r.errors.ArgumentError("MODEL", "is broken", "repair it")
    assert raised is r.errors.ArgumentError or caught.value.code == 2
    other = Meeting.at("127.0.0.1", server.port, 1 - rank, 2, hosted=True)
    with pytest.raises(r.errors.ArgumentError, match=rf"rank {rank}: stopped \(MODEL: is broken; repair"):
        other.raise_trouble()


def test_whoever_hosts_the_meeting_is_gone(monkeypatch):
    host = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    variables = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(host.port),
    }
    over = pytest.raises(r.errors.ArgumentError, match=r"rank 1: the meeting at .* is over")
    with over, joined(variables) as team:
        del host
        team.agree({})


def test_claims(server):
    """Nobody does what another does; what one did who is gone is done by one of the others."""
    ranks = [Meeting(dist.TCPStore("127.0.0.1", server.port), rank, 3) for rank in range(3)]
    assert [rank.claim("a") for rank in ranks] == [True, False, False]
    assert ranks[0].claim("a")
    ranks[0].lose(0)
    for rank in ranks[1:]:
        assert rank.gone() == {0}
        assert rank.leader() == 1
    assert [rank.claim("a") for rank in ranks[1:]] == [True, False]
    assert [rank.claim("a") for rank in ranks[1:]] == [True, False]


def test_progress_counts_what_all_have_done(server, tmp_path):
    """The bar of one rank shows the results of every rank."""
    team = Fleet(Meeting(server, 0, 2), "group")
    server.set("gone 1", "1")
    audit, seen = fleet.audit(), []
    audit.store = team.open_store(tmp_path / ".units", {}, False)
    steps = audit.steps()
    for step in steps[:4]:  # as another rank would
        (tmp_path / ".units" / f"{step.key}.json").write_text("{}")
    team._progress = (lambda *shown: seen.append(shown), steps)
    team._look()
    assert seen == [("1 of 2 processes", 4, len(steps))]
    assert team.parts([3, 4, 5]) == [12]


def test_a_group_has_the_same_name_when_torchrun_starts_it_again():
    assert room.group_of({"TORCHELASTIC_RUN_ID": "job"}) == "job"
    assert room.group_of({"TORCHELASTIC_RUN_ID": "none"}) == room.group_of({}) != ""
    assert room.group_of({room.GROUP: "own", "TORCHELASTIC_RUN_ID": "job"}) == "own"
