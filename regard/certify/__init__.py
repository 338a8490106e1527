"""Certificates: how much a map can amplify a change, proved; and attacks that try to break the proof."""

from regard.certify import modules, theorems  # noqa: F401 (registers the rules of modules and the theorems)
from regard.certify.approximation import approximation_error, kernel_error, row_errors
from regard.certify.certification import certify, declare, deviation
from regard.certify.citation import cite
from regard.certify.falsification import Witness, falsify, falsify_deviation
from regard.certify.imaging import image
from regard.certify.misspecification import Misspecification, apriori, dropped, misspecification, replaced
from regard.certify.theorem import THEOREMS, Bound, Refusal, Theorem
from regard.certify.theorems.contraction import contraction
from regard.certify.theorems.dot_whole import growing_witness
from regard.certify.theorems.rank_collapse import collapse_after, consensus, rank_collapse
from regard.certify.theorems.score_perturbation import score_perturbation

__all__ = [
    "THEOREMS",
    "Bound",
    "Misspecification",
    "Refusal",
    "Theorem",
    "Witness",
    "approximation_error",
    "apriori",
    "certify",
    "cite",
    "collapse_after",
    "consensus",
    "contraction",
    "declare",
    "deviation",
    "dropped",
    "falsify",
    "falsify_deviation",
    "growing_witness",
    "image",
    "kernel_error",
    "misspecification",
    "rank_collapse",
    "replaced",
    "row_errors",
    "score_perturbation",
]
