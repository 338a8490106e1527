"""Certified radii of trained classifiers, beside those of zonotopes, of intervals and of an attack.

The table of `benchmarks.decisions --only classifiers`.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

import regard as r
from benchmarks.classifiers import Words
from benchmarks.kept import RESULTS, Row, Rows
from benchmarks.reviews import train
from benchmarks.zonotope import interval_margin, zonotope_margin
from regard import maps
from regard.decisions.networks import affine, one_of
from regard.decisions.shipped import Reviews, load
from regard.proofs.ball_model.beginning import second_order
from regard.proofs.ball_model.margin import least
from regard.proofs.classifier import classifier
from regard.proofs.decision_attack import LeastMargin
from regard.proofs.theorems.ball_model import run, start

TRAINED = {3: (0.08, 3.0), 6: (0.055, 4.0)}
"""Targets for so many layers: the certified radius over a token's length, and over that of zonotopes."""
EXCESS = 0.012
"""The relative radius at which margins are compared."""
CLOSE, STEP = 1.04, 1.21
"""How close the largest radius is found, and how far one goes from a guess at that of zonotopes."""


def spread(lengths: Sequence[int], words: int) -> Iterator[tuple[int, int]]:
    """(sentence, token) of so many words: the first of each sentence, then the second of each, and so on."""
    places = [(k, token) for token in range(1, 1 + max(lengths)) for k in range(len(lengths))]
    kept = [(k, token) for k, token in places if token <= lengths[k]]
    return iter(kept[:words])


def trained(layers: int) -> Reviews:
    """A classifier of width 64, trained once."""
    path = RESULTS / f"reviews-{layers}.safetensors"
    if not path.is_file():
        RESULTS.mkdir(exist_ok=True)
        train(path, 64, layers)
    return load(path, 64, layers).double()


def largest(margin: Callable[[float], float], guess: float, most: float) -> float:
    """The largest radius with a margin above zero, to a factor of 1.04, in steps from a guess, then by
    bisection; zero where there is none above a millionth of it.
    """
    low, high, radius = 0.0, most, guess
    while radius > 1e-6 * guess:
        low, high = (radius, high) if margin(radius) > 0 else (low, radius)
        if low and high / low <= CLOSE:
            break
        up = math.sqrt(low * high) if high < most else min(STEP * low, most)
        radius = up if low else radius * (radius / guess) / STEP
    return low


def classifier_part(name: str, model: Reviews | Words, sentences: list[list[str]], words: int) -> bool:
    """One classifier; whether a target was missed."""
    layers = len(model.encoder.layers)
    network, kept = r.declare.one(model.encoder), Rows(f"{name.split()[0]}-{layers}")
    with torch.no_grad():
        tokens = [model.embed([sentence])[0].double() for sentence in sentences]
    found: list[Row] = []
    for k, token in spread([len(x) - 1 for x in tokens], words):
        x = tokens[k]
        found.append(kept.get(f"{k} {token}", lambda x=x, token=token: _compared(model, network, x, token)))
        shown = " ".join(f"{value:.4g}" for value in found[-1])
        print(f"  {name}, {layers} layers, word {len(found)}: {shown}", file=sys.stderr, flush=True)
    return _printed(f"{name}, {layers} layers", layers, found)


def _printed(name: str, layers: int, rows: list[Row]) -> bool:
    """The means of all words; whether a target was missed."""
    columns = list(zip(*rows, strict=True))
    ours, zonotope, box, seen, first, second, theirs = (statistics.fmean(column) for column in columns)
    least_radius, factor = TRAINED[layers]
    print(
        f"{name}: radius/length ours {ours:.4f} (target {least_radius:g}; {min(columns[0]):.3f} … "
        f"{max(columns[0]):.3f}), zonotope {zonotope:.4f} (ours is {ours / max(zonotope, 1e-12):.2f} times "
        f"that, target {factor:g}), interval {box:.2g}, attack {seen:.3f}, {len(rows)} words"
    )
    print(
        f"{name}: beyond the attack a margin drops at {EXCESS:.1%} by {first:.1%} (order 1, target 14 %), "
        f"{second:.1%} (order 2, target 2.5 %), {theirs:.0%} (zonotope)",
        flush=True,
    )
    return (
        ours < least_radius or ours < factor * zonotope or (layers == 3 and (first > 0.14 or second > 0.025))
    )


def _compared(model: Reviews | Words, network: maps.Map, x: Tensor, token: int) -> Row:
    """Relative radii of the ball model, of zonotopes, of intervals and of the attack; and how much more than
    the attack's the margin drops, by both orders and by zonotopes.
    """
    readout = maps.Compose((one_of(len(x), 0), maps.Affine(*affine(model.readout))))
    found = r.certified_radius(model.encoder, x, token, readout=readout, resolution=CLOSE)
    length, label = float(x[token].norm()), int(found.label)
    w, b = affine(model.readout)
    direction, offset = w[:, label] - w[:, 1 - label], float(b[label] - b[1 - label])
    most, guess = min(float(found.attack), 100.0), float(found.value) / 4
    zonotope = largest(
        lambda radius: zonotope_margin(network, x, token, radius, direction) + offset, guess, most
    )
    box = largest(
        lambda radius: interval_margin(network, x, token, radius, direction) + offset, most / 1e4, most
    )
    domain = r.one_token(x, token, EXCESS * length)
    whole = classifier(model.encoder, x, readout)
    margin = float(found.margin)
    drop = margin - LeastMargin(whole, domain, (label,)).find(20).witness.value
    state = start(domain)
    below = [_margin(network, readout, one, direction, offset) for one in (state, second_order(state))]
    below.append(zonotope_margin(network, x, token, EXCESS * length, direction) + offset)
    excess = [(margin - one) / drop - 1 for one in below]
    radii = (float(found.value), zonotope, box, float(found.attack))
    return [*(radius / length for radius in radii), *excess]


def _margin(
    network: maps.Map, readout: maps.Compose, state: object, direction: Tensor, offset: float
) -> float:
    after = run(maps.Compose((network, readout.maps[0])), state)  # type: ignore[arg-type]
    return float(least(after, direction.unsqueeze(-1), torch.tensor([offset], dtype=torch.float64)))
