"""Files of checkpoints that are not what their names say, or not all there."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from regard._written import parsed
from regard.errors import ArgumentError

POINTER = b"version https://git-lfs.github.com/spec/"
"""How a file begins that stands for another one in Git LFS."""
LAYERS = re.compile(r"layers$|^n_layer$|blocks$|^depths?$|stages$")
WIDTHS = re.compile(
    r"vocab|hidden|intermediate|inner|head|label|expert|embd|(^|_)dim$|^d_|width|ffn|^source$|^target$"
)
COUNTS = re.compile(r"heads?$|layers?$|_size$|(^|_)dim$|^d_|width")
"""Names of fields that say how much of something there is, how wide it is, and what is never negative."""
FEW, FEW_LAYERS = 10_000, 256
"""So much is made of any config, whatever its weights are."""


def refuse_pointer(path: Path) -> None:
    """A pointer of Git LFS is a few lines of text where the weights should be."""
    with path.open("rb") as file:
        start = file.read(len(POINTER))
    if start == POINTER:
        found = f"{path} is a pointer of Git LFS ({path.stat().st_size} bytes of text), not the file itself"
        raise ArgumentError("MODEL", found, "run `git lfs pull` in its directory, or download the file")


def refuse_sizes(directory: Path, config: dict[str, Any], sizes: Sequence[int]) -> None:
    """Refuse a width that no tensor can have, and more layers than there are tensors, before anything is made
    of them.
    """
    numbers, most = max(sum(sizes), FEW), max(len(sizes), FEW_LAYERS)
    for name, value in _numbers(config):
        limit = most if LAYERS.search(name) else numbers if WIDTHS.search(name) else value
        if value > limit or (value < 0 and COUNTS.search(name)):
            found = (
                f"{directory / 'config.json'} has {value} for {name}, and the weights beside it are "
                f"{len(sizes)} tensors of {sum(sizes):,} numbers"
            )
            raise ArgumentError("MODEL", found, "check that config and weights belong together")


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a config, each with the name of its field; names of classes are no fields."""
    if isinstance(value, dict):
        for key, part in value.items():
            if key not in ("label2id", "id2label"):
                yield from _numbers(part, key)
    elif isinstance(value, list):
        for part in value:
            yield from _numbers(part, name)
    elif isinstance(value, (int, float)) and value == value:
        yield name, value


def missing_pieces(directory: Path) -> list[str]:
    """The files that the tokenizer of a directory says it is made of, and that are not there or are
    pointers.
    """
    import transformers

    path = directory / "tokenizer_config.json"
    try:
        name = parsed(path.read_bytes()).get("tokenizer_class", "")
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
    named = config.get("architectures")
    classes = [str(name).lower() for name in named] if isinstance(named, list) else []
    fits = [kind for short, kind in plain.items() if any(name.startswith(short) for name in classes)]
    fits = fits or [plain[name] for name in _prefixes(weights) if name in plain]
    if not fits:
        found = f"{weights.parent} has a config that has no model_type, and nothing else tells the type"
        raise ArgumentError("MODEL", found, 'add "model_type" to config.json')
    best = max(fits, key=len)
    source = "its architectures" if classes else "the names of its weights"
    warnings.warn(f"config.json has no model_type: assumed to be {best}, from {source}", stacklevel=2)
    return best


def saved_class(config: Any) -> str:
    """Return the name of the class that a model was saved as; "" where its config names none."""
    named = getattr(config, "architectures", None)
    first = named[0] if isinstance(named, list) and named else ""
    return first if isinstance(first, str) else ""


def _prefixes(weights: Path) -> list[str]:
    """What the names of weights begin with."""
    if weights.suffix != ".safetensors":
        return []
    from safetensors import safe_open

    with safe_open(weights, framework="pt") as file:
        return sorted({name.split(".")[0].lower() for name in file.keys()})  # noqa: SIM118 (it is no dict)
