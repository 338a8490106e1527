"""Local constants: how much each part of a layer amplifies a small change of its own input,
at that input.
"""

from __future__ import annotations

import math
import zlib
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Generator, Tensor

from regard.audits.adapters.base import NotCovered
from regard.audits.capture import Function, branch, output_tensor, replay, tokens_in
from regard.audits.checks.base import (
    HEAD,
    LAYER,
    MEASURED,
    Check,
    Column,
    Measurable,
    Result,
    Scene,
    as_list,
    register,
)
from regard.audits.moving import Moving
from regard.audits.watching import ObservedSite
from regard.derive import linearize
from regard.derive.jacobian import Jacobian

TOLERANCE = 5e-3
"""The residual |Jᵀu - σv|/σ at which a largest singular value is taken."""
SMALL = 2048
"""Up to how many inputs there are two starts: in few dimensions a small residual may be that of the second
singular value.
"""
SUSPECT = 20.0
"""From which constant on an MLP is measured token by token."""
AFTER = ("head_branch_constant", "attention_branch_constant")
"""Columns with what stands before attention."""
NO_NORM = "no constants of heads after their norm: something else stands between the norm and attention"
Found = tuple[float, float]
"""A constant and its residual."""


def constants(scene: Scene, site: Measurable) -> Result:
    """The largest singular value of the derivative of each head, of the layer,
    of both branches with their norms, and of the block.
    """
    heads, after, found, missing = _parts(scene, site)
    tokens = _mlp(scene, site)
    if tokens:
        found["mlp_branch_constant"] = tokens[0]
    if site.path not in scene.alone and site.block is not None:
        found["block_constant"] = block_constant(scene, site.block.path)
    worst = max(residual for _, residual in (*heads, *after, *found.values()))
    numbers: dict[str, Any] = {name: value for name, (value, _) in found.items()}
    numbers |= {"head_constant": _values(heads), "head_branch_constant": _values(after), "residual": worst}
    if not _placed(scene, site):
        numbers = {name: value for name, value in numbers.items() if name not in AFTER}
    return Result(numbers, _by_token(scene, site, tokens), joined_reasons(missing, _outside(scene, site)))


def _placed(scene: Scene, site: Measurable) -> bool:
    """Whether it is known what stands between the residual stream and a layer."""
    if isinstance(site, ObservedSite) and site.reads.inside and site.reads.norm is not None:
        return True  # the norm is in the module of the attention
    branch = () if site.block is None or site.path in scene.alone else site.block.attention
    return bool(branch) or site.path in scene.direct


def joined_reasons(*reasons: str) -> str:
    """Several reasons as one."""
    return "; ".join(reason for reason in reasons if reason)


def _outside(scene: Scene, site: Measurable) -> str:
    """Why there is no constant of the block around a layer, or of its MLP; nothing where there are both."""
    if site.path in scene.alone:
        before = "" if _placed(scene, site) else "with what stands before it, "
        return f"no constants {before}of its block and its MLP: {scene.alone[site.path]}"
    if not _placed(scene, site):
        return "no constants with what stands before it: that is more than modules of its block"
    if site.block is None or not site.block.mlp:
        return "no constant of the MLP: no one branch of its block was found to be it"
    return ""


def _parts(scene: Scene, site: Measurable) -> tuple[list[Found], list[Found], dict[str, Found], str]:
    """Of heads alone, of heads with the norm before them, of all together, and what is missing."""
    if isinstance(site, ObservedSite):
        heads, after = _observed_heads(scene, site)
        found, missing = _observed_layer(scene, site)
        return heads, after, found, missing or ("" if after else NO_NORM)
    moving = Moving(scene, site)
    return *_heads(moving), _attention(moving), ""


def _observed_heads(scene: Scene, site: ObservedSite) -> tuple[list[Found], list[Found]]:
    """By automatic differentiation of the module, head by head; with the norm nothing where it is unknown."""
    alone = [site.head_jacobian(head) for head in range(site.heads)]
    after = [site.after_norm(head, jacobian) for head, jacobian in enumerate(alone)]
    heads = [largest(jacobian, scene.generator(site.layer)) for jacobian in alone]
    if not any(jacobian is not None for jacobian in after):
        return heads, [] if site.norm_missing else heads
    return heads, [largest(one, scene.generator(site.layer)) for one in after if one is not None]


def _observed_layer(scene: Scene, site: ObservedSite) -> tuple[dict[str, Found], str]:
    """The same for all heads together; its output projection may not be known."""
    try:
        found = {
            name: largest(jacobian, scene.generator(site.layer))
            for name, jacobian in site.jacobians().items()
        }
    except NotCovered as reason:
        return {}, f"no constant of the layer: {reason}"
    try:
        jacobian = site.branch_jacobian()
    except NotCovered as reason:
        return found, str(reason)
    own = found["layer_constant"] if jacobian is None else largest(jacobian, scene.generator(site.layer))
    return {**found, "attention_branch_constant": own}, ""


def branches(scene: Scene, site: Measurable) -> Result:
    """What a quick look takes: attention with its norm and the MLP, without heads and the block."""
    tokens = _mlp(scene, site)
    attention, missing = _quick_attention(scene, site)
    attention = attention if _placed(scene, site) else {k: v for k, v in attention.items() if k not in AFTER}
    found = attention | ({"mlp_branch_constant": tokens[0]} if tokens else {})
    numbers = {name: value for name, (value, _) in found.items()}
    worst = max((residual for _, residual in found.values()), default=math.nan)
    reason = joined_reasons(missing, _outside(scene, site))
    return Result({**numbers, "residual": worst}, _by_token(scene, site, tokens), reason)


def _quick_attention(scene: Scene, site: Measurable) -> tuple[dict[str, Found], str]:
    if isinstance(site, ObservedSite):
        return _observed_layer(scene, site)
    moving = Moving(scene, site)
    own = _branch(moving) if site.context is None else None
    return {"attention_branch_constant": own} if own is not None else _attention(moving), ""


def _values(found: list[Found]) -> list[float]:
    return [value for value, _ in found]


def block_constant(scene: Scene, path: str) -> Found:
    """The constant and the residual of a block, computed once for an input."""
    known = _blocks.setdefault(scene, {})
    if path not in known:
        jacobian = linearize(replay(scene.model, scene.trace, (path,)), tokens_in(scene.trace[path]))
        known[path] = largest(
            jacobian, scene.generator(zlib.crc32(path.encode()))
        )  # whoever asks first, the same start
    return known[path]


_blocks: WeakKeyDictionary[Scene, dict[str, Found]] = WeakKeyDictionary()


def _heads(moving: Moving) -> tuple[list[Found], list[Found]]:
    """Of each head: alone, and with the norm before it."""
    layer, jacobian = moving.site.layer, moving.heads()
    alone = largest_of_each(jacobian, moving.scene.generator(layer))
    if not moving.before:
        return alone, alone
    return alone, largest_of_each(moving.heads_after_norm(jacobian), moving.scene.generator(layer))


def _attention(moving: Moving) -> dict[str, Found]:
    """Of all heads together: alone, with the norm before them, and for cross-attention by what moves."""
    scene, site = moving.scene, moving.site

    def norm(jacobian: Jacobian) -> Found:
        return largest(jacobian, scene.generator(site.layer))

    if site.context is None:
        alone = norm(site.jacobian())
        return {"layer_constant": alone, "attention_branch_constant": _branch(moving) or alone}
    both = norm(moving.both())
    return {
        "queries_constant": norm(site.jacobian()),
        "context_constant": norm(moving.by_context()),
        "layer_constant": both,
        "attention_branch_constant": norm(moving.both(normalized=True)) if moving.before else both,
    }


def _branch(moving: Moving) -> Found | None:
    """The attention branch of the block as the model runs it; None where that is the layer itself."""
    scene, block = moving.scene, moving.site.block
    if block is None or not block.attention or block.attention[0] == moving.site.path:
        return None
    if not all(path in scene.trace for path in block.attention):
        return None
    run = branch(scene.model, scene.trace, block, block.attention)
    point = tokens_in(scene.trace[block.attention[0]])
    return largest(linearize(run, point), scene.generator(moving.site.layer))


def _mlp(scene: Scene, site: Measurable) -> list[Found]:
    """Of the feed-forward branch; and of it at each token, where it is large and no token meets another."""
    paths = () if site.block is None else site.block.mlp
    if site.block is None or not paths or site.path in scene.alone:
        return []
    run = branch(scene.model, scene.trace, site.block, paths)
    point = tokens_in(scene.trace[paths[0]])
    start = zlib.crc32(paths[0].encode())  # whichever attention of the block is measured
    whole = largest(linearize(run, point), scene.generator(start))
    if whole[0] < SUSPECT or not is_tokenwise(run, point):
        return [whole]

    def one_by_one(x: Tensor) -> Tensor:
        return run(x.squeeze(-2)).unsqueeze(-2)

    alone = linearize(one_by_one, point.unsqueeze(-2), batch=1)
    return [whole, *largest_of_each(alone, scene.generator(start))]


def is_tokenwise(run: Function, point: Tensor) -> bool:
    """Whether no token of the output moves with another of the input, seen in two rows of the derivative."""
    if len(point) < 2:
        return True
    leaf = point.detach().clone().requires_grad_()
    with torch.enable_grad():
        value = run(leaf)
    for own in (0, len(point) - 1):
        (moved,) = torch.autograd.grad(value[own].sum(), leaf, retain_graph=True)
        moved[own] = 0
        if value.shape[:-1] != point.shape[:-1] or bool(moved.any()):
            return False
    return True


def _by_token(scene: Scene, site: Measurable, tokens: list[Found]) -> Any:
    """What the MLP does to each token, and how long tokens are when they leave the block."""
    block = None if site.block is None else scene.trace.get(site.block.path)
    if block is None or len(tokens) < 2:
        return None
    leaving = output_tensor(block.output).detach().double().norm(dim=-1)
    return {"mlp": _values(tokens[1:]), "leaving": as_list(leaving)}


def largest(jacobian: Jacobian, generator: Generator) -> Found:
    """The largest singular value and its residual."""
    return largest_of_each(jacobian, generator)[0]


def largest_of_each(jacobian: Jacobian, generator: Generator) -> list[Found]:
    """The same for each element of a batch."""
    starts = 2 if jacobian.size_in <= SMALL else 1
    drawn = [_pairs(jacobian.norm(tolerance=TOLERANCE, generator=generator)) for _ in range(starts)]
    return [max(several) for several in zip(*drawn, strict=True)]


def _pairs(found: Any) -> list[Found]:
    residuals = [residual if math.isfinite(residual) else math.inf for residual in as_list(found.residual)]
    return list(zip(as_list(found.value), residuals, strict=True))


_HOW = (
    " The largest singular value of the derivative, in Frobenius norm, found from below, to the "
    "residual of this layer."
)

register(
    Check(
        "constants",
        "How much does each part amplify a small change of its input?",
        (
            Column(
                "head_constant",
                "head alone",
                "How much a head (rows times values, before the output projection) amplifies a small "
                "change of all that it reads." + _HOW,
                MEASURED,
                HEAD,
                True,
                "median",
            ),
            Column(
                "head_branch_constant",
                "head after its norm",
                "The same for the head with the norm layer before it, which is how it acts in the model; the "
                "head alone where nothing stands before it." + _HOW,
                MEASURED,
                HEAD,
                True,
                "median",
            ),
            Column(
                "layer_constant",
                "attention alone",
                "The same for all heads together, mixed by the output projection. Cross-attention: its "
                "queries and its context move together." + _HOW,
                MEASURED,
                LAYER,
                True,
                "median",
            ),
            Column(
                "attention_branch_constant",
                "attention after its norm",
                "The same for the attention branch of the block with the norm layer before it, without the "
                "residual connection: how attention acts in the model. Attention alone where nothing stands "
                "before it." + _HOW,
                MEASURED,
                LAYER,
                True,
                "median",
            ),
            Column(
                "queries_constant",
                "cross-attention, its queries move",
                "The same for cross-attention where its queries move and its context is held." + _HOW,
                MEASURED,
                LAYER,
                True,
                "median",
            ),
            Column(
                "context_constant",
                "cross-attention, its context moves",
                "The same for cross-attention where its context moves and its queries are held." + _HOW,
                MEASURED,
                LAYER,
                True,
                "median",
            ),
            Column(
                "mlp_branch_constant",
                "MLP after its norm",
                "The same for the feed-forward branch of the block with its norm. Where each token passes "
                "through it alone, this is the one that is amplified most." + _HOW,
                MEASURED,
                LAYER,
                True,
                "median",
                "attention_branch_constant",
            ),
            Column(
                "block_constant",
                "block",
                "The same for the whole block, residual connections and norm layers included, by the "
                "sequence that passes through it; an encoder's output that it also reads is held." + _HOW,
                MEASURED,
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
                MEASURED,
                LAYER,
                None,
            ),
        ),
        of_site=constants,
        quick_site=branches,
        order=30,
    )
)
