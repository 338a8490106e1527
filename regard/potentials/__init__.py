"""Potentials: scores of a query against a key."""

from regard.potentials.additive import Additive
from regard.potentials.base import FunctionPotential, Potential, Scaled, Sum
from regard.potentials.distance import Gaussian, Laplace, StudentT
from regard.potentials.dot import Bilinear, Cosine, Dot
from regard.potentials.normed import NormedDot
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
    "PositionPotential",
    "Potential",
    "RelativeBias",
    "Rotary",
    "Scaled",
    "SoftCap",
    "StudentT",
    "Sum",
]
