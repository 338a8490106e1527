"""How spread out the attention of a head is."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.audit.checks.base import Check, register
from regard.audit.site import Site
from regard.normalizers import Reference


def entropy(site: Site) -> Tensor:
    """Mean over queries of -Σ_j P_ij log P_ij, for each head."""
    marks = torch.arange(site.points.shape[-2])
    rows = site.attention.normalizer.weights(site.scores(), Reference(allowed=site.attention.support.allows(marks, marks)))
    return torch.special.entr(rows).sum(-1).mean((0, -1))


register(
    Check(
        name="entropy",
        title="entropy of the attention rows (nats)",
        meaning="Mean over queries and inputs of the entropy of the attention law. "
        "Zero: each query looks at one key; log n: it looks at all alike.",
        measure=entropy,
        combine=lambda values: values.mean(0),
        high_is_alarming=False,
    )
)
