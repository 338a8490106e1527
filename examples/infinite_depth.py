"""Where depth pays: which symbol came last, however far back?

    python examples/infinite_depth.py --out infinite_depth.svg

Sequences of blanks with a few symbols; every token is to tell the last symbol up to it. The layer sees one
token back, so that k layers see k tokens back. The same layer, with as many parameters, is trained on short
sequences at depths 2, 4, 8 and infinitely deep, and all are tried on sequences that are four times as long;
the infinitely deep one to 1e-8, as it was trained, and to 1e-12.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from plot import Line, chart
from torch import Tensor, nn

import regard as r
from regard.maps import Compose
from regard.nn import Anderson, Declaring, Deep
from regard.nonexpansive import IntoBall

SYMBOLS, WIDTH, SHORT, LONG = 4, 8, 16, 64
RARE = 0.08
"""How often a token is a symbol; all others are blank."""


class Layer(Declaring):
    """Attention to the token before and the own one, on the unit ball: w(√(1 + g²) + g) = 0.98 whatever the
    weights are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.empty(WIDTH, WIDTH)) for _ in range(3))
        for w in self.parameters():
            nn.init.orthogonal_(w)
        self.strength = nn.Parameter(torch.zeros(()))

    def value(self) -> Compose:
        g = torch.sigmoid(self.strength)
        w_q, w_k, w_v = (w / torch.linalg.matrix_norm(w, 2) for w in (self.w_q, self.w_k, self.w_v))
        values = 0.98 / ((1 + g**2).sqrt() + g) * w_v
        attention = r.Attention(r.Dot(w_q, w_k, scale=g), r.Linear(values), support=r.Window(1, 0))
        return Compose((IntoBall(1.0), attention))


class Unrolled(nn.Module):
    """The same layer, a fixed number of times."""

    def __init__(self, layer: Layer, depth: int) -> None:
        super().__init__()
        self.layer, self.depth = layer, depth

    def forward(self, u: Tensor) -> Tensor:
        z = u
        for _ in range(self.depth):
            z = self.layer(z) + u
        return z


class Reader(nn.Module):
    """Symbols to points, a network, and the direction of its points to symbols."""

    def __init__(self, depth: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS + 1, WIDTH, padding_idx=0)
        layer = Layer()
        self.network = Deep(layer, 1e-8, Anderson(5)) if math.isinf(depth) else Unrolled(layer, int(depth))
        self.out = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, ids: Tensor) -> Tensor:
        z = self.network(self.embedding(ids))
        return self.out(z / (1e-12 + z.norm(dim=-1, keepdim=True)))


def sequences(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Ids (0 is blank), the last symbol at every token, and how far back it was; a symbol comes first."""
    ids = torch.randint(1, SYMBOLS + 1, (count, length), generator=generator)
    blank = torch.rand(count, length, generator=generator) > RARE
    blank[:, 0] = False
    ids = ids.masked_fill(blank, 0)
    places = torch.arange(length).expand(count, -1).masked_fill(blank, 0).cummax(-1).values
    return ids, ids.gather(-1, places) - 1, torch.arange(length) - places


def train(model: Reader, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        ids, last, _ = sequences(32, SHORT, generator)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), last.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def tried(model: Reader, name: str, how: str = "") -> Line:
    """Print how many answers are right, and give their share for each distance."""
    right = []
    for length in (SHORT, LONG):
        ids, last, back = sequences(200, length, torch.Generator().manual_seed(2))
        with torch.no_grad():
            right.append((model(ids).argmax(-1) == last).double())
    far = right[1][back >= 16].mean()
    print(f"{name:>6} {float(right[0].mean()):10.3f} {float(right[1].mean()):10.3f} {float(far):16.3f}")
    if isinstance(model.network, Deep):
        found = model.network.solve(model.embedding(ids[:8]).detach())
        constant, tolerance = model.network.contraction.constant, model.network.tolerance
        print(f"       contraction {constant:.3f} proved, {found.evaluations} evaluations to {tolerance:g}")
    points = [(float(k), float(right[1][back == k].mean())) for k in range(0, 41, 2)]
    kind = "ours" if not isinstance(model.network, Deep) else "other" if how else "seen"
    return Line(f"depth {name}{how}", points, kind)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--out", type=Path, default=Path("infinite_depth.svg"))
    asked = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    print(f"{'depth':>6} {f'length {SHORT}':>10} {f'length {LONG}':>10} {'16 or more back':>16}")
    lines = []
    for depth in (2, 4, 8, math.inf):
        torch.manual_seed(asked.seed)
        model = Reader(depth)
        train(model, asked.steps)
        lines.append(tried(model, "∞" if math.isinf(depth) else str(depth)))
        if isinstance(model.network, Deep):
            model.network.tolerance = 1e-12
            lines.append(tried(model, "∞", ", 1e-12"))
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    drawn = chart(
        "which symbol came last",
        "tokens back to the last symbol",
        lines,
        above="share of right answers",
        logarithmic=(False, False),
    )
    asked.out.write_text(drawn, encoding="utf-8")
    print(f"saved to {asked.out}")


if __name__ == "__main__":
    main()
