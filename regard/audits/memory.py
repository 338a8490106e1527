"""Free memory is returned to the system: blocks of many sizes otherwise fragment it,
more with every layer.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def give_back() -> None:
    """Return free memory to the system, where the C library can;
    fragmentation was half of the peak memory of an audit.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    """malloc_trim of glibc, or None elsewhere."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
