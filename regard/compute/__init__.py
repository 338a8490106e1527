"""Running a declaration: apply, explain, attend, and the engines."""

from regard._refused import Refused
from regard.compute import engines as _engines  # noqa: F401  (engines register themselves)
from regard.compute import gap as _gap  # noqa: F401  (law_gap registers itself)
from regard.compute.application import apply, explain
from regard.compute.engine import Engine, Plan, Prediction, all_engines
from regard.compute.engines.flex import Flex
from regard.compute.engines.fourier import Fourier
from regard.compute.engines.linear import Linear as LinearEngine
from regard.compute.engines.reference import Reference as ReferenceEngine
from regard.compute.engines.ring import Ring
from regard.compute.engines.sdpa import Sdpa
from regard.compute.engines.tiled import Tiled
from regard.compute.selection import Explanation
from regard.compute.tensors import attend

__all__ = [
    "Engine",
    "Explanation",
    "Flex",
    "Fourier",
    "LinearEngine",
    "Plan",
    "Prediction",
    "ReferenceEngine",
    "Refused",
    "Ring",
    "Sdpa",
    "Tiled",
    "all_engines",
    "apply",
    "attend",
    "explain",
]
