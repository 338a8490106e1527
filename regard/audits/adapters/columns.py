"""Columns of linear layers: which of them, head by head, give tensors that were seen, as they are or turned
by positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.audits.adapters.turnings import Way

Layer = tuple[str, Tensor, Tensor | None]
"""The name of a linear layer, its matrix (d, width) and its bias (width,), in float64."""
CLOSE = 1e-4
"""How far what columns give may be from what was seen, relative."""


@dataclass(frozen=True)
class Columns:
    """weight (g, d, e) and bias (g, e): a projection with its heads."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Turned:
    """A projection, the factor on it, and how positions turn what it gives; frequencies None: not at all."""

    columns: Columns
    factor: float
    frequencies: Tensor | None
    interleaved: bool


def linear_layers(module: nn.Module) -> list[Layer]:
    """Every linear layer inside a module whose matrix can be read."""
    found: list[Layer] = []
    for name, child in module.named_modules():
        own: Any = child
        transposed = type(child).__name__ == "Conv1D"
        if (isinstance(child, nn.Linear) or transposed) and own.weight.dtype.is_floating_point:
            weight = own.weight.detach().double().cpu()
            bias = None if own.bias is None else own.bias.detach().double().cpu()
            found.append((name, weight if transposed else weight.mT, bias))
    fused: Any = module
    if isinstance(module, nn.MultiheadAttention) and fused.in_proj_weight is not None:
        bias = fused.in_proj_bias
        found.append(
            (
                "in_proj",
                fused.in_proj_weight.detach().double().mT,
                None if bias is None else bias.detach().double(),
            )
        )
    return found


def find_columns(layers: Sequence[Layer], source: Tensor, wanted: Tensor) -> Columns | None:
    """The columns that give wanted (h, n, e) from source (n, d); heads that are equal share theirs."""
    for columns, given in _candidates(layers, source, wanted):
        if given.shape == _distinct(wanted).shape and _equal(given, _distinct(wanted)):
            return columns
    return None


def find_turned(
    layers: Sequence[Layer], source: Tensor, wanted: Tensor, ways: Sequence[Way]
) -> Turned | None:
    """The same up to a factor, and turned by positions in one of these ways."""
    target = _distinct(wanted)
    for columns, given in _candidates(layers, source, wanted):
        for way in ways:
            turned = way.turn(given)
            size = float(turned.square().sum())
            factor = float((turned * target).sum()) / size if size > 0 else 0.0
            if factor and _equal(factor * turned, target):
                factor = 1.0 if abs(factor - 1) < CLOSE / 10 else factor
                return Turned(columns, factor, way.frequencies, way.interleaved)
    return None


def _candidates(layers: Sequence[Layer], source: Tensor, wanted: Tensor) -> Iterator[tuple[Columns, Tensor]]:
    """Projections that may give a tensor, with what they give, (g, n, e)."""
    target = _distinct(wanted)
    groups, tokens, width = target.shape
    if len(source) != tokens:
        return
    for _, weight, bias in layers:
        if len(weight) != source.shape[-1] or weight.shape[-1] < groups * width:
            continue
        given = source @ weight if bias is None else source @ weight + bias
        for starts in _layouts(weight.shape[-1], len(wanted), groups, width):
            places = starts.unsqueeze(-1) + torch.arange(width)
            columns = Columns(weight[:, places].movedim(0, 1), None if bias is None else bias[places])
            yield columns, given[:, places].transpose(0, 1)


def _layouts(total: int, heads: int, groups: int, width: int) -> Iterator[Tensor]:
    """Where the columns of each head may begin: one after the other from some place on, or with those of
    queries, keys and values side by side for each head or each group.
    """
    order = torch.arange(groups)
    for start in range(0, total - groups * width + 1, width):
        yield start + order * width
    slots = total // (groups * width)
    if slots > 1 and total == slots * groups * width:
        for slot in range(slots):
            yield (order * slots + slot) * width
    for members in range(2, groups + 1):  # queries of a group, then its key and its value
        if groups % members == 0 and total == (groups // members) * (members + 2) * width:
            yield ((order // members) * (members + 2) + order % members) * width


def _distinct(wanted: Tensor) -> Tensor:
    """Heads without those that only repeat the one before, as grouped keys and values do."""
    heads = len(wanted)
    for members in sorted((m for m in range(2, heads + 1) if heads % m == 0), reverse=True):
        grouped = wanted.unflatten(0, (-1, members))
        if bool((grouped == grouped[:, :1]).all()):
            return grouped[:, 0]
    return wanted


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and float((first - second).norm()) <= CLOSE * float(second.norm())
