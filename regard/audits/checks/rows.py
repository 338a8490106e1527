"""The attention rows of a head: how spread out they are, how large scores get, and where the mass goes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.audits.checks.base import HEAD, RUN, Check, Column, Measurable, Result, Scene, as_list, register
from regard.audits.row_blocks import NORMAL, RowBlock, row_blocks

SHOWN = 3
"""Of how many inputs the laws themselves are kept."""
NUMBERS = 20_000
"""How many numbers the laws of a layer may be;
longer inputs and larger layers keep their statistics alone.
"""


def rows(scene: Scene, site: Measurable) -> Result:
    """Statistics of the laws, for each head; some queries at a time, in memory that grows like the tokens."""
    entropies, logits, spread, steep, mass, laws = [], [], [], [], [], None
    for some in row_blocks(site):
        laws = some.laws
        entropies.append(torch.special.entr(laws).sum(-1))
        seen = some.scores.abs().masked_fill(~some.visible | (laws.to(torch.float32) == 0), 0.0)
        logits.append(seen.amax((-1, -2)))
        spread.append(logit_spread(some).amax(-1))
        steep.append(stiffness(laws).amax(-1))
        mass.append(laws.sum(-2))
    assert laws is not None
    entropy = torch.cat(entropies, -1)
    numbers = {
        "entropy": as_list(entropy.mean(-1)),
        "effective_support": as_list(entropy.exp().mean(-1)),
        "largest_logit": as_list(torch.stack(logits).amax(0)),
        "logit_spread": as_list(torch.stack(spread).amax(0)),
        "sink_mass": as_list((torch.stack(mass).sum(0) / entropy.shape[-1]).amax(-1)),
        "row_stiffness": as_list(torch.stack(steep).amax(0)),
    }
    small = scene.index < SHOWN and len(mass) == 1 and laws.numel() <= NUMBERS
    return Result(numbers, {"laws": (laws * 1000).round().div(1000).tolist()} if small else None)


def logit_spread(some: RowBlock) -> Tensor:
    """What of the scores of each row varies in it: for each pair of some weight the score, or the range of
    the scores of the row where that is smaller.
    """
    scores, hidden = some.compared, ~some.visible
    highest = scores.masked_fill(hidden, -math.inf).amax(-1, keepdim=True)
    lowest = scores.masked_fill(hidden, math.inf).amin(-1, keepdim=True)
    part = torch.minimum(scores.abs(), (highest - lowest).clamp_min(0.0))
    return part.masked_fill(hidden | (some.laws < NORMAL), 0.0).amax(-1)


def stiffness(laws: Tensor) -> Tensor:
    """p₁ (1 - p₁ + p₂) of each row, p₁ ≥ p₂ its largest entries:
    at least the norm of the softmax's derivative (yudin2025, g₁).
    """
    if laws.shape[-1] < 2:
        return torch.zeros(laws.shape[:-1], dtype=laws.dtype)
    first, second = laws.topk(2, -1).values.unbind(-1)
    rest = laws.sum(-1) - first  # 1 - p₁ would round to zero for a row that is nearly one-hot
    return first * (rest + second)


register(
    Check(
        "rows",
        "Where does each head look, and how sharply?",
        (
            Column(
                "entropy",
                "entropy (nats)",
                "Mean entropy of the attention rows. Zero: each query looks at one key; log n: "
                "at all of them equally.",
                RUN,
                HEAD,
                False,
                "mean",
            ),
            Column(
                "effective_support",
                "effective support",
                "Mean of exp(entropy): how many keys a query looks at, in effect.",
                RUN,
                HEAD,
                None,
                "mean",
            ),
            Column(
                "largest_logit",
                "largest logit",
                "Largest absolute score before the softmax, scale included, over all visible pairs whose "
                "weight is not zero in float32. A pair that a bias by position alone takes below 10⁻³⁸ is "
                "hidden. Where it grows, rows saturate.",
                RUN,
                HEAD,
                True,
            ),
            Column(
                "logit_spread",
                "logit spread",
                "Largest part of a score that varies in its row: the absolute score, or the range of the "
                "visible scores of its row where that is smaller, without masks and biases by position, over "
                "pairs with a weight above 10⁻³⁸. What is the same for a whole row changes no weight.",
                RUN,
                HEAD,
                True,
            ),
            Column(
                "sink_mass",
                "sink mass",
                "Largest share of all attention that a single key receives. Near one: every query looks at "
                "the same token.",
                RUN,
                HEAD,
                None,
                "mean",
            ),
            Column(
                "row_stiffness",
                "row stiffness g₁",
                "Largest p₁(1 - p₁ + p₂) of the rows, p₁ ≥ p₂ their largest entries: a bound of the norm "
                "of the softmax's derivative "
                "there. At most 1/2; zero for rows that look at one key only, or at very many equally.",
                RUN,
                HEAD,
                True,
            ),
        ),
        of_site=rows,
        quick_site=rows,
        order=20,
    )
)
