"""Directories that regard itself wrote: models of regard.nn, alone or in a training,
with the characters they read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.training import Alphabet


def is_own(config: dict[str, Any]) -> bool:
    """Whether a config is one of regard.nn."""
    return "regard" in config and "model_type" not in config


def inside(path: Path) -> Path:
    """The model in a directory: of the newest checkpoint of a training, of one checkpoint,
    or the directory itself.
    """
    if (path / "config.json").is_file():
        return path
    steps = sorted(
        (step for step in path.glob("step-*") if re.fullmatch(r"step-[0-9]+", step.name)),
        key=lambda step: int(step.name[5:]),
    )
    for place in (path, *reversed(steps)):
        if (place / "model" / "config.json").is_file():
            return place / "model"
    return path


def name_of(directory: Path) -> str:
    """What a report calls it: as the user does, links are not followed; a checkpoint is called by its step,
    not by the directory inside.
    """
    here = directory.absolute()
    return here.parent.name if here.name == "model" and (here.parent / "state.json").is_file() else here.name


def build(config: dict[str, Any]) -> nn.Module:
    """The model of a config without its weights."""
    from regard.nn.saving import blank

    return blank(config).eval()


def read(directory: Path) -> nn.Module:
    """The model with its weights."""
    from regard.nn import load

    found: nn.Module = load(directory)
    return found


class Characters:
    """A tokenizer for models that `regard train` made: tokens are characters, or bytes."""

    is_fast = True
    all_special_ids = ()

    def __init__(self, alphabet: Alphabet) -> None:
        self._alphabet = alphabet

    def __len__(self) -> int:
        return len(self._alphabet)

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        """The tokens of a text, and where each is from."""
        from regard.training.reading import encode

        whole = self._alphabet.characters is not None
        places = [
            (at, at + 1)
            for at, character in enumerate(text)
            for _ in (character if whole else character.encode())
        ]
        most = options.get("max_length")
        numbers = encode(self._alphabet, "--text", text)
        return {"input_ids": numbers[:most], "offset_mapping": places[:most]}

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of tokens."""
        if self._alphabet.characters is None:
            return bytes(int(token, 16) for token in tokens).decode(errors="replace")
        return "".join(tokens)

    def decode(self, numbers: list[int]) -> str:
        """The text of these ids."""
        return self.convert_tokens_to_string(self.convert_ids_to_tokens(numbers))

    def convert_ids_to_tokens(self, numbers: list[int]) -> list[str]:
        """The characters of tokens; bytes by their numbers."""
        known = self._alphabet.characters
        return [f"0x{number:02x}" if known is None else known[number] for number in numbers]


def tokenizer_in(directory: Path) -> Characters:
    """The characters that a training kept beside its model."""
    from regard.training.reading import alphabet_in

    try:
        return Characters(alphabet_in(directory.resolve().parent))
    except ArgumentError:
        found = f"{directory} is a model of regard.nn without the characters of a training beside it"
        remedy = "use --weights-only, or Python: regard.audit(regard.nn.load(directory), [{'ids': ids}])"
        raise ArgumentError("MODEL", found, remedy) from None
