"""Contexts made smaller: few atoms that stand for many keys, with a proof of what that changes."""

from regard.compression.compressed import Compressed
from regard.compression.compressing import compress

__all__ = ["Compressed", "compress"]
