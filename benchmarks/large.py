"""python -m benchmarks.large [--quick] [--shape 7B] [--layers 1 2]: an audit of a model with large shapes.

Random weights in bfloat16 are written to a temporary directory shard by shard, a layer a file, so that the
model is never in memory; then `regard audit --low-memory` reads one block at a time. A model of fewer layers
costs less disk and tells as much: layers cost the same. Printed are processor time, peak memory beyond what
the libraries take, and the same for all layers: extrapolated, not run, and marked so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

TEXT = "the red dog sat on the mat and the green cat sat on the house"
WORDS = ("[PAD]", "[UNK]", "the", "a", "and", "cat", "dog", "sat", "on", "mat", "red", "green", "house")
CHECKS = "weights,rows,constants,geometry"
"""What is exact; proofs are bounded by tokens and not by parameters (python -m benchmarks.lengths)."""
BLOCKS = 3.0
"""Blocks in float32, beside embeddings and libraries, that an audit may hold at its peak."""
console = Console(width=120)


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    layers: int
    width: int
    inner: int
    heads: int
    groups: int
    vocabulary: int = 32_000

    def block(self) -> int:
        """Parameters of a block."""
        narrow = self.width * self.groups // self.heads
        return 2 * self.width * (self.width + narrow) + 3 * self.width * self.inner + 2 * self.width

    def whole(self) -> int:
        """Parameters of the model."""
        return self.layers * self.block() + 2 * self.vocabulary * self.width + self.width


SHAPES = {
    "tiny": Shape(4, 64, 128, 4, 2, 128),
    "1B": Shape(16, 2048, 8192, 32, 8),
    "7B": Shape(32, 4096, 11008, 32, 32),
    "70B": Shape(80, 8192, 28672, 64, 8),
}


def write_model(folder: Path, shape: Shape, layers: int) -> None:
    """config.json, a tokenizer, and safetensors: one file for each layer, one for what is around them."""
    from safetensors.torch import save_file

    _write_tokenizer(folder)
    _write_config(folder, shape, layers)
    generator, index = torch.Generator().manual_seed(0), {}

    def drawn(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * size[-1] ** -0.5).to(torch.bfloat16)

    narrow = shape.width * shape.groups // shape.heads
    sizes = {
        "self_attn.q_proj": (shape.width, shape.width),
        "self_attn.k_proj": (narrow, shape.width),
        "self_attn.v_proj": (narrow, shape.width),
        "self_attn.o_proj": (shape.width, shape.width),
        "mlp.gate_proj": (shape.inner, shape.width),
        "mlp.up_proj": (shape.inner, shape.width),
        "mlp.down_proj": (shape.width, shape.inner),
    }
    ones = torch.ones(shape.width, dtype=torch.bfloat16)
    for part in range(layers + 1):
        if part < layers:
            tensors = {f"model.layers.{part}.{name}.weight": drawn(*size) for name, size in sizes.items()}
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"model.layers.{part}.{name}.weight"] = ones.clone()
        else:
            around = (shape.vocabulary, shape.width)
            tensors = {"model.embed_tokens.weight": drawn(*around), "lm_head.weight": drawn(*around)}
            tensors["model.norm.weight"] = ones
        file = f"model-{part + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _write_config(folder: Path, shape: Shape, layers: int) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)


def _write_tokenizer(folder: Path) -> None:
    import tokenizers
    import transformers

    words = {word: number for number, word in enumerate(WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", model_max_length=4096
    )
    made.save_pretrained(folder)


def run_audit(folder: Path, out: Path, checks: str, text: str = TEXT) -> tuple[float, float]:
    """Processor seconds and peak gigabytes of `regard audit --low-memory`, in a process of its own."""
    command = [sys.executable, "-m", "regard", "audit", str(folder), "--low-memory", "--text", text]
    command += ["--checks", checks, "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (out.parent / "log.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        _, status, used = os.wait4(process.pid, 0)
    if status != 0:
        raise RuntimeError((out.parent / "log.txt").read_text()[-2000:])
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20


def measure(name: str, layers: int, checks: str) -> tuple[float, float, float, int]:
    """Seconds to write, seconds of the audit, its peak, and what the report did not cover."""
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        model, out = Path(folder, "model"), Path(folder, "report")
        model.mkdir()
        started = time.process_time()
        write_model(model, shape, layers)
        written = time.process_time() - started
        seconds, peak = run_audit(model, out, checks)
        report = json.loads((out / "report.json").read_text())
    return written, seconds, peak, len(report.get("skipped", []))


def main() -> int:
    """Measure and print; exit status 1 where more than a few blocks were in memory."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="7B")
    parser.add_argument("--layers", type=int, nargs=2, default=(1, 2), help="two numbers of layers")
    parser.add_argument("--checks", default=CHECKS)
    options = parser.parse_args()
    name = "tiny" if options.quick else options.shape
    shape, few, more = SHAPES[name], *options.layers
    base, _ = _libraries()
    rows = {layers: measure(name, layers, options.checks) for layers in (few, more)}
    table = Table(f"{name} shapes", "written, s", "audit, CPU s", "peak, GB", "not covered")
    for layers, (written, seconds, peak, missing) in rows.items():
        cells = [f"{written:.0f}", f"{seconds:.0f}", f"{peak:.2f}", str(missing)]
        table.add_row(f"{layers} layers ({options.checks})", *cells)
    console.print(table)
    each = (rows[more][1] - rows[few][1]) / (more - few)
    room = 4 * (BLOCKS * shape.block() + 2 * shape.vocabulary * shape.width) / 2**30 + base + 0.5
    grown = rows[more][2] - rows[few][2]
    block = 4 * shape.block() / 2**30
    met = rows[more][2] <= room and grown <= 0.5 * block + 0.1
    console.print(
        f"a layer more: {each:.0f} CPU s and {grown:+.2f} GB; a block is {block:.2f} GB in float32, "
        f"libraries {base:.2f} GB; at most {room:.2f} GB are asked for: {'met' if met else 'missed'}"
    )
    _extrapolate(each / shape.block(), rows[few][1] - few * each, base)
    return 0 if met else 1


def _libraries() -> tuple[float, float]:
    """Gigabytes and seconds that Python, torch and transformers take."""
    command = [
        sys.executable,
        "-c",
        "import torch, transformers.models.llama.modeling_llama, regard.audits.run",
    ]
    process = subprocess.Popen(command)
    _, _, used = os.wait4(process.pid, 0)
    return used.ru_maxrss / 2**20, used.ru_utime + used.ru_stime


def _extrapolate(each: float, rest: float, base: float) -> None:
    """All layers of known shapes: time in proportion to parameters, memory that of a few blocks."""
    table = Table("shape", "parameters", "CPU time", "memory", title="extrapolated, not run")
    for name, shape in SHAPES.items():
        if name == "tiny":
            continue
        hours = (rest + shape.layers * each * shape.block()) / 3600
        held = base + 4 * (2 * shape.block() + 2 * shape.vocabulary * shape.width) / 2**30
        table.add_row(name, f"{shape.whole() / 1e9:.1f} · 10⁹", f"{hours:.1f} h", f"{held:.0f} GB")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
