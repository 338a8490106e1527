"""Depth: how the constant of a stack of blocks grows with layers, and how loose the product of its blocks is."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from regard.audit.capture import passage, recalled, tokens_in
from regard.audit.checks.base import EXACT, STACK, Check, Column, Result, Scene, register
from regard.audit.checks.constants import largest
from regard.derive import linearize
from regard.derive.jacobian import Jacobian

CURVES = 2
"""For how many inputs the constants after every layer are measured, and not the last alone."""
LONGEST = 128
"""Up to how many tokens: the graphs of all blocks are kept for it."""


def depth(scene: Scene) -> Result:
    """For each stack: the constant from the tokens that enter it to those that leave it, and the product of the blocks' constants."""
    found = {stack: _stack(scene, stack) for stack in scene.stacks}
    if not found:
        return Result()
    numbers = {name: {stack: values[name] for stack, values in found.items()} for name in ("network_constant", "product")}
    curves = {stack: values["curve"] for stack, values in found.items() if values["curve"]}
    return Result(numbers, {"stacks": curves} if curves else None)


def _stack(scene: Scene, stack: str) -> dict[str, object]:
    blocks = scene.stacks[stack]
    point = tokens_in(scene.trace[blocks[0].path])
    whole = _norm(scene, linearize(passage(scene.model, scene.options, blocks[0].path, scene.end(stack)), point))
    if scene.index >= CURVES or len(point) > LONGEST:
        return {"network_constant": whole, "product": math.nan, "curve": None}
    singles = [linearize(recalled(scene.model, scene.trace, (block.path,)), tokens_in(scene.trace[block.path])) for block in blocks]
    alone = [_norm(scene, jacobian) for jacobian in singles]
    so_far = [_norm(scene, Chain(singles[: k + 1])) for k in range(len(singles))]
    final = 1.0
    if scene.end(stack) != blocks[-1].path:
        last = (scene.end(stack),)
        final = _norm(scene, linearize(recalled(scene.model, scene.trace, last), tokens_in(scene.trace[last[0]])))
    curve = {"blocks": alone, "so_far": so_far, "final": final, "end": whole}
    return {"network_constant": whole, "product": math.prod(alone) * final, "curve": curve}


def _norm(scene: Scene, jacobian: Jacobian) -> float:
    return largest(jacobian, scene.generator())[0]


class Chain(Jacobian):
    """The derivative of maps one after the other, from their derivatives."""

    def __init__(self, jacobians: list[Jacobian]) -> None:
        self._jacobians = jacobians
        self.point, self.value, self.batch_shape = jacobians[0].point, jacobians[-1].value, torch.Size()

    def mv(self, tangent: Tensor) -> Tensor:
        for jacobian in self._jacobians:
            tangent = jacobian.mv(tangent)
        return tangent

    def rmv(self, cotangent: Tensor) -> Tensor:
        for jacobian in reversed(self._jacobians):
            cotangent = jacobian.rmv(cotangent)
        return cotangent

    def second(self, tangent: Tensor) -> Tensor:
        raise NotImplementedError("a chain of derivatives has no second derivative")

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        raise NotImplementedError("a chain of derivatives has products only")

    def block(self, i: int, j: int) -> Tensor:
        raise NotImplementedError("a chain of derivatives has products only")

    def in_double(self) -> Jacobian:
        return Chain([jacobian.in_double() for jacobian in self._jacobians])

    def nudged(self, relative: float, generator: torch.Generator) -> Jacobian:
        return Chain([jacobian.nudged(relative, generator) for jacobian in self._jacobians])


register(
    Check(
        "depth",
        "How much does the whole network amplify, and how does that grow with depth?",
        (
            Column(
                "network_constant",
                "network, end to end",
                "How much all blocks together amplify a small change of the tokens that enter the first: the largest singular value of the "
                "derivative, in Frobenius norm.",
                EXACT,
                STACK,
                True,
                "median",
            ),
            Column(
                "product",
                "product of the blocks",
                "The product of the local constants of all blocks, and of the norm after the last. It is how bounds of layers compose, "
                "and shows how loose that is.",
                EXACT,
                STACK,
                None,
                "median",
            ),
        ),
        of_input=depth,
        order=70,
    )
)
