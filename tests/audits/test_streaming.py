"""A model that is read block by block has the report of the loaded one, is never held whole,
and leaves nothing behind.
"""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

import regard as r
from regard._allocation import memory as own_memory
from regard.audits import streaming, terminal
from regard.audits.checkpoint import find
from regard.audits.checks import checks
from regard.audits.load import architecture, config_of, load_weights, skeleton
from regard.audits.run import BLOCKWISE, Audit
from regard.audits.store import Store
from regard.audits.streaming import Streamed, StreamedAudit, exceeds_memory
from regard.cli import main
from tests.audits.checkpoints import ENVIRONMENT, model_of, save, save_pickle, tokenizer

pytest.importorskip("transformers")
KINDS = ("bert", "gpt2", "llama", "t5")
TEXTS = ("the cat sat on the mat", "a red dog .")
WHOLE = {"depth", "influence", "words"}


def named(*names):
    return [check for check in checks() if check.name in names]


MOST = named("weights", "rows", "constants", "geometry")
FEW = named("weights", "rows")


def shards(directory, kind, dtype=torch.float32):
    """A checkpoint in several files, by another class than the audited one, so with other names."""
    model_of(kind).to(dtype).save_pretrained(directory, max_shard_size="20KB")
    tokenizer().save_pretrained(directory)
    checkpoint = find(str(directory))
    assert len(checkpoint.weights) > 1
    return checkpoint


def streamed(checkpoint, asked=MOST, texts=TEXTS):
    run = StreamedAudit(checkpoint, texts, tokenizer=tokenizer(), checks=asked)
    run.measure()
    return run.report()


def whole(checkpoint, asked=MOST):
    """The report of the loaded model, without the time of a check that a streamed model cannot make."""
    run = Audit(load_weights(checkpoint), TEXTS, tokenizer=tokenizer(), checks=asked, name=checkpoint.name)
    run.measure()
    report = run.report()
    return dataclasses.replace(report, settings={**report.settings, "radius": None})


def left(disk):
    """How many parameters of blocks are in memory, and how many hooks there are."""
    names = [name for own in disk._blocks.values() for name in own]
    hooks = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in disk.model.modules()
    )
    return sum(not disk.model.get_parameter(name).is_meta for name in names), hooks


def rewritten(checkpoint, change):
    """Every file of a checkpoint, changed."""
    from safetensors.torch import load_file, save_file

    for path in checkpoint.weights:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_the_report_is_that_of_the_loaded_model(kind, tmp_path):
    """Every field and every digit, on the cpu."""
    checkpoint = shards(tmp_path, kind)
    found = streamed(checkpoint)
    assert found.covered
    assert not found.missing
    assert {"qk_norm", "entropy", "block_constant", "effective_rank"} <= {
        name for row in found.rows for name in row.values
    }
    assert found.to_dict() == whole(checkpoint).to_dict()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_numbers(kind, dtype, tmp_path):
    checkpoint, asked = shards(tmp_path, kind, dtype), named("weights", "rows", "geometry")
    found = streamed(checkpoint, asked).to_dict()
    assert found["model"]["dtype"] == str(dtype).removeprefix("torch.")
    assert found["settings"]["arithmetic"] == "float32"
    assert found == whole(checkpoint, asked).to_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_are_computed_and_blocks_are_not_there(kind, tmp_path):
    """Rotary frequencies and positions are in no checkpoint."""
    checkpoint = shards(tmp_path, kind)
    disk, model = Streamed(checkpoint), load_weights(checkpoint)
    buffers = dict(disk.model.named_buffers())
    assert buffers.keys() == dict(model.named_buffers()).keys()
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    assert kind != "llama" or any(name.endswith("inv_freq") for name in buffers)
    assert left(disk) == (0, 0)
    assert sum(len(names) for names in disk._blocks.values()) > len(list(model.parameters())) / 2


def test_proofs_are_those_of_the_loaded_model(tmp_path):
    checkpoint, asked = shards(tmp_path, "llama"), named("bounds", "one-token")
    found = streamed(checkpoint, asked)
    assert found.rows
    assert found.to_dict() == whole(checkpoint, asked).to_dict()


def test_what_needs_all_blocks_is_not_made_and_said(tmp_path):
    found = streamed(shards(tmp_path, "gpt2"), named("rows", *WHOLE))
    assert {(entry.check, entry.input) for entry in found.skipped} == {
        (name, index) for name in WHOLE for index in range(len(TEXTS))
    }
    assert {entry.reason for entry in found.skipped} == {BLOCKWISE}
    assert BLOCKWISE.startswith("the model is read block by block: ")
    assert {row.scope for row in found.rows} == {"head"}


def test_pickles(tmp_path):
    pickle = find(str(save_pickle(tmp_path / "pickle")))
    same = find(str(save(tmp_path / "same")))
    assert streamed(pickle, FEW).rows == streamed(same, FEW).rows
    torch.save(model_of("bert").state_dict(), pickle.weights[0], _use_new_zipfile_serialization=False)
    with pytest.raises(r.errors.ArgumentError, match="pickle in an old format"):
        Streamed(find(str(pickle.directory)))


def test_a_config_that_names_other_numbers_than_the_file(tmp_path):
    """Loading rounds to what the config names, so this does too; without a name, the tensors say it."""
    checkpoint, asked = shards(tmp_path, "llama"), named("rows", "geometry")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    exact = streamed(checkpoint, asked)
    path.write_text(json.dumps({**config, "dtype": "bfloat16"}))
    assert streamed(checkpoint, asked).to_dict() == whole(checkpoint, asked).to_dict()
    assert streamed(checkpoint, asked).rows != exact.rows
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "dtype"}))
    assert streamed(checkpoint, asked).to_dict() == exact.to_dict()


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    """Neither after a block that fails while it runs, nor after a measurement that fails,
    nor after Ctrl-C.
    """
    run = StreamedAudit(shards(tmp_path, "llama"), TEXTS, tokenizer=tokenizer(), checks=named("rows"))
    disk = run._run.disk
    inside = disk.model.get_submodule("layers.1.mlp")
    for error in (OSError, KeyboardInterrupt):

        def fail(*call, error=error):
            assert left(disk)[0] > 0
            raise error("broken")

        handle = inside.register_forward_pre_hook(fail)
        with pytest.raises(error, match="broken"):
            run.measure()
        handle.remove()
        assert left(disk) == (0, 0)
    monkeypatch.setattr(run._run, "_measure_one", lambda *call: fail())
    with pytest.raises(KeyboardInterrupt, match="broken"):
        run.measure()
    assert left(disk) == (0, 0)
    monkeypatch.undo()
    run.measure()
    assert left(disk) == (0, 0)
    assert run.report().covered


def test_a_block_is_held_alone(tmp_path):
    """Layer 1 is not layer 10; what is outside of blocks needs nothing."""
    model_of("llama", num_hidden_layers=11).save_pretrained(tmp_path)
    disk = Streamed(find(str(tmp_path)))
    for path, there in (("layers.1.self_attn", "layers.1."), ("layers.10", "layers.10."), ("norm", "none")):
        with disk.hold_block(path):
            held = {
                name
                for name, parameter in disk.model.named_parameters()
                if not parameter.is_meta and name.startswith("layers")
            }
            assert held == {name for name, _ in disk.model.named_parameters() if name.startswith(there)}


@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "embed_tokens.weight"])
def test_broken_numbers(name, tmp_path):
    def broken(tensors):
        if f"model.{name}" in tensors:
            tensors[f"model.{name}"][0, 0] = torch.nan

    checkpoint = shards(tmp_path, "llama")
    rewritten(checkpoint, broken)
    with pytest.raises(r.errors.ArgumentError, match=f"NaN or infinity in {name}"):
        Streamed(checkpoint)


def test_checkpoints_that_cannot_be_read_so(tmp_path):
    import transformers

    name = "model.layers.1.mlp.up_proj.weight"
    for number, (change, words) in enumerate(
        (
            (lambda tensors: tensors.pop(name, None), "has no tensor layers.1.mlp.up_proj.weight"),
            (
                lambda tensors: name in tensors and tensors.update({name: torch.zeros(3, 32)}),
                r"has shape \[3, "
                r"32\] in the checkpoint",
            ),
            (
                lambda tensors: (
                    name in tensors and tensors.update({name: tensors[name].to(torch.float8_e4m3fn)})
                ),
                "stored as float8_e4m3fn",
            ),
        )
    ):
        checkpoint = shards(tmp_path / str(number), "llama")
        rewritten(checkpoint, change)
        with pytest.raises(r.errors.ArgumentError, match=words):
            Streamed(checkpoint)
    sizes = {"vocab_size": 40, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 24}
    transformers.XLNetModel(transformers.XLNetConfig(**sizes)).save_pretrained(tmp_path / "unknown")
    with pytest.raises(r.errors.ArgumentError, match="no blocks around attention that regard knows"):
        Streamed(find(str(tmp_path / "unknown")))


def test_an_audit_goes_on(tmp_path):
    """The store of an audit that was broken off after one text,
    and the same keys as those of the loaded model.
    """
    checkpoint = shards(tmp_path / "model", "llama")
    directory, seen = tmp_path / "units", []
    first = StreamedAudit(checkpoint, TEXTS, tokenizer=tokenizer(), checks=FEW)
    first.store = Store(directory)

    def stop(what, done, total):
        seen.append((what, done, total))
        if what.startswith("input 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.measure(stop)
    assert {total for _, _, total in seen} == {8}
    kept = {path.name: path.stat().st_mtime_ns for path in directory.glob("*.json")}
    assert len(kept) == 5
    second = StreamedAudit(checkpoint, TEXTS, tokenizer=tokenizer(), checks=FEW)
    second.store = Store(directory, resume=True)
    second.measure()
    assert all((directory / name).stat().st_mtime_ns == time for name, time in kept.items())
    assert second.report().to_dict() == streamed(checkpoint, FEW).to_dict()
    keys = Audit(load_weights(checkpoint), TEXTS, tokenizer=tokenizer(), checks=FEW).steps()
    assert {path.stem for path in directory.glob("*.json")} == {step.key for step in keys}


def test_parameters_are_left_out_for_one_model_only(tmp_path):
    """And those that several modules share stay shared."""
    config = config_of(shards(tmp_path, "t5"))
    found = skeleton(config)
    assert all(parameter.is_meta for parameter in found.parameters())
    assert not any(buffer.is_meta for buffer in found.buffers())
    assert len(list(found.parameters())) == len(list(architecture(config).parameters()))
    assert not torch.nn.Linear(2, 2).weight.is_meta


def test_memory(tmp_path, monkeypatch):
    checkpoint = shards(tmp_path, "bert")
    size = 4 * sum(parameter.numel() for parameter in load_weights(checkpoint).parameters())
    assert size < own_memory() < 2**60
    for memory, large in ((size / 0.61, True), (size / 0.59, False)):
        monkeypatch.setattr(streaming, "memory", lambda memory=memory: memory)
        assert exceeds_memory(checkpoint) is large


def run_here(monkeypatch, *arguments):
    """The command in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["regard", "audit", *map(str, arguments)])
    with pytest.raises(SystemExit) as done:
        main()
    return done.value.code


def test_the_command_line(tmp_path, monkeypatch, capsys):
    model = shards(tmp_path / "model", "llama").directory
    reports = {}
    for way in ("--low-memory", "--no-low-memory"):
        asked = (
            model,
            "--text",
            "the cat sat",
            "--checks",
            "weights,rows,depth",
            way,
            "--out",
            tmp_path / way,
        )
        assert run_here(monkeypatch, *asked) in (0, None)
        assert capsys.readouterr().err == ""
        reports[way] = json.loads((tmp_path / way / "report.json").read_text())
    low, high = reports.values()
    assert [entry["reason"] for entry in low["skipped"]] == [BLOCKWISE]
    assert not high["skipped"]
    assert low["rows"] == [row for row in high["rows"] if row["scope"] != "stack"]
    assert run_here(monkeypatch, model, "--weights-only", "--low-memory", "--out", tmp_path / "out") == 2
    assert "--low-memory: is given, and --weights-only" in capsys.readouterr().err


def test_by_itself_where_the_memory_is_small(tmp_path, monkeypatch, capsys):
    model = shards(tmp_path / "model", "bert").directory
    asked = (model, "--text", "the cat", "--checks", "rows,depth", "--out", tmp_path / "out")
    monkeypatch.setattr(streaming, "memory", lambda: 1000.0)
    for more, sentence, skipped in (((), f"{terminal.BLOCKWISE}\n", 1), (("--no-low-memory",), "", 0)):
        assert run_here(monkeypatch, *asked, *more) in (0, None)
        assert capsys.readouterr().err == sentence
        assert len(json.loads((tmp_path / "out" / "report.json").read_text())["skipped"]) == skipped


def test_a_broken_model_leaves_no_files(tmp_path, monkeypatch, capsys):
    def broken(tensors):
        for name in tensors:
            if name.endswith("layer.1.output.dense.weight"):
                tensors[name][0, 0] = torch.inf

    checkpoint = shards(tmp_path / "model", "bert")
    rewritten(checkpoint, broken)
    asked = (
        checkpoint.directory,
        "--low-memory",
        "--checks",
        "weights,rows",
        "--text",
        "cat",
        "--out",
        tmp_path / "out",
    )
    assert run_here(monkeypatch, *asked) == 2
    assert "has NaN or infinity in encoder.layer.1.output.dense.weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


MEASURE = """
import sys
from regard.audits.checks import checks
from regard.audits.checkpoint import find
from regard.audits.load import architecture, config_of, tokenizer_of
from regard.audits.streaming import StreamedAudit

def memory(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

checkpoint = find(sys.argv[1])
tokenizer = tokenizer_of(checkpoint)
architecture(config_of(checkpoint))  # the libraries are there
asked = [check for check in checks() if check.name in ("rows", "geometry")]
before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
audit = StreamedAudit(checkpoint, ["the cat sat on the mat"], tokenizer=tokenizer, checks=asked)
audit.measure()
print(len(audit.report().heads), memory("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of memory from /proc")
def test_a_large_model_is_never_held_whole(tmp_path):
    """Eight layers of width 1024 in bfloat16: from the empty model to its report,
    less than half of the weights in float32.
    """
    import transformers
    from safetensors.torch import save_file

    sizes = {
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "intermediate_size": 6144,
        "vocab_size": 100,
    }
    config = transformers.LlamaConfig(**sizes, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    shapes = {name: tensor.shape for name, tensor in architecture(config).state_dict().items()}
    places, noise = {}, torch.randn(6144 * 1024, dtype=torch.bfloat16) / 32
    for part in ("", *(f"layers.{layer}." for layer in range(8))):
        names = [
            name for name in shapes if (name.startswith(part) if part else not name.startswith("layers."))
        ]
        own = {f"model.{name}": noise[: shapes[name].numel()].reshape(shapes[name]).clone() for name in names}
        save_file(own, tmp_path / f"model-{part or 'rest.'}safetensors", metadata={"format": "pt"})
        places.update(dict.fromkeys(own, f"model-{part or 'rest.'}safetensors"))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path],
        capture_output=True,
        text=True,
        timeout=170,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    heads, peak = map(int, done.stdout.split())
    total = 4 * sum(shape.numel() for shape in shapes.values())
    assert heads == 128
    assert peak < total / 2, f"{peak / 2**20:.0f} MB of {total / 2**20:.0f} MB"
