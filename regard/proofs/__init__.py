"""Certificates: how much a map can amplify a change, proved; and attacks that try to break the proof."""

from regard.proofs import (  # noqa: F401 (register their rules)
    modules,
    normed_scores,
    theorems,
)
from regard.proofs.approximation import approximation_error, kernel_error, row_errors
from regard.proofs.certification import certify, declare, deviation
from regard.proofs.citation import cite
from regard.proofs.decision import Decision, decide
from regard.proofs.exchanges import Substitutions, substitutions
from regard.proofs.falsification import Witness, falsify, falsify_deviation
from regard.proofs.imaging import image
from regard.proofs.misspecifications import (
    Misspecification,
    apriori,
    dropped_distance,
    misspecification,
    replaced_distance,
)
from regard.proofs.pair_exchanges import PairExchanges, exchange_pairs
from regard.proofs.radius import Radius, certified_radius
from regard.proofs.ratios import ratio_errors
from regard.proofs.similarity import Similarity, certified_cosine
from regard.proofs.theorem import THEOREMS, Bound, Refusal, Theorem
from regard.proofs.theorems.contraction import contraction
from regard.proofs.theorems.dot_whole import growing_witness
from regard.proofs.theorems.log_determinant import series_remainder
from regard.proofs.theorems.rank_collapse import collapse_after, consensus, rank_collapse
from regard.proofs.theorems.score_perturbation import score_perturbation

__all__ = [
    "THEOREMS",
    "Bound",
    "Decision",
    "Misspecification",
    "PairExchanges",
    "Radius",
    "Refusal",
    "Similarity",
    "Substitutions",
    "Theorem",
    "Witness",
    "approximation_error",
    "apriori",
    "certified_cosine",
    "certified_radius",
    "certify",
    "cite",
    "collapse_after",
    "consensus",
    "contraction",
    "decide",
    "declare",
    "deviation",
    "dropped_distance",
    "exchange_pairs",
    "falsify",
    "falsify_deviation",
    "growing_witness",
    "image",
    "kernel_error",
    "misspecification",
    "rank_collapse",
    "ratio_errors",
    "replaced_distance",
    "row_errors",
    "score_perturbation",
    "series_remainder",
    "substitutions",
]
