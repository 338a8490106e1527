"""The nearest other word of a vocabulary, and the distance between its vector and that of a token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.decisions.networks import Entered, entering

NUMBERS = 4_000_000
"""How many numbers of tokens are held together."""

Nearest = Callable[[int], tuple[str, float]]
"""From the place of a token to the nearest other word there, with its distance relative to the token."""


def nearest_token(network: Entered, x: Tensor, tokenizer: Any) -> Nearest:
    """A function that puts each word of the vocabulary in the place of a token, and compares the vectors that
    enter the first layer.
    """
    size = min(len(tokenizer), network.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(list(range(size)))]
    spelled = [tokenizer.convert_tokens_to_string([token]).strip().removeprefix("##") for token in tokens]
    special = set(getattr(tokenizer, "all_special_ids", ()))
    words = [k for k, word in enumerate(spelled) if word.isalpha() and k not in special]
    ids = network.options["input_ids"]

    def nearest(place: int) -> tuple[str, float]:
        own = spelled[int(ids[0, place])].lower()
        others = torch.tensor([k for k in words if spelled[k].lower() != own], dtype=torch.long)
        if not len(others):
            return "", math.nan
        parts = others.split(NUMBERS // x.numel() + 1)
        far = torch.cat([_distances(network, x, place, part) for part in parts])
        best = int(far.argmin())
        return spelled[int(others[best])], float(far[best] / x[place].norm())

    return nearest


def _distances(network: Entered, x: Tensor, place: int, ids: Tensor) -> Tensor:
    options = {name: part.repeat(len(ids), 1) for name, part in network.options.items()}
    options["input_ids"][:, place] = ids.to(options["input_ids"].device)
    return (entering(network.model, options, network.first)[:, place] - x[place]).norm(dim=-1).cpu()
