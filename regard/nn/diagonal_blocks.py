"""What each token does to itself: the blocks J_ii of causal maps, whose Jacobians are block triangular.

Products of block triangular matrices have products of blocks on their diagonal, so that blocks compose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard import maps, nonexpansive
from regard._verb import Verb
from regard.attention import Attention
from regard.errors import ArgumentError
from regard.lookups import Identity, Linear
from regard.moments import Mean
from regard.nn.declared import on_batch
from regard.normalizers import Softmax
from regard.potentials import Dot
from regard.proofs.causality import causal
from regard.supports import Causal

diagonal_blocks = Verb("diagonal_blocks")
"""diagonal_blocks.one(map, x) -> (f(x), J_ii (..., n, e, d)) for a causal map."""

TOKENWISE = (
    maps.Affine,
    maps.Pointwise,
    maps.Normalize,
    maps.Gated,
    nonexpansive.IntoBall,
    nonexpansive.Center,
    nonexpansive.GroupSort,
    nonexpansive.MemoryStep,
)
"""Maps that act on each token alone."""


def check_causal(map: Any) -> None:
    """Raise where a token may see later ones."""
    if not causal(map):
        found = f"is BlockTriangular() and tokens may see later ones in {type(map).__name__}"
        raise ArgumentError("log_determinant", found, "use support=Causal(), or Dense() or Series(probes)")


def opaque_blocks(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """J_ii of any causal function: row i of f where token i alone moves, n evaluations."""
    tokens = torch.arange(x.shape[-2], device=x.device)

    def own(one: Tensor, index: Tensor, sequence: Tensor) -> Tensor:
        moved = torch.where((tokens == index).unsqueeze(-1), one, sequence)
        return (f(moved) * (tokens == index).unsqueeze(-1)).sum(-2)

    def blocks(sequence: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.jacrev(own), (0, 0, None))(sequence, tokens, sequence)

    flat = x.flatten(0, -3) if x.ndim > 2 else x.unsqueeze(0)
    return torch.func.vmap(blocks)(flat).reshape(*x.shape[:-1], -1, x.shape[-1])


@diagonal_blocks.rule(object, Tensor)
def _any(map: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """n evaluations of the map."""
    return on_batch(map, x), opaque_blocks(map, x)


def _tokenwise(map: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    def one(token: Tensor) -> Tensor:
        return map(token.unsqueeze(0)).squeeze(0)

    blocks = torch.func.vmap(torch.func.jacrev(one))(x.reshape(-1, x.shape[-1]))
    return map(x), blocks.reshape(*x.shape[:-1], *blocks.shape[-2:])


for _kind in TOKENWISE[1:]:
    diagonal_blocks.rule(_kind, Tensor)(_tokenwise)


@diagonal_blocks.rule(maps.Affine, Tensor)
def _affine(map: maps.Affine, x: Tensor) -> tuple[Tensor, Tensor]:
    return map(x), map.w.mT.expand(*x.shape[:-1], -1, -1)


@diagonal_blocks.rule(maps.Compose, Tensor)
def _compose(map: maps.Compose, x: Tensor) -> tuple[Tensor, Tensor]:
    x, blocks = diagonal_blocks.one(map.maps[0], x)
    for inner in map.maps[1:]:
        x, after = diagonal_blocks.one(inner, x)
        blocks = after @ blocks
    return x, blocks


@diagonal_blocks.rule(maps.Added, Tensor)
def _added(map: maps.Added, x: Tensor) -> tuple[Tensor, Tensor]:
    found = [diagonal_blocks.one(inner, x) for inner in map.maps]
    return sum(value for value, _ in found[1:]) + found[0][0], sum(b for _, b in found[1:]) + found[0][1]


@diagonal_blocks.rule(maps.Residual, Tensor)
def _residual(map: maps.Residual, x: Tensor) -> tuple[Tensor, Tensor]:
    value, blocks = diagonal_blocks.one(map.map, x)
    return x + value, torch.eye(x.shape[-1]).to(x) + blocks


@diagonal_blocks.rule(Attention, Tensor)
def _attention(map: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    """One head; several are mixed by Heads."""
    if not _written_out(map) or any(t.ndim > 2 for t in _matrices(map)):
        return _any(map, x)
    value, blocks = _softmax_blocks(map, x.unsqueeze(-3))
    return value.squeeze(-3), blocks.squeeze(-4)


@diagonal_blocks.rule(maps.Heads, Tensor)
def _heads(map: maps.Heads, x: Tensor) -> tuple[Tensor, Tensor]:
    if not _written_out(map.attention):
        return _any(map, x)
    value, blocks = _softmax_blocks(map.attention, x.unsqueeze(-3))
    value = (value @ map.w_o).sum(-3)
    mixed = (map.w_o.mT.unsqueeze(-3) @ blocks).sum(-4)
    return value if map.b_o is None else value + map.b_o, mixed


def _written_out(map: Attention) -> bool:
    """Softmax rows of dot products of earlier tokens, for which there is a formula."""
    return (
        isinstance(map.potential, Dot)
        and isinstance(map.normalizer, Softmax)
        and isinstance(map.support, Causal)
        and isinstance(map.moment, Mean)
        and isinstance(map.lookup, (Identity, Linear))
        and not isinstance(map.normalizer.temperature, Tensor)
    )


def _matrices(map: Attention) -> list[Tensor]:
    potential, lookup = map.potential, map.lookup
    assert isinstance(potential, Dot)
    found = [potential.w_q, potential.w_k, lookup.w_v if isinstance(lookup, Linear) else None]
    return [matrix for matrix in found if matrix is not None]


def _softmax_blocks(map: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    """J_ii = Wᵀ(P_ii(I + y_ii v_iᵀ) + C_i Aᵀ), y_ii = x_i - m_i, for heads in dimension -3."""
    potential, lookup, normalizer = map.potential, map.lookup, map.normalizer
    assert isinstance(potential, Dot)
    assert isinstance(normalizer, Softmax)
    w_q, w_k = potential.w_q, potential.w_k
    queries, keys = (x if w is None else x @ w for w in (w_q, w_k))
    queries = queries if potential.b_q is None else queries + potential.b_q.unsqueeze(-2)
    keys = keys if potential.b_k is None else keys + potential.b_k.unsqueeze(-2)
    factor = potential.factor(keys.shape[-1]) / normalizer.temperature
    factor = factor[..., None, None] if isinstance(factor, Tensor) and factor.ndim else factor
    w_v = lookup.w_v if isinstance(lookup, Linear) else torch.eye(x.shape[-1]).to(x)
    values = x @ w_v
    if isinstance(lookup, Linear) and lookup.b_v is not None:
        values = values + lookup.b_v.unsqueeze(-2)
    later = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).triu(1)
    rows = (factor * queries @ keys.mT).masked_fill(later, -math.inf).softmax(-1)
    mean = rows @ values
    own = rows.diagonal(dim1=-2, dim2=-1)[..., None, None]
    toward = factor * (queries if w_k is None else queries @ w_k.mT)  # v_i = Aᵀx_i + β
    straight = own * (w_v.mT.unsqueeze(-3) + (values - mean).unsqueeze(-1) * toward.unsqueeze(-2))
    spread = torch.einsum("...ij,...je,...jc->...iec", rows, values, keys)
    spread = spread - mean.unsqueeze(-1) * (rows @ keys).unsqueeze(-2)
    factors = factor.unsqueeze(-1) if isinstance(factor, Tensor) and factor.ndim else factor
    return mean, straight + factors * (spread if w_q is None else spread @ w_q.mT.unsqueeze(-3))
