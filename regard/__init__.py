"""regard: the mathematics of attention as working software.

a = regard.Attention(regard.Dot(w_q, w_k), regard.Linear(w_v), support=regard.Causal())
y = a(x)                       # run it
print(regard.explain(a, x))    # which engine, and why
regard.linearize(a, x).norm()  # how much it stretches at x
regard.attend(q, k, v, potential=regard.Gaussian(bandwidth=2.0))   # the tensor door
"""

from regard.attention import Attention, Softmatch
from regard.audit import audit
from regard.certificate import Certificate, Hypothesis
from regard.compute import Engine, Explanation, Flex, LinearEngine, ReferenceEngine, Sdpa, Tiled, apply, attend, engines, explain
from regard.derive import (
    Estimate,
    Jacobian,
    Lens,
    ReversedAttention,
    RowStatistics,
    UpperEstimate,
    backward_lens,
    linearize,
    reversed_attention,
    row_statistics,
)
from regard.errors import (
    AmbiguousRuleError,
    ArgumentError,
    ConvergenceWarning,
    MissingExtraError,
    NoRuleError,
    PerformanceWarning,
    RefusalError,
    RegardError,
)
from regard.kernel import Kernel
from regard.lookups import Factored, FunctionLookup, Identity, Linear, Lookup, Table
from regard.measure import GaussianMeasure, Measure, dirac
from regard.moments import Law, Mean, Mode, Moment, Sample, SecondMoment
from regard.normalizers import (
    Elu,
    Entmax,
    FeatureMap,
    LinearKernel,
    Normalizer,
    PositiveRandom,
    Reference,
    Sigmoid,
    Sinkhorn,
    Softmax,
    Sparsemax,
)
from regard.norms import Frobenius, Norm, SequenceNorm, TokenMax, TokenSum, Wasserstein
from regard.potentials import (
    Additive,
    Alibi,
    Bilinear,
    Buckets,
    Clipped,
    Cosine,
    Dot,
    Gaussian,
    Laplace,
    Logarithmic,
    Potential,
    RelativeBias,
    Rotary,
    SoftCap,
    StudentT,
)
from regard.supports import Causal, Document, Full, Padding, Support, Where, Window

__version__ = "0.1.0"

__all__ = [
    "Additive",
    "Alibi",
    "AmbiguousRuleError",
    "ArgumentError",
    "Attention",
    "Bilinear",
    "Buckets",
    "Causal",
    "Certificate",
    "Clipped",
    "ConvergenceWarning",
    "Cosine",
    "Document",
    "Dot",
    "Elu",
    "Engine",
    "Entmax",
    "Estimate",
    "Explanation",
    "FeatureMap",
    "Flex",
    "Frobenius",
    "Full",
    "Gaussian",
    "GaussianMeasure",
    "Hypothesis",
    "Identity",
    "Jacobian",
    "Kernel",
    "Laplace",
    "Law",
    "Lens",
    "Linear",
    "LinearEngine",
    "LinearKernel",
    "Logarithmic",
    "Lookup",
    "Mean",
    "Measure",
    "MissingExtraError",
    "Mode",
    "Moment",
    "NoRuleError",
    "Norm",
    "Normalizer",
    "Padding",
    "PerformanceWarning",
    "Pointwise",
    "PositiveRandom",
    "Potential",
    "Reference",
    "ReferenceEngine",
    "RefusalError",
    "RegardError",
    "RelativeBias",
    "ReversedAttention",
    "Rotary",
    "RowStatistics",
    "Sample",
    "Sdpa",
    "SecondMoment",
    "SequenceNorm",
    "Sigmoid",
    "Sinkhorn",
    "SoftCap",
    "Softmatch",
    "Softmax",
    "Sparsemax",
    "StudentT",
    "Support",
    "Table",
    "Tiled",
    "TokenMax",
    "TokenSum",
    "UpperEstimate",
    "Wasserstein",
    "Where",
    "Window",
    "apply",
    "attend",
    "audit",
    "backward_lens",
    "dirac",
    "engines",
    "explain",
    "linearize",
    "reversed_attention",
    "row_statistics",
]
