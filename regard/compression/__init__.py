"""Contexts and kernels made smaller: few atoms for many keys, few features for a kernel, with proofs of what
that changes.
"""

from regard.compression.compressed import Compressed
from regard.compression.compressing import compress
from regard.compression.features import FeatureError, feature_error
from regard.compression.gaussians import gaussian_form
from regard.compression.spectra import Spectrum, mercer

__all__ = ["Compressed", "FeatureError", "Spectrum", "compress", "feature_error", "gaussian_form", "mercer"]
