"""How far proofs about whole networks reach, beside zonotopes, intervals and attacks.

python -m benchmarks.decisions [--quick] [--words 20] [--radii 1e-4 1e-3 3e-3 1e-2] [--only model|classifiers]
    [--layers 3 6] [--sst FOLDER] [--text "…"]

All six layers of all-MiniLM-L6-v2, one word moves: the bound of the ball model over the largest move that an
attack finds (Frobenius norm of all outputs), and CPU seconds of one thread; means over words of five
sentences, or of one text. Classifiers with 3 and 6 layers of width 64, norms last (kept in
benchmarks/results): the certified radius over the length of a token, beside that of multi-norm zonotopes and
of intervals, and how much more than the attack's a margin drops. They are trained on the sentences of
`regard.decisions.reviews`, with vectors of letters as the shipped one; and, with the path of a folder that
holds SST-2 (`benchmarks.classifiers`), with vectors of words, as the networks that the targets were set on.

Every word's numbers are written down in benchmarks/results as they are found: the same command goes on where
a run was stopped, unless the code of proofs is another now. The exit status says whether a target was missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard as r
from benchmarks.classifiers import read_corpus
from benchmarks.classifiers import trained as words_trained
from benchmarks.kept import RESULTS, Row, Rows
from benchmarks.margins import TRAINED, classifier_part, spread, trained
from regard import maps
from regard._allocation import keep_freed_memory
from regard.audits.checkpoint import demo_directory
from regard.decisions.networks import entering, stack_of
from regard.decisions.shipped import words_of
from regard.proofs.places import farthest
from regard.proofs.question import question
from regard.proofs.theorem import Refusal
from regard.proofs.theorems.ball_model import ball_model

SENTENCES = (
    "the movie was great",
    "a warm and funny film",
    "it never finds its rhythm",
    "the plot makes no sense",
    "she plays the part well",
)
TARGETS = {1e-4: 1.02, 1e-3: 1.15, 3e-3: 1.6}
FINITE = sys.float_info.max
"""The target of all other radii."""
SECONDS, LONG_SECONDS, SHORT = 15.0, 120.0, 8
"""CPU seconds for texts of at most so many tokens, and for longer ones, of at most 32."""
OPINIONS = (
    "the movie was great .",
    "what a warm film !",
    "the plot was not clever",
    "we hated the long ending",
    "nothing about the soup was stale",
)


def attack(map: maps.Map, domain: r.Radii, steps: int = 12) -> float:
    """The largest move of the value along gradients."""
    still = map(domain.measure.points)
    generator, best = torch.Generator().manual_seed(0), 0.0
    x = farthest.one(domain, torch.randn(still.shape, generator=generator, dtype=torch.float64))
    for _ in range(steps):
        leaf = x.detach().requires_grad_()
        move = (map(leaf) - still).norm()
        best = max(best, float(move.detach()))
        x = farthest.one(domain, torch.autograd.grad(move, leaf)[0])
    return best


def measure(map: maps.Compose, x: Tensor, token: int, relative: float) -> Row:
    """Bound over attack, and CPU seconds of the bound; infinite where it is refused."""
    domain = r.one_token(x, token, relative * float(x[token].norm()))
    began = time.process_time()
    try:
        with question():
            bound = float(ball_model(map, domain, r.Frobenius())[0].value)
    except Refusal:
        bound = float("inf")
    seconds = time.process_time() - began
    return [bound / attack(map, domain), seconds]


def model_part(words: int, radii: list[float], sentences: tuple[str, ...] = SENTENCES) -> bool:
    """Six layers of a pretrained model, word by word; whether a target was missed."""
    map, tokens = _demo(sentences)
    kept, found = Rows("model"), dict[float, list[Row]]()
    for k, token in spread([len(x) - 2 for x in tokens], words):
        with question():  # the value at the input is enclosed once for all radii
            for relative in radii:
                x, name = tokens[k], f"{sentences[k]} {token} {relative:g}"
                row = kept.get(name, lambda x=x, token=token, far=relative: measure(map, x, token, far))
                found.setdefault(relative, []).append(row)
                shown = "ratio {:.4f}, {:.1f} CPU s".format(*row)
                print(f"  word {len(found[relative])}, relative {relative:g}: {shown}", file=sys.stderr)
    most = max(len(x) for x in tokens)
    missed = [_printed(relative, rows, most) for relative, rows in found.items()]
    return any(missed)


def _demo(sentences: tuple[str, ...]) -> tuple[maps.Compose, list[Tensor]]:
    """The six layers as one map, and the tokens of sentences as they enter it."""
    from transformers import AutoModel, AutoTokenizer

    folder = demo_directory()
    model: Any = AutoModel.from_pretrained(folder).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stack = stack_of(model)
    numbers = [{"input_ids": tokenizer(one, return_tensors="pt").input_ids} for one in sentences]
    return maps.Compose(stack.blocks), [entering(model, one, stack.first)[0] for one in numbers]


def _printed(relative: float, rows: list[Row], most: int) -> bool:
    """The means at one radius; whether a target was missed."""
    ratios, seconds = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    target, time_target = TARGETS.get(relative, FINITE), SECONDS if most <= SHORT else LONG_SECONDS
    print(
        f"relative {relative:g}: bound/attack mean {float(ratios.mean()):.4f}, median "
        f"{float(ratios.median()):.4f}, largest {float(ratios.max()):.4f} (target {target:.3g}), "
        f"{float(seconds.mean()):.1f} CPU s (target {time_target:g}), {len(rows)} words, up to {most} tokens",
        flush=True,
    )
    return not bool(ratios.mean() <= target) or bool(seconds.mean() > time_target)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one word, one radius, three layers")
    parser.add_argument("--words", type=int, default=20)
    parser.add_argument("--radii", type=float, nargs="+", default=[1e-4, 1e-3, 3e-3, 1e-2])
    parser.add_argument("--only", choices=["model", "classifiers"])
    parser.add_argument("--text", help="another sentence for the pretrained model, all of whose words move")
    parser.add_argument("--sst", type=Path, metavar="FOLDER", help="sst_train.json and sst_dev.json")
    parser.add_argument("--layers", type=int, nargs="+", choices=list(TRAINED), default=list(TRAINED))
    chosen = parser.parse_args()
    words, radii = (1, [1e-3]) if chosen.quick else (chosen.words, chosen.radii)
    torch.set_num_threads(1)
    keep_freed_memory()  # as `regard decide` does
    missed = False
    if chosen.only != "classifiers":
        missed |= model_part(words, radii, (chosen.text,) if chosen.text else SENTENCES)
    for layers in [] if chosen.only == "model" else [3] if chosen.quick else chosen.layers:
        if chosen.sst is not None:
            corpus = read_corpus(chosen.sst)
            model = words_trained(corpus, layers, RESULTS)
            missed |= classifier_part("words of SST-2", model, corpus.short(5), words)
        else:
            opinions = [words_of(sentence) for sentence in OPINIONS]
            missed |= classifier_part("letters of opinions", trained(layers), opinions, words)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
