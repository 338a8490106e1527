"""Contexts and kernels made smaller: few atoms for many keys, few features for a kernel, with proofs of what
that changes.
"""

from regard.compression.candidates import (
    Candidate,
    Features,
    LowRank,
    Merged,
    Nystrom,
    Quantized,
    Recent,
    TopK,
)
from regard.compression.choosing import Cheaper, Choice, cheaper
from regard.compression.compressed import Compressed
from regard.compression.compressing import compress
from regard.compression.features import FeatureError, feature_error
from regard.compression.gaussians import gaussian_form
from regard.compression.spectra import Spectrum, mercer

__all__ = [
    "Candidate",
    "Cheaper",
    "Choice",
    "Compressed",
    "FeatureError",
    "Features",
    "LowRank",
    "Merged",
    "Nystrom",
    "Quantized",
    "Recent",
    "Spectrum",
    "TopK",
    "cheaper",
    "compress",
    "feature_error",
    "gaussian_form",
    "mercer",
]
