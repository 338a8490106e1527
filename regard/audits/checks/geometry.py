"""The tokens that enter a layer: how far apart they are, in how many directions,
and whether some are sinks or massive.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.audits.capture import tokens_in
from regard.audits.checks.base import (
    LAYER,
    RUN,
    Check,
    Column,
    Measurable,
    Result,
    Scene,
    as_list,
    register,
)
from regard.audits.row_blocks import row_blocks
from regard.audits.watching import ObservedSite

MASS = 0.3
"""A token that receives this share of all attention of the layer is a sink."""
MASSIVE = 5.0
"""So is one whose norm is this many times the median."""


def geometry(scene: Scene, site: Measurable) -> Result:
    """Radius, effective rank and mean cosine, with and without sinks, and token norms."""
    x = stream(scene, site)
    norms = x.norm(dim=-1)
    typical = float(norms.median())
    sinks = norms > MASSIVE * typical
    if site.context is None and len(site.points) == len(x):
        received = sum((some.laws.sum((0, 1)) for some in row_blocks(site)), x.new_zeros(()))
        if len(received) == len(x):  # keys may be fewer, as of windows of tokens
            sinks = sinks | (received > max(MASS, 3 / len(x)) * site.heads * len(x))
    rest = x[~sinks]
    numbers = {
        "radius": float((x - x.mean(0)).norm(dim=-1).max()),
        "effective_rank": effective_rank(x),
        "effective_rank_without_sinks": effective_rank(rest),
        "mean_cosine": mean_cosine(x),
        "mean_cosine_without_sinks": mean_cosine(rest),
        "largest_token": float(norms.max()),
        "token_ratio": float(norms.max()) / typical if typical > 0 else math.nan,
    }
    return Result(numbers, {"norms": as_list(norms), "sinks": sinks.nonzero().flatten().tolist()})


def stream(scene: Scene, site: Measurable) -> Tensor:
    """The tokens that enter the block: a norm layer before attention would hide how large they are. Where a
    module computes more than this attention, those of the attention itself.
    """
    if isinstance(site, ObservedSite) and site.reads.inside:
        return site.stream
    if site.block is None or len(tokens_in(scene.trace[site.block.path])) != len(site.points):
        return site.points
    return tokens_in(scene.trace[site.block.path]).detach().to("cpu", torch.float64)


def effective_rank(x: Tensor) -> float:
    """exp of the entropy of the singular values' squares, normalized (roy2007):
    one where all tokens are parallel.
    """
    if not len(x):
        return math.nan
    squares = torch.linalg.svdvals(x).square()
    total = float(squares.sum())
    return float(torch.special.entr(squares / total).sum().exp()) if total > 0 else math.nan


def mean_cosine(x: Tensor) -> float:
    """The mean of cos(x_i, x_j) over pairs of different tokens: one where all point the same way."""
    if len(x) < 2:
        return math.nan
    units = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return (float(units.sum(0).square().sum()) - len(x)) / (len(x) * (len(x) - 1))


_SINKS = (
    f" Sinks are tokens with more than {MASS:.0%} of the layer's attention or {MASSIVE:g} times the median "
    "norm; they dominate."
)

register(
    Check(
        "geometry",
        "Do tokens collapse, and are some massive?",
        (
            Column(
                "radius",
                "radius",
                "Largest distance of a token that enters the block (the layer, where no block is known) from "
                "their mean.",
                RUN,
                LAYER,
                None,
                "median",
            ),
            Column(
                "effective_rank",
                "effective rank",
                "In how many directions the tokens spread: exp of the entropy of the squared singular "
                "values. One: all are parallel.",
                RUN,
                LAYER,
                False,
                "median",
            ),
            Column(
                "effective_rank_without_sinks",
                "effective rank without sinks",
                "The same without sink tokens." + _SINKS,
                RUN,
                LAYER,
                False,
                "median",
                "effective_rank",
            ),
            Column(
                "mean_cosine",
                "mean cosine",
                "Mean cosine between different tokens. Near one: tokens have collapsed to one direction.",
                RUN,
                LAYER,
                True,
                "median",
            ),
            Column(
                "mean_cosine_without_sinks",
                "mean cosine without sinks",
                "The same without sink tokens." + _SINKS,
                RUN,
                LAYER,
                True,
                "median",
                "mean_cosine",
            ),
            Column(
                "largest_token",
                "largest token norm",
                "Norm of the largest token that enters the block (the layer, where no block is known).",
                RUN,
                LAYER,
                True,
            ),
            Column(
                "token_ratio",
                "largest over median token",
                "Norm of the largest token over the median norm. Far above one: a massive activation.",
                RUN,
                LAYER,
                True,
            ),
        ),
        of_site=geometry,
        quick_site=geometry,
        order=60,
    )
)
