"""Certified radii beside published ones: python -m benchmarks.published FOLDER [--layers 3 6 12]
    [--words 8 4 2] [--norm l2|box]

Networks of the sizes of DeepT (Bonaert et al., "Fast and precise certification of transformers", PLDI 2021)
with standard LayerNorm: width 128, 128 neurons, four heads, ReLU, weights drawn from N(0, 0.02²), five passes
over SST-2, whose FOLDER is given (`benchmarks.classifiers`). One word moves, before the norm layer of
embeddings, as theirs does. Published numbers are means of reference_results/standard_layer_norm/*.csv of
github.com/eth-sri/DeepT (Zonotope, 117 to 137 words of ten sentences).

What differs: their weights are not to be had, so the networks are trained anew, with one vector a word where
theirs has word pieces, without dropout, and sentences are short ones of the test part. So are lengths of
tokens, by which a radius is to be divided before it is compared; theirs are not published: at the beginning
of training they are about 0.39. Every word is written down when it is found, as in `benchmarks.decisions`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import regard as r
from benchmarks.classifiers import PUBLISHED, Words, accuracy, read_corpus, trained
from benchmarks.kept import RESULTS, Row, Rows
from benchmarks.margins import spread
from regard import maps
from regard.decisions.networks import affine, one_of

THEIRS = {"l2": {3: 0.00673, 6: 0.00445, 12: 0.00245}, "box": {3: 0.00115, 6: 0.00073, 12: 0.00038}}
SECONDS = {3: 38, 6: 86, 12: 157}
"""Of theirs on a GPU, for one word in the l2 norm."""
NORMS: dict[str, r.SequenceNorm] = {"l2": r.Frobenius(), "box": r.EntryMax()}


def network_of(model: Words) -> nn.Sequential:
    """From words and positions, before their norm layer, to tokens."""
    return nn.Sequential(model.norm, model.encoder)


def readout_of(model: Words, tokens: int) -> maps.Compose:
    """From tokens to two logits."""
    pooler = maps.Affine(*affine(model.pooler))
    return maps.Compose(
        (one_of(tokens, 0), pooler, maps.Pointwise(maps.Tanh()), maps.Affine(*affine(model.readout)))
    )


def measure(model: Words, x: Tensor, token: int, norm: r.SequenceNorm) -> Row:
    """The certified radius, that of the attack, the length of the token, and CPU seconds."""
    began = time.process_time()
    found = r.certified_radius(
        network_of(model), x, token, norm, readout=readout_of(model, len(x)), resolution=1.1
    )
    seconds = time.process_time() - began
    return [float(found.value), float(found.attack), float(x[token].norm()), seconds]


def part(folder: Path, layers: int, words: int, name: str) -> None:
    """One network."""
    corpus = read_corpus(folder)
    model = trained(corpus, layers, RESULTS, PUBLISHED)
    kept, sentences = Rows(f"published-{layers}-{name}"), corpus.short(5)
    with torch.no_grad():
        tokens = [model.before(torch.tensor(model.number(one))).double() for one in sentences]
    rows: list[Row] = []
    for k, token in spread([len(x) - 1 for x in tokens], words):
        x = tokens[k]
        row = kept.get(f"{k} {token}", lambda x=x, token=token: measure(model, x, token, NORMS[name]))
        rows.append(row)
        shown = " ".join(f"{value:.4g}" for value in row)
        print(f"  {layers} layers, word {len(rows)}: {shown}", file=sys.stderr, flush=True)
    ours, seen, length, seconds = (statistics.fmean(column) for column in zip(*rows, strict=True))
    relative = statistics.fmean(row[0] / row[2] for row in rows)
    print(
        f"{layers} layers ({accuracy(model.float(), corpus):.1%} of test sentences right): certified {name} "
        f"radius {ours:.5f} (DeepT: {THEIRS[name][layers]:g}), attack {seen:.4f}, length of a token "
        f"{length:.3f}, relative {relative:.2%}, {seconds:.0f} CPU s a word, {len(rows)} words",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="sst_train.json and sst_dev.json")
    parser.add_argument("--layers", type=int, nargs="+", choices=list(SECONDS), default=list(SECONDS))
    parser.add_argument("--words", type=int, nargs="+", default=[8, 4, 2], help="for each number of layers")
    parser.add_argument("--norm", choices=list(NORMS), default="l2")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for layers, words in zip(chosen.layers, chosen.words, strict=False):
        part(chosen.folder, layers, words, chosen.norm)
    return 0


if __name__ == "__main__":
    sys.exit(main())
