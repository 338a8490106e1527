"""How far proofs about whole networks reach: all six layers of all-MiniLM-L6-v2, one word moves.

python -m benchmarks.decisions [--quick] [--words 20] [--radii 1e-4 1e-3 3e-3]

For each relative radius the bound of the ball model over the largest move that an attack finds (Frobenius
norm of all outputs), and CPU seconds of one thread. Means over words of five sentences; the exit status says
whether a target was missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from torch import Tensor

import regard as r
from regard import maps
from regard.audits.load import demo_directory
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
SECONDS = 15.0


def network(model: Any) -> maps.Compose:
    """The layers of a BERT as a declaration."""
    return maps.Compose(
        tuple(_layer(layer, model.config.num_attention_heads) for layer in model.encoder.layer)
    )


def _layer(layer: Any, heads: int) -> maps.Compose:
    own = layer.attention.self
    (w_q, b_q), (w_k, b_k), (w_v, b_v) = (_affine(part) for part in (own.query, own.key, own.value))
    potential = r.Dot(_split(w_q, heads), _split(w_k, heads), b_q=_parts(b_q, heads), b_k=_parts(b_k, heads))
    w_o, b_o = _affine(layer.attention.output.dense)
    values = r.Linear(_split(w_v, heads), _parts(b_v, heads))
    attention = maps.Heads(r.Attention(potential, values), w_o.unflatten(0, (heads, -1)).contiguous(), b_o)
    (w_1, b_1), (w_2, b_2) = (_affine(part) for part in (layer.intermediate.dense, layer.output.dense))
    hidden = maps.feed_forward(maps.Gelu(), w_1, w_2, b_1, b_2)
    first, second = (_norm(part.LayerNorm) for part in (layer.attention.output, layer.output))
    return maps.post_norm(attention, hidden, first, second)


def _affine(module: Any) -> tuple[Tensor, Tensor]:
    return module.weight.detach().double().mT.contiguous(), module.bias.detach().double()


def _norm(module: Any) -> maps.Normalize:
    return maps.Normalize(float(module.eps), module.weight.detach().double(), module.bias.detach().double())


def _split(weight: Tensor, heads: int) -> Tensor:
    return weight.unflatten(-1, (heads, -1)).movedim(-2, 0).contiguous()


def _parts(bias: Tensor, heads: int) -> Tensor:
    return bias.unflatten(-1, (heads, -1))


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


def measure(map: maps.Compose, x: Tensor, token: int, relative: float) -> tuple[float, float]:
    """Bound over attack, and CPU seconds of the bound; infinite where it is refused."""
    domain = r.one_token(x, token, relative * float(x[token].norm()))
    began = time.process_time()
    try:
        with question():
            bound = float(ball_model(map, domain, r.Frobenius())[0].value)
    except Refusal:
        bound = float("inf")
    seconds = time.process_time() - began
    return bound / attack(map, domain), seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one word, one radius")
    parser.add_argument("--words", type=int, default=20)
    parser.add_argument("--radii", type=float, nargs="+", default=[1e-4, 1e-3, 3e-3, 1e-2])
    chosen = parser.parse_args()
    words, radii = (1, [1e-3]) if chosen.quick else (chosen.words, chosen.radii)
    from transformers import AutoModel, AutoTokenizer

    torch.set_num_threads(1)
    folder = demo_directory()
    model, tokenizer = (
        AutoModel.from_pretrained(folder).double().eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    map, missed = network(model), False
    for relative in radii:
        found: list[tuple[float, float]] = []
        for sentence in SENTENCES:
            with torch.no_grad():
                x = model.embeddings(tokenizer(sentence, return_tensors="pt").input_ids)[0]
            for token in range(1, len(x) - 1):
                if len(found) < words:
                    found.append(measure(map, x, token, relative))
        ratios, seconds = (torch.tensor(column, dtype=torch.float64) for column in zip(*found, strict=True))
        target = TARGETS.get(relative, float("inf"))
        missed |= bool(ratios.mean() > target) or bool(seconds.mean() > SECONDS)
        print(
            f"relative {relative:g}: bound/attack mean {float(ratios.mean()):.4f}, largest "
            f"{float(ratios.max()):.4f} (target {target:g}), {float(seconds.mean()):.1f} CPU s "
            f"(target {SECONDS:g}), {len(found)} words",
            flush=True,
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
