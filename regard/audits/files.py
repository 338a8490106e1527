"""Files of checkpoints that are not what their names say, or not all there."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError

POINTER = b"version https://git-lfs.github.com/spec/"
"""How a file begins that stands for another one in Git LFS."""


def refuse_pointer(path: Path) -> None:
    """A pointer of Git LFS is a few lines of text where the weights should be."""
    with path.open("rb") as file:
        start = file.read(len(POINTER))
    if start == POINTER:
        found = f"{path} is a pointer of Git LFS ({path.stat().st_size} bytes of text), not the file itself"
        raise ArgumentError("MODEL", found, "run `git lfs pull` in its directory, or download the file")


def missing_pieces(directory: Path) -> list[str]:
    """The files that the tokenizer of a directory says it is made of, and that are not there or are
    pointers.
    """
    import transformers

    path = directory / "tokenizer_config.json"
    try:
        name = json.loads(path.read_text(encoding="utf-8")).get("tokenizer_class", "")
    except (OSError, ValueError, AttributeError):
        return [] if path.is_file() else [path.name]
    names = getattr(getattr(transformers, str(name), None), "vocab_files_names", None) or {}
    needed = [file for file in names.values() if isinstance(file, str) and file != "tokenizer.json"]
    return [file for file in needed if not _whole(directory / file)]


def _whole(path: Path) -> bool:
    return path.is_file() and path.read_bytes()[: len(POINTER)] != POINTER


def nearest_types(kind: object, most: int = 3) -> list[str]:
    """Known names that look like an unknown model_type; none where it is known, or is no name."""
    import difflib

    from transformers import CONFIG_MAPPING

    known = list(CONFIG_MAPPING.keys())
    if not isinstance(kind, str) or kind in known:
        return []
    return difflib.get_close_matches(kind.lower(), known, most)


def guess_type(weights: Path, config: dict[str, Any]) -> str:
    """The type of a model whose config does not say it: from the name of its class, or from the names of its
    weights; a warning says what was guessed.
    """
    from transformers import CONFIG_MAPPING

    plain = {kind.replace("-", "").replace("_", ""): kind for kind in CONFIG_MAPPING}
    classes = [str(name).lower() for name in config.get("architectures") or ()]
    fits = [kind for short, kind in plain.items() if any(name.startswith(short) for name in classes)]
    fits = fits or [plain[name] for name in _prefixes(weights) if name in plain]
    if not fits:
        found = f"{weights.parent} has a config without model_type, and nothing else in it tells the type"
        raise ArgumentError("MODEL", found, 'add "model_type" to config.json')
    best = max(fits, key=len)
    source = "its architectures" if classes else "the names of its weights"
    warnings.warn(f"config.json has no model_type: assumed to be {best}, from {source}", stacklevel=2)
    return best


def _prefixes(weights: Path) -> list[str]:
    """What the names of weights begin with."""
    if weights.suffix != ".safetensors":
        return []
    from safetensors import safe_open

    with safe_open(weights, framework="pt") as file:
        return sorted({name.split(".")[0].lower() for name in file.keys()})  # noqa: SIM118 (it is no dict)
