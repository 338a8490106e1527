"""Rows of a table that take long: each is written down when it is found, so that a run that was stopped goes
on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from regard._files import write_text

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"

Row = list[float]


def code() -> str:
    """A hash of the files that proofs and baselines are made of: rows of other code are found anew."""
    found = hashlib.blake2b(digest_size=8)
    for path in sorted([*ROOT.glob("regard/_*.py"), *ROOT.glob("regard/proofs/**/*.py"), *BASELINES]):
        found.update(path.read_bytes())
    return found.hexdigest()


BASELINES = (ROOT / "benchmarks" / "zonotope.py",)


class Rows:
    """Rows of one table by their names, for the code as it is."""

    def __init__(self, name: str, folder: Path = RESULTS) -> None:
        self.path, self.code = folder / f"{name}.rows.json", code()
        self.rows: dict[str, Row] = self._read()

    def _read(self) -> dict[str, Row]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return dict(found["rows"]) if found["code"] == self.code else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def get(self, name: str, make: Callable[[], Row]) -> Row:
        """The row as it was found, now or by an earlier run."""
        if name not in self.rows:
            self.rows[name] = list(make())
            self.path.parent.mkdir(exist_ok=True)
            write_text(self.path, json.dumps({"code": self.code, "rows": self.rows}))
        return self.rows[name]
