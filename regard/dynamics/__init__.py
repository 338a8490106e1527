"""Attention as motion: particles that flow, laws that stay Gaussian, and what can be observed of them."""

from regard.dynamics.blow_up import BlowUpError
from regard.dynamics.closures import Closure, closure
from regard.dynamics.coalescence import Coalescence, Merge, coalesce
from regard.dynamics.collapsing import Collapse, collapse
from regard.dynamics.condensed import Condensed
from regard.dynamics.diffusion import Heat, heat, score, score_slope
from regard.dynamics.displacement import Displacement
from regard.dynamics.drifts import drift
from regard.dynamics.equal_angles import Equiangular, equiangular
from regard.dynamics.flowing import flow, iterate
from regard.dynamics.hull import HullWarning
from regard.dynamics.merging import Merged, merge_within
from regard.dynamics.observables import (
    Clusters,
    EffectiveRank,
    Energy,
    Entropy,
    Hull,
    MeanCosine,
    Moved,
    Observable,
    Radius,
)
from regard.dynamics.observations import Observations
from regard.dynamics.saving import resume
from regard.dynamics.schemes import DormandPrince, Euler, Heun, RungeKutta, Scheme
from regard.dynamics.shaped import ShapedCovariance
from regard.dynamics.spaces import Euclidean, Rescaled, Space, Sphere
from regard.dynamics.trajectory import Trajectory
from regard.measure import GaussianMeasure

__all__ = [
    "BlowUpError",
    "Closure",
    "Clusters",
    "Coalescence",
    "Collapse",
    "Condensed",
    "Displacement",
    "DormandPrince",
    "EffectiveRank",
    "Energy",
    "Entropy",
    "Equiangular",
    "Euclidean",
    "Euler",
    "GaussianMeasure",
    "Heat",
    "Heun",
    "Hull",
    "HullWarning",
    "MeanCosine",
    "Merge",
    "Merged",
    "Moved",
    "Observable",
    "Observations",
    "Radius",
    "Rescaled",
    "RungeKutta",
    "Scheme",
    "ShapedCovariance",
    "Space",
    "Sphere",
    "Trajectory",
    "closure",
    "coalesce",
    "collapse",
    "drift",
    "equiangular",
    "flow",
    "heat",
    "iterate",
    "merge_within",
    "resume",
    "score",
    "score_slope",
]
