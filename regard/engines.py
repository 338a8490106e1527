"""The engines: ways to compute a declaration, which differ in speed, never in meaning;
and what it takes to add one.
"""

from regard.compute import (
    Engine,
    Flex,
    Fourier,
    LinearEngine,
    Plan,
    Prediction,
    ReferenceEngine,
    Sdpa,
    Tiled,
    all_engines,
)
from regard.compute.engine import register
from regard.compute.fourier.nonuniform import Finufft
from regard.compute.fourier.separable import Separable

__all__ = [
    "Engine",
    "Finufft",
    "Flex",
    "Fourier",
    "LinearEngine",
    "Plan",
    "Prediction",
    "ReferenceEngine",
    "Sdpa",
    "Separable",
    "Tiled",
    "all_engines",
    "register",
]
