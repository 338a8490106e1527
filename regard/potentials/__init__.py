"""Potentials: scores of a query against a key."""

from regard.potentials.additive import Additive
from regard.potentials.base import FunctionPotential, Potential, Scaled, Sum
from regard.potentials.distance import Gaussian, Laplace, StudentT
from regard.potentials.dot import Bilinear, Cosine, Dot
from regard.potentials.normed import NormedDot
from regard.potentials.pair_bias import PairBias
from regard.potentials.positions import (
    Alibi,
    Buckets,
    Clipped,
    Logarithmic,
    PositionPotential,
    RelativeBias,
    Rotary,
)
from regard.potentials.softcap import SoftCap
from regard.potentials.xpos import XPos

__all__ = [
    "Additive",
    "Alibi",
    "Bilinear",
    "Buckets",
    "Clipped",
    "Cosine",
    "Dot",
    "FunctionPotential",
    "Gaussian",
    "Laplace",
    "Logarithmic",
    "NormedDot",
    "PairBias",
    "PositionPotential",
    "Potential",
    "RelativeBias",
    "Rotary",
    "Scaled",
    "SoftCap",
    "StudentT",
    "Sum",
    "XPos",
]
