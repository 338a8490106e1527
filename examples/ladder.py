"""The ladder of one attention head: every bound of its constant around a given input, over the radius, with
what a search finds below.

python examples/ladder.py [--tokens 12] [--width 8] [--radii 17] [--seed 0] [--out docs/pictures/ladder.svg]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run as a script, the root of the repository is not on the path

import regard
from examples.plot import Line, chart


def radii_of(count: int) -> list[float]:
    """From 0.001 to 10, evenly on a logarithmic axis."""
    return [10 ** ((16 * step / (count - 1) - 12) / 4) for step in range(count)]


def example(tokens: int, width: int, seed: int) -> tuple[regard.Attention, torch.Tensor]:
    """A head with random projections, and normal tokens."""
    generator = torch.Generator().manual_seed(seed)
    w_q, w_k, w_v = (
        torch.randn(width, width, generator=generator, dtype=torch.float64) / width**0.5 for _ in range(3)
    )
    attention = regard.Attention(regard.Dot(w_q, w_k), regard.Linear(w_v))
    return attention, torch.randn(tokens, width, generator=generator, dtype=torch.float64)


def slug(rung: regard.Certificate) -> str:
    """The name of a bound's theorem; what follows a colon is about this instance."""
    cited = rung.theorem.split(":")[0]
    return next(theorem.name for theorem in regard.theorems.THEOREMS.values() if theorem.cited == cited)


def rungs(attention: regard.Attention, x: torch.Tensor, radius: float) -> dict[str, float]:
    """Every bound of the constant on a neighborhood, by its theorem."""
    certificate = regard.certify(attention, regard.Neighborhood(x, radius), regard.Frobenius())
    return {slug(rung): rung.value for rung in (certificate, *certificate.others)}


def line(name: str, points: list[tuple[float, float]]) -> Line:
    """A bound; published ones have a source."""
    source = regard.theorems.THEOREMS[name].source
    return Line(f"{name} {source}".strip(), points, "published" if source else "ours")


def curves(attention: regard.Attention, x: torch.Tensor, radii: list[float]) -> list[Line]:
    """A line for each theorem; those about one sequence alone are dots at the smallest radius."""
    found = [(radius, rungs(attention, x, radius)) for radius in radii]
    names = list(found[0][1])
    lines = [line(name, [(radius, values[name]) for radius, values in found]) for name in names]
    return lines + [
        line(name, [(radii[0], value)])
        for name, value in rungs(attention, x, 0.0).items()
        if name not in names
    ]


def seen(attention: regard.Attention, x: torch.Tensor, radii: list[float]) -> Line:
    """What a search finds, from below; a pair seen in a small neighborhood is in every larger one."""
    best, points = 0.0, []
    for radius in radii:
        near = regard.Neighborhood(x, radius)
        best = max(best, regard.falsify(attention, near, regard.Frobenius(), steps=20, restarts=2).value)
        points.append((radius, best))
    return Line("seen by a search", points, "seen")


def main() -> None:
    """Draw the ladder and print its ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--radii", type=int, default=17, help="how many, two or more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/ladder.svg"))
    options = parser.parse_args()
    if options.radii < 2:
        parser.error(f"--radii: is {options.radii}; give two or more, the ends of the ladder")
    attention, x = example(options.tokens, options.width, options.seed)
    radii = radii_of(options.radii)
    lines = [*curves(attention, x, radii), seen(attention, x, radii)]
    title = f"Bounds of the constant of one head, {options.tokens} tokens of width {options.width}"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    drawn = chart(
        title, "how far the input may move (Frobenius radius)", lines, above="constant in Frobenius norm"
    )
    options.out.write_text(drawn, encoding="utf-8")
    print(f"{'radius 0.001':>14}{'radius 10':>12}")
    for curve in lines:
        last = f"{curve.points[-1][1]:.4g}" if len(curve.points) > 1 else "–"
        print(f"{curve.points[0][1]:>14.4g}{last:>12}  {curve.name}")
    print(f"saved to {options.out}")


if __name__ == "__main__":
    main()
