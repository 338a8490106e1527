"""Results that an interrupted run has left: the next run of the same question continues from there."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regard._files import write_text
from regard._written import parsed

if TYPE_CHECKING:
    from regard.decisions.asked import Asked
    from regard.decisions.typo_runs import Typos
    from regard.decisions.word_answers import WordAnswer

NAME = ".words.json"
_BYTES = torch.uint8


class Kept:
    """Results in a file, by name and for one question; those of another question are not read."""

    def __init__(self, directory: Path, question: str) -> None:
        self.path, self.question = directory / NAME, question
        self.found: dict[str, Any] = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            found = parsed(self.path.read_bytes())
            return dict(found["found"]) if found["question"] == self.question else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def put(self, name: str, one: Typos | WordAnswer) -> None:
        """Write a result down at once, whole or not at all."""
        self.found[name] = asdict(one)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps({"question": self.question, "found": self.found}))

    def remove(self) -> None:
        """The run is done."""
        self.path.unlink(missing_ok=True)


def question_of(asked: Asked, radius: float, resolution: float, level: float) -> str:
    """What results depend on: the weights, the tokens, the settings and the version."""
    from regard import __version__

    found = hashlib.blake2b(repr((__version__, asked.kind, asked.text, radius, resolution, level)).encode())
    for tensor in (asked.x, *asked.model.state_dict().values()):
        found.update(tensor.detach().cpu().contiguous().flatten().view(dtype=_BYTES).numpy().tobytes())
    return found.hexdigest()
