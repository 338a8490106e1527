"""Trainings: they learn, go on bit for bit after every kind of end, and say what is wrong."""

import errno
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

from regard.errors import ArgumentError
from regard.training import Diverged, Milestone, Recipe, Stepped, Text, Training, Warned, loop
from regard.training.checkpoint import UNFINISHED, Checkpoint, _own_lock, alone, checkpoints
from regard.training.recipe import LARGEST_RATE
from tests.training.command import DATA, SHORT, TINY, contents, interrupted, status, train

pytest.importorskip("typer")
pytest.importorskip("safetensors")

SMALL = {"width": 16, "layers": 2, "heads": 2, "context": 16, "batch": 4}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "milton.txt"
    path.write_text(DATA.read_text()[:6_000])
    return path


@pytest.fixture(scope="module", autouse=True)
def _short():
    """Samples of a few tokens: they take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "SAMPLED", SHORT)
        yield


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A training that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert status("--data", text, "--out", out, *TINY) == 0
    return out


@pytest.fixture(scope="module")
def begun(text, tmp_path_factory):
    """A training that stopped after its checkpoint of step 4, with the one of step 0 beside it."""
    out = tmp_path_factory.mktemp("begun") / "run"
    training = Training.start(Text.read(text), Recipe(**SMALL, steps=8, every=4), out)
    for event in training.events():
        if isinstance(event, Stepped) and event.step == 5:
            break
    return out


@pytest.fixture
def half(begun, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(begun, tmp_path / "run"))


# Learning


def test_a_model_learns(tmp_path):
    own = tmp_path / "own.txt"
    own.write_text(DATA.read_text()[:20_000])
    recipe = Recipe(width=32, layers=1, heads=2, context=32, batch=16, steps=80, every=80, learning_rate=1e-2)
    training = Training.start(Text.read(own), recipe, tmp_path / "run")
    events = list(training.events())
    first, last = (event.entry for event in events if isinstance(event, Milestone))
    counts = training.text.tokens.bincount().double()
    frequencies = float(torch.special.entr(counts / counts.sum()).sum())
    assert first["held_out_loss"] == pytest.approx(math.log(len(training.text.alphabet)), abs=0.1)
    assert last["held_out_loss"] < frequencies - 0.3  # more than how often each letter comes
    assert [event.step for event in events if isinstance(event, Stepped)] == list(range(1, 81))


def test_a_checkpoint_is_a_model_with_the_loss_it_says(whole, text):
    from regard.nn import load

    training = Training.resume(whole, {})
    training.model = load(whole / "step-000008" / "model")
    entry = json.loads((whole / "history.jsonl").read_text().splitlines()[-1])
    assert training.held_out_loss() == entry["held_out_loss"]
    assert training.sample() == entry["sample"]


def test_the_history_has_the_regularity_of_every_head(whole):
    entries = [json.loads(line) for line in (whole / "history.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [0, 4, 8]
    for entry in entries:
        assert list(entry["layers"]) == ["decoder.layers.0.attention", "decoder.layers.1.attention"]
        for numbers in entry["layers"].values():
            assert all(len(numbers[name]) == 2 for name in ("qk_norm", "ov_norm", "entropy", "max_logit"))
            assert all(0 < value <= math.log(16) for value in numbers["entropy"])
            assert numbers["jacobian_norm"] > 0
    assert entries[1]["layers"] != entries[2]["layers"]


def test_the_command_shows_losses_tables_and_text(text, tmp_path, capsys):
    assert status("--data", text, "--out", tmp_path / "run", *TINY) == 0
    shown = capsys.readouterr().out
    for words in (
        "step 0 of 8",
        "step 8: training loss ",
        "held-out loss ",
        "Jacobian norm",
        "decoder.layers.1.attention",
        "  │ ",
        "done: ",
    ):
        assert words in shown, words


def test_bytes_train_too(tmp_path):
    (tmp_path / "any.bin").write_bytes(bytes(range(256)) * 4)
    assert status("--data", tmp_path / "any.bin", "--bytes", "--out", tmp_path / "run", *TINY) == 0
    assert json.loads((tmp_path / "run" / "step-000008" / "state.json").read_text())["characters"] is None


def test_fast_growth_is_said_and_kept(text, tmp_path, capsys):
    recipe = Recipe(**SMALL, steps=40, every=40, learning_rate=1.0)
    events = list(Training.start(Text.read(text), recipe, tmp_path / "run").events())
    warned = [message for event in events if isinstance(event, Warned) for message in event.messages]
    assert warned
    assert all(message.startswith("decoder.layers.") and ", head " in message for message in warned)
    last = [event for event in events if isinstance(event, Milestone)][-1]
    assert last.entry["warnings"] == warned


# Going on


def test_a_killed_training_goes_on_bit_for_bit(whole, text, tmp_path):
    out = tmp_path / "run"
    done = interrupted(6, "SIGKILL", "--data", text, "--out", out, *TINY)
    assert done.returncode == -9, done.stderr
    assert checkpoints(out)[-1].step == 4
    assert status("--out", out, "--resume") == 0
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM"])
def test_ctrl_c_saves_and_says_how_to_go_on(whole, text, tmp_path, sent):
    out = tmp_path / "run"
    done = interrupted(6, sent, "--data", text, "--out", out, *TINY)
    assert done.returncode == 130, done.stderr
    assert (
        f"stopped after step 7; saved in {out}/step-000007; continue with: regard train --out {out} --resume"
        in done.stderr
    )
    assert status("--out", out, "--data", text, "--resume", *TINY) == 0
    ours, theirs = contents(out), contents(whole)
    last = [name for name in theirs if name.startswith("step-000008") or name == "history.jsonl"]
    assert len(last) == 5
    assert [ours[name] for name in last] == [theirs[name] for name in last]


def test_dropped_lines_of_the_history_come_back(half, whole):
    lines = (half / "history.jsonl").read_text().splitlines()
    (half / "history.jsonl").write_text(f'{lines[0]}\n{{"step": 4, "cut o')
    assert status("--out", half, "--resume") == 0
    assert contents(half) == contents(whole)


@pytest.mark.parametrize("end", ["\u2028", "\u0085", "\x0b", "\x1c"])
def test_a_line_of_the_history_ends_where_files_end_lines(end, tmp_path):
    entries = [{"step": step, "sample": f"a{end}b"} for step in (0, 2, 4)]
    path = tmp_path / "history.jsonl"
    for entry in entries:
        loop._append(path, entry)
    before = path.read_bytes()
    loop._rewind(path, entries[-1])
    assert path.read_bytes() == before


def test_lines_of_the_history_that_are_no_text_are_left_out_and_counted(half, capsys):
    lines = (half / "history.jsonl").read_bytes()
    (half / "history.jsonl").write_bytes(b'\xff\xfe\n{"step": 1e999}\n' + lines + b'{"step": 5, "cut o\xc3')
    assert status("--out", half, "--resume") == 0
    assert "2 of its lines cannot be read, and are left out" in capsys.readouterr().err.replace("\n", " ")
    assert [json.loads(line)["step"] for line in (half / "history.jsonl").read_text().splitlines()] == [
        0,
        4,
        8,
    ]


def test_a_finished_training_says_so(whole, capsys):
    before = contents(whole)
    assert status("--out", whole, "--resume") == 0
    assert "step 8 of 8" in capsys.readouterr().out
    assert contents(whole) == before


def test_another_number_of_threads_is_said(half, monkeypatch, capsys):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert status("--out", half, "--resume") == 0
    assert "not bit for bit: threads: 1 before, 7 now" in capsys.readouterr().err


# What goes wrong on disk


def full(path, *arguments):
    path.write_bytes(b"half of i")
    raise OSError(errno.ENOSPC, "No space left on device")


def full_at_the_end(path, *arguments):
    with path.open("a") as stream:
        stream.write('{"step": 8, "half of i')
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_old_checkpoint(half, whole, monkeypatch, capsys):
    before = contents(half)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "write_tensors", full)
        assert status("--out", half, "--resume") == 1
    message = capsys.readouterr().err
    assert "step 8 cannot be written to" in message
    assert (
        "(No space left on device); the checkpoint of step 4 is whole, and "
        "--resume continues from it; make room first" in message
    )
    assert contents(half) == before
    assert not list(half.glob(f"{UNFINISHED}*"))
    assert status("--out", half, "--resume") == 0
    assert contents(half) == contents(whole)


def test_a_disk_that_fills_with_the_history_loses_nothing(half, whole, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_append", full_at_the_end)
        assert status("--out", half, "--resume") == 1
    assert "the checkpoint of step 8 is whole" in capsys.readouterr().err
    assert status("--out", half, "--resume") == 0
    assert contents(half) == contents(whole)


def test_what_a_killed_process_left_is_swept(half):
    (half / f"{UNFINISHED}8").mkdir()
    (half / f"{UNFINISHED}8" / "optimizer.safetensors").write_bytes(b"half")
    assert status("--out", half, "--resume") == 0
    assert not list(half.glob(f"{UNFINISHED}*"))


def flipped(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda kept: flipped(kept / "model" / "model.safetensors"),
            "model/model.safetensors is missing or was changed",
        ),
        (
            lambda kept: flipped(kept / "optimizer.safetensors"),
            "optimizer.safetensors is missing or was changed",
        ),
        (
            lambda kept: (kept / "optimizer.safetensors").unlink(),
            "optimizer.safetensors is missing or was changed",
        ),
        (lambda kept: (kept / "state.json").write_text("{"), "state.json cannot be read"),
        (lambda kept: (kept / "state.json").write_text("[]"), "state.json cannot be read"),
        (lambda kept: (kept / "state.json").unlink(), "state.json cannot be read"),
        (lambda kept: _edited(kept / "state.json"), "state.json was changed"),
    ],
    ids=["weights", "moments", "no moments", "cut state", "other state", "no state", "edited state"],
)
def test_a_damaged_checkpoint_is_refused(half, spoil, message):
    spoil(half / "step-000004")
    with pytest.raises(ArgumentError) as raised:
        train("--out", half, "--resume")
    assert message in str(raised.value)
    assert f"remove {half / 'step-000004'}, and --resume continues from step-000000" in str(raised.value)


def test_a_checkpoint_under_another_name_is_damaged(half):
    (half / "step-000004").rename(half / "step-000007")
    with pytest.raises(
        ArgumentError, match=r"step-000007 is damaged \(its name says step 7, its state.json step 4\)"
    ):
        train("--out", half, "--resume")


def test_any_changed_bit_of_the_state_is_found(half):
    path = half / "step-000004" / "state.json"
    content = path.read_bytes()
    for place in range(0, len(content), 3):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(ArgumentError):
            Checkpoint(path.parent).state()
    path.write_bytes(content)
    assert Checkpoint(path.parent).state()["step"] == 4


def _same_values(content):
    """Other bytes with the same values: another last digit of a number, or a blank at the end."""
    for found in re.finditer(rb"\d\.\d{16,}", content):
        for digit in b"0123456789":
            changed = content[: found.end() - 1] + bytes([digit]) + content[found.end() :]
            if changed != content and json.loads(changed) == json.loads(content):
                yield changed
    yield content + b"\n"


def test_a_changed_digit_of_the_state_that_changes_no_value_is_found(half):
    path = half / "step-000004" / "state.json"
    changes = list(_same_values(path.read_bytes()))
    assert len(changes) > 1
    for changed in changes:
        path.write_bytes(changed)
        with pytest.raises(ArgumentError, match=r"state\.json was changed"):
            Checkpoint(path.parent).state()


def test_a_checkpoint_of_another_format_is_refused(half):
    path = half / "step-000004" / "state.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 1'))
    with pytest.raises(ArgumentError, match=r"has format 1, and this version reads 2"):
        train("--out", half, "--resume")


def test_a_directory_whose_name_only_looks_like_a_number_is_no_checkpoint(half, whole):
    (half / "step-²").mkdir()
    assert status("--out", half, "--resume") == 0
    (half / "step-²").rmdir()
    assert contents(half) == contents(whole)


def _edited(path):
    state = json.loads(path.read_text())
    state["step"] = 5
    path.write_text(json.dumps(state))


def test_the_advice_for_a_damaged_checkpoint_works(half, whole):
    flipped(half / "step-000004" / "model" / "model.safetensors")
    shutil.rmtree(half / "step-000004")
    assert status("--out", half, "--resume") == 0
    assert contents(half) == contents(whole)


def test_checkpoints_are_tensors_and_json(whole):
    kept = {path.suffix for path in (whole / "step-000008").rglob("*") if path.is_file()}
    assert kept == {".safetensors", ".json"}
    assert [checkpoint.step for checkpoint in checkpoints(whole)] == [4, 8]


# Wrong arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--resume", "--width", "32"),
            "--width: is 32, and the training in this directory has 16; leave it out to go on",
        ),
        (("--resume", "--steps", "99"), "--steps: is 99, and the training in this directory has 8"),
        (("--resume", "--bytes"), "--bytes: is True, and the training in this directory has False"),
        (("--resume", "--data", DATA), "is not the text of this training, or was changed"),
        (("--data", DATA), "holds a training at step 4; add --resume to continue it"),
    ],
)
def test_another_training_is_not_mixed_in(half, arguments, message):
    before = contents(half)
    with pytest.raises(ArgumentError) as raised:
        train("--out", half, *arguments)
    assert message in str(raised.value)
    assert contents(half) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--data: is missing; give a file with text, or --resume"),
        (("--resume",), "holds no checkpoint; leave it out to start"),
        (("--data", DATA, "--heads", "5"), "--heads: is 5, which does not divide the width 128"),
        (("--data", DATA, "--context", "300000"), "a context of 300000 needs 600002"),
        (("--data", DATA.parent / "nothing.txt"), "No such file"),
        (
            ("--data", DATA, "--learning-rate", "1e38"),
            "--learning-rate: is 1e+38; give a positive number, such as 0.001",
        ),
        (
            ("--data", DATA, "--width", "100000000"),
            "--width: is 100000000, and training takes at least 7,152,557,",
        ),
        (("--data", DATA, "--layers", "100000000"), "--width: is 128, and training takes at least "),
        (("--data", DATA, "--batch", "100000000"), "--batch: is 100000000, and training takes at least "),
    ],
)
def test_wrong_arguments_leave_nothing_behind(tmp_path, arguments, message):
    with pytest.raises(ArgumentError) as raised:
        train("--out", tmp_path / "run", *arguments)
    assert message in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_directory_that_cannot_be_made_is_said(text, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=r"^--out: .* cannot be written"):
        train("--data", text, "--out", tmp_path / "file" / "run", *TINY)


def test_two_trainings_do_not_share_a_directory(half):
    with alone(half), pytest.raises(ArgumentError, match="is in use by another training"):
        train("--out", half, "--resume")


def test_the_directory_is_read_under_the_lock(text, tmp_path, monkeypatch):
    seen = []

    def start(*arguments):
        with pytest.raises(ArgumentError, match="is in use by another training"), alone(tmp_path / "run"):
            pass
        seen.append(arguments)
        return begin(*arguments)

    begin = Training.start
    monkeypatch.setattr(Training, "start", start)
    assert status("--data", text, "--out", tmp_path / "run", *TINY) == 0
    assert len(seen) == 1


def test_a_training_does_not_begin_over_one_that_came_between(text, tmp_path):
    late, first = (
        Training.start(Text.read(text), Recipe(**SMALL, steps=2, every=2, seed=seed), tmp_path / "run")
        for seed in (5, 0)
    )
    list(first.events())
    before = contents(tmp_path / "run")
    with pytest.raises(ArgumentError, match=r"^--out: .* was changed by another training since"):
        list(late.events())
    assert contents(tmp_path / "run") == before


def test_a_lock_whose_file_was_removed_is_not_held(tmp_path):
    """Who opened the file before the last holder removed it would lock what nobody else finds."""
    with (tmp_path / ".lock").open("w") as stream:
        (tmp_path / ".lock").unlink()
        assert not _own_lock(stream, tmp_path / ".lock")
        (tmp_path / ".lock").write_text("")
        assert not _own_lock(stream, tmp_path / ".lock")


def test_a_lock_leaves_what_others_put_there(tmp_path):
    with alone(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / ".lock").exists()
        (tmp_path / "a" / "note").write_text("mine")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "note"]


def test_text_that_changed_under_a_training_is_refused(text, tmp_path):
    own, out = tmp_path / "own.txt", tmp_path / "run"
    own.write_text(text.read_text())
    next(Training.start(Text.read(own), Recipe(**SMALL, steps=4, every=4), out).events())
    own.write_text(text.read_text() + "More.")
    with pytest.raises(ArgumentError, match="is not the text of this training, or was changed"):
        Training.resume(out, {})


# A loss that is no number


def test_a_loss_that_is_no_number_names_a_head_and_keeps_the_last_checkpoint(text, tmp_path, capsys):
    out = tmp_path / "run"
    assert status("--data", text, "--out", out, *TINY, "--learning-rate", "1e15", "--every", "1") == 1
    message = capsys.readouterr().err
    assert "the loss or its gradient is not finite at step" in message
    assert ", head " in message
    last = checkpoints(out)[-1]
    assert f"the last good checkpoint is {last.path}" in message
    assert last.state()["step"] == last.step


def test_the_largest_rate_diverges_in_words(text, tmp_path, capsys):
    assert status("--data", text, "--out", tmp_path / "run", *TINY, "--learning-rate", LARGEST_RATE) == 1
    assert "the loss or its gradient is not finite at step" in capsys.readouterr().err


def test_the_head_whose_logits_grew_is_named(half):
    training = Training.resume(half, {})
    module = training.model.decoder.layers[1].attention
    for event in training.events():
        if isinstance(event, Stepped) and event.step == 6:
            with torch.no_grad():
                module.projection.weight[8:16] *= 1e25  # the queries of head 1, and
                module.projection.weight[24:32] *= 1e25  # its keys
            break
    with pytest.raises(
        Diverged,
        match=r"step 7 \(loss nan\); decoder\.layers\.1\.attention, head 1: the largest logit .* not finite",
    ):
        list(training.events())
    assert Checkpoint(half / "step-000004").state()["step"] == 4


def test_what_commands_a_terminal_is_not_shown():
    from regard._printable import printable

    assert printable("a\x1b[31mé\n\tb\x07") == "a�[31mé\n\tb�"
