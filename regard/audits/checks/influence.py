"""Influence: how much the output of the network moves when one input token does."""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.audits.capture import output_tensor, tokens_in
from regard.audits.checks.base import (
    MEASURED,
    SEARCHED,
    STACK,
    Check,
    Column,
    Limit,
    Result,
    Scene,
    as_list,
    register,
)
from regard.audits.sources import not_given, sources
from regard.derive.graph import twice_differentiable
from regard.derive.jacobian import spectral_norms

INPUTS = Limit(3, 1_000_000)
"""On how many inputs: the derivative of the whole network by every token is the most expensive
measurement.
"""
ENTRIES = 10_000_000
"""How many numbers the pulled-back coordinates may be together; where all would be more,
random directions stand for them.
"""
TOGETHER = 96
"""How many coordinates of the output one backward pass takes at most."""
DIRECTIONS = 8
"""How many random directions of each output token the map of pairs is made of."""
LONGEST_MAP = 48
"""Up to how many tokens there is a map of pairs."""
PAIRS = 400_000
"""For how many pairs of tokens together: attention keeps a number for each pair and head."""


def influence(scene: Scene) -> Result:
    """|∂ output / ∂ token j|₂ for each token of the first stack; the output is the mean of its tokens."""
    if scene.index >= INPUTS.of(scene):
        return Result()
    if not scene.stacks:
        return Result(reason=scene.stackless)
    stack = next(iter(scene.stacks))
    if reason := not_given(scene):
        return Result(reason=reason)
    values = token_influence(scene)
    share = float(values.max() / values.sum()) if float(values.sum()) > 0 else math.nan
    point, width = tokens_in(scene.trace[scene.stacks[stack][0].path]), _width(scene, stack)
    kind = MEASURED if width <= _room(point) else SEARCHED
    table = {"influence": as_list(values), "kind": kind, "map": influence_map(scene)}
    return Result({"influence_share": {stack: share}}, table)


def influence_map(scene: Scene) -> list[list[float]]:
    """|∂ y_i / ∂ x_j|_F of every output token y_i of the first stack by every token x_j, estimated: the mean
    of |vᵀ ∂ y_i / ∂ x_j|² over random v is its square. Nothing for long inputs.
    """
    stack, blocks = next(iter(scene.stacks.items()))
    point = tokens_in(scene.trace[blocks[0].path]).detach().requires_grad_()
    if len(point) > LONGEST_MAP:
        return []
    with torch.enable_grad(), twice_differentiable():
        output = sources(scene, stack)[0].passage(scene, scene.end(stack))(point)
        size = (len(output), DIRECTIONS, output.shape[-1])
        drawn = torch.randn(size, generator=scene.generator(1), dtype=torch.float64)
        rows = [
            torch.autograd.grad(own, point, part.to(output), retain_graph=True, is_grads_batched=True)[0]
            for own, part in zip(output, drawn, strict=True)
        ]
    squares = torch.stack(rows).double().square().sum(-1).mean(1)
    return [as_list(row) for row in squares.sqrt().cpu()]


def _width(scene: Scene, stack: str) -> int:
    """Of the tokens that leave a stack."""
    return output_tensor(scene.trace[scene.end(stack)].output).shape[-1]


def _room(point: Tensor) -> int:
    """How many coordinates of the output are pulled back."""
    return ENTRIES // max(1, point.numel())


def token_influence(scene: Scene) -> Tensor:
    """|∂ mean output / ∂ x_j|₂, (n,); for wide models from below, by random directions of the output.

    Computed once for an input.
    """
    if scene not in _known:
        _known[scene] = _measure(scene)
    return _known[scene]


_known: WeakKeyDictionary[Scene, Tensor] = WeakKeyDictionary()


def _measure(scene: Scene) -> Tensor:
    stack, blocks = next(iter(scene.stacks.items()))
    point = tokens_in(scene.trace[blocks[0].path]).detach().requires_grad_()
    with torch.enable_grad(), twice_differentiable():
        pooled = sources(scene, stack)[0].passage(scene, scene.end(stack))(point).mean(0)
        directions = _directions(scene, pooled, _room(point))
        parts = directions.split(max(1, min(TOGETHER, PAIRS // len(point) ** 2)))
        pulled = [
            torch.autograd.grad(pooled, point, part, retain_graph=True, is_grads_batched=True)[0]
            for part in parts
        ]
    by_token = torch.cat(pulled).transpose(0, 1).double()  # (n, outputs, d)
    return spectral_norms(by_token).cpu()


def _directions(scene: Scene, pooled: Tensor, count: int) -> Tensor:
    """All coordinates of the output, or as many orthonormal random directions as there is room for."""
    width = len(pooled)
    if width <= count:
        return torch.eye(width, dtype=pooled.dtype, device=pooled.device)
    drawn = torch.randn(width, max(1, count), generator=scene.generator(), dtype=torch.float64)
    return torch.linalg.qr(drawn)[0].mT.to(pooled)


register(
    Check(
        "influence",
        "Which token does the output depend on most?",
        (
            Column(
                "influence_share",
                "share of the most influential token",
                "The influence of a token is the norm of the derivative of the mean output token by it. "
                "This is the largest, "
                "over the sum of all: near one, the output depends on a single token. For long or wide "
                "inputs both are of random directions of the output, a lower bound on each norm. "
                f"Measured on the first {INPUTS.usual} inputs (all of them in a thorough audit).",
                MEASURED,
                STACK,
                True,
                "median",
            ),
        ),
        of_input=influence,
        order=80,
    )
)
