"""How far branch and bound reaches: python -m benchmarks.subdivision [--quick] [--pieces 32]

The classifier of `regard decide`. A word and some others that could stand in its place: how far from the word
towards all of them, as a part of the way, no mixture changes the answer, proved by one bound and by at most
so many (`decide(…, pieces=)` cuts hulls of embeddings). And what cutting a ball could give at all: its
certified radius where moves along the k directions that move the value most are left out, as if they had been
cut without end, beside the whole ball's.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor

import regard as r
from regard.decisions.asked import Asked, shipped_on
from regard.decisions.shipped import load
from regard.proofs.ball_model.inputs import BallPart, Inputs
from regard.proofs.ball_model.state import State
from regard.proofs.classifier import Classifier, classifier
from regard.proofs.decision import better_order
from regard.proofs.theorem import Refusal
from regard.proofs.theorems.ball_model import run, start

WAYS = (
    ("the soup was dull .", "dull", ("boring", "bland", "stale")),
    ("we loved the film .", "loved", ("enjoyed", "adored", "admired")),
    ("what a warm film !", "warm", ("funny", "lovely", "charming")),
)
SHORTER, SHORTEST, CLOSE = 0.8, 0.01, 1.05
WITHOUT = (0, 1, 4, 16)


def place_of(asked: Asked, word: str) -> int:
    """Where a word stands."""
    return asked.words.index(word)


def tokens_of(asked: Asked, place: int, others: tuple[str, ...]) -> Tensor:
    """Other words as tokens in its place, (k, d)."""
    words, model = asked.words[1:], load()
    with torch.no_grad():
        found = model.embed([[*words[: place - 1], one, *words[place:]] for one in others])
    return found[:, place].double()


def part_of_the_way(asked: Asked, place: int, others: Tensor, pieces: int) -> float:
    """The largest part of the way to all others that is proved, in steps of 0.8; zero below a hundredth."""
    own, part = asked.x[place], 1.0
    while part > SHORTEST:
        hull = r.Hull(asked.x, place, own + part * (others - own))
        if r.decide(asked.model, asked.x, hull, readout=asked.readout, steps=2, pieces=pieces).holds:
            return part
        part *= SHORTER
    return 0.0


def hulls(text: str, word: str, others: tuple[str, ...], pieces: int) -> None:
    """One word, towards one, two and three others."""
    asked = shipped_on(text)
    place = place_of(asked, word)
    tokens = tokens_of(asked, place, others)
    far = (tokens - asked.x[place]).norm(dim=-1) / asked.x[place].norm()
    for count in range(1, len(others) + 1):
        began = time.process_time()
        one, many = (part_of_the_way(asked, place, tokens[:count], most) for most in (1, pieces))
        seconds = time.process_time() - began
        print(
            f"{word} → {', '.join(others[:count])} ({float(far[:count].max()):.0%} of its length): {one:.0%} "
            f"of the way by one bound, {many:.0%} by at most {pieces}; {seconds:.0f} CPU s",
            flush=True,
        )


def without(found: Classifier, x: Tensor, place: int, kept: Tensor) -> float:
    """The certified radius of a token that moves in the span of kept columns (d, k), over its length."""
    label, length = (int(found.logits(x).argmax()),), float(x[place].norm())

    def proved(radius: float) -> bool:
        linear = torch.zeros(*x.shape, kept.shape[-1], dtype=torch.float64)
        linear[place] = radius * length * kept
        begun = start(r.one_token(x, place, 0.0))
        inputs = Inputs((BallPart(kept.shape[-1]),), (1.0,))
        state = State(inputs, x, linear, None, begun.groups, begun.shape)
        try:
            return better_order(found, state, label)[0] > 0
        except Refusal:
            return False

    low, high = 1e-3, 1.0
    while high / low > CLOSE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if proved(middle) else (low, middle)
    return low


def balls(text: str, word: str) -> None:
    """What moves along some directions cost."""
    asked = shipped_on(text)
    place, found = place_of(asked, word), classifier(asked.model, asked.x, asked.readout)
    after = run(r.declare.one(asked.model.double()), start(r.one_token(asked.x, place, 1e-3)))
    directions = torch.linalg.svd(after.linear.flatten(0, 1), full_matrices=False).Vh.mT
    radii = [without(found, asked.x, place, directions[:, k:]) for k in WITHOUT]
    shown = ", ".join(
        f"{radius / radii[0]:.2f} without {k}" for radius, k in zip(radii, WITHOUT, strict=True)
    )
    print(f"{word}: a ball of radius {radii[0]:.1%} of its length; {shown} of {len(directions)} directions")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one word and one other")
    parser.add_argument("--pieces", type=int, default=32)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for text, word, others in WAYS[:1] if chosen.quick else WAYS:
        hulls(text, word, others[:1] if chosen.quick else others, chosen.pieces)
    for text, word, _ in [] if chosen.quick else WAYS:
        balls(text, word)
    return 0


if __name__ == "__main__":
    sys.exit(main())
