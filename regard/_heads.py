"""Heads stand in dimension -3 of features and values;
fewer heads of keys than of queries are grouped queries.
"""

from __future__ import annotations

import torch.utils._pytree as pytree
from torch import Tensor

from regard._object import tensors_in
from regard._types import Features
from regard.errors import ArgumentError


def head_count(features: Features) -> int:
    """The largest size of dimension -3, one where there is none."""
    return max([1, *(t.shape[-3] for t in tensors_in(features) if t.ndim >= 3)])


def project_points(points: Tensor, weight: Tensor) -> Tensor:
    """points @ weight.

    Tokens (..., 1, n, d) of a batch that all heads (h, d, e) share are one matrix, and so are the heads.
    """
    if weight.ndim != 3 or points.ndim < 4 or points.shape[-3] != 1:
        return points @ weight
    wide = points.squeeze(-3) @ weight.transpose(0, 1).flatten(1)
    return wide.unflatten(-1, (weight.shape[0], weight.shape[-1])).transpose(-2, -3)


def mix_heads(values: Tensor, w_o: Tensor) -> Tensor:
    """Σ_h values_h w_o[h] for values (..., h, n, e): the heads side by side are one matrix."""
    if values.ndim < 3 or values.shape[-3] != len(w_o):
        return (values @ w_o).sum(-3)
    return values.transpose(-2, -3).flatten(-2) @ w_o.flatten(0, 1)


def repeat_groups(name: str, tensor: Tensor, heads: int, dim: int = -3) -> Tensor:
    """A tensor of g groups, each shared by heads/g consecutive heads of the queries."""
    if tensor.ndim < -dim or tensor.shape[dim] in (1, heads) or heads == 1:
        return tensor
    groups = tensor.shape[dim]
    if heads % groups:
        raise ArgumentError(
            name,
            f"have {groups} heads and the queries {heads}",
            "the heads of the keys must divide those of the queries",
        )
    return tensor.repeat_interleave(heads // groups, dim)


def match_key_heads(queries: Features, keys: Features, least: int = 1) -> Features:
    """The keys' features, matched to the heads of the queries."""
    heads = max(head_count(queries), least)
    if isinstance(keys, Tensor):
        return repeat_groups("keys", keys, heads)
    return pytree.tree_map(lambda t: repeat_groups("keys", t, heads) if isinstance(t, Tensor) else t, keys)
