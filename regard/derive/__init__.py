"""The derivatives of a declaration, and of any map: exact products, blocks, norms;
the backward pass as attention; rows on demand.
"""

from regard.derive.estimate import Estimate, UpperEstimate
from regard.derive.jacobian import Jacobian
from regard.derive.linearization import linearize
from regard.derive.reversed import Lens, ReversedAttention, backward_lens, reversed_attention
from regard.derive.rows import RowStatistics, row_statistics

__all__ = [
    "Estimate",
    "Jacobian",
    "Lens",
    "ReversedAttention",
    "RowStatistics",
    "UpperEstimate",
    "backward_lens",
    "linearize",
    "reversed_attention",
    "row_statistics",
]
