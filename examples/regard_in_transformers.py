"""One trained model, several attentions: how far its output moves, and what its rows look like under each.

python examples/regard_in_transformers.py [--model DIRECTORY] [--text "..."]
"""

from __future__ import annotations

import argparse

import torch

import regard
from regard import hf
from regard.audits.load import load

ATTENTIONS: dict[str, dict[str, regard.Potential | regard.normalizers.Normalizer]] = {
    "as_trained": {},
    "warmer": {"normalizer": regard.Softmax(temperature=1.5)},
    "entmax": {"normalizer": regard.Entmax(1.5)},
    "sparsemax": {"normalizer": regard.Sparsemax()},
    "cosine": {"potential": regard.Cosine(scale=8.0)},
}


def main() -> None:
    """Run the model under each attention and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model directory; the demonstration model if not given")
    parser.add_argument("--text", default="The bank raised its rates after the river flooded.")
    options = parser.parse_args()
    model, tokenizer, name, *_ = load(options.model)
    batch = dict(tokenizer(options.text, return_tensors="pt"))
    recorder = hf.Recorder()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        trained = model(**batch).last_hidden_state
        for attention, nouns in ATTENTIONS.items():
            model.set_attn_implementation(hf.register(attention, record=recorder, **nouns))
            hf.verify(model)
            with recorder.name(model):
                moved = (model(**batch).last_hidden_state - trained).norm() / trained.norm()
            print(f"{name}, {attention}: the output moves by {100 * float(moved):.3g} %")
            print(recorder, end="\n\n")


if __name__ == "__main__":
    main()
