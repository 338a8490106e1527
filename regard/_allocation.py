"""How much memory there is, and memory of large tensors that come and go in processes of regard."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

try:
    import resource
except ImportError:  # Windows has no limits of this kind
    resource = None  # type: ignore[assignment]

MAPPED, TRIMMED = -3, -1
"""The names of glibc's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD."""
LARGEST = 1 << 30


CONTAINER = Path("/sys/fs/cgroup/memory.max")
"""Where Linux says what a container may have; "max" where that is all there is."""


def memory() -> float:
    """Bytes of memory that this process may have: the machine's, or less where a container or a limit of the
    shell says so; infinity where nothing does.
    """
    found = [float("inf")]
    with contextlib.suppress(AttributeError, ValueError, OSError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(ValueError, OSError):
        found.append(int(CONTAINER.read_text()))
    if resource is not None:
        limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
        found += [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return min(found)


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
