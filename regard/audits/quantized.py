"""GGUF files: a model with its config and its tokenizer in one file, as transformers reads it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from regard.audits.files import refuse_pointer
from regard.errors import ArgumentError, MissingExtraError

SUFFIX = ".gguf"
START = b"GGUF"
"""How such a file begins."""


def quantized_file(model: str | None) -> Path | None:
    """The file that a name means: itself, or the only one in a directory without a config; None for anything
    else.
    """
    path = None if model is None else Path(model).expanduser()
    if path is None or (path.is_file() and path.suffix != SUFFIX):
        return None
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob(f"*{SUFFIX}"))
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise ArgumentError("MODEL", f"{path} has several models ({names})", "give one of these files")
        path = files[0] if files else path
    return path if path.is_file() else None


def check_quantized(path: Path) -> None:
    """An error that says what is wrong with the file, or missing to read it."""
    refuse_pointer(path)
    with path.open("rb") as file:
        if file.read(len(START)) != START:
            raise ArgumentError("MODEL", f"{path} is not a GGUF file", "download it again")
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(f"{package}, which reads {path.name},", "gguf")


def refuse_parts(path: Path) -> None:
    """Its tensors are changed on the way into a model, so that none is read alone."""
    if path.suffix == SUFFIX:
        found = f"{path.name} is a GGUF file, which is only read whole"
        raise ArgumentError("MODEL", found, "leave --weights-only and --low-memory out")
