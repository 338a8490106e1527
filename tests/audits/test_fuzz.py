"""300 broken checkpoints, configs, texts and arguments: each ends in a report or in one sentence."""

import json
import subprocess
import sys

import pytest

from tests.audits.checkpoints import ENVIRONMENT

pytest.importorskip("typer")
pytest.importorskip("transformers")
pytest.importorskip("resource")
CASES, SEED = 300, 34


def test_nothing_that_is_broken_breaks_the_command(tmp_path):
    """In one process of 2 GB. One case again: python -m tests.audits.fuzz 34 300 DIRECTORY NUMBER."""
    command = [sys.executable, "-m", "tests.audits.fuzz", str(SEED), str(CASES), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=ENVIRONMENT)
    *failed, last = done.stdout.splitlines() or [""]
    assert (done.returncode, last) == (0, f"{CASES} cases"), done.stderr[-2000:]
    assert not failed, json.dumps([json.loads(line) for line in failed], indent=1)
