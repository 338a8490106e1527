"""What may be the field of a flow, and what may flow: the arguments, checked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard import _check
from regard.attention import Attention
from regard.errors import ArgumentError
from regard.maps import Map, Mapping
from regard.measure import Measure


def read_maps(map: Mapping | Sequence[Mapping]) -> tuple[Mapping, ...]:
    """One map, or several that act one after the other in time."""
    maps = tuple(map) if isinstance(map, (tuple, list)) else (map,)
    if not maps:
        raise ArgumentError("map", "is an empty sequence", "give a map, or one for each layer")
    for one in maps:
        if not isinstance(one, (Map, Attention)):
            remedy = "give an Attention or a map of regard.maps"
            if isinstance(one, torch.nn.Module):
                remedy = "give regard.declare(module), or module.declare() where it has one"
            raise ArgumentError("map", f"is a {type(one).__name__}", remedy)
    return maps


def read_source(x: Measure | Tensor) -> Measure:
    """Particles with weights: a Tensor (..., n, d), or a Measure."""
    if not isinstance(x, (Measure, Tensor)):
        raise ArgumentError("x", f"is a {type(x).__name__}", "give a Tensor (..., n, d) or a Measure")
    points = x.points if isinstance(x, Measure) else _check.floating("x", x)
    if points.ndim < 2:
        raise ArgumentError("x", f"has shape {list(points.shape)}", "give (..., n, d): one row per particle")
    if not points.shape[-2] or not points.shape[-1]:
        found = f"has shape {list(points.shape)}"
        raise ArgumentError("x", found, "give at least one particle with at least one coordinate")
    _check.finite("x", points)
    if isinstance(x, Tensor):
        return Measure(points)
    return Measure(points.expand(*x.batch_shape, -1, -1), x.log_weights, x.marks)
