"""One process of an audit by several, on a tiny model: called by tests, or run as a module by what starts
workers.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import regard as r
from regard.audits import Audit, meeting, page
from regard.audits.fleet import joined

SUBJECT = {"MODEL": "tiny", "--text": "two"}
KILLED, DIFFERS, FAILS, STOPS = "killed", "differs", "fails", "stops"
"""What may happen to a rank."""


def audit():
    """Twelve steps on two inputs, and a twin."""
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    inputs = [torch.randn(1, length, 8) for length in (4, 3)]
    return Audit(model, inputs, checks=["weights", "rows", "constants", "geometry"], twin=True)


def work(environment, folder, fault="", resume=False, after=()):
    """What the command line does, on one rank; gives the exit status. after: files that are waited for."""
    with joined(environment) as team:
        if fault == FAILS:
            raise r.errors.ArgumentError("MODEL", "cannot be read", "repair it")
        run = audit()
        team.agree({**SUBJECT, "--text": "three"} if fault == DIFFERS else SUBJECT)
        run.store = team.open_store(folder / "out" / ".units", SUBJECT, resume)
        if fault in (KILLED, STOPS):
            _measure_until(run, folder / fault, fault)
        (folder / f"began {team.rank}").touch()
        _measure_after(run, [*(folder / f"began {rank}" for rank in range(team.world)), *after])
        with (folder / f"done {team.rank}").open("a") as file:
            _note_steps(run, file)
            team.measure(run)
        code = team.await_report(None)
        if code is None:
            page.save(run.report(), folder / "out")
            team.reported(0)
            run.store.remove()
        return code or 0


def _measure_until(run, flag, fault):
    """In the middle of its second layer the process is killed, or stands still; once."""
    measure = run._measure_one

    def once(item, place, scene):
        if place.layer == 1 and not flag.exists():
            flag.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL if fault == KILLED else signal.SIGSTOP)
        measure(item, place, scene)

    run._measure_one = once


def _measure_after(run, flags):
    """No layer is measured before these files are there, however late another rank begins."""
    measure, patience = run._measure_one, time.monotonic() + 60

    def waiting(item, place, scene):
        while not all(flag.exists() for flag in flags) and time.monotonic() < patience:
            time.sleep(0.01)
        measure(item, place, scene)

    run._measure_one = waiting


def _note_steps(run, file):
    """Write down the keys of what was measured here."""
    put = run.store.put

    def noted(key, value):
        put(key, value)
        print(key, file=file, flush=True)

    run.store.put = noted


def rank(number, world, port, folder, faults):
    """A rank in a process of its own; `faults` by rank."""
    torch.set_num_threads(1)
    meeting.BEAT, meeting.SILENT = 0.1, 2.0
    environment = {
        "RANK": str(number),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "test",
    }
    others = [fault for other, fault in faults.items() if other != number and fault in (KILLED, STOPS)]
    try:
        code = work(environment, folder, faults.get(number, ""), after=[folder / fault for fault in others])
    except r.errors.RegardError as error:
        Path(folder, f"error {number}").write_text(str(error))
        code = 2
    os._exit(code)


def restarted(folder):
    """A worker of torchrun; the second rank is killed the first time."""
    torch.set_num_threads(1)
    folder = Path(folder)
    tries = folder / f"tries {os.environ['RANK']}"
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    if os.environ["RANK"] == "1":
        return work(os.environ, folder, KILLED)
    return work(os.environ, folder, after=[folder / KILLED])


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, lost = Path(sys.argv[1]), os.environ["RANK"] == sys.argv[2]
    sys.exit(work(os.environ, place, KILLED if lost else "", after=[] if lost else [place / KILLED]))
