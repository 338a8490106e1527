"""Exact local constants: how much each part of a layer amplifies a small change of its own input,
at that input.
"""

from __future__ import annotations

import math
import zlib
from typing import Any
from weakref import WeakKeyDictionary

from torch import Generator, Tensor

from regard.audits.adapters.base import NotCovered
from regard.audits.capture import branch, replay, tokens_in
from regard.audits.checks.base import (
    EXACT,
    HEAD,
    LAYER,
    Check,
    Column,
    Measurable,
    Result,
    Scene,
    as_list,
    register,
)
from regard.audits.watching import ObservedSite
from regard.derive import linearize
from regard.derive.jacobian import Jacobian

TOLERANCE = 5e-3
"""The residual |Jᵀu - σv|/σ at which a largest singular value is taken."""
SMALL = 2048
"""Up to how many inputs there are two starts: in few dimensions a small residual may be that of the second
singular value.
"""


def constants(scene: Scene, site: Measurable) -> Result:
    """The largest singular value of the derivative of each head, of the layer,
    of both branches with their norms, and of the block.
    """
    found, missing = _layer(scene, site)
    if site.block is not None:
        for name, paths in (("attention_branch", site.block.attention), ("mlp_branch", site.block.mlp)):
            if (
                paths and paths[0] == site.path and site.context is None and found
            ):  # nothing stands before attention: it is the layer itself
                found[f"{name}_constant"] = found["layer_constant"]
            elif paths and all(path in scene.trace for path in paths):
                point = tokens_in(scene.trace[paths[0]])
                jacobian = linearize(branch(scene.model, scene.trace, site.block, paths), point)
                found[f"{name}_constant"] = largest(jacobian, scene.generator(site.layer))
        if site.block.path in scene.trace:
            found["block_constant"] = block_constant(scene, site.block.path)
    heads = _heads(scene, site)
    worst = max(residual for _, residual in (*heads, *found.values()))
    numbers: dict[str, Any] = {name: value for name, (value, _) in found.items()}
    return Result(
        {**numbers, "head_constant": [value for value, _ in heads], "residual": worst}, reason=missing
    )


def _layer(scene: Scene, site: Measurable) -> tuple[dict[str, tuple[float, float]], str]:
    """The constant of the layer, or why there is none: what was only observed may have no known output
    projection.
    """
    try:
        return {"layer_constant": largest(site.jacobian(), scene.generator(site.layer))}, ""
    except NotCovered as reason:
        return {}, f"no constant of the layer: {reason}"


def block_constant(scene: Scene, path: str) -> tuple[float, float]:
    """The constant and the residual of a block, computed once for an input."""
    known = _blocks.setdefault(scene, {})
    if path not in known:
        jacobian = linearize(replay(scene.model, scene.trace, (path,)), tokens_in(scene.trace[path]))
        known[path] = largest(
            jacobian, scene.generator(zlib.crc32(path.encode()))
        )  # whoever asks first, the same start
    return known[path]


_blocks: WeakKeyDictionary[Scene, dict[str, tuple[float, float]]] = WeakKeyDictionary()


def _heads(scene: Scene, site: Measurable) -> list[tuple[float, float]]:
    """The constant and the residual of each head: all at once,
    or one by one where several share their values.
    """
    if isinstance(site, ObservedSite):
        alone = (site.head_jacobian(head) for head in range(site.heads))
        return [largest(jacobian, scene.generator(site.layer)) for jacobian in alone]
    if site.grouped or site.points.numel() <= SMALL:
        jacobians = [linearize(head, site.source, site.context) for head in site.singles]
        return [largest(jacobian, scene.generator(site.layer)) for jacobian in jacobians]
    points = site.points.expand(site.heads, -1, -1)
    source = points if isinstance(site.source, Tensor) else site.source.replace(points=points)
    found = linearize(site.attention, source, site.context).norm(
        tolerance=TOLERANCE, generator=scene.generator(site.layer)
    )
    return list(zip(as_list(found.value), as_list(found.residual), strict=True))  # type: ignore[union-attr]


def largest(jacobian: Jacobian, generator: Generator) -> tuple[float, float]:
    """The largest singular value and its residual."""
    starts = 2 if jacobian.size_in <= SMALL else 1
    return max(_value(jacobian.norm(tolerance=TOLERANCE, generator=generator)) for _ in range(starts))


def _value(found: Any) -> tuple[float, float]:
    residual = float(found.residual)
    return float(found), residual if math.isfinite(residual) else math.inf


_HOW = (
    " The largest singular value of the exact derivative, in Frobenius norm, found from below, to the "
    "residual of this layer."
)

register(
    Check(
        "constants",
        "How much does each part amplify a small change of its input?",
        (
            Column(
                "head_constant",
                "local constant of the head",
                "How much a head (rows times values, before the output projection) amplifies a small "
                "change of its input." + _HOW,
                EXACT,
                HEAD,
                True,
                "median",
            ),
            Column(
                "layer_constant",
                "local constant of attention",
                "The same for all heads together, mixed by the output projection." + _HOW,
                EXACT,
                LAYER,
                True,
                "median",
            ),
            Column(
                "attention_branch_constant",
                "attention after its norm",
                "The same for the attention branch of the block with the norm layer before it, without the "
                "residual connection." + _HOW,
                EXACT,
                LAYER,
                True,
                "median",
            ),
            Column(
                "mlp_branch_constant",
                "MLP after its norm",
                "The same for the feed-forward branch of the block. A large one where attention is tame is "
                "how massive activations show." + _HOW,
                EXACT,
                LAYER,
                True,
                "median",
            ),
            Column(
                "block_constant",
                "block",
                "The same for the whole block, residual connections and norm layers included." + _HOW,
                EXACT,
                LAYER,
                True,
                "median",
            ),
            Column(
                "residual",
                "residual",
                "Largest residual |Jᵀu - σv|/σ of the constants of this layer. Small: each is a singular "
                "value to about its square, "
                "and all but surely the largest.",
                EXACT,
                LAYER,
                None,
            ),
        ),
        of_site=constants,
        order=30,
    )
)
