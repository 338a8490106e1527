"""python -m benchmarks.cheaper [--layers 0 3 5] [--quick]: which cheaper attention would do for layers of
all-MiniLM-L6-v2 on 256 tokens of Paradise Lost, layer by layer.

Errors are relative to the outputs, after the output projection, on a third of the tokens as queries that
neither fit nor calibration saw.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from regard.audits.load import load
from regard.audits.places import sites
from regard.compression import Cheaper, cheaper
from regard.maps import Heads

DATA = Path(__file__).resolve().parents[1] / "examples" / "data" / "paradise_lost.txt"
ERROR = 0.1
"""A choice is recommended below this relative error."""


def tables(layers: list[int], tokens: int = 256) -> dict[int, Cheaper]:
    """The table of each layer."""
    model, tokenizer, _ = load(None)
    call = tokenizer(DATA.read_text()[:8000], return_tensors="pt", truncation=True, max_length=tokens)
    found = {site.layer: site for site in sites(model, dict(call))}
    return {
        layer: cheaper(Heads(found[layer].attention, found[layer].w_o), found[layer].points)
        for layer in layers
    }


def main() -> int:
    """Print a table for each layer; 1 where calibration missed, or a proved number is below a measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 3, 5])
    parser.add_argument("--quick", action="store_true", help="the last of these layers alone")
    torch.set_num_threads(1)
    console, missed = Console(width=120), False
    asked = parser.parse_args()
    for layer, found in tables(asked.layers[-1:] if asked.quick else asked.layers).items():
        table = Table(
            "candidate", "memory", "error", "95 % below", "above", "KL", "proved", title=f"layer {layer}"
        )
        for choice in found.choices:
            name = type(choice.candidate).__name__
            proved = "–" if choice.proved is None else f"{choice.proved:.3g}"
            numbers = (choice.memory, choice.error, choice.quantile, choice.above, choice.divergence)
            table.add_row(f"{name} {_size(choice.candidate)}", *(f"{value:.3g}" for value in numbers), proved)
            missed |= choice.proved is not None and choice.proved < choice.error
            missed |= choice.above > 0.2
        best = found.best(ERROR)
        console.print(table)
        console.print(f"within {ERROR:.0%} of fresh outputs: {'none' if best is None else best.candidate}")
    return int(missed)


def _size(candidate: object) -> str:
    numbers = [value for value in vars(candidate).values() if isinstance(value, int)]
    return str(numbers[0]) if numbers else type(next(iter(vars(candidate).values()))).__name__


if __name__ == "__main__":
    sys.exit(main())
