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
    Ring,
    Sdpa,
    Tiled,
    all_engines,
)
from regard.compute.engine import register
from regard.compute.fourier.nonuniform import Finufft
from regard.compute.fourier.separable import Separable
from regard.compute.ring.places import Consecutive, Shards, ZigZag

__all__ = [
    "Consecutive",
    "Engine",
    "Finufft",
    "Flex",
    "Fourier",
    "LinearEngine",
    "Plan",
    "Prediction",
    "ReferenceEngine",
    "Ring",
    "Sdpa",
    "Separable",
    "Shards",
    "Tiled",
    "ZigZag",
    "all_engines",
    "register",
]
