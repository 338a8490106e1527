"""The engines: ways to compute a declaration, which differ in speed, never in meaning;
and what it takes to add one.
"""

from regard.compute import (
    Engine,
    Flex,
    LinearEngine,
    Plan,
    Prediction,
    ReferenceEngine,
    Sdpa,
    Tiled,
    all_engines,
)
from regard.compute.engine import register

__all__ = [
    "Engine",
    "Flex",
    "LinearEngine",
    "Plan",
    "Prediction",
    "ReferenceEngine",
    "Sdpa",
    "Tiled",
    "all_engines",
    "register",
]
