"""The optimizer, and its state as tensors with names, so that no pickle is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.training.recipe import Recipe

BETAS, DECAY = (0.9, 0.95), 0.1
LONGEST_GRADIENT = 1.0
"""Gradients longer than this are shortened to it."""
RANDOM = "random_state"


def optimizer_of(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; matrices decay, biases and norms do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=BETAS)


def tensors_of(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """The moments of every parameter by its name, and the state of torch's random numbers."""
    found = {RANDOM: torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{key}/{name}"] = torch.as_tensor(value).detach().contiguous()
    return found


def restore(model: nn.Module, optimizer: torch.optim.AdamW, tensors: dict[str, Tensor]) -> None:
    """Put the moments and the random numbers back."""
    torch.set_rng_state(tensors[RANDOM])
    for name, parameter in model.named_parameters():
        own: dict[str, Any] = {
            key.partition("/")[0]: value for key, value in tensors.items() if key.partition("/")[2] == name
        }
        if own:
            optimizer.state[parameter] = own
