"""Memory of large tensors that come and go, in processes that are regard's own."""

from __future__ import annotations

import ctypes
import sys

MAPPED, TRIMMED = -3, -1
"""The names of glibc's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD."""
LARGEST = 1 << 30


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed for the next tensor instead of giving it back to the system, page
    by page; whether it does. For commands: a setting of the whole process, which a library should not change.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(bool(mallopt(name, LARGEST)) for name in (MAPPED, TRIMMED))
