"""Memory that commands keep: in a process of its own, since it is a setting of the whole process."""

import subprocess
import sys

PROGRAM = """
import resource, sys
import torch
from regard._allocation import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory() is sys.platform.startswith("linux")
before = None
for k in range(12):
    if k == 4:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(8_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(kind):
    """How often memory was asked of the system, for tensors of 32 MB one after the other."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_what_is_freed_is_used_again():
    """Pages of tensors that come and go are asked for once."""
    kept = faults("keep")
    assert kept < 1000 or not sys.platform.startswith("linux")


def test_other_systems_have_no_such_setting(monkeypatch):
    from regard import _allocation

    monkeypatch.setattr(_allocation.sys, "platform", "darwin")
    assert _allocation.keep_freed_memory() is False
