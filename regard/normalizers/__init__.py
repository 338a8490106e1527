"""Normalizers: scores to weights."""

from regard.normalizers.base import Normalizer, Reference
from regard.normalizers.entmax import Entmax, Sparsemax
from regard.normalizers.exponential import Exponential
from regard.normalizers.linear import Elu, FeatureKernel, FeatureMap, LinearKernel, PositiveRandom
from regard.normalizers.sigmoid import Sigmoid
from regard.normalizers.sink import SinkSoftmax
from regard.normalizers.sinkhorn import Sinkhorn
from regard.normalizers.softmax import Softmax

__all__ = [
    "Elu",
    "Entmax",
    "Exponential",
    "FeatureKernel",
    "FeatureMap",
    "LinearKernel",
    "Normalizer",
    "PositiveRandom",
    "Reference",
    "Sigmoid",
    "SinkSoftmax",
    "Sinkhorn",
    "Softmax",
    "Sparsemax",
]
