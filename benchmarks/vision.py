"""The vision transformers of VNN-COMP beside their verifiers: python -m benchmarks.vision FOLDER
    [--count 100] [--only pgd_2_3_16|ibp_3_3_8] [--first-order]

FOLDER is benchmarks/vit_2023 of github.com/VNN-COMP/vnncomp2025_benchmarks: two networks (onnx/) with 2 and 3
layers, BatchNorm in place of LayerNorm, trained against attacks, and 200 pictures (vnnlib/), of each of which
every one of 3,072 numbers may move by 1/255. Whether the answer stays is asked of the ball model, once for
each picture and without cutting it up. Pictures that a first bound of CROWN decides, or an attack, were left
out of this set by those who made it.

Published: 60 and 65 of 100 by alpha-beta-CROWN with branch and bound in 100 s each on a GPU, 49 and 18 by
NeuralSAT, 29 and 54 by PyRAT, none by NNV (github.com/VNN-COMP/vnncomp2025_results). Every picture is written
down when it is found, as in `benchmarks.decisions`.

The proof is about the network with exact numbers, its BatchNorms multiplied into the matrices after them in
float64, beside which it is run to compare.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import re
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard as r
from benchmarks.kept import Row, Rows
from regard import maps
from regard._enclosed import computed_lengths
from regard._upper import Upper, exact, relative_error, sizes
from regard.nonexpansive import MixTokens
from regard.proofs.ball_model.beginning import second_order
from regard.proofs.ball_model.ellipsoids import Sum, longest, no_shape
from regard.proofs.ball_model.groups import no_groups
from regard.proofs.ball_model.inputs import Inputs, Part, shares_of
from regard.proofs.ball_model.margin import least
from regard.proofs.ball_model.state import State
from regard.proofs.theorem import Refusal
from regard.proofs.theorems.ball_model import run

PUBLISHED = {"pgd_2_3_16": (60, 49, 29, 0), "ibp_3_3_8": (65, 18, 54, 0)}
VERIFIERS = ("alpha-beta-CROWN", "NeuralSAT", "PyRAT", "NNV")
HEADS, ROUNDS = 3, 8
CURVED = 10_000_000
"""Up to how many numbers second derivatives are carried here."""


@dataclass(frozen=True)
class Vision:
    """A network: patches (p, pixels) are projected, tokens added; `body` gives one token, then logits."""

    projection: Tensor
    bias: Tensor
    beginning: Tensor
    positions: Tensor
    body: maps.Compose
    readout: maps.Affine
    patch: int

    def patches(self, pictures: Tensor) -> Tensor:
        """Pixels (3, 32, 32) as patches (p, pixels)."""
        columns = torch.nn.functional.unfold(pictures.unsqueeze(0), self.patch, stride=self.patch)
        return columns[0].mT

    def tokens(self, picture: Tensor) -> Tensor:
        made = self.patches(picture) @ self.projection + self.bias
        return torch.cat([self.beginning.unsqueeze(0), made]) + self.positions

    def logits(self, picture: Tensor) -> Tensor:
        return self.readout(self.body(self.tokens(picture)))[0]


def read_network(path: Path) -> Vision:
    """An ONNX file of this benchmark."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load_model_from_string(gzip.decompress(path.read_bytes())).graph
    found: dict[str, Tensor] = {
        one.name: torch.from_numpy(numpy_helper.to_array(one).copy()).double() for one in graph.initializer
    }
    eps = next(_number(node, "epsilon") for node in graph.node if node.op_type == "BatchNormalization")
    used = [name for node in graph.node if node.op_type == "MatMul" for name in node.input if name in found]
    kernel = found["0.projection.weight"]
    layers = len(used) // 6
    blocks: list[maps.Map] = []
    for layer in range(layers):
        matrices = [found[name] for name in used[6 * layer : 6 * layer + 6]]
        blocks += _block(found, f"1.{layer}", matrices, eps)
    count = len(found["0.positions"])
    mean = MixTokens(torch.full((1, count), 1 / count, dtype=torch.float64))
    scale, shift = _batch_norm(found, "2.1", eps)
    w = found["2.2.weight"].mT
    return Vision(
        kernel.flatten(1).mT,
        found["0.projection.bias"],
        found["0.cls_token"],
        found["0.positions"],
        maps.Compose((*blocks, mean)),
        maps.Affine(scale.unsqueeze(-1) * w, shift @ w + found["2.2.bias"]),
        kernel.shape[-1],
    )


def _number(node: Any, name: str) -> float:
    return next(float(one.f) for one in node.attribute if one.name == name)


def _batch_norm(found: dict[str, Tensor], name: str, eps: float) -> tuple[Tensor, Tensor]:
    """x ↦ scale x + shift."""
    scale = found[f"{name}.weight"] / (found[f"{name}.running_var"] + eps).sqrt()
    return scale, found[f"{name}.bias"] - scale * found[f"{name}.running_mean"]


def _block(found: dict[str, Tensor], name: str, matrices: list[Tensor], eps: float) -> list[maps.Map]:
    """Attention and neurons, each after its BatchNorm, with residual connections."""
    q, k, v, out, up, down = matrices
    scale, shift = _batch_norm(found, f"{name}.0.fn.0.norm", eps)

    def heads(w: Tensor, side: str) -> tuple[Tensor, Tensor]:
        bias = shift @ w + found[f"{name}.0.fn.1.{side}.bias"]
        width = w.shape[-1] // HEADS
        return (scale.unsqueeze(-1) * w).unflatten(-1, (HEADS, width)).transpose(0, 1), bias.unflatten(
            -1, (HEADS, width)
        )

    (w_q, b_q), (w_k, b_k), (w_v, b_v) = heads(q, "query"), heads(k, "key"), heads(v, "value")
    attention = r.Attention(r.Dot(w_q, w_k, None, b_q, b_k), r.Linear(w_v, b_v))
    mixed = maps.Heads(attention, out.unflatten(0, (HEADS, -1)), found[f"{name}.0.fn.1.out.bias"])
    scale, shift = _batch_norm(found, f"{name}.1.fn.0.norm", eps)
    first = maps.Affine(scale.unsqueeze(-1) * up, shift @ up + found[f"{name}.1.fn.1.0.bias"])
    second = maps.Affine(down, found[f"{name}.1.fn.1.3.bias"])
    neurons = maps.Compose((first, maps.Pointwise(maps.Relu()), second))
    return [maps.Residual(mixed), maps.Residual(neurons)]


BOUND = re.compile(r"\(assert \((<=|>=) X_(\d+) (\S+)\)\)")
RIVAL = re.compile(r"\(>= Y_(\d+) Y_(\d+)\)")


def read_picture(path: Path) -> tuple[Tensor, Tensor, int]:
    """The least and the largest picture, and the label."""
    text = gzip.decompress(path.read_bytes()).decode()
    ends = torch.zeros(2, 3 * 32 * 32, dtype=torch.float64)
    for side, number, value in BOUND.findall(text):
        ends[int(side == "<="), int(number)] = float(value)
    labels = {int(label) for _, label in RIVAL.findall(text)}
    if len(labels) != 1:
        raise ValueError(f"{path.name} compares with {len(labels)} labels, where it should be one")
    low, high = ends.unflatten(-1, (3, 32, 32))
    return low, high, labels.pop()


@dataclass(frozen=True)
class ImagePart(Part):
    """u = Ut for |t_k| ≤ 1, with U (width, pixels) such that |u| ≤ 1: so |a·u| ≤ Σ_k |a·U_k|."""

    width: int
    columns: Tensor

    def reach(self, slopes: Tensor) -> Upper:
        along = sizes(slopes @ self.columns).sum(-1)
        whole = computed_lengths(self.columns.mT).sum(-1)
        rounding = relative_error(self.width + 4) * computed_lengths(slopes) * whole
        return computed_lengths(slopes).minimum(along + rounding)


def begin(network: Vision, low: Tensor, high: Tensor) -> State:
    """Every pixel of a picture in an interval of its own: each patch is the image of a box, and lies in an
    ellipsoid FFᵀ about its middle, x = c + Fu.
    """
    middle, radius = network.patches((low + high) / 2), network.patches((high - low) / 2)
    n, d = network.positions.shape
    shares = shares_of([1.0] * (n - 1))
    center, parts = network.tokens((low + high) / 2), []
    linear = torch.zeros(n, d, (n - 1) * d, dtype=torch.float64)
    off = torch.zeros(n, dtype=torch.float64)
    for k, share in enumerate(shares):
        columns = (network.projection * radius[k].unsqueeze(-1)).mT
        factor, inside = _whitened(columns)
        linear[k + 1, :, k * d : (k + 1) * d] = factor / share
        parts.append(ImagePart(d, inside))
        size = computed_lengths(factor.flatten()) * computed_lengths(inside.mT).sum(-1)
        missed = computed_lengths((factor @ inside - columns).mT).sum(-1) + relative_error(d + 8) * size
        whole = computed_lengths(network.projection.mT).norm() * computed_lengths(middle[k].abs() + radius[k])
        missed = missed + relative_error(network.projection.shape[0] + 16) * (whole + exact(4.0))
        off[k + 1] = missed.bound
    state = State(Inputs(tuple(parts), shares), center, linear, None, no_groups(n, d), no_shape(n, d))
    return state.with_rest(Sum(n, d).ball(Upper(off)))


def _whitened(columns: Tensor) -> tuple[Tensor, Tensor]:
    """F and U with FU ≈ V and |Ut| ≤ 1 for |t_k| ≤ 1: the ellipsoid of a sum of segments (M1), with weights
    that are lengths in its own coordinates.
    """
    factor, inside = torch.eye(len(columns), dtype=torch.float64), columns
    for _ in range(ROUNDS):
        weights = torch.linalg.vector_norm(inside, dim=0).clamp_min(1e-12)
        shape = weights.sum() * (columns / weights) @ columns.mT
        factor = torch.linalg.cholesky(shape)
        inside = torch.linalg.solve_triangular(factor, columns, upper=False)
    far = float(longest(Sum(1, len(columns)).segments(inside.unsqueeze(0)).done())[0])  # at least |Ut|
    return factor * far, inside / (far * (1 + 1e-12))


def margin(network: Vision, state: State, label: int) -> float:
    """At most the least lead of the label."""
    try:
        after = run(network.body, state)
    except Refusal:
        return -float("inf")
    w, b = network.readout.w, network.readout.b
    assert b is not None
    others = [k for k in range(w.shape[-1]) if k != label]
    return float(least(after, w[:, label].unsqueeze(-1) - w[:, others], b[label] - b[others]).min())


def measure(network: Vision, path: Path, first_only: bool) -> Row:
    """The least lead that is proved, by the first order and by the second; the lead of the picture itself,
    and CPU seconds.
    """
    low, high, label = read_picture(path)
    logits = network.logits((low + high) / 2)
    lead = float(logits[label] - torch.cat([logits[:label], logits[label + 1 :]]).max())
    began = time.process_time()
    state = begin(network, low, high)
    n, d, width = state.linear.shape
    first = margin(network, state, label)
    second = first
    if first <= 0 and not first_only and n * d * width * width <= CURVED:
        second = margin(network, second_order(state), label)
    return [first, second, lead, time.process_time() - began]


def part(folder: Path, name: str, count: int, first_only: bool) -> None:
    """One network."""
    network = read_network(folder / "onnx" / f"{name}.onnx.gz")
    with (folder / "instances.csv").open() as file:
        paths = [folder / f"{row[1]}.gz" for row in csv.reader(file) if name in row[0]]
    kept, rows = Rows(f"vision-{name}{'-1' if first_only else ''}"), []
    for number, path in enumerate(paths[:count]):
        rows.append(kept.get(path.name, partial(measure, network, path, first_only)))
        shown = " ".join(f"{value:.4g}" for value in rows[-1])
        print(f"  {name}, picture {number + 1}: {shown}", file=sys.stderr, flush=True)
    proved = sum(max(row[0], row[1]) > 0 for row in rows)
    lost = statistics.median((row[2] - max(row[0], row[1])) / row[2] for row in rows)
    seconds, theirs = statistics.fmean(row[3] for row in rows), PUBLISHED[name]
    others = ", ".join(f"{verifier} {count}" for verifier, count in zip(VERIFIERS, theirs, strict=True))
    print(
        f"{name}: {proved} of {len(rows)} proved, {seconds:.1f} CPU s each; what is proved of the lead is "
        f"{lost:.2f} of that of the picture less (median; below 1 is a proof). Of 100, published: {others}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with onnx/, vnnlib/ and instances.csv")
    parser.add_argument("--count", type=int, default=100, help="pictures of each network")
    parser.add_argument("--only", choices=list(PUBLISHED))
    parser.add_argument("--first-order", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for name in [chosen.only] if chosen.only else PUBLISHED:
        part(chosen.folder, name, chosen.count, chosen.first_order)
    return 0


if __name__ == "__main__":
    sys.exit(main())
