"""What approximate attention gets wrong: certified from the variational gap of its rows, and measured.

python examples/approximate_attention.py [--tokens 64] [--width 16] [--seed 0]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import regard
from regard.proofs.approximation import approximation_error


def top(weights: Tensor, count: int) -> Tensor:
    """The heaviest keys of each row, renormalized."""
    kept, chosen = weights.topk(count, -1)
    return torch.zeros_like(weights).scatter(-1, chosen, kept / kept.sum(-1, keepdim=True))


def features(attention: regard.Attention, tokens: Tensor, count: int, seed: int) -> Tensor:
    """Rows of positive random features (FAVOR+)."""
    feature_map = regard.normalizers.PositiveRandom.draw(
        attention.potential.w_q.shape[-1], count, seed, tokens.dtype
    )
    return attention.replace(normalizer=regard.LinearKernel(feature_map)).weights(tokens)


def measured(attention: regard.Attention, law: Tensor, tokens: Tensor) -> float:
    """The largest distance between an output and what the rows give."""
    values = attention.lookup.values(tokens, None)
    return float((law @ values - attention(tokens)).norm(dim=-1).max())


def main() -> None:
    """Print one line for each approximation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(options.seed)
    w_q, w_k, w_v = (
        torch.randn(options.width, options.width, generator=generator, dtype=torch.float64)
        / options.width**0.5
        for _ in range(3)
    )
    attention = regard.Attention(regard.Dot(w_q, w_k), regard.Linear(w_v))
    tokens = torch.randn(options.tokens, options.width, generator=generator, dtype=torch.float64)
    weights = attention.weights(tokens)
    shares = [count for count in (4, 16, 32, 60) if count < options.tokens]
    rows = {f"top {count} of {options.tokens} keys": top(weights, count) for count in shares}
    rows |= {
        f"{count} random features": features(attention, tokens, count, options.seed)
        for count in (16, 256, 4096)
    }
    print(f"{'rows':<24}{'largest gap':>14}{'certified':>12}{'measured':>12}")
    for name, law in rows.items():
        gap, bound = (
            float(attention.law_gap(law, tokens).max()),
            approximation_error(attention, law, tokens).value,
        )
        print(f"{name:<24}{gap:>14.4g}{bound:>12.4g}{measured(attention, law, tokens):>12.4g}")


if __name__ == "__main__":
    main()
