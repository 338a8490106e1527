"""Windows of a text: the seed and the number of an update determine which ones it sees,
so that a resumed training sees the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.training.recipe import Recipe

HELD_OUT_WINDOWS = 256
"""On how many windows the held-out loss is taken at most, spread over the text evenly."""
STRIDE = 1_000_003
"""Factors that keep apart the random numbers of the updates of one training,
and of trainings with other seeds.
"""

Batch = tuple[Tensor, Tensor]
"""Tokens (b, n) and the tokens that follow them."""


def batch_at(tokens: Tensor, recipe: Recipe, step: int) -> Batch:
    """The windows of update `step`, drawn evenly from the text."""
    generator = torch.Generator().manual_seed(STRIDE * (recipe.seed + 1) + step)
    starts = torch.randint(len(tokens) - recipe.context, (recipe.batch,), generator=generator)
    return _windows(tokens, starts, recipe.context)


def held_out_batches(tokens: Tensor, recipe: Recipe) -> list[Batch]:
    """Windows that do not overlap, all of them or HELD_OUT_WINDOWS spread evenly, in batches."""
    count = (len(tokens) - 1) // recipe.context
    chosen = torch.linspace(0, count - 1, min(count, HELD_OUT_WINDOWS)).round().long()
    return [
        _windows(tokens, starts, recipe.context) for starts in (chosen * recipe.context).split(recipe.batch)
    ]


def _windows(tokens: Tensor, starts: Tensor, context: int) -> Batch:
    places = starts.unsqueeze(-1) + torch.arange(context + 1)
    found = tokens[places]
    return found[:, :-1], found[:, 1:]
