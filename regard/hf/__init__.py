"""The plug for transformers: attention of a declared potential and normalizer inside any model that asks
its attention interface.
"""

from regard.hf.recorder import Recorder
from regard.hf.registration import register, verify

__all__ = ["Recorder", "register", "verify"]
