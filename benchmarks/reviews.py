"""The classifier that comes with the package: how it was trained, and how good it is.

python -m benchmarks.reviews            accuracy of the shipped weights
python -m benchmarks.reviews --train    train them anew (minutes of one thread) and write them

Sentences are those of `regard.decisions.reviews`, a grammar written for this project. Every test sentence has
a pair of a word and a clause that no training sentence has. The exit status says whether a target was missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.decisions.reviews import sentences
from regard.decisions.shipped import LAYERS, WEIGHTS, WIDTH, Reviews, load, words_of
from regard.decisions.typos import typos

TARGETS = {"words in clauses they were never seen in": 0.95, "the same with one typo": 0.85}
BATCH, STEPS = 128, 2500


def batches(seed: int, typed: float) -> list[tuple[list[list[str]], Tensor]]:
    """Sentences of one length together, some with a typo."""
    draw, by_length = random.Random(seed), defaultdict(list)
    for text, label in sentences(BATCH * 20, seed, test=False):
        words = words_of(text)
        if draw.random() < typed:
            words = mistyped(words, draw)
        by_length[len(words)].append((words, label))
    found = []
    for group in by_length.values():
        for k in range(0, len(group), BATCH):
            chosen = group[k : k + BATCH]
            found.append(([words for words, _ in chosen], torch.tensor([label for _, label in chosen])))
    draw.shuffle(found)
    return found


def mistyped(words: list[str], draw: random.Random) -> list[str]:
    """One word with one wrong letter."""
    places = [k for k, word in enumerate(words) if len(word) > 2 and word.isalpha()]
    k = draw.choice(places)
    return [*words[:k], draw.choice(typos(words[k])), *words[k + 1 :]]


def train(path: Path, width: int = WIDTH, layers: int = LAYERS) -> None:
    """Minutes of one thread; the same seed gives the same weights on the same machine."""
    torch.manual_seed(0)
    model, seed, step = Reviews(width, layers), 0, 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, STEPS)
    while step < STEPS:
        seed += 1
        for words, labels in batches(seed, typed=0.5):
            if step == STEPS:
                break
            loss = nn.functional.cross_entropy(model.train()(words), labels, label_smoothing=0.02)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            if step % 250 == 0:
                print(f"step {step}: loss {float(loss.detach()):.4f}", flush=True)
    from safetensors.torch import save_file

    save_file({name: part.contiguous() for name, part in model.state_dict().items()}, path)
    print(f"{path}: {path.stat().st_size} bytes")


def accuracy(model: Reviews, typed: bool, count: int = 2000) -> float:
    """Of sentences that training cannot have seen."""
    draw, right = random.Random(7), 0
    with torch.no_grad():
        for text, label in sentences(count, 99_991, test=True):
            words = words_of(text)
            words = mistyped(words, draw) if typed else words
            right += int(model([words])[0].argmax()) == label
    return right / count


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", action="store_true", help="train anew")
    parser.add_argument("--quick", action="store_true", help="fewer sentences")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.train:
        began = time.process_time()
        train(WEIGHTS)
        print(f"{time.process_time() - began:.0f} CPU s")
    model, missed = load(), False
    for typed, (name, target) in enumerate(TARGETS.items()):
        found = accuracy(model, bool(typed), 300 if chosen.quick else 2000)
        missed |= found < target
        print(f"accuracy, {name}: {found:.3f} (target {target})")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
