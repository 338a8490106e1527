"""Layers of a Transformer against torch's own: a pass forward and backward, and whole steps of training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.measure import Contender
from regard.nn import from_torch

Shape = tuple[int, int, int, int]


def _torch_layer(shape: Shape) -> nn.TransformerEncoderLayer:
    """Width heads · c, four times that inside, without dropout: torch leaves its fused kernel where
    attention weights are dropped.
    """
    torch.manual_seed(0)
    width = shape[1] * shape[3]
    return nn.TransformerEncoderLayer(width, shape[1], 4 * width, dropout=0.0, batch_first=True)


def _pass(module: nn.Module, x: Tensor, upstream: Tensor) -> Contender:
    inputs = [x, *module.parameters()]
    return lambda: torch.autograd.grad(module(x), inputs, upstream)


def layer(shape: Shape) -> dict[str, Contender]:
    """One encoder layer, with the same weights."""
    theirs = _torch_layer(shape)
    x, upstream = (
        torch.randn(shape[0], shape[2], shape[1] * shape[3], requires_grad=True),
        torch.randn(shape[0], shape[2], shape[1] * shape[3]),
    )
    return {"torch layer": _pass(theirs, x, upstream), "regard layer": _pass(from_torch(theirs), x, upstream)}


def _step(module: nn.Module, x: Tensor) -> Contender:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def run() -> Tensor:
        loss = (module(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return run


def training(shape: Shape) -> dict[str, Contender]:
    """A step of training of two layers, from the same weights."""
    theirs = nn.TransformerEncoder(_torch_layer(shape), 2, enable_nested_tensor=False)
    x = torch.randn(shape[0], shape[2], shape[1] * shape[3])
    return {"torch training step": _step(theirs, x), "regard training step": _step(from_torch(theirs), x)}
