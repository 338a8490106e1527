"""Quantized checkpoints are audited a matrix at a time, with the numbers of the matrices that they mean."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.audits import terminal
from regard.audits.adapters.base import NotCovered
from regard.audits.checkpoint import find
from regard.audits.checks import checks
from regard.audits.dequantizing import matrix, unpacked
from regard.audits.streaming import StreamedAudit
from regard.audits.weights import Tensors, WeightAudit
from tests.audits.checkpoints import save, tokenizer
from tests.audits.test_streaming import run_here

BLOCK = 6


def fp8_in_blocks(name, weight):
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    scales = torch.rand(rows, columns) + 0.5
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: len(weight), : weight.shape[1]]
    stored = (weight / spread).to(torch.float8_e4m3fn)
    return {name: stored, f"{name}_scale_inv": scales}, stored.float() * spread


def fp8_by_rows(name, weight):
    scales = weight.abs().amax(-1, keepdim=True) / 400
    stored = (weight / scales).to(torch.float8_e4m3fn)
    return {name: stored, f"{name}_scale": scales}, stored.float() * scales


def int8_with_zeros(name, weight):
    scales, zeros = (
        weight.abs().amax(-1, keepdim=True) / 100,
        torch.full((len(weight), 1), 3, dtype=torch.int8),
    )
    stored = (weight / scales + zeros).round().to(torch.int8)
    tensors = {name: stored, f"{name}_scale": scales, f"{name}_zero_point": zeros}
    return tensors, (stored.float() - zeros) * scales


def int8_in_groups(name, weight):
    """Groups of columns, in the order of another matrix's columns."""
    count = 4
    groups = torch.randperm(weight.shape[1]) % count
    scales = torch.rand(len(weight), count) + 0.1
    stored = torch.randint(-127, 128, weight.shape, dtype=torch.int8)
    wide = torch.empty_like(weight)
    for column, group in enumerate(groups.tolist()):
        wide[:, column] = stored[:, column] * scales[:, group]
    return {name: stored, f"{name}_scale": scales, f"{name}_g_idx": groups.to(torch.int32)}, wide


def fp8_in_named_blocks(name, weight):
    tensors, wide = fp8_in_blocks(name, weight)
    return {name: tensors[name], f"{name}_scale": tensors[f"{name}_scale_inv"]}, wide


def bitsandbytes(name, weight):
    rows = weight.abs().amax(-1)
    stored = (127 * weight / rows.unsqueeze(-1)).round().to(torch.int8)
    return {name: stored, f"{name.removesuffix('weight')}SCB": rows}, stored.float() * (rows / 127)[:, None]


def gptq(name, weight, bits=4, group=8):
    """As AutoGPTQ packs it, entry by entry."""
    stem, (out, inputs) = name.removesuffix("weight"), weight.shape
    groups = torch.arange(inputs) // group
    zeros = torch.randint(1, 2**bits, (inputs // group, out))
    scales = torch.rand(inputs // group, out) + 0.1
    q = torch.randint(2**bits, (inputs, out))
    each = 32 // bits
    packed = torch.zeros(inputs // each, out, dtype=torch.int64)
    for i in range(inputs):
        packed[i // each] |= q[i] << (bits * (i % each))
    packed_zeros = torch.zeros(inputs // group, out // each, dtype=torch.int64)
    for j in range(out):
        packed_zeros[:, j // each] |= (zeros[:, j] - 1) << (bits * (j % each))
    wide = torch.stack([scales[groups[i]] * (q[i] - zeros[groups[i]]) for i in range(inputs)]).mT
    tensors = {
        f"{stem}qweight": packed.to(torch.int32),
        f"{stem}qzeros": packed_zeros.to(torch.int32),
        f"{stem}scales": scales,
        f"{stem}g_idx": groups.to(torch.int32),
    }
    return tensors, wide


FORMS = {
    fp8_in_blocks: {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    fp8_by_rows: {"quant_method": "compressed-tensors"},
    int8_with_zeros: {"quant_method": "compressed-tensors"},
    int8_in_groups: {"quant_method": "compressed-tensors"},
    fp8_in_named_blocks: {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"block_structure": [BLOCK, BLOCK]}}},
    },
    bitsandbytes: {"quant_method": "bitsandbytes", "load_in_8bit": True},
    gptq: {"quant_method": "gptq", "bits": 4},
}


def both(folder, form):
    """A checkpoint with quantized projections, and one with the matrices that they mean."""
    torch.manual_seed(0)
    plain, small = save(folder / "plain", "llama"), save(folder / "small", "llama")
    tensors = load_file(plain / "model.safetensors")
    meant, stored = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if "_proj" in name:
            found, meant[name] = form(name, tensor)
            del stored[name]
            stored |= found
    meant = {name: tensor.contiguous() for name, tensor in meant.items()}
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, small / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "quantization_config": FORMS[form]}))
    return find(str(plain)), find(str(small)), meant


def rows(audit):
    audit.measure()
    report = audit.report()
    assert report.covered
    assert not report.missing
    assert report.heads
    return [(row.layer, row.head, row.values) for row in report.heads]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_matrices_are_those_that_are_meant(form, tmp_path):
    """Each entry; norms of heads by weights alone; and a block at a time on a text."""
    plain, small, meant = both(tmp_path, form)
    read = Tensors(small)
    for name, expected in meant.items():
        torch.testing.assert_close(read.read([name])[0], expected, rtol=1e-6, atol=1e-7)
    asked = [check for check in checks() if check.name in ("weights", "rows")]
    texts = ["the red cat sat on a mat ."]
    for one, other in (
        (WeightAudit(plain, checks=asked[:1]), WeightAudit(small, checks=asked[:1])),
        *[
            tuple(StreamedAudit(c, texts, tokenizer=tokenizer(), checks=asked) for c in (plain, small))
            for _ in range(form is gptq)
        ],
    ):
        assert rows(other) == rows(one)


@pytest.mark.parametrize(
    ("settings", "stored", "zero"),
    [
        ({}, 7, 8),
        ({"sym": True}, 7, 8),
        ({"sym": True}, 8, 8),  # written by newer programs that do not name the second format
        ({"sym": False}, 8, 9),
        ({"checkpoint_format": "gptq_v2"}, 8, 8),
    ],
)
def test_zeros_of_gptq(settings, stored, zero):
    word = sum(stored << (4 * place) for place in range(8))
    tensors = {
        "x.qweight": torch.zeros(1, 8, dtype=torch.int32),
        "x.qzeros": torch.tensor([[word]], dtype=torch.int64).to(torch.int32),
        "x.scales": torch.ones(1, 8),
        "x.g_idx": torch.zeros(8, dtype=torch.int32),
    }
    found = unpacked("x.weight", tensors.__getitem__, {"quant_method": "gptq", "bits": 4, **settings})
    assert torch.equal(found, torch.full((8, 8), -float(zero)))


def test_blocks_that_nobody_names(tmp_path):
    scales = {"x.weight_scale": torch.ones(2, 2)}
    with pytest.raises(NotCovered, match="does not say in which"):
        matrix("x.weight", torch.zeros(5, 5, dtype=torch.int8), scales, {})


def test_what_is_not_known_is_said(tmp_path):
    _, small, meant = both(tmp_path, gptq)
    config = small.directory / "config.json"
    known = json.loads(config.read_text())
    known["quantization_config"]["quant_method"] = "awq"
    config.write_text(json.dumps(known))
    name = next(name for name in meant if "q_proj" in name)
    with pytest.raises(Exception, match="packed by awq of 4 bits"):
        Tensors(find(str(small.directory))).read([name])


def test_the_command_line_reads_them_block_by_block(tmp_path, monkeypatch, capsys):
    both(tmp_path, fp8_in_blocks)
    asked = ("--text", "the red cat sat", "--checks", "weights,rows", "--out", tmp_path / "out")
    capsys.readouterr()
    assert run_here(monkeypatch, tmp_path / "small", *asked) in (0, None)
    assert capsys.readouterr().err == f"{terminal.QUANTIZED}\n"
    assert json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
