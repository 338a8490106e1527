"""Theorems: what certificates are proved with, what some of them say on their own, and what it takes to add
one.

THEOREMS has them all. A theorem for another map is a `Theorem` with rules; a potential gets the certificates
of the others by rules for `bilinear`, `slopes` or `curvature`. Rules compute with `Upper` and `Lower`,
numbers that are at least, or at most, true ones.
"""

from regard._upper import Lower, Upper, exact
from regard.proofs import (
    THEOREMS,
    Bound,
    Refusal,
    Theorem,
    collapse_after,
    consensus,
    contraction,
    growing_witness,
    rank_collapse,
    score_perturbation,
    series_remainder,
)
from regard.proofs.near.curvature import curvature
from regard.proofs.scores import bilinear, slopes
from regard.proofs.theorems.edits import row_deviations

__all__ = [
    "THEOREMS",
    "Bound",
    "Lower",
    "Refusal",
    "Theorem",
    "Upper",
    "bilinear",
    "collapse_after",
    "consensus",
    "contraction",
    "curvature",
    "exact",
    "growing_witness",
    "rank_collapse",
    "row_deviations",
    "score_perturbation",
    "series_remainder",
    "slopes",
]
