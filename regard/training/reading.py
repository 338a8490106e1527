"""What a training keeps beside its model: the characters that tokens stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regard._written import parsed
from regard.errors import ArgumentError
from regard.training.text import Alphabet


def alphabet_in(checkpoint: Path) -> Alphabet:
    """The alphabet of a checkpoint, step-N."""
    return Alphabet(_read_state(checkpoint, "characters"))


def context_in(checkpoint: Path) -> int:
    """How many tokens a model was trained to look back at."""
    return int(_read_state(checkpoint, "recipe")["context"])


def beginning(alphabet: Alphabet) -> str:
    """How a text may begin: after a line break, after a space, else with the first character there is."""
    known = alphabet.characters
    return "\n" if known is None else next((c for c in ("\n", " ") if c in known), known[0])


def _read_state(checkpoint: Path, name: str) -> Any:
    path = checkpoint / "state.json"
    try:
        return parsed(path.read_bytes())[name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"does not say its {name} ({type(error).__name__})"
        raise ArgumentError(
            str(path), found, "give the directory of a training, or of one of its checkpoints"
        ) from None


def encode(alphabet: Alphabet, argument: str, text: str) -> list[int]:
    """Tokens of a text; a character that was not in the text of the training is refused in the name of an
    argument.
    """
    known = alphabet.characters
    strange = [] if known is None else [character for character in text if character not in known]
    if strange:
        raise ArgumentError(
            argument,
            f"holds {strange[0]!r}, which the model was not trained on",
            "give a text in its characters",
        )
    if not text:
        raise ArgumentError(argument, "is empty", "give one character or more")
    return alphabet.encode(text)
