"""A vision transformer of VNN-COMP: python -m benchmarks.vit FOLDER [--count 10] [--radius 1]

FOLDER holds model.onnx and data.pt of models/ibp_3_3_8 of github.com/shizhouxing/ViT_vnncomp2023 (three
layers, three heads, BatchNorm where others have LayerNorm). All 3,072 numbers of a picture move, each by
`radius`/255: how many of the first pictures keep their class by the ball model, for that radius and for parts
of it. The published answer at radius 1 is 65 of 100 within 100 s each, by α,β-CROWN with branch and bound, on
a GPU. (Of the other network of that benchmark, pgd_2_3_16, the pictures were not to be had.) It needs onnx.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

import regard as r
from regard import maps
from regard.decisions.networks import attention
from regard.nonexpansive import MixTokens
from regard.proofs.ball_model.beginning import at_rest
from regard.proofs.ball_model.ellipsoids import Sum
from regard.proofs.ball_model.inputs import BoxPart, Inputs
from regard.proofs.ball_model.state import State
from regard.proofs.classifier import Classifier, classifier
from regard.proofs.decision import better_order
from regard.proofs.theorem import Refusal

HEADS, PATCH, EPSILON = 3, 8, 1e-5
MEAN, SPREAD = torch.tensor([[0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]], dtype=torch.float64)
"""What is taken from each color, and by which it is then divided."""
PARTS = (1.0, 0.3, 0.1, 0.03)

Weights = dict[str, Tensor]


def weights_of(path: Path) -> tuple[Weights, list[Tensor]]:
    """All tensors by their names, and those of products, which have none, in the order of the layers."""
    import onnx
    from onnx import numpy_helper

    parts = onnx.load(str(path)).graph.initializer
    found = {part.name: torch.tensor(numpy_helper.to_array(part)).double() for part in parts}
    numbered = [name for name in found if name.startswith("onnx::MatMul")]
    return found, [found.pop(name) for name in sorted(numbered, key=lambda name: int(name.split("_")[-1]))]


def batch_norm(found: Weights, name: str) -> maps.Affine:
    """A batch norm at rest is affine."""
    scale = found[f"{name}.weight"] / (found[f"{name}.running_var"] + EPSILON).sqrt()
    return maps.Affine(torch.diag(scale), found[f"{name}.bias"] - scale * found[f"{name}.running_mean"])


def network_of(found: Weights, products: list[Tensor]) -> maps.Compose:
    """From tokens to ten logits."""
    blocks: list[maps.Map] = []
    for k in range(len(products) // 6):
        q, key, v, out, one, two = products[6 * k : 6 * k + 6]
        first, second = f"1.{k}.0.fn", f"1.{k}.1.fn"
        biases = [found[f"{first}.1.{name}.bias"] for name in ("query", "key", "value", "out")]
        parts = list(zip((q, key, v), biases[:3], strict=True))
        heads = attention(parts, (out, biases[3]), HEADS)
        hidden = maps.feed_forward(
            maps.Relu(), one, two, found[f"{second}.1.0.bias"], found[f"{second}.1.3.bias"]
        )
        blocks.append(maps.Residual(maps.Compose((batch_norm(found, f"{first}.0.norm"), heads))))
        blocks.append(maps.Residual(maps.Compose((batch_norm(found, f"{second}.0.norm"), hidden))))
    tokens = len(found["0.positions"])
    mean = MixTokens(torch.full((1, tokens), 1 / tokens, dtype=torch.float64))
    last = maps.Affine(found["2.2.weight"].mT.contiguous(), found["2.2.bias"])
    return maps.Compose((*blocks, mean, batch_norm(found, "2.1"), last))


def patches(picture: Tensor) -> Tensor:
    """A picture (3, 32, 32) as rows of numbers (16, 192), as the convolution takes them."""
    scaled = (picture.double() - MEAN[:, None, None]) / SPREAD[:, None, None]
    cut = scaled.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)  # colors, rows, columns, patch
    return cut.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)


def begun(found: Weights, picture: Tensor, radius: float) -> State:
    """The tokens of all pictures whose numbers are within radius/255 of this one's."""
    weight = found["0.projection.weight"].flatten(1)  # (48, 192)
    numbers = patches(picture)
    tokens = torch.cat([found["0.cls_token"].unsqueeze(0), numbers @ weight.mT + found["0.projection.bias"]])
    still = at_rest(tokens + found["0.positions"])
    count, each = numbers.shape
    far = (radius / 255 / SPREAD).repeat_interleave(PATCH * PATCH) * math.sqrt(count * each) * (1 + 1e-12)
    linear = torch.zeros(*still.center.shape, count * each, dtype=torch.float64)
    for k in range(count):
        linear[k + 1, :, each * k : each * (k + 1)] = weight * far
    state = State(
        Inputs((BoxPart(count * each),), (1.0,)), still.center, linear, None, still.groups, still.shape
    )
    blur = 1e-12 * (1 + linear.flatten(1).norm(dim=-1) + still.center.norm(dim=-1))  # of these products
    return state.with_rest(Sum(*still.center.shape).ball(r._upper.Upper(blur)))


def kept(network: Classifier, state: State, label: int) -> bool:
    """Whether the class leads everywhere."""
    try:
        return better_order(network, state, (label,))[0] > 0
    except Refusal:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--radius", type=float, default=1.0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    weights, products = weights_of(chosen.folder / "model.onnx")
    network = classifier(network_of(weights, products))
    pictures, labels = torch.load(chosen.folder / "data.pt", weights_only=True)
    pictures, labels = pictures[: chosen.count], labels[: chosen.count].tolist()
    right = [int(network.logits(begun(weights, one, 0.0).center).argmax()) for one in pictures]
    hits = sum(one == other for one, other in zip(right, labels, strict=True))
    print(f"{hits} of {len(labels)} pictures have their own class", flush=True)
    for part in PARTS:
        began = time.process_time()
        states = (begun(weights, one, part * chosen.radius) for one in pictures)
        count = sum(kept(network, state, label) for state, label in zip(states, labels, strict=True))
        seconds = (time.process_time() - began) / len(labels)
        print(
            f"all numbers within {part * chosen.radius:g}/255: {count} of {len(labels)} proved, "
            f"{seconds:.1f} CPU s each",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
