"""Certificates: how much a map can amplify a change, proved; and attacks that try to break the proof."""

from regard.certify.certification import certify, declare, deviation
from regard.certify.falsification import Witness, falsify
from regard.certify.theorem import THEOREMS, Bound, Refusal, Theorem

__all__ = ["THEOREMS", "Bound", "Refusal", "Theorem", "Witness", "certify", "declare", "deviation", "falsify"]

from regard.certify import theorems  # noqa: E402, F401 (registers the theorems)
