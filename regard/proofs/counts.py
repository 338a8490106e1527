"""How much each row can see, for normalizers that count keys."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.attention import log_counts
from regard.domains import Domain, Near
from regard.proofs.setting import pair_bias, tokens_of
from regard.proofs.subject import Head
from regard.proofs.theorem import Refusal


def seen_counts(head: Head, domain: Domain) -> Tensor:
    """c_ij (n, n): how often key j counts for row i, zero where it is not seen."""
    tokens = tokens_of(domain)
    if tokens is None:
        raise Refusal(
            "rows of this normalizer count their keys; say how many tokens there "
            "are, e.g. Ball(radius, tokens=n)"
        )
    pair_bias(head, domain)  # rows that see nothing are refused
    measure = domain.measure if isinstance(domain, Near) else None
    marks = torch.arange(tokens) if measure is None else measure.positions()
    weights = None if measure is None else log_counts(measure)
    counts = torch.ones(tokens, dtype=torch.float64) if weights is None else weights.exp() * (1 + 1e-14)
    return head.support.allows(marks, marks).expand(tokens, tokens) * counts
