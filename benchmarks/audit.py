"""python -m benchmarks.audit [--quick]: how long an audit takes, in forward passes of the same inputs, and
how much memory.

Times are of one thread. A forward pass is that of the audited model on the same sentences in the same
process, in float64 as the audit runs it; memory is the peak of a process of its own that does nothing else.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decoder import decoder_directory
from regard.audits import Audit, included_sentences, sites
from regard.audits.checks import checks
from regard.audits.load import load
from regard.derive import linearize

ALL_SECONDS, WEIGHT_SECONDS, HEAD_SECONDS = 60.0, 3.0, 0.1
EXTRA, LONG_PEAK = 500, 2048
"""MiB: beyond the model for ten sentences, and in all for 512 tokens."""
BASE = 450
"""MiB of a process that has imported torch and transformers and holds nothing."""
console = Console(width=120)


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def verdict(value: float, target: float) -> str:
    """Whether a target is met."""
    return f"{target:g} [green]met[/]" if value <= target else f"{target:g} [red]missed[/]"


def times(sentences: int) -> list[tuple[str, float, float, float | None]]:
    """Rows: what, seconds, forward passes, and the target in seconds."""
    model, tokenizer, name, *_ = load(None)
    texts = included_sentences()[:sentences]
    run = Audit(model, texts, tokenizer=tokenizer, name=name)
    with torch.no_grad():
        forward = statistics.median(
            seconds(lambda: [run.model(**item.options) for item in run.inputs]) for _ in range(5)
        )
    whole = seconds(run.measure)
    weights = Audit(model, [], checks=[check for check in checks() if check.name == "weights"])
    site = sites(run.model, run.inputs[0].options)[0]
    points = site.points.expand(site.heads, -1, -1)
    heads = statistics.median(
        seconds(lambda: linearize(site.attention, points).norm(tolerance=1e-2)) for _ in range(5)
    )
    rows: list[tuple[str, float, float, float | None]] = [
        ("forward passes of all sentences", forward, 1.0, None)
    ]
    for what, value, target in (
        (f"all checks, {len(texts)} sentences", whole, ALL_SECONDS if sentences >= 10 else None),
        ("--checks weights", seconds(weights.measure), WEIGHT_SECONDS),
        ("exact constants of all heads of a layer", heads, HEAD_SECONDS),
    ):
        rows.append((what, value, value / forward, target))
    return rows


LIMITED = ("bounds", "one-token", "depth")
"""Checks that leave something out on long inputs,
so that their times at two lengths are not of the same work.
"""

PEAK = """
import re, sys, torch
torch.set_num_threads(1)
def peak():  # of this program: ru_maxrss would begin with that of the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
from benchmarks.decoder import decoder_directory
from regard.audits import Audit, included_sentences
from regard.audits.load import load
from regard.audits.checks import checks
model, tokenizer, name, *_ = load(None)
tokens = int(sys.argv[1])
if tokens:
    ids = tokenizer(" ".join(included_sentences() * 9), return_tensors="pt")["input_ids"][:, :tokens]
    inputs = [{"input_ids": ids}]
else:
    inputs = included_sentences()[: int(sys.argv[2])]
with torch.no_grad():
    model(**(inputs[0] if tokens else tokenizer(inputs[0], return_tensors="pt")))
before = peak()
import time
chosen = [check for check in checks() if check.name not in sys.argv[3].split(",")]
run = Audit(model, inputs, tokenizer=tokenizer, checks=chosen)
start = time.perf_counter()
run.measure()
print(before, peak(), time.perf_counter() - start)
"""


def peak(tokens: int, sentences: int = 0, without: tuple[str, ...] = ()) -> tuple[float, float, float]:
    """MiB of a process with the model after one forward pass, its peak in the audit without some checks,
    and the seconds of the audit.
    """
    command = [sys.executable, "-c", PEAK, str(tokens), str(sentences), ",".join(without)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    before, most, took = (float(word) for word in found.stdout.split())
    return before, most, took


DECODER = {
    "--quick": (["--quick"], 15.0),
    "--checks weights,rows,constants,geometry": (["--checks", "weights,rows,constants,geometry"], 45.0),
    "all checks": ([], 240.0),
}
"""Commands on the decoder, with their targets in CPU seconds; the program's start and the page included."""
COMMAND = """
import re, resource, sys
from regard.cli import main
try:
    main()
except SystemExit as end:
    status = end.code
own = resource.getrusage(resource.RUSAGE_SELF)
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
print("MEASURED", own.ru_utime + own.ru_stime, peak, status or 0)
"""


def decoder(names: list[str]) -> int:
    """The commands on SmolLM2-135M on two texts: CPU seconds and memory; how many targets are missed."""
    directory = decoder_directory()
    if directory is None:
        console.print("the decoder is not installed: make decoder")
        return 0
    weights = sum(path.stat().st_size for path in Path(directory).glob("*.safetensors")) / 2**20
    missed = 0
    for name in names:
        options, target = DECODER[name]
        texts = [part for text in included_sentences()[:2] for part in ("--text", text)]
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, "-c", COMMAND, "audit", directory, *texts, *options, "--out", out]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        taken, most, _ = (float(word) for word in done.stdout.split("MEASURED")[-1].split())
        missed += (taken > target) + (most > weights + BASE + EXTRA)
        console.print(
            f"decoder, {name}: {taken:.1f} CPU s, target {verdict(taken, target)}; "
            f"peak {most:.0f} MiB, {most - weights:.0f} beyond the weights, target "
            f"{verdict(most - weights, BASE + EXTRA)}"
        )
    return missed


def main() -> int:
    """Measure and print; exit status 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three sentences, no long input")
    parser.add_argument("--decoder", action="store_true", help="the 30-layer decoder alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.decoder:
        return 1 if decoder(list(DECODER)[: 1 if options.quick else None]) else 0
    missed = 0
    table = Table(title="all-MiniLM-L6-v2, one thread", title_justify="left")
    for column in ("what", "seconds", "forward passes", "target (s)"):
        table.add_column(column, justify="right")
    for what, value, passes, target in times(3 if options.quick else 10):
        missed += target is not None and value > target
        table.add_row(what, f"{value:.3f}", f"{passes:.1f}", "" if target is None else verdict(value, target))
    console.print(table)
    before, most, _ = peak(0, 3 if options.quick else 10)
    missed += most - before > EXTRA
    console.print(
        f"memory beyond the model, sentences: {most - before:.0f} MiB, target {verdict(most - before, EXTRA)}"
    )
    if not options.quick:
        sizes = (64, 128, 256, 512)
        found = {tokens: peak(tokens) for tokens in sizes}
        growth = math.log(peak(512, without=LIMITED)[2] / peak(128, without=LIMITED)[2]) / math.log(4)
        missed += (found[512][1] > LONG_PEAK) + (growth > 2.2)
        for tokens, (_, most, took) in found.items():
            console.print(f"{tokens} tokens: {took:.1f} s, peak {most:.0f} MiB")
        console.print(f"peak at 512 tokens: target {verdict(found[512][1], LONG_PEAK)}")
        console.print(
            f"time without {', '.join(LIMITED)} grows as n^{growth:.2f} from 128 to 512 tokens, target "
            f"{verdict(growth, 2.2)}"
        )
    console.print(f"{missed} of the targets missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
