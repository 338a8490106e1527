"""How much each row can see, for normalizers that count keys."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._enclosed import Numbers
from regard._upper import Upper, exact
from regard.attention import log_counts
from regard.domains import Domain, Near
from regard.proofs.setting import bias_error, pair_bias, tokens_of
from regard.proofs.subject import Head
from regard.proofs.theorem import Refusal


def seen_counts(head: Head, domain: Domain) -> Upper:
    """At least c_ij (n, n): how often key j counts for row i, zero where it is not seen."""
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
    counts = exact(torch.ones(tokens)) if weights is None else Numbers(weights, bias_error(weights)).exp()
    seen: Tensor = head.support.allows(marks, marks).expand(tokens, tokens)
    return counts.map(lambda value: value.double().expand(tokens, tokens)).where(seen)
