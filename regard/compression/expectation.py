"""Groups that follow given queries: clusters of what these queries tell apart, and the tilt of each group by
the mean query that looks at it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.compression.partitions import cluster
from regard.measure import Measure
from regard.proofs.cells import Cells
from regard.proofs.key_form import KeyForm
from regard.proofs.subject import Head

STEPS = 3
"""How often tilts are chosen again; the mean divergence falls with each."""
ROOM = 8_000_000
"""Numbers that one block of rows may take."""


def clustered(head: Head, form: KeyForm, keys: Measure, queries: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Labels (n,) and the anchor of each group (k, d)."""
    seen = looked_at(head, keys, queries)
    values = keys.points @ head.matrix(keys.dimension) if head.factors else keys.points
    labels = cluster(features(form, keys.points, values, queries, seen), seen + 1e-3 / keys.size, size)
    return labels, tilted(head, form, keys, queries, labels)


def looked_at(head: Head, keys: Measure, queries: Tensor) -> Tensor:
    """The mean weight of each key over the queries, (n,)."""
    total = keys.points.new_zeros(keys.size)
    for block in queries.split(max(1, ROOM // keys.size)):
        total = total + head.attention.weights(block, keys).sum(0)
    return total / len(queries)


def features(form: KeyForm, keys: Tensor, values: Tensor, queries: Tensor, seen: Tensor) -> Tensor:
    """Keys in the metric of the queries, Cov^{1/2} A y, beside values over their spread."""
    away = queries - queries.mean(0)
    squares, directions = torch.linalg.eigh(away.mT @ away / len(queries))
    root = directions * squares.clamp_min(0).sqrt()
    mean = seen @ values
    spread = (seen * (values - mean).square().sum(-1)).sum()
    return torch.cat([keys @ form.a.mT @ root, values / (2 * spread).sqrt().clamp_min(1e-150)], -1)


def tilted(head: Head, form: KeyForm, keys: Measure, queries: Tensor, labels: Tensor) -> Tensor:
    """Anchors (k, d) by expectation and maximization: each group's anchor is the mean query that looks at
    it.
    """
    count = int(labels.max()) + 1
    anchors = queries.mean(0).expand(count, -1)
    for _ in range(STEPS):
        anchors = next_anchors(Cells(head, form, keys, labels, anchors), queries)
    return anchors


def next_anchors(cells: Cells, queries: Tensor) -> Tensor:
    """Σ_q P̂_c(q) q / Σ_q P̂_c(q); the mean of all queries where none looks."""
    atoms = cells.measure
    total = queries.new_zeros(cells.count)
    weighted = queries.new_zeros(cells.count, queries.shape[-1])
    for block in queries.split(max(1, ROOM // cells.count)):
        rows = cells.head.attention.weights(block, atoms)
        total, weighted = total + rows.sum(0), weighted + rows.mT @ block
    found = weighted / total.clamp_min(1e-300).unsqueeze(-1)
    return torch.where((total > 1e-200).unsqueeze(-1), found, queries.mean(0))
