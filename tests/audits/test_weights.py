"""The audit of weights alone gives the numbers of the loaded model, from any form of a checkpoint,
and never holds it whole.
"""

import json
import math
import subprocess
import sys

import pytest
import torch

import regard as r
from regard.audits.checkpoint import find
from regard.audits.checks import checks
from regard.audits.load import load_weights
from regard.audits.run import Audit
from regard.audits.weights import Tensors, WeightAudit, _prefix
from tests.audits.checkpoints import ENVIRONMENT, KINDS, model_of, save, save_pickle

pytest.importorskip("transformers")
WEIGHTS = [check for check in checks() if check.name == "weights"]


def by_weights(directory):
    audit = WeightAudit(find(str(directory)))
    audit.measure()
    return audit.report()


def by_model(directory):
    checkpoint = find(str(directory))
    audit = Audit(load_weights(checkpoint), [], checks=WEIGHTS, name=checkpoint.name)
    audit.measure()
    return audit.report()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_report_is_that_of_the_loaded_model(kind, tmp_path):
    """Every field, though the checkpoint has another head on top, so other names."""
    directory = save(tmp_path / "model", kind)
    found = by_weights(directory)
    assert found.covered
    assert not found.missing
    assert found.to_dict() == by_model(directory).to_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_narrow_numbers_are_read_exactly(dtype, tmp_path):
    model = model_of("llama").to(dtype)
    model.save_pretrained(tmp_path)
    found = by_weights(tmp_path)
    assert found.model["dtype"] == str(dtype).removeprefix("torch.")
    own = model.model.layers[1].self_attn
    width = own.head_dim
    q, k = own.q_proj.weight.double()[:width], own.k_proj.weight.double()[:width]
    wanted = float(torch.linalg.matrix_norm(q.mT @ k, 2)) / width**0.5
    row = next(row for row in found.heads if (row.layer, row.head) == (1, 0))
    assert row.values["qk_norm_alone"] == pytest.approx(wanted, rel=1e-12)


def test_shards_and_pickles(tmp_path):
    whole = by_weights(save(tmp_path / "model")).rows
    model_of("bert").save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(find(str(tmp_path / "shards")).weights) > 2
    assert by_weights(tmp_path / "shards").rows == whole
    assert by_weights(save_pickle(tmp_path / "pickle")).rows == whole


def test_what_the_checkpoint_lacks_is_a_reason(tmp_path):
    from safetensors.torch import load_file, save_file

    save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["bert.encoder.layer.1.attention.self.key.weight"]
    tensors["bert.encoder.layer.0.attention.self.key.weight"] = torch.zeros(3, 32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    missing = {entry.layer: entry.reason for entry in by_weights(tmp_path).missing}
    assert "has shape [3, 32] in the checkpoint and [32, 32] in the model" in missing[0]
    assert "has no tensor encoder.layer.1.attention.self.key.weight" in missing[1]


def test_stored_integers_are_not_matrices(tmp_path):
    from safetensors.torch import load_file, save_file

    save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "bert.encoder.layer.1.attention.self.key.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (entry,) = by_weights(tmp_path).missing
    assert "stored as float8_e4m3fn" in entry.reason


def test_broken_numbers(tmp_path):
    from safetensors.torch import load_file, save_file

    save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["bert.encoder.layer.1.attention.self.key.weight"][0, 0] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        r.errors.ArgumentError, match=r"NaN or infinity in encoder\.layer\.1\.attention\.self\.key\.weight"
    ):
        by_weights(tmp_path)


def test_prefixes():
    wanted = ["layer.0.q", "layer.1.q"]
    assert _prefix(["layer.0.q", "layer.1.q", "aux.layer.0.q"], wanted) == ""
    assert _prefix(["model.layer.0.q", "model.layer.1.q", "aux.layer.0.q"], wanted) == "model."
    assert _prefix(["other"], wanted) == ""
    with pytest.raises(r.errors.ArgumentError, match=r"two models in one checkpoint \('a.', 'b.'\)"):
        _prefix(["a.layer.0.q", "a.layer.1.q", "b.layer.0.q", "b.layer.1.q"], wanted)


def test_nothing_is_read_but_attention_and_the_norms_it_reads(tmp_path, monkeypatch):
    asked = []
    original = Tensors.read
    monkeypatch.setattr(Tensors, "read", lambda self, keys: (asked.extend(keys), original(self, keys))[1])
    by_weights(save(tmp_path))
    norms = {key for key in asked if ".attention." not in key}
    assert len(asked) > len(norms)
    assert norms == {
        f"bert.{name}.LayerNorm.{part}"
        for name in ("embeddings", "encoder.layer.0.output")
        for part in ("weight", "bias")
    }


def test_a_bound_where_attention_reads_a_norm(tmp_path):
    """Proved for every head of self-attention; cross-attention has none, and says so as nothing."""
    report = by_weights(save(tmp_path, "t5"))
    found = {row.site: row.values["any_input_bound"] for row in report.heads}
    crossing = {site for site in found if site.endswith("EncDecAttention")}
    assert len(crossing) == 2
    assert {site for site, bound in found.items() if math.isnan(bound)} == crossing
    assert all(row.values["any_input_bound"] > 0 for row in report.heads if row.site not in crossing)
    written = {
        row["site"]: row["values"]["any_input_bound"]
        for row in report.to_dict()["rows"]
        if row["scope"] == "head"
    }
    assert {site for site, bound in written.items() if bound is None} == crossing


def test_the_bound_is_that_of_the_norm_of_the_checkpoint(tmp_path):
    """A norm layer twice as large gives a larger ball, so a larger bound,
    and only for the layer that reads it.
    """
    from safetensors.torch import load_file, save_file

    before = by_weights(save(tmp_path)).heads
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["bert.encoder.layer.0.output.LayerNorm.weight"] *= 2
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for old, new in zip(before, by_weights(tmp_path).heads, strict=True):
        ratio = new.values["any_input_bound"] / old.values["any_input_bound"]
        assert ratio == 1 if old.layer == 0 else 2 < ratio < 4


def test_a_norm_that_the_checkpoint_lacks_is_a_reason(tmp_path):
    from safetensors.torch import load_file, save_file

    save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["bert.encoder.layer.0.output.LayerNorm.bias"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (entry,) = by_weights(tmp_path).missing
    assert entry.layer == 1
    assert "has no tensor encoder.layer.0.output.LayerNorm.bias" in entry.reason


MEASURE = """
import sys
from regard.audits.checkpoint import find
from regard.audits.weights import WeightAudit

def memory(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

audit = WeightAudit(find(sys.argv[1]))
before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
audit.measure()
print(len(audit.report().heads), memory("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of memory from /proc")
def test_a_large_checkpoint_is_never_held_whole(tmp_path):
    """Eight layers of width 1024 in shards: the peak is that of one layer in float64,
    whatever the number of layers.
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
    config = transformers.LlamaConfig(**sizes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        shapes = {
            name: tensor.shape
            for name, tensor in transformers.AutoModel.from_config(config).state_dict().items()
        }
    places, total, noise = {}, 0, torch.randn(6144 * 1024)
    for layer in range(8):
        own = {
            f"model.{name}": noise[: shape.numel()].reshape(shape).clone()
            for name, shape in shapes.items()
            if f"layers.{layer}." in name
        }
        shard = f"model-{layer + 1:05d}-of-00008.safetensors"
        save_file(own, tmp_path / shard, metadata={"format": "pt"})
        places.update(dict.fromkeys(own, shard))
        total += sum(tensor.nbytes for tensor in own.values())
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": places})
    )
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path],
        capture_output=True,
        text=True,
        timeout=170,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    heads, peak = map(int, done.stdout.split())
    assert heads == 128
    assert peak < total / 4, f"{peak / 2**20:.0f} MB of {total / 2**20:.0f} MB"
