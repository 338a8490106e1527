"""An influence map of a real sentence: how much each output token of a layer moves for a step of each input
token.

python examples/influence_map.py [--layer 3] [--text "..."] [--model DIRECTORY] [--out
docs/pictures/influence.svg]
"""

from __future__ import annotations

import argparse
import html
from pathlib import Path

import torch

import regard
from regard.audits import sites
from regard.audits.load import load

CELL, LABEL, GAP = 26, 92, 40


def heatmap(values: torch.Tensor, names: list[str], title: str, left: int) -> list[str]:
    """One square picture as SVG elements, rows are outputs and columns inputs;
    the darkest cell is the largest value.
    """
    top = LABEL
    largest = float(values.max())
    parts = [
        f'<text x="{left + LABEL}" y="18" font-size="14" font-weight="bold">{html.escape(title)}, largest '
        f"{largest:.2f}</text>"
    ]
    for i, name in enumerate(names):
        label = html.escape(name)
        middle = top + CELL * i + CELL * 0.65
        parts.append(f'<text x="{left + LABEL - 6}" y="{middle:.0f}" text-anchor="end">{label}</text>')
        across = left + LABEL + CELL * i + CELL * 0.6
        parts.append(f'<text transform="translate({across:.0f},{top - 6}) rotate(-60)">{label}</text>')
        for j in range(len(names)):
            share = float(values[i, j]) / largest
            shade = f"rgb({round(255 - 225 * share)},{round(255 - 165 * share)},{round(255 - 95 * share)})"
            box = f'x="{left + LABEL + CELL * j}" y="{top + CELL * i}" width="{CELL}" height="{CELL}"'
            told = f"{label} &#8592; {html.escape(names[j])}: {float(values[i, j]):.3f}"
            parts.append(f'<rect {box} fill="{shade}"><title>{told}</title></rect>')
    return parts


def main() -> None:
    """Draw weights and influence side by side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model directory; the demonstration model if not given")
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--text", default="The bank raised its rates after the river flooded.")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/influence.svg"))
    options = parser.parse_args()
    model, tokenizer, name = load(options.model)
    batch = dict(tokenizer(options.text, return_tensors="pt"))
    site = sites(model, batch)[options.layer]
    attention, tokens = site.attention, site.points.unsqueeze(0)  # (1, n, d): heads are broadcast
    names = tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
    jacobian = regard.linearize(attention, tokens)
    influence = (
        jacobian.influence().square().sum(-3).sqrt()
    )  # all heads together: an upper bound of the norm of the stacked block
    weights = attention.weights(tokens).mean(-3)
    width = 2 * (LABEL + CELL * len(names)) + GAP + 30
    height = LABEL + CELL * len(names) + 20
    parts = heatmap(weights, names, "mean weight", 0)
    parts += heatmap(influence, names, "influence", LABEL + CELL * len(names) + GAP)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    frame = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">'
    )
    options.out.write_text(
        "\n".join([frame, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]),
        encoding="utf-8",
    )
    print(f"{name}, layer {options.layer}, {len(names)} tokens, {site.heads} heads")
    print(f"largest weight, mean over heads: {float(weights.max()):.3f}")
    print(f"norm of the Jacobian: {jacobian.norm(generator=torch.Generator().manual_seed(0))}")
    print(f"token-max norm: {jacobian.norm(regard.TokenMax())}")
    strongest = influence.fill_diagonal_(0).flatten().argmax().item()
    i, j = divmod(int(strongest), len(names))
    print(
        f"strongest influence between different tokens: {names[j]!r} on {names[i]!r}, "
        f"{float(influence[i, j]):.2f}"
    )
    print(f"saved to {options.out}")


if __name__ == "__main__":
    main()
