"""python -m benchmarks.plug [--quick]: a small Llama with regard's attention, in times of the same model with
transformers' own "sdpa".

One thread, processor time, the two models in turn; the ratio is that of the least times. Weights are random:
time does not see them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from regard import Entmax, Gaussian, hf

TARGET = 1.1
"""Times that of "sdpa", for the same attention."""
console = Console(width=120)


@dataclass(frozen=True)
class Case:
    """An input, and whether gradients are taken; `target` None where attention is another,
    so that there is nothing to match.
    """

    what: str
    implementation: str
    batch: int = 1
    tokens: int = 512
    padding: int = 0
    groups: int = 4
    training: bool = False
    target: float | None = TARGET


CASES = (
    Case("sdpa against itself: the noise", "sdpa", target=None),
    Case("forward", "regard"),
    Case("forward, no shared keys", "regard", groups=8),
    Case("forward, padded batch", "regard", batch=2, padding=100),
    Case("forward and backward", "regard", training=True),
    Case("forward and backward, padded batch", "regard", batch=2, padding=100, training=True),
    Case("forward, recorded rows", "recorded", target=None),
    Case("forward, Gaussian(bandwidth=3)", "gaussian", target=None),
    Case("forward, Entmax(1.5)", "entmax", target=None),
)


def llama(implementation: str, groups: int) -> nn.Module:
    """Four layers of eight heads of width 32."""
    from transformers import AutoModel, LlamaConfig

    sizes = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 512,
        "vocab_size": 1000,
    }
    torch.manual_seed(0)
    return AutoModel.from_config(
        LlamaConfig(**sizes, num_key_value_heads=groups), attn_implementation=implementation
    ).eval()


def step(case: Case, implementation: str) -> Callable[[], None]:
    """One run of the model."""
    model = llama(implementation, case.groups)
    ids = torch.randint(0, 1000, (case.batch, case.tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[-1, : case.padding] = 0

    def run() -> None:
        with torch.set_grad_enabled(case.training):
            out = model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            if case.training:
                out.sum().backward()

    return run


def seconds(call: Callable[[], None]) -> float:
    """Processor time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def compare(case: Case, rounds: int) -> tuple[float, float]:
    """Least seconds with "sdpa", and with regard."""
    theirs, ours = step(case, "sdpa"), step(case, case.implementation)
    theirs()
    ours()
    found = [(seconds(theirs), seconds(ours)) for _ in range(rounds)]
    return min(a for a, _ in found), min(b for _, b in found)


def main() -> int:
    """Measure and print; exit status 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plug", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="ten rounds each, and only the cases with a target"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    recorder = hf.Recorder()
    hf.register()
    hf.register("recorded", record=recorder)
    hf.register("gaussian", potential=Gaussian(bandwidth=3.0))
    hf.register("entmax", normalizer=Entmax(1.5))
    table = Table(title="a small Llama, 512 tokens, one thread", title_justify="left")
    for column in ("what", "sdpa (ms)", "regard (ms)", "ratio", "target"):
        table.add_column(column, justify="right")
    missed = 0
    for case in [case for case in CASES if case.target is not None or not options.quick]:
        with recorder:
            theirs, ours = compare(case, 10 if options.quick else 15)
        late = case.target is not None and ours > case.target * theirs
        missed += late
        verdict = (
            ""
            if case.target is None
            else f"{case.target:g} [red]missed[/]"
            if late
            else f"{case.target:g} [green]met[/]"
        )
        table.add_row(case.what, f"{1e3 * theirs:.1f}", f"{1e3 * ours:.1f}", f"{ours / theirs:.2f}", verdict)
    console.print(table)
    console.print(f"{missed} of the targets missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
