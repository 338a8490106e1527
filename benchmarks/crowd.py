"""python -m benchmarks.crowd [--quick | --picture FILE]: constants by the energy of scores over attacks, and
the old ones.

Values are the tokens themselves, tokens in a ball about 0, g = |A|R². An attack is a local search, so a ratio
is an upper bound of how loose a certificate is.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import regard as r
from examples.plot import Line, chart

D = torch.float64
FROBENIUS = {(0.5, 8): 1.25, (1.0, 16): 1.5, (3.0, 16): 2.8}
"""Certified over attacked that is to be reached for tied dot products, by g and the number of tokens."""
SECOND = (5.0, 14.5)
"""g, and what the constant of tied dot products in W₂ is to be at most, to one decimal."""
FIRST = {"generic": 3.0, "tied": 6.0, "skew": 1.43, "negative": 1.1}
"""Certified over attacked in W₁, by kind of scores, for every g."""
PULLS = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
console = Console(width=120)


def matrix(kind: str, width: int = 5) -> Tensor:
    """Scores xᵀAy with |A| = 1."""
    drawn = torch.randn(width, width, generator=torch.Generator().manual_seed(0), dtype=D)
    found = {
        "generic": drawn,
        "tied": drawn @ drawn.mT,
        "skew": drawn - drawn.mT,
        "negative": -torch.eye(width, dtype=D),
    }[kind]
    return found / torch.linalg.matrix_norm(found, 2)


def into_ball(points: Tensor) -> Tensor:
    """The nearest points of the unit ball."""
    return points / points.norm(dim=-1, keepdim=True).clamp_min(1.0)


def attacked_frobenius(a: Tensor, tokens: int, steps: int, restarts: int = 3) -> float:
    """The largest norm of the Jacobian that an ascent finds."""
    best = 0.0
    for seed in range(restarts):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, len(a), generator=generator, dtype=D).requires_grad_()
        climb = torch.optim.Adam([x], 0.05)
        for _ in range(steps):
            jacobian = torch.func.jacrev(lambda y: (y @ a @ y.mT).softmax(-1) @ y)(into_ball(x))
            norm = torch.linalg.matrix_norm(jacobian.reshape(x.numel(), x.numel()), 2)
            best = max(best, float(norm.detach()))
            climb.zero_grad()
            (-norm).backward()
            climb.step()
    return best


def stretching(a: Tensor, x: Tensor, logs: Tensor, y: Tensor, step: Tensor) -> Tensor:
    """How much W₁ grows when a mass of nearly nothing at y, beside atoms x, moves along a unit step:
    |C_y Aᵀd| + Σ_i w_i K(x_i, y) |(I + (y - m_i) v_iᵀ) d|, K(x, y) = e^{s(x, y)}/Σ_k w_k e^{s(x, x_k)}.
    """
    weights, slope = logs.log_softmax(-1), x @ a
    scores = slope @ x.mT + weights.unsqueeze(-2)
    rows = scores.logsumexp(-1)
    means = (scores - rows.unsqueeze(-1)).exp() @ x
    crowd = ((slope @ y.unsqueeze(-1)).squeeze(-1) - rows + weights).exp()
    moved = step.unsqueeze(-2) + (y.unsqueeze(-2) - means) * (slope @ step.unsqueeze(-1))
    own = ((y.unsqueeze(-2) @ a @ x.mT).squeeze(-2) + weights).softmax(-1)
    around = x - (own.unsqueeze(-2) @ x)
    pulled = (around @ a.mT @ step.unsqueeze(-1)).squeeze(-1)
    me = ((own * pulled).unsqueeze(-1) * around).sum(-2)
    return me.norm(dim=-1) + (crowd * moved.norm(dim=-1)).sum(-1)


def attacked_first(a: Tensor, steps: int, atoms: int = 4, restarts: int = 48) -> float:
    """The largest growth of W₁ that an ascent finds, over atoms, masses, a point and a direction."""
    generator = torch.Generator().manual_seed(0)
    width = len(a)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=D)

    left, _, right = torch.linalg.svd(a)
    x, y, step = into_ball(drawn(restarts, atoms, width)), 2 * drawn(restarts, width), drawn(restarts, width)
    logs = -4 * drawn(restarts, atoms).abs()
    for k, share in enumerate((-1.0, -0.5, -0.25, 0.25, 0.5, 1.0)):  # nearly a point mass, and y beside it
        for j in range(min(3, width)):
            x[3 * k + j] = share * left[:, j] + 0.02 * drawn(atoms, width)
            y[3 * k + j] = step[3 * k + j] = right[j]
            logs[3 * k + j] = 0
    leaves = [leaf.clone().requires_grad_() for leaf in (x, logs, y, step)]
    climb = torch.optim.Adam(leaves, 0.05)
    best = 0.0
    for at in range(steps):
        for group in climb.param_groups:
            group["lr"] = 0.05 * (1 - at / steps) + 1e-4
        unit = leaves[3] / leaves[3].norm(dim=-1, keepdim=True)
        found = stretching(a, into_ball(leaves[0]), leaves[1], into_ball(leaves[2]), unit)
        best = max(best, float(found.detach().max()))
        climb.zero_grad()
        (-found.log().sum()).backward()
        climb.step()
    return best


def published(a: Tensor) -> float:
    """The constant in W₁ of the source that has one on balls, on the same ball."""
    found = r.certify(r.Attention(r.Bilinear(a)), r.Ball(1.0), r.Wasserstein(1.0))
    name = r.theorems.THEOREMS["castin_mean_field"].cited
    return min(
        (rung.value for rung in (found, *found.others) if rung.theorem.startswith(name)), default=math.nan
    )


def constants(a: Tensor, norm: r.Norm, tokens: int | None = None) -> tuple[float, float]:
    """The constant on the unit ball, and the smallest without the energy of scores."""
    found = r.certify(r.Attention(r.Bilinear(a)), r.Ball(1.0, tokens=tokens), norm)
    name = r.theorems.THEOREMS["energy"].cited
    old = min(rung.value for rung in (found, *found.others) if not rung.theorem.startswith(name))
    return found.value, old


def picture(kinds: tuple[str, ...] = ("generic", "tied")) -> str:
    """Certified, attacked and published over g, as SVG."""
    pulls, lines = (0.25, *PULLS), []
    for kind in kinds:
        scores = [(g, g * matrix(kind)) for g in pulls]
        proved = [(g, constants(a, r.Wasserstein(1.0))[0]) for g, a in scores]
        seen = [(g, attacked_first(a, 250)) for g, a in scores]
        lines += [Line(f"{kind}: certified", proved, "ours" if kind == "generic" else "other")]
        lines += [Line(f"{kind}: attacked", seen, "seen")]
    known = [(g, published(g * matrix("generic"))) for g in pulls]
    lines.append(Line("castin2024, both", known, "published"))
    return chart("W₁ on a ball", "g = |A| R²", lines, above="constant")


def main() -> int:
    """Measure and print; exit status 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crowd", description=__doc__)
    parser.add_argument("--picture", type=Path, help="draw certified and attacked over g, and nothing else")
    parser.add_argument("--quick", action="store_true", help="short attacks, few sizes")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.picture is not None:
        options.picture.write_text(picture(), encoding="utf-8")
        return 0
    table = Table(title="attacked / certified / without the energy of scores", title_justify="left")
    for column in (
        "norm",
        "scores",
        "g",
        "attacked",
        "certified",
        "before",
        "published",
        "certified / attacked",
        "target",
    ):
        table.add_column(column, justify="right")
    kept: list[bool] = []

    def row(
        what: str,
        kind: str,
        g: float,
        seen: float,
        proved: float,
        before: float,
        goal: float,
        known: str = "",
    ) -> None:
        kept.append(seen <= proved <= goal * seen)
        verdict = "[green]met[/]" if kept[-1] else "[red]missed[/]"
        numbers = f"{seen:.4g}", f"{proved:.4g}", f"{before:.4g}", known, f"{proved / seen:.2f}"
        table.add_row(what, kind, f"{g:g}", *numbers, f"{goal:g} {verdict}")

    for (g, tokens), goal in FROBENIUS.items():
        a = g * torch.eye(4, dtype=D)
        seen = attacked_frobenius(a, tokens, 60 if options.quick else 300)
        row(f"Frobenius, n = {tokens}", "tied", g, seen, *constants(a, r.Frobenius(), tokens), goal)
    g, most = SECOND
    proved, before = constants(g * matrix("tied"), r.Wasserstein(2.0))
    kept.append(round(proved, 1) <= most)
    verdict = "[green]met[/]" if kept[-1] else "[red]missed[/]"
    numbers = "", f"{proved:.5g}", f"{before:.4g}", "", ""
    table.add_row("W₂", "tied", f"{g:g}", *numbers, f"≤ {most:g} {verdict}")
    for kind, goal in FIRST.items():
        for g in PULLS[:3:2] if options.quick else PULLS:
            a = g * matrix(kind)
            seen = attacked_first(a, 150 if options.quick else 500)
            row("W₁", kind, g, seen, *constants(a, r.Wasserstein(1.0)), goal, f"{published(a):.4g}")
    console.print(table)
    missed = kept.count(False)
    console.print(f"{missed} of {len(kept)} targets missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
