"""The plug for transformers: attention of a declared potential and normalizer inside any model that asks
its attention interface.
"""

from regard.hf.compressing import CompressedCache, LayerError, compress
from regard.hf.hearing import Heard, listening
from regard.hf.recorder import Recorder
from regard.hf.registration import register, verify

__all__ = [
    "CompressedCache",
    "Heard",
    "LayerError",
    "Recorder",
    "compress",
    "listening",
    "register",
    "verify",
]
