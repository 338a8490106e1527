"""Every pair of typos in a sentence: python -m benchmarks.pairs [--quick] [--text "…"] [--worth 3000]

The classifier of `regard decide` on one sentence: each of its words may become any word that is one letter
away, and any two of them at once. `proofs.exchange_pairs` proves sets of pairs where a bound reaches, and
runs all others, so the answer is exact. Of the sentence that is asked by default there are about four million
pairs, which take about ten minutes of one thread. --quick: the first two words. The exit status says whether
a pair changes the answer.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

import torch
from torch import Tensor

from regard.decisions.asked import shipped_on
from regard.decisions.shipped import load
from regard.decisions.typos import typos
from regard.proofs import PairExchanges, exchange_pairs

TEXT = "We hated the dull film and we really despised the awful service."
BATCH = 1024


def choices_of(text: str, most: int | None = None) -> dict[int, Tensor]:
    """{place: the tokens that its typos become}, for the first words of a text."""
    model, asked = load(), shipped_on(text)
    words, found = asked.words[1:], dict[int, Tensor]()
    for place in asked.moving[:most]:
        others = [[*words[: place - 1], one, *words[place:]] for one in typos(words[place - 1])]
        with torch.no_grad():
            found[place] = torch.cat([model.embed(group)[:, place] for group in _groups(others)]).double()
    return found


def _groups(sentences: list[list[str]]) -> list[list[list[str]]]:
    return [sentences[k : k + BATCH] for k in range(0, len(sentences), BATCH)]


def count(choices: dict[int, Tensor]) -> int:
    """How many exchanges of exactly two words there are."""
    return sum(len(one) * len(other) for one, other in itertools.combinations(choices.values(), 2))


def decided(text: str, most: int | None = None, worth: int = 3000) -> PairExchanges:
    """What becomes of the answer."""
    asked = shipped_on(text)
    return exchange_pairs(
        asked.model, asked.x, choices_of(text, most), readout=asked.readout, batch=BATCH, worth=worth
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the first two words")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--worth", type=int, default=3000, help="about how many runs a bound costs")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    most = 2 if chosen.quick else None
    choices = choices_of(chosen.text, most)
    print(f"“{chosen.text}”: {len(choices)} words, {count(choices):,} pairs of typos", flush=True)
    began = time.process_time()
    found = decided(chosen.text, most, chosen.worth)
    seconds = time.process_time() - began
    print(f"{found}; the least lead that was run is {found.lead:.4g}, {seconds:.0f} CPU s")
    return int(not found.holds)


if __name__ == "__main__":
    sys.exit(main())
