"""Memory that is free goes back to the system: blocks of many sizes otherwise leave holes that grow from layer to layer."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def give_back() -> None:
    """Return what is free, where the C library can; half of the peak of an audit were holes."""
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
