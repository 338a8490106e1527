"""Depth: how the constant of a stack of blocks grows with layers,
and how loose the product of its blocks is.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from regard.audits.capture import Function, passage, replay, tokens_in
from regard.audits.checks.base import (
    MEASURED,
    STACK,
    Check,
    Column,
    Cost,
    Limit,
    Result,
    Scene,
    register,
    too_long,
)
from regard.audits.checks.constants import block_constant, largest
from regard.derive import linearize

CURVES = 2
"""For how many inputs the constants after every layer are measured, and not the last alone."""
DEPTHS = 12
"""After how many blocks at most: of deeper stacks after every second, third, ... one."""
LONGEST = Limit(128, 512, Cost("for six layers of width 384", 512, 38.0, 1.3))
"""Up to how many tokens: the graph of each part of a stack is kept for it."""


def depth(scene: Scene) -> Result:
    """For each stack: the constant from the tokens that enter it to those that leave it,
    and the product of the blocks' constants.
    """
    found = {stack: _stack(scene, stack) for stack in scene.stacks}
    if not found:
        return Result(reason=scene.alone)
    numbers = {
        name: {stack: values[name] for stack, values in found.items()}
        for name in ("network_constant", "product")
    }
    curves = {stack: values["curve"] for stack, values in found.items() if values["curve"]}
    reason = next((values["reason"] for values in found.values() if values["reason"]), "")
    return Result(numbers, {"stacks": curves} if curves else None, reason)


def _stack(scene: Scene, stack: str) -> dict[str, Any]:
    first = scene.stacks[stack][0].path
    point = tokens_in(scene.trace[first])
    whole = _norm(scene, passage(scene.model, scene.options, first, scene.end(stack)), point)
    found = {"network_constant": whole, "product": math.nan, "curve": None, "reason": ""}
    if scene.index >= CURVES:
        return found
    reason = too_long(scene, len(point), LONGEST, "no constants after every layer, and no product of them,")
    return {**found, "reason": reason} if reason else {**found, **_curve(scene, stack, point, whole)}


def _curve(scene: Scene, stack: str, point: Tensor, whole: float) -> dict[str, Any]:
    """The constants of blocks alone, of the first ones together, and of the norm after the last."""
    paths, end = [block.path for block in scene.stacks[stack]], scene.end(stack)
    alone = [block_constant(scene, path)[0] for path in paths]
    step = -(-len(paths) // DEPTHS)
    so_far = alone[:1] + [math.nan] * (len(paths) - 1)
    for last in range(len(paths) - 1, 0, -step):
        part = paths[: last + 1]
        own = part[-1] == end
        so_far[last] = whole if own else _norm(scene, replay(scene.model, scene.trace, part), point)
    final = (
        1.0
        if paths[-1] == end
        else _norm(scene, replay(scene.model, scene.trace, (end,)), tokens_in(scene.trace[end]))
    )
    return {
        "product": math.prod(alone) * final,
        "curve": {"blocks": alone, "so_far": so_far, "final": final, "end": whole},
    }


def _norm(scene: Scene, function: Function, point: Tensor) -> float:
    return largest(linearize(function, point), scene.generator())[0]


register(
    Check(
        "depth",
        "How much does the whole network amplify, and how does that grow with depth?",
        (
            Column(
                "network_constant",
                "network, end to end",
                "How much all blocks together amplify a small change of the tokens that enter the first: "
                "the largest singular value of the "
                "derivative, in Frobenius norm.",
                MEASURED,
                STACK,
                True,
                "median",
            ),
            Column(
                "product",
                "product of the blocks",
                "The product of the measured constants of all blocks, and of the norm after the last. It is "
                "how bounds of layers compose, "
                f"and shows how loose that is. From the first {CURVES} inputs, where they have at most "
                f"{LONGEST}.",
                MEASURED,
                STACK,
                None,
                "median",
                "network_constant",
            ),
        ),
        of_input=depth,
        order=70,
    )
)
