"""What is reported of an error that nobody foresaw: whose it is, what it is, and where it happened."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

REGARD, TORCH = (str(Path(file).parent) for file in (__file__, torch.__file__))
PACKAGE = str(Path(REGARD).parent)


def failure(error: Exception) -> str:
    """An error as a sentence: of the memory, of the model's own code, of its derivatives, or of regard."""
    frames = traceback.extract_tb(error.__traceback__)
    own = next((frame for frame in frames[::-1] if not _passes(frame)), None)
    what = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return f"there is not enough memory ({what})"
    if own is None:
        return f"an internal error ({what}); please report it with this sentence"
    if not own.filename.startswith(PACKAGE):
        where = f"{Path(own.filename).name}, line {own.lineno}"
        return f"the model failed when it ran again ({what}; {where})"
    if any("autograd" in frame.filename for frame in frames[frames.index(own) + 1 :]):
        return f"the model has no derivative that torch can compute ({what})"
    where = f"{own.filename.removeprefix(PACKAGE).lstrip('/')}, line {own.lineno}"
    return f"an internal error of regard ({what}; {where}): please report it with this sentence"


def _passes(frame: traceback.FrameSummary) -> bool:
    """Whether a frame only calls what a model asks for: torch, and what watches its functions."""
    return frame.filename.startswith(TORCH) or frame.name == "__torch_function__"
