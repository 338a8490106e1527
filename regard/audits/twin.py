"""The untrained twin: the same architecture with the random weights that training begins with, measured on
the same input, so that what training did can be told from what the architecture gives.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from regard.errors import ArgumentError

CHECKS = ("weights", "rows", "constants", "geometry", "depth")
"""The checks whose columns are compared."""
SMALL = 50_000_000
"""Up to how many parameters a twin is made unasked: it takes as much memory as the model."""


def random_twin(model: nn.Module, seed: int = 0) -> nn.Module:
    """Return the same architecture with the weights that training would begin with, drawn from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        twin = _built(model) if _configured(model) else _begun(copy.deepcopy(model))
    some = next(model.parameters())
    return twin.to(some.device, some.dtype).eval()


def _configured(model: nn.Module) -> bool:
    """Whether it is a model of transformers, which is made from its config."""
    config = getattr(model, "config", None)
    return hasattr(config, "to_dict") and hasattr(model, "post_init")


def _built(model: Any) -> nn.Module:
    built: nn.Module = type(model)(copy.deepcopy(model.config))
    return built


def _begun(model: nn.Module) -> nn.Module:
    """Every layer as it says that it begins."""
    for path, module in model.named_modules():
        begin = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if begin is not None:
            begin()
        elif list(module.parameters(recurse=False)):
            where = path or type(module).__name__
            raise ArgumentError(
                "model",
                f"has weights of its own in {where}, which does not say how they are initialized",
                "give it a method reset_parameters, or leave the twin out",
            )
    return model
