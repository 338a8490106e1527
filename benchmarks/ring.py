"""python -m benchmarks.ring [--quick]: one process beside a ring of two (gloo, this machine).

Attention with its gradients: seconds of processor time of a rank, memory beyond what was there before, bytes
that a rank sends, and how far outputs and gradients are from float64. Then particles on a Fourier series,
whose grids are added over the ranks. One thread a process; every row in processes of its own.

What is asked: errors of at most 1e-6 in float32 (of the largest entry), and of the series 1e-10 beside one
process; a rank of two takes less time than one process, where calls are not too short for that.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from regard import Attention, Causal, Dot, Gaussian, apply, attend
from regard.audits.memory import give_back
from regard.engines import Fourier, Ring, ZigZag

HEADS, WIDTH = 8, 64
LIMITS = {"tokens": (1e-6, 0.85), "particles": (1e-10, 0.7)}
"""The error that is asked for, and the share of the time of one process that a rank of two may take: half of
the pairs, and on the ring each shard is computed again before it is differentiated, 4.5 passes where one
process takes 3.5.
"""
Run = Callable[[], list[Tensor]]
console = Console(width=120)


def _drawn(*shape: int, seed: int, kind: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=kind)


def _tokens(count: int, ring: Ring | None, kind: torch.dtype = torch.float32) -> Run:
    """Causal attention of own tokens with all gradients: outputs, and those of q, k and v."""
    some: Callable[[Tensor], Tensor] = (lambda t: t) if ring is None else ring.shard
    own = [_drawn(1, HEADS, count, WIDTH, seed=seed, kind=torch.float32) for seed in range(4)]
    *moving, upstream = (some(t).to(kind) for t in own)
    del own

    def run() -> list[Tensor]:
        q, k, v = (t.requires_grad_() for t in moving)
        out = attend(q, k, v, potential=Dot(), support=Causal(), engine=ring)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), upstream)]

    return run


def _particles(count: int, ring: Ring | None) -> Run:
    """One step of particles in a plane on a series."""
    cloud = 20 * torch.rand(count, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own = cloud if ring is None else ring.shard(cloud)
    return lambda: [apply(Attention(Gaussian(bandwidth=1.0)), own, engine=Fourier(1e-6, ring=ring))]


QUESTIONS: dict[str, Callable[[int, Ring | None], Run]] = {"tokens": _tokens, "particles": _particles}


@contextmanager
def _counting_bytes() -> Iterator[list[int]]:
    """The bytes of tensors that this process hands to torch.distributed."""
    sent = [0]
    meet, reduce = dist.batch_isend_irecv, dist.all_reduce

    def send(steps: list[Any]) -> Any:
        sent[0] += sum(step.tensor.nbytes for step in steps if step.op is dist.isend)
        return meet(steps)

    def add(tensor: Tensor, *options: Any, **named: Any) -> Any:
        sent[0] += tensor.nbytes
        return reduce(tensor, *options, **named)

    dist.batch_isend_irecv, dist.all_reduce = send, add
    try:
        yield sent
    finally:
        dist.batch_isend_irecv, dist.all_reduce = meet, reduce


def _run(rank: int, world: int, folder: str, question: str, count: int) -> None:
    """One process: measure, and write down what was found."""
    torch.set_num_threads(1)
    ring = None
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        ring = Ring(shards=ZigZag(), timeout=600.0)
    ask = QUESTIONS[question]
    ask(64, ring)()
    run = ask(count, ring)
    give_back()  # of tensors that were cut into shards
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, started = _kilobytes("VmRSS"), time.process_time()
    with _counting_bytes() as sent:
        found = run()
    seconds = time.process_time() - started
    held = _kilobytes("VmHWM") - before
    told = {"seconds": seconds, "megabytes": held / 1024, "sent": sent[0] / 2**20}
    torch.save(found, Path(folder, f"{world}-{rank}.pt"))
    Path(folder, f"{world}-{rank}.json").write_text(json.dumps(told))
    if world > 1:
        dist.barrier()


def _kilobytes(name: str) -> int:
    """What the system says of this process."""
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def _measured(folder: str, world: int, question: str, count: int) -> dict[str, float]:
    """The most that a rank of so many took."""
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_run, args=(rank, world, folder, question, count)) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    told = [json.loads(Path(folder, f"{world}-{rank}.json").read_text()) for rank in range(world)]
    return {name: max(one[name] for one in told) for name in told[0]}


def _errors(folder: str, question: str, count: int) -> tuple[float, float]:
    """Of one process and of two, relative to the largest entry: beside float64, or of two beside one."""
    single = torch.load(Path(folder, "1-0.pt"), weights_only=True)
    exact = _tokens(count, None, torch.float64)() if question == "tokens" else single
    worst = [_far(single, exact)]
    for rank in range(2):
        own = torch.load(Path(folder, f"2-{rank}.pt"), weights_only=True)
        marks = ZigZag().marks(rank, 2, count)
        worst.append(_far(own, [t.index_select(-2, marks) for t in exact], exact))
    return worst[0], max(worst[1:])


def _far(found: list[Tensor], expected: list[Tensor], whole: list[Tensor] | None = None) -> float:
    trios = zip(found, expected, whole or expected, strict=True)
    return max(float((f - e).abs().max() / w.abs().max()) for f, e, w in trios)


def main() -> int:
    """Measure and print; exit status 1 where something is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ring", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the short form")
    parser.add_argument("--only", choices=tuple(QUESTIONS), help="one of the two")
    options = parser.parse_args()
    counts = {"tokens": 2048, "particles": 100_000} if options.quick else {"tokens": 8192, "particles": 10**6}
    table = Table("", "processes", "CPU s a rank", "MB a rank", "MB sent", "error", "")
    missed = 0
    for question, count in counts.items():
        if options.only not in (None, question):
            continue
        with tempfile.TemporaryDirectory() as folder:
            one, two = (_measured(folder, world, question, count) for world in (1, 2))
            errors = _errors(folder, question, count)
        most, share = LIMITS[question]
        met = errors[1] <= most and (options.quick or two["seconds"] <= share * one["seconds"])
        missed += not met
        for world, row, error in ((1, one, errors[0]), (2, two, errors[1])):
            cells = [f"{row['seconds']:.2f}", f"{row['megabytes']:.0f}", f"{row['sent']:.1f}", f"{error:.1e}"]
            verdict = "" if world == 1 else "[green]met[/]" if met else "[red]missed[/]"
            table.add_row(f"{count:,} {question}", str(world), *cells, verdict)
    console.print(table)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
