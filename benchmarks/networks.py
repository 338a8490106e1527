"""Random networks against the ball model: python -m benchmarks.networks [--count 500] [--seed 0] [--case N]

A case is a network with one to twelve layers (norms first or last, LayerNorm or RMSNorm, GELU, ReLU or SiLU,
plain or gated, masks, rotary positions or biases, sharp or flat scores), a neighborhood of an input (one
token or several in balls or boxes, the hull of some embeddings) with a relative radius from 1e-4 to 0.5, and
what gradient ascent finds in it. Every fourth network is an encoder of torch that was trained, to say at the
first token whether the others have a positive mean, and every fourth no Transformer at all: sums of maps,
residual connections inside others, layers whose derivative vanishes. In every third, remainders of all tokens
are one ellipsoid, as in networks that are wide. A bound below what is found is a violation, printed with
the number that draws the case again, and the exit status says whether there was one.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor, nn

import regard as r
from regard import maps
from regard.domains import Near
from regard.nonexpansive import MixTokens
from regard.proofs.ball_model import network as stack
from regard.proofs.places import farthest
from regard.proofs.question import question
from regard.proofs.theorem import Refusal
from regard.proofs.theorems.ball_model import ball_model

D = torch.float64
TOLERANCE = 1e-9
"""What float64 may lose in a move that is seen, relative to it."""


STEPS = 60
"""Of training."""


class Draw:
    """Numbers of one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=D)

    def one(self, choices: list[object]) -> object:
        return choices[int(torch.randint(len(choices), (), generator=self.generator))]

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=self.generator, dtype=D))


@dataclass(frozen=True)
class Case:
    """A network and a neighborhood; words: what was drawn."""

    network: maps.Compose
    domain: Near
    words: str


def case(seed: int) -> Case:
    """That of a number."""
    return {3: trained_case, 1: crooked_case}.get(seed % 4, random_case)(seed)


def trained_case(seed: int) -> Case:
    """An encoder of torch after some steps of Adam."""
    draw = Draw(seed)
    layers, tokens, width = (int(draw.one(one)) for one in ([1, 2, 3, 4], [2, 3, 5], [8, 12]))  # type: ignore[call-overload, arg-type]
    first, name = bool(draw.one([False, True])), str(draw.one(["gelu", "relu"]))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(
            width, 2, 2 * width, 0.0, activation=name, norm_first=first, batch_first=True, dtype=D
        )
        encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        loss = _train(encoder, nn.Linear(width, 1, dtype=D), (64, tokens, width), draw)
    x = draw.normal(tokens, width)
    relative = 10 ** draw.uniform(-4.0, math.log10(0.5))
    domain, where = _domain(draw, x, relative)
    words = f"trained to a loss of {loss:.2f}, {layers} layers, {tokens} tokens of width {width}, {name}, "
    network = maps.Compose((r.declare.one(encoder.eval()),))
    return Case(network, domain, words + f"norms {'first' if first else 'last'}, {where} {relative:.2g}")


def _train(encoder: nn.Module, readout: nn.Module, shape: tuple[int, int, int], draw: Draw) -> float:
    """The last loss of a network that says at the first token whether others have a positive mean."""
    optimizer = torch.optim.Adam([*encoder.parameters(), *readout.parameters()], lr=1e-2)
    for _ in range(STEPS):
        x = draw.normal(*shape)
        label = (x[:, 1:, 0].mean(-1) > 0).double()
        loss = nn.functional.binary_cross_entropy_with_logits(readout(encoder(x)[:, 0]).squeeze(-1), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for tensor in encoder.parameters():
        tensor.requires_grad_(False)
    return float(loss.detach())


def random_case(seed: int) -> Case:
    """One with weights as they are drawn."""
    draw = Draw(seed)
    layers = int(draw.one([1, 1, 1, 2, 2, 2, 3, 3, 4, 6, 12]))  # type: ignore[call-overload]
    tokens, width = int(draw.one([1, 2, 3, 4, 6])), 8  # type: ignore[call-overload]
    kind = _kind(draw)
    network = maps.Compose(tuple(_block(draw, width, kind) for _ in range(layers)))
    x = draw.normal(tokens, width) * draw.uniform(0.3, 3.0)
    relative = 10 ** draw.uniform(-4.0, math.log10(0.5))
    domain, where = _domain(draw, x, relative)
    shown = ", ".join(f"{name} {value}" for name, value in kind.items())
    return Case(network, domain, f"{layers} layers, {tokens} tokens, {where} {relative:.2g}, {shown}")


def crooked_case(seed: int) -> Case:
    """Maps in an order that no Transformer has; a token that is next to nothing, where even layers bend."""
    draw = Draw(seed)
    layers, tokens, width = int(draw.one([2, 3, 4, 5])), int(draw.one([2, 3, 4])), 8  # type: ignore[call-overload]
    made = [_even(draw, width), *(_crooked(draw, width, tokens) for _ in range(layers))]
    x = draw.normal(tokens, width)
    x[0] *= 1e-3
    far = 10 ** draw.uniform(-2.0, 0.0)
    words = f"crooked, {layers} layers, {tokens} tokens, radius {far:.2g}"
    return Case(maps.Compose(tuple(made)), r.one_token(x, 0, far), words)


def _crooked(draw: Draw, width: int, tokens: int) -> maps.Map:
    kind = _kind(draw)
    around = maps.Residual(_attention(draw, width, kind))
    wide = maps.Affine(3 * draw.normal(width, width) / width**0.5, 0.2 * draw.normal(width))
    made = {
        "attention": lambda: around,
        "twice": lambda: maps.Residual(around),
        "inside": lambda: maps.Residual(maps.Compose((around, wide))),
        "sum": lambda: maps.Added((wide, around)),
        "other sum": lambda: maps.Added((around, wide)),
        "two": lambda: maps.Added((around, maps.Residual(_attention(draw, width, kind)))),
        "mixed": lambda: MixTokens(draw.normal(tokens, tokens) / tokens**0.5),
        "even": lambda: maps.Residual(_even(draw, width)),
        "block": lambda: _block(draw, width, kind),
    }
    return made[str(draw.one(list(made)))]()


def _even(draw: Draw, width: int) -> maps.Map:
    """φ(wᵀx) + φ(-wᵀx), mixed: its derivative at zero is zero."""
    w, out = (draw.normal(width, width) / width**0.5 for _ in range(2))
    return maps.feed_forward(maps.Gelu(), torch.cat([w, -w], 1), torch.cat([out, out]))


def _kind(draw: Draw) -> dict[str, object]:
    return {
        "pre": draw.one([False, True]),
        "activation": draw.one([maps.Gelu(), maps.Gelu(tanh=True), maps.Relu(), maps.Silu()]),
        "gated": draw.one([False, False, True]),
        "centered": draw.one([True, True, False]),
        "eps": draw.one([1e-5, 1e-12, 0.1]),
        "scores": draw.one(["plain", "plain", "rotary", "alibi"]),
        "support": draw.one([r.Full(), r.Full(), r.Causal(), r.Window(2, 1)]),
        "sharp": draw.one([0.5, 1.0, 3.0]),
    }


def _domain(draw: Draw, x: Tensor, relative: float) -> tuple[Near, str]:
    token = int(torch.randint(len(x), (), generator=draw.generator))
    far = relative * float(x[token].norm())
    radii = torch.zeros(len(x), dtype=D)
    radii[token] = far
    made = {
        "ball": lambda: r.Radii(x, radii),
        "box": lambda: r.Box(x, radii / x.shape[-1] ** 0.5),
        "balls": lambda: r.Radii(x, torch.full((len(x),), far / len(x), dtype=D)),
        "hull": lambda: r.Hull(x, token, x[token] + far * draw.normal(3, x.shape[-1]) / x.shape[-1] ** 0.5),
    }
    name = str(draw.one(["ball", "ball", "box", "balls", "hull"]))
    return made[name](), name


def _attention(draw: Draw, width: int, kind: dict[str, object]) -> maps.Heads:
    heads, inner = 2, 4
    size = float(kind["sharp"]) / width**0.5  # type: ignore[arg-type]
    dot = r.Dot(
        draw.normal(heads, width, inner) * size,
        draw.normal(heads, width, inner) * size,
        b_q=0.3 * draw.normal(heads, inner),
        b_k=0.3 * draw.normal(heads, inner),
    )
    potential = {"plain": dot, "rotary": r.Rotary(dot), "alibi": dot + r.Alibi(0.3)}[str(kind["scores"])]
    values = r.Linear(draw.normal(heads, width, inner) / width**0.5, 0.2 * draw.normal(heads, inner))
    return maps.Heads(
        r.Attention(potential, values, support=kind["support"]),  # type: ignore[arg-type]
        draw.normal(heads, inner, width) / 2,
        0.1 * draw.normal(width),
    )


def _block(draw: Draw, width: int, kind: dict[str, object]) -> maps.Compose:
    attention = _attention(draw, width, kind)
    first, second = (_norm(draw, width, bool(kind["centered"]), float(kind["eps"])) for _ in range(2))  # type: ignore[arg-type]
    block = maps.pre_norm if kind["pre"] else maps.post_norm
    return block(attention, _hidden(draw, width, kind), first, second)


def _hidden(draw: Draw, width: int, kind: dict[str, object]) -> maps.Map:
    inner, activation = 10, kind["activation"]
    first, gate = (draw.normal(width, inner) / width**0.5 for _ in range(2))
    out, bias = draw.normal(inner, width) / inner**0.5, 0.3 * draw.normal(inner)
    if kind["gated"]:
        return maps.Gated(activation, first, gate, out, bias, 0.3 * draw.normal(inner))  # type: ignore[arg-type]
    return maps.feed_forward(activation, first, out, bias, 0.1 * draw.normal(width))  # type: ignore[arg-type]


def _norm(draw: Draw, width: int, centered: bool, eps: float) -> maps.Normalize:
    bias = 0.1 * draw.normal(width) if centered else None
    return maps.Normalize(eps, 1 + 0.3 * draw.normal(width), bias, centered=centered)


def seen(found: Case, seed: int, steps: int = 12, starts: int = 2) -> float:
    """The largest move of the value that ascent finds."""
    draw, best = Draw(seed + 10**6), 0.0
    still = found.network(found.domain.measure.points)
    for _ in range(starts):
        x = farthest.one(found.domain, draw.normal(*found.domain.measure.points.shape))
        for _ in range(steps):
            leaf = x.detach().requires_grad_()
            move = (found.network(leaf) - still).norm()
            best = max(best, float(move.detach()))
            x = farthest.one(found.domain, torch.autograd.grad(move, leaf)[0])
    return best


@dataclass(frozen=True)
class Verdict:
    """Bounds of both orders, where they speak, and what was seen."""

    bounds: tuple[float, ...]
    seen: float
    reason: str = ""

    @property
    def violated(self) -> bool:
        return any(bound < self.seen * (1 - TOLERANCE) for bound in self.bounds)


def check(seed: int) -> Verdict:
    """The bounds of a case against what is seen; a refusal is no bound."""
    found = case(seed)
    try:
        with question(), patch.object(stack, "APART", stack.APART if seed % 3 else 0):
            bounds = tuple(float(one.value) for one in ball_model(found.network, found.domain, r.Frobenius()))
    except Refusal as refusal:
        return Verdict((), 0.0, str(refusal))
    return Verdict(bounds, seen(found, seed))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", type=int, help="one case, by its number")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    numbers = range(chosen.seed, chosen.seed + chosen.count) if chosen.case is None else [chosen.case]
    began, violated, ratios, refused, done = time.monotonic(), 0, [], 0, 0
    for number in numbers:
        if time.monotonic() - began > chosen.seconds:
            break
        found, done = check(number), done + 1
        refused += not found.bounds
        if found.bounds and found.seen > 0:
            ratios.append(min(found.bounds) / found.seen)
        if found.violated:
            violated += 1
            print(f"VIOLATED case {number}: {case(number).words}: {found.bounds}, {found.seen}", flush=True)
        elif chosen.case is not None:
            said = found.reason or f"bounds {found.bounds}, seen {found.seen}"
            print(f"case {number}: {case(number).words}: {said}")
    middle = sorted(ratios)[len(ratios) // 2] if ratios else math.nan
    print(
        f"{done} networks: {violated} violations, {refused} refused, bound/attack smallest "
        f"{min(ratios, default=math.nan):.6f}, median {middle:.4g}"
    )
    return int(violated > 0)


if __name__ == "__main__":
    sys.exit(main())
