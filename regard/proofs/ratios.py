"""ratio_errors: what attention with rounded keys, or other scores that are off by a little, gets wrong."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import Upper, exact, sizes, stack
from regard._upper import relative_error as rounding_error
from regard.attention import Attention, log_counts
from regard.measure import Measure
from regard.proofs.approximation import Points, laws_of, one_sequence, slack_of, spreads, value_error
from regard.proofs.near.local_scores import rounding_of_logs
from regard.proofs.subject import Head, single_heads
from regard.proofs.theorem import Refusal
from regard.proofs.theorems.bounded_ratio import ratio_bound


def ratio_errors(attention: Attention, law: Tensor, x: Points, context: Points | None = None) -> Tensor:
    """For each query at least how far Σ_j law_ij v_j is from the attention's output: (m,), or (h, m) where
    `law` has heads; from the ratio of the two laws, so infinite where the law lacks a key.

    Examples:
        >>> layer, x = regard.Attention(regard.Dot()), torch.randn(4, 2, dtype=torch.float64)
        >>> law = torch.full((4, 4), 0.25, dtype=torch.float64)
        >>> bounds = regard.proofs.ratio_errors(layer, law, x)
        >>> bool(((law @ x - layer(x)).norm(dim=-1) <= bounds).all())
        True
    """
    queries = one_sequence("x", x)
    keys = queries if context is None else one_sequence("context", context)
    heads = [Head(head) for head in single_heads(attention)]
    laws = laws_of(law, len(heads), queries.size, keys.size)
    rows = stack([_head(head, one, queries, keys) for head, one in zip(heads, laws, strict=True)]).bound
    return rows if law.ndim > 2 else rows.squeeze(0)


def _head(head: Head, law: Tensor, queries: Measure, keys: Measure) -> Upper:
    if not head.softmax:
        raise Refusal(f"rows of {type(head.normalizer).__name__} are not softmax rows")
    totals = law.sum(-1, keepdim=True)
    oscillation = _oscillation(head, law, queries, keys)
    values = head.lookup.values(keys.points, keys.marks)
    radius, reach = (stack(part) for part in zip(*spreads(head, values, queries, keys), strict=True))
    spread = _spread(law / totals, values, value_error(head.lookup, values, keys))
    defect = sizes(totals.squeeze(-1) - 1) + rounding_error(4 * keys.size + 64)
    found = ratio_bound(oscillation, spread, radius) + defect * reach
    outside = ((law > 0) & ~_seen(head, queries, keys)).any(-1)  # values there are in no radius
    return found.map(lambda value: torch.where(outside, math.inf, value))


def _seen(head: Head, queries: Measure, keys: Measure) -> Tensor:
    """Keys with mass that a query may see, (m, n)."""
    found = head.support.allows(queries.positions(), keys.positions()).expand(queries.size, keys.size)
    return found if keys.log_weights is None else found & (keys.log_weights > -math.inf)


def _oscillation(head: Head, law: Tensor, queries: Measure, keys: Measure) -> Upper:
    """At least that of log ν - log μ - a on keys that a query sees, (m,); infinite where ν lacks some."""
    scores = head.potential.scores(queries.points, keys.points, queries.positions(), keys.positions())
    counts = log_counts(keys)
    scores = scores if counts is None else scores + counts
    seen, logs = _seen(head, queries, keys), law.log()
    apart = torch.where(seen, logs - scores, 0.0)
    low = torch.where(seen, apart, math.inf).amin(-1)
    high = torch.where(seen, apart, -math.inf).amax(-1)
    lost = (seen & (law <= 0)).any(-1)
    largest = apart[apart.isfinite()].abs()
    rounding = 2 * rounding_of_logs(torch.cat([logs[logs.isfinite()], largest]), 1)
    found = Upper((high - low).clamp_min(0.0), 8) + slack_of(head, queries, keys) + rounding
    return found.map(lambda value: torch.where(lost, math.inf, value))


def _spread(law: Tensor, values: Tensor, error: Upper) -> Upper:
    """At least ν|v - νv|, (m,): the mean of computed lengths, and what rounding may hide of it."""
    mean = law @ values
    found = []
    for row, center in zip(law, mean, strict=True):
        away = computed_lengths(values - center)
        found.append((sizes(row) * away).sum())
    longest = computed_lengths(values).amax()
    lost = rounding_error(4 * len(values) + 64) * longest + 2 * error + exact(0.0)
    return stack(found) * (exact(1.0) + rounding_error(2 * len(values) + 16)) + 2 * lost
