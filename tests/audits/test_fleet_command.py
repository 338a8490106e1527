"""The command line on several ranks: one report and one summary; and what it refuses."""

import os
import re
import sys

import pytest
import torch
import torch.distributed as dist

from regard.audits.owning import Hold, Owner
from regard.cli import main
from tests.audits.checkpoints import save
from tests.ranks import run_processes

pytest.importorskip("typer")
pytest.importorskip("transformers")
pytest.importorskip("jinja2")

FILES = ("report.json", "report.html", "card.md")
USUAL = ("--checks", "weights,rows", "--text", "the cat sat", "--text", "a dog")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model") / "tiny")


def command(rank, world, port, folder, arguments):
    """What torchrun does for a rank, with its words in files."""
    torch.set_num_threads(1)
    for number, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(folder / f"{name} {rank}", os.O_WRONLY | os.O_CREAT), number)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "120",
    }
    sys.argv = ["regard", "audit", *map(str, arguments[rank])]
    main()


DURATION = re.compile(r"   \d+ (s|min)$", re.MULTILINE)
"""The time that an audit took, at the end of its first line."""


def on_ranks(folder, *arguments):
    """Exit codes, outputs and errors of ranks with these arguments."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    codes = run_processes(command, len(arguments), server.port, folder, arguments)
    words = [[(folder / f"{name} {rank}").read_text() for rank in range(len(codes))] for name in WORDS]
    return codes, *words


WORDS = ("output", "errors")


def here(monkeypatch, *arguments):
    """The exit status of the command in this process."""
    monkeypatch.setattr(sys, "argv", ["regard", "audit", *map(str, arguments)])
    with pytest.raises(SystemExit) as done:
        main()
    return done.value.code


@pytest.mark.parametrize("more", [(), ("--low-memory",)])
def test_one_report(more, model, tmp_path, monkeypatch, capsys):
    """Also where every rank holds one block at a time."""
    monkeypatch.setenv("COLUMNS", "120")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert here(monkeypatch, model, *USUAL, *more, "--out", tmp_path / "one") == 0
    torch.set_num_threads(threads)
    summary, said = capsys.readouterr()
    codes, outputs, errors = on_ranks(tmp_path, *[(model, *USUAL, *more, "--out", tmp_path / "two")] * 2)
    assert (codes, errors) == ([0, 0], [said, ""])
    summary = summary.replace(str(tmp_path / "one"), str(tmp_path / "two"))
    assert [DURATION.sub("", output) for output in outputs] == [DURATION.sub("", summary), ""]
    for name in FILES:
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == sorted(FILES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--processes", "0"), "--processes: is 0; give 1 or more"),
        (("--processes", "-2"), "--processes: is -2; give 1 or more"),
    ],
)
def test_processes_that_cannot_be(arguments, message, model, monkeypatch, capsys, tmp_path):
    assert here(monkeypatch, model, *arguments, "--out", tmp_path / "out") == 2
    assert capsys.readouterr().err == f"regard: {message}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [(), ("--resume",), ("--processes", "2")])
def test_two_audits_in_one_directory(more, model, monkeypatch, capsys, tmp_path):
    """The second is refused before it does anything, and told who the first is."""
    owner = Owner(1, "another-machine", "noon")
    first = Hold(tmp_path / ".units", owner)
    (tmp_path / ".units" / "weights-0.json").write_text("{}")
    assert here(monkeypatch, model, "--weights-only", "--out", tmp_path, *more) == 2
    words = capsys.readouterr()
    assert words.out == ""
    assert words.err == (
        f"regard: --out: {tmp_path} is in use by another run (process 1 on another-machine, since noon); "
        "wait for it, or give another directory; if it is no longer running, delete "
        f"{tmp_path / '.units'}\n"
    )
    assert (tmp_path / ".units" / "weights-0.json").read_text() == "{}"
    first.release()
