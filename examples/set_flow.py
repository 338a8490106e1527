"""A flow of point sets: handwritten digits as clouds of points, trained by maximum likelihood, sampled by the
inverse that is proved to exist.

    python examples/set_flow.py --out set_flow.svg

Each image of scikit-learn's digits gives points, drawn by intensity. Every block is x + f(x) with attention
in f and a certificate that f contracts, for the weights as they are after each step. Beside it: the same flow
without attention, and a flow of affine couplings with attention and as many parameters.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn

import regard as r
from regard.maps import Added, Affine, Compose
from regard.nn import Declaring, Dense, Invertible, Roulette, Series
from regard.nonexpansive import GroupSort, IntoBall

POINTS, WIDTH, BLOCKS = 16, 16, 4
SIDE = 8  # pixels


def clouds(seed: int) -> Tensor:
    """Each image as POINTS points of the square [-2, 2]²: pixels by intensity, and a place in the pixel."""
    from sklearn.datasets import load_digits

    images = torch.tensor(load_digits().data, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.multinomial(images, POINTS, replacement=True, generator=generator)
    corner = torch.stack((pixels % SIDE, pixels // SIDE), -1)
    places = corner + torch.rand(corner.shape, generator=generator)
    return places / 2 - 2


def unit_norm(w: Tensor) -> Tensor:
    """The matrix, divided by its spectral norm where that is above one."""
    return w / torch.linalg.matrix_norm(w, 2).clamp_min(1.0)


class Block(Declaring):
    """f = out ∘ (sort, mix, sort) ∘ ((1 - α) z + α attention(z)/L) ∘ lift, whose constant is below 0.98 in
    TokenMax norm whatever the parameters are.
    """

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.lift, self.mix, self.out = (
            nn.Parameter(torch.empty(*shape)) for shape in ((2, WIDTH), (WIDTH, WIDTH), (WIDTH, 2))
        )
        self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.empty(WIDTH, WIDTH)) for _ in range(3))
        for w in self.parameters():
            nn.init.orthogonal_(w)
        self.bias, self.shift = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.strength, self.share = nn.Parameter(torch.tensor(-2.0)), nn.Parameter(torch.tensor(-1.0))

    def value(self) -> Compose:
        """The block as a map: every matrix is divided by its norm, and attention by its constant."""
        radius = 4.0
        g = 2 * torch.sigmoid(self.strength)
        w_q, w_k, w_v = (unit_norm(w) for w in (self.w_q, self.w_k, self.w_v))
        scores = r.Dot(w_q, w_k, scale=g / radius**2)
        share = torch.sigmoid(self.share) if self.attends else torch.zeros(()).to(g)
        values = share / ((1 + g**2).sqrt() + g) * w_v
        rest = (1 - share) * torch.eye(WIDTH).to(w_v)
        mixing = Added((r.Attention(scores, r.Linear(values)), Affine(rest)))
        return Compose(
            (
                Affine(unit_norm(self.lift), self.bias),
                IntoBall(radius),
                mixing,
                GroupSort(),
                Affine(unit_norm(self.mix), self.shift),
                GroupSort(),
                Affine(0.98 * unit_norm(self.out)),
            )
        )


class ResidualFlow(nn.Module):
    """Blocks x + f(x), each followed by a learned scale of the axes; noise is standard normal."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        series = Series(1, Roulette(2, 0.5))
        self.blocks = nn.ModuleList(Invertible(Block(attends), log_determinant=series) for _ in range(BLOCKS))
        self.scales = nn.Parameter(torch.zeros(BLOCKS, 2))

    def forward(self, x: Tensor, exact: bool = False) -> tuple[Tensor, Tensor]:
        total = torch.zeros(x.shape[:-2], dtype=x.dtype)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            assert isinstance(block, Invertible)
            block.log_determinant = Dense() if exact else Series(1, Roulette(2, 0.5))
            x, log_det = block(x)
            x = x * scale.exp()
            total = total + log_det + POINTS * scale.sum()
        return x, total

    def inverse(self, y: Tensor) -> Tensor:
        for block, scale in zip(reversed(self.blocks), self.scales.flip(0), strict=True):
            assert isinstance(block, Invertible)
            y = block.inverse(y * (-scale).exp(), 1e-6)
        return y


class CouplingFlow(nn.Module):
    """Affine couplings: one coordinate of every point is scaled and shifted by attention on the others."""

    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.lifts = nn.ModuleList(nn.Linear(1, width) for _ in range(blocks))
        self.queries = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(blocks))
        self.outs = nn.ModuleList(
            nn.Sequential(nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2))
            for _ in range(blocks)
        )
        for out in self.outs:
            nn.init.zeros_(out[-1].weight)
            nn.init.zeros_(out[-1].bias)

    def _scale_and_shift(self, number: int, seen: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.nn.functional.gelu(self.lifts[number](seen))
        q, k, v = self.queries[number](h).chunk(3, -1)
        h = h + r.attend(q, k, v)
        scale, shift = self.outs[number](h).split(1, -1)
        return torch.tanh(scale), shift

    def forward(self, x: Tensor, exact: bool = False) -> tuple[Tensor, Tensor]:
        total = torch.zeros(x.shape[:-2], dtype=x.dtype)
        parts = list(x.split(1, -1))
        for number in range(len(self.lifts)):
            moved, seen = number % 2, 1 - number % 2
            scale, shift = self._scale_and_shift(number, parts[seen])
            parts[moved] = parts[moved] * scale.exp() + shift
            total = total + scale.sum((-2, -1))
        return torch.cat(parts, -1), total


def bits(flow: nn.Module, x: Tensor, exact: bool = False) -> Tensor:
    """Bits for each coordinate, of densities in units of a pixel."""
    noise, log_det = flow(x, exact)
    normal = -0.5 * (noise**2 + math.log(2 * math.pi)).sum((-2, -1))
    return -(normal + log_det) / (2 * POINTS * math.log(2)) + 1.0  # two units to a pixel is one bit


def train(flow: nn.Module, x: Tensor, steps: int, seed: int) -> None:
    """Maximum likelihood on batches of clouds."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(flow.parameters(), lr=5e-3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    for _ in range(steps):
        batch = x[torch.randint(len(x), (64,), generator=generator)]
        loss = bits(flow, batch).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(flow.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def drawing(rows: list[tuple[str, Tensor]]) -> str:
    """Clouds side by side, one row for each kind, as SVG."""
    size, gap, left = 84, 8, 90
    width, height = left + 8 * (size + gap), len(rows) * (size + gap) + gap
    style = (
        "<style>.page{fill:#fff}text{fill:#24292f;font:12px sans-serif}.box{fill:none;stroke:#d8dee4}"
        "circle{fill:#1f6feb}@media(prefers-color-scheme:dark){.page{fill:#0d1117}text{fill:#e6edf3}"
        ".box{stroke:#30363d}circle{fill:#58a6ff}}</style>"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">{style}',
        f'<rect class="page" width="{width}" height="{height}"/>',
    ]
    for row, (name, sets) in enumerate(rows):
        top = gap + row * (size + gap)
        parts.append(f'<text x="6" y="{top + size / 2:.0f}">{name}</text>')
        for column, points in enumerate(sets[:8]):
            at = left + column * (size + gap)
            parts.append(f'<rect class="box" x="{at}" y="{top}" width="{size}" height="{size}"/>')
            for a, b in points.clamp(-2, 2).tolist():
                x, y = at + size * (a + 2) / 4, top + size * (b + 2) / 4
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def count(flow: nn.Module) -> int:
    return sum(parameter.numel() for parameter in flow.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--test", type=int, default=200, help="clouds that bits are counted on")
    parser.add_argument("--seed", type=int, default=0, help="of the points, the split, the weights")
    parser.add_argument("--out", type=Path, default=Path("set_flow.svg"))
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    data = clouds(asked.seed)
    order = torch.randperm(len(data))
    held, seen = data[order[: asked.test]], data[order[asked.test :]]
    flows = {
        "residual, attention": ResidualFlow(True),
        "residual, points alone": ResidualFlow(False),
        "coupling, attention": CouplingFlow(),
    }
    print(f"{'flow':24} {'parameters':>10} {'bits/dim':>9}   uniform on the square: {math.log2(SIDE):.3f}")
    for name, flow in flows.items():
        train(flow, seen, asked.steps, asked.seed + 1)
        with torch.no_grad():
            found = bits(flow, held, exact=True)
        error = float(found.std()) / len(found) ** 0.5
        print(f"{name:24} {count(flow):10d} {float(found.mean()):9.3f} ± {error:.3f}")
    flow = flows["residual, attention"].double()
    assert isinstance(flow, ResidualFlow)
    with torch.no_grad():
        noise = torch.randn(8, POINTS, 2, dtype=torch.float64)
        samples = flow.inverse(noise)
        back, _ = flow(samples, exact=True)
    constants = [block.contraction.constant for block in flow.blocks if isinstance(block, Invertible)]
    print("certified constants of the blocks: " + ", ".join(f"{constant:.3f}" for constant in constants))
    print(f"noise again from samples, up to {float((back - noise).abs().max()):.1e}")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(drawing([("digits", held), ("samples", samples)]), encoding="utf-8")
    print(f"saved to {asked.out}")


if __name__ == "__main__":
    main()
