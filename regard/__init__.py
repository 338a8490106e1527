"""regard: the mathematics of attention as working software.

a = regard.Attention(regard.Dot(w_q, w_k), regard.Linear(w_v), support=regard.Causal())
y = a(x)                       # run it
print(regard.explain(a, x))    # which engine, and why
regard.linearize(a, x).norm()  # how much it stretches at x
regard.certify(a, regard.Ball(1.0, tokens=8), regard.TokenMax())  # how much it can stretch in a ball, proved
regard.attend(q, k, v, potential=regard.Gaussian(bandwidth=2.0))   # the tensor door
"""

import importlib as _importlib
from typing import Any as _Any

from regard import _command

_command.quiet_interrupts()  # before torch is imported, which takes a second

from regard import (
    attention,
    audits,
    certificate,
    compression,
    compute,
    costs,
    derive,
    domains,
    dynamics,
    engines,
    errors,
    fixed_point,
    lipschitz_norm,
    lookups,
    maps,
    measure,
    moments,
    nonexpansive,
    normalizers,
    normed,
    norms,
    potentials,
    proofs,
    supports,
    theorems,
    tilt,
    transport,
)
from regard.attention import Attention
from regard.audits import audit
from regard.certificate import Certificate
from regard.compression import compress, mercer
from regard.compute import apply, attend, explain
from regard.costs import cost
from regard.derive import linearize
from regard.domains import Ball, Box, Hull, Neighborhood, Radii, Shell, Whole, one_token
from regard.dynamics import flow, iterate
from regard.kernel import Kernel
from regard.lookups import Factored, FunctionLookup, Identity, Linear, Table
from regard.measure import Measure
from regard.moments import Law, Mean, Mode, Sample, SecondMoment
from regard.normalizers import Entmax, LinearKernel, Sigmoid, Sinkhorn, SinkSoftmax, Softmax, Sparsemax
from regard.norms import EntryMax, Frobenius, OwnToken, TokenMax, TokenSum, Wasserstein
from regard.potentials import (
    Additive,
    Alibi,
    Bilinear,
    Cosine,
    Dot,
    Gaussian,
    Laplace,
    NormedDot,
    PairBias,
    Potential,
    RelativeBias,
    Rotary,
    SoftCap,
    StudentT,
)
from regard.proofs import (
    Decision,
    Radius,
    Witness,
    certified_cosine,
    certified_radius,
    certify,
    cite,
    decide,
    declare,
    deviation,
    falsify,
    falsify_deviation,
    image,
    substitutions,
)
from regard.supports import Causal, Document, Full, Padding, Where, Window
from regard.transport import wasserstein

__version__ = "0.2.0"

_LAZY = ("callbacks", "hf", "nn", "plot", "testing", "training")
"""Modules that are imported when they are first used."""
_LISTED = ("engines", "errors", "maps", *_LAZY)
"""Modules that `dir(regard)` lists: those that are used as regard.maps.Residual. Every other module is an
attribute too, and is not listed, as most have a public function or class of nearly the same name.
"""

_MODULES = (
    attention,
    audits,
    certificate,
    domains,
    engines,
    errors,
    fixed_point,
    lipschitz_norm,
    lookups,
    maps,
    measure,
    moments,
    nonexpansive,
    normalizers,
    normed,
    norms,
    potentials,
    supports,
    theorems,
    tilt,
    transport,
    compression,
    compute,
    costs,
    derive,
    dynamics,
    proofs,
)
"""Modules whose public names an AttributeError points to."""


def __getattr__(name: str) -> _Any:
    """A module that is loaded on demand; for a name that is in one of the modules,
    an error that says in which.
    """
    if name in _LAZY:
        return _importlib.import_module(f"regard.{name}")
    for module in _MODULES:
        found = vars(module)
        if (
            name in found.get("__all__", ())
            or getattr(found.get(name), "__module__", None) == module.__name__
        ):
            raise AttributeError(f"regard.{name} is {module.__name__}.{name}")
    raise AttributeError(f"module 'regard' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names and the modules that are used by name: what tab completion offers."""
    return sorted({*__all__, *_LISTED, "__version__"})


__all__ = [
    "Additive",
    "Alibi",
    "Attention",
    "Ball",
    "Bilinear",
    "Box",
    "Causal",
    "Certificate",
    "Cosine",
    "Decision",
    "Document",
    "Dot",
    "Entmax",
    "EntryMax",
    "Factored",
    "Frobenius",
    "Full",
    "FunctionLookup",
    "Gaussian",
    "Hull",
    "Identity",
    "Kernel",
    "Laplace",
    "Law",
    "Linear",
    "LinearKernel",
    "Mean",
    "Measure",
    "Mode",
    "Neighborhood",
    "NormedDot",
    "OwnToken",
    "Padding",
    "PairBias",
    "Potential",
    "Radii",
    "Radius",
    "RelativeBias",
    "Rotary",
    "Sample",
    "SecondMoment",
    "Shell",
    "Sigmoid",
    "SinkSoftmax",
    "Sinkhorn",
    "SoftCap",
    "Softmax",
    "Sparsemax",
    "StudentT",
    "Table",
    "TokenMax",
    "TokenSum",
    "Wasserstein",
    "Where",
    "Whole",
    "Window",
    "Witness",
    "apply",
    "attend",
    "audit",
    "certified_cosine",
    "certified_radius",
    "certify",
    "cite",
    "compress",
    "cost",
    "decide",
    "declare",
    "deviation",
    "explain",
    "falsify",
    "falsify_deviation",
    "flow",
    "image",
    "iterate",
    "linearize",
    "mercer",
    "one_token",
    "substitutions",
    "wasserstein",
]
