"""Depth: how the constant of a stack of blocks grows with layers,
and how loose the product of its blocks is.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from torch import Tensor

from regard.audits.capture import Function, replay, tokens_in
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
from regard.audits.checks.constants import block_constant, joined_reasons, largest
from regard.audits.sources import Source, beside, incomplete, origins
from regard.derive import linearize

CURVES = 2
"""For how many inputs the constants after every layer are measured, and not the last alone."""
DEPTHS = 12
"""After how many blocks at most: of deeper stacks after every second, third, ... one."""
LONGEST = Limit(128, 512, Cost("for six layers of width 384", 512, 38.0, 1.3))
"""Up to how many tokens: the graph of each part of a stack is kept for it."""


def depth(scene: Scene) -> Result:
    """For each stack: the constant from the tokens that enter it to those that leave it, for all that it is
    computed from, and the product of the blocks' constants.
    """
    numbers: dict[str, dict[str, float]] = {"network_constant": {}, "inner_constant": {}, "product": {}}
    if not scene.stacks:
        return Result(reason=scene.stackless)
    curves, reasons = {}, []
    for stack in scene.stacks:
        missing = incomplete(scene, stack)
        reason = f"no constant end to end, and no product of blocks: {missing}" if missing else ""
        whole, (named, why) = math.nan, ({}, "") if missing else _named(scene, stack)
        reasons.append(why)
        for name, source in named.items():
            constant = _norm(scene, source.passage(scene, scene.end(stack)), source.point)
            numbers["network_constant" if source.given else "inner_constant"][name] = constant
            whole = constant if source.stack == stack and math.isnan(whole) else whole
        why, curve = _curve(scene, stack, whole) if scene.index < CURVES and not missing else ("", None)
        reasons += [reason, why]
        numbers["product"][stack] = math.nan
        if curve is not None:
            curves[stack] = curve
            numbers["product"][stack] = math.prod(curve["blocks"]) * (curve["final"] or 1.0)
    return Result(numbers, {"stacks": curves} if curves else None, joined_reasons(*dict.fromkeys(reasons)))


def _named(scene: Scene, stack: str) -> tuple[dict[str, Source], str]:
    """What a stack is computed from, by the names of rows (the stack where that is one sequence), and why
    some argument of the model has no number.
    """
    found, also = origins(scene, stack), beside(scene, stack)
    known = {name: one for name, one in found.items() if not (one.given and {*one.made_of} & {*also})}
    reason = _unnumbered(stack, found, known, also)
    if len(found) == 1 and not reason:
        return {stack: next(iter(known.values()))}, ""
    return {f"{stack or 'the model'} from {name}": source for name, source in known.items()}, reason


def _unnumbered(stack: str, found: dict[str, Source], known: dict[str, Source], also: tuple[str, ...]) -> str:
    """Why some argument of the model has no number, or none has; nothing where each has one."""
    given = {name for one in known.values() if one.given for name in one.made_of}
    if not given:
        other = [f"{' and '.join(also)} in another way"] if also else []
        return f"no constant end to end: {stack} reads {', and '.join([' and '.join(found), *other])}"
    inner = [name for one in found.values() if not one.given for name in one.made_of]
    missing = " and ".join(dict.fromkeys(name for name in (*inner, *also) if name not in given))
    if not missing:
        return ""
    return (
        f"no constant end to end from {missing}: {stack} reads it in another way than as tokens that enter "
        "its blocks"
    )


def _unchained(scene: Scene, stack: str) -> str:
    """Why the blocks of a stack are no chain of maps with a layer each; nothing where they are."""
    blocks = scene.stacks[stack]
    if not all(block.single for block in blocks):
        return f"no product of blocks: those of {stack} hold the attention of several layers"
    for one, other in pairwise(blocks):
        if not scene.follows(one.path, other.path):
            return f"no product of blocks: {other.path} does not read what {one.path} returns, as it is"
    return ""


def _curve(scene: Scene, stack: str, whole: float) -> tuple[str, Any]:
    """The constants of blocks alone, of the first ones together, and of the norm after the last; or why they
    are missing.
    """
    point = tokens_in(scene.trace[scene.stacks[stack][0].path])
    reason = _unchained(scene, stack)
    reason = reason or too_long(
        scene, len(point), LONGEST, "no constants after every layer, and no product of them,"
    )
    if reason:
        return reason, None
    paths, end = [block.path for block in scene.stacks[stack]], scene.end(stack)
    alone = [block_constant(scene, path)[0] for path in paths]
    step = -(-len(paths) // DEPTHS)
    so_far = alone[:1] + [math.nan] * (len(paths) - 1)
    for last in range(len(paths) - 1, 0, -step):
        part = paths[: last + 1]
        own = part[-1] == end and not math.isnan(whole)
        so_far[last] = whole if own else _norm(scene, replay(scene.model, scene.trace, part), point)
    final = (
        None
        if paths[-1] == end
        else _norm(scene, replay(scene.model, scene.trace, (end,)), tokens_in(scene.trace[end]))
    )
    return "", {"blocks": alone, "so_far": so_far, "final": final, "end": whole}


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
                "derivative, in Frobenius norm. Blocks that read a second input have a number for each "
                "argument of the model.",
                MEASURED,
                STACK,
                True,
                "median",
            ),
            Column(
                "inner_constant",
                "network, from within",
                "The same for tokens that the blocks read and that the model was not given: learned ones, or "
                "what another stack returns.",
                MEASURED,
                STACK,
                None,
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
