"""Atoms of many heads at once, as tensors: what `compress` does for given queries, in the arithmetic of the
tensors and without a proof.

Keys (h, n, c), values (h, n, e) and queries (h, m, c) of heads that are compressed alike; scores are inner
products, so that a scale is in the queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SINKS, NEWEST = 4, 32
"""The first keys, and at most so many of the last, stand for themselves."""
ROUNDS, STEPS = 4, 3
"""How often clusters, and the tilts of their atoms, are found again."""
RIDGE = 5e-3
"""How strongly fitted values are held to the means, relative to the mean square of a weight."""
BALANCED, MOST = 4, 3.0
"""How often masses of atoms are corrected, and by how many nats at most."""


@dataclass(frozen=True)
class HeadAtoms:
    """keys (h, k, c), values (h, k, e) and biases (h, k), which are added to the scores of the atoms."""

    keys: Tensor
    values: Tensor
    bias: Tensor

    def outputs(self, queries: Tensor) -> Tensor:
        """(h, m, e)."""
        return self.rows(queries) @ self.values

    def rows(self, queries: Tensor) -> Tensor:
        """The law on the atoms, (h, m, k)."""
        return (queries @ self.keys.mT + self.bias.unsqueeze(-2)).softmax(-1)


def merge_heads(keys: Tensor, values: Tensor, queries: Tensor, size: int) -> HeadAtoms:
    """Exactly `size` atoms for each head: clusters of what the queries tell apart, tilted by the queries that
    look at them; masses and values are those that fit the queries' rows.
    """
    if size >= keys.shape[-2]:
        return HeadAtoms(keys, values, keys.new_zeros(keys.shape[:-1]))
    rows = (queries @ keys.mT).softmax(-1)
    seen = rows.mean(-2)
    labels = _clustered(_features(keys, values, queries, seen), seen + 1e-3 / keys.shape[-2], size)
    logs = _shares((seen + 1e-12).log(), labels, size)
    for _ in range(STEPS):
        law = _atoms(keys, values, logs, labels, size).rows(queries)
        anchors = law.mT @ queries / law.sum(-2).clamp_min(1e-20).unsqueeze(-1)
        logs = _shares((keys * _spread(anchors, labels)).sum(-1), labels, size)
    atoms = _atoms(keys, values, logs, labels, size)
    return _fitted(atoms, labels, (rows, seen), (queries, values))


def protected(count: int, size: int) -> Tensor:
    """Keys that stand for themselves: the first and the last."""
    newest = min(NEWEST, size // 4)
    return torch.cat([torch.arange(min(SINKS, size // 4)), torch.arange(count - newest, count)])


def _features(keys: Tensor, values: Tensor, queries: Tensor, seen: Tensor) -> Tensor:
    """Keys in the metric of the queries beside values over their spread."""
    away = queries - queries.mean(-2, keepdim=True)
    squares, directions = torch.linalg.eigh(away.mT @ away / queries.shape[-2])
    root = directions * squares.clamp_min(0).sqrt().unsqueeze(-2)
    mean = seen.unsqueeze(-2) @ values
    spread = (seen * (values - mean).square().sum(-1)).sum(-1)
    return torch.cat([keys @ root, values / (2 * spread).sqrt().clamp_min(1e-20)[:, None, None]], -1)


def _clustered(features: Tensor, weights: Tensor, size: int) -> Tensor:
    """Labels (h, n): protected keys are alone, the others in clusters that are never empty."""
    alone = protected(features.shape[-2], size)
    rest = torch.ones(features.shape[-2], dtype=torch.bool)
    rest[alone] = False
    points, mass = features[:, rest], weights[:, rest]
    seeds = _far_apart(points, mass, size - len(alone))
    centers = points.gather(1, seeds.unsqueeze(-1).expand(-1, -1, points.shape[-1]))
    for _ in range(ROUNDS):
        labels = _nearest(points, centers)
        totals = _sums(mass.unsqueeze(-1), labels, centers.shape[1])
        means = _sums(mass.unsqueeze(-1) * points, labels, centers.shape[1]) / totals.clamp_min(1e-30)
        centers = torch.where(totals > 0, means, centers)
    labels = _nearest(points, centers).scatter(1, seeds, torch.arange(seeds.shape[1]).expand_as(seeds))
    found = features.new_empty(features.shape[:-1], dtype=torch.long)
    found[:, alone] = torch.arange(len(alone))
    found[:, rest] = len(alone) + labels
    return found


def _far_apart(points: Tensor, weights: Tensor, size: int) -> Tensor:
    """Greedily the point with the largest weight times squared distance from those chosen, (h, size)."""
    squares, columns = points.square().sum(-1), points.mT.contiguous()
    chosen = [weights.argmax(-1)]
    nearest = torch.full_like(squares, torch.inf)
    heads = torch.arange(len(points))
    for _ in range(size - 1):
        last = points[heads, chosen[-1]].unsqueeze(-2)
        away = squares - 2 * (last @ columns).squeeze(-2) + squares[heads, chosen[-1]].unsqueeze(-1)
        nearest = torch.minimum(nearest, away.clamp_min(0))
        nearest[heads, chosen[-1]] = -1.0  # never chosen twice
        chosen.append((weights * nearest).argmax(-1))
    return torch.stack(chosen, -1)


def _nearest(points: Tensor, centers: Tensor) -> Tensor:
    return (centers.square().sum(-1).unsqueeze(-2) - 2 * points @ centers.mT).argmin(-1)


def _sums(values: Tensor, labels: Tensor, count: int) -> Tensor:
    """Sums (h, k, ·) over groups."""
    found = values.new_zeros(values.shape[0], count, values.shape[-1])
    return found.scatter_add_(1, labels.unsqueeze(-1).expand_as(values), values)


def _spread(values: Tensor, labels: Tensor) -> Tensor:
    """What each key's group has, (h, n, ·)."""
    return values.gather(1, labels.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def _shares(scores: Tensor, labels: Tensor, size: int) -> Tensor:
    """Logarithms of the law in each group that is proportional to exp(score)."""
    top = scores.new_full((len(scores), size), -torch.inf).scatter_reduce(1, labels, scores, "amax")
    above = scores - top.gather(1, labels)
    totals = scores.new_zeros(len(scores), size).scatter_add_(1, labels, above.exp())
    return above - totals.log().gather(1, labels)


def _atoms(keys: Tensor, values: Tensor, logs: Tensor, labels: Tensor, size: int) -> HeadAtoms:
    """Means of the laws, with their entropies as log-weights."""
    law = logs.exp().unsqueeze(-1)
    entropy = _sums(-law * logs.unsqueeze(-1).clamp_min(-1e4), labels, size)
    return HeadAtoms(_sums(law * keys, labels, size), _sums(law * values, labels, size), entropy.squeeze(-1))


def _fitted(
    atoms: HeadAtoms, labels: Tensor, looked: tuple[Tensor, Tensor], asked: tuple[Tensor, Tensor]
) -> HeadAtoms:
    """Biases so that each atom has the mean mass of its group, values by least squares near the means."""
    (rows, seen), (queries, values) = looked, asked
    size = atoms.bias.shape[-1]
    mass = _sums(seen.unsqueeze(-1), labels, size).squeeze(-1).clamp_min(1e-20)
    bias = atoms.bias
    for _ in range(BALANCED):
        found = HeadAtoms(atoms.keys, atoms.values, bias).rows(queries).mean(-2).clamp_min(1e-20)
        bias = bias + (mass / found).log().clamp(-MOST, MOST)
    share = _shares((seen + 1e-20).log(), labels, size).exp().unsqueeze(-1)
    means = _sums(share * values, labels, size)
    law = HeadAtoms(atoms.keys, means, bias).rows(queries)
    gram = law.mT @ law
    ridge = RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    held = gram + ridge[:, None, None] * torch.eye(size, dtype=gram.dtype)
    moved = torch.linalg.solve(held, law.mT @ (rows @ values - law @ means))
    return HeadAtoms(atoms.keys, means + moved, bias)
