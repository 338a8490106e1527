"""Text: a file as numbers, by characters or by bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from regard.errors import ArgumentError

BYTES = 256
HELD_OUT = 0.1
"""The share at the end of a text that is never trained on."""
MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
"""How files in other encodings begin."""


@dataclass(frozen=True)
class Alphabet:
    """The characters that tokens stand for, in their order; None where tokens are bytes.

    Examples:
        >>> alphabet = regard.training.Alphabet("abc")
        >>> alphabet.encode("cab"), alphabet.decode([2, 0, 1]), len(regard.training.Alphabet(None))
        ([2, 0, 1], 'cab', 256)
    """

    characters: str | None

    def __len__(self) -> int:
        return BYTES if self.characters is None else len(self.characters)

    def encode(self, text: str) -> list[int]:
        """Text as tokens; every character must be known."""
        if self.characters is None:
            return list(text.encode("utf-8"))
        number = {character: index for index, character in enumerate(self.characters)}
        return [number[character] for character in text]

    def decode(self, tokens: Tensor | list[int]) -> str:
        """Tokens as text; bytes that are no character become a replacement sign."""
        numbers = [int(token) for token in tokens]
        if self.characters is None:
            return bytes(numbers).decode("utf-8", errors="replace")
        return "".join(self.characters[number] for number in numbers)


@dataclass(frozen=True, eq=False)
class Text:
    """tokens (n,): the whole text; path: where it was read; fingerprint:
    equal for equal bytes of the file.

    Examples:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     path = pathlib.Path(place, "text.txt")
        ...     _ = path.write_text("to be or not to be " * 20)
        ...     text = regard.training.Text.read(path)
        >>> len(text.tokens), text.alphabet.characters
        (380, ' benort')
    """

    tokens: Tensor
    alphabet: Alphabet
    path: Path
    fingerprint: str

    @classmethod
    def read(cls, path: Path, as_bytes: bool = False) -> Text:
        """The text in a file."""
        found = _content(path)
        alphabet, numbers = (Alphabet(None), list(found)) if as_bytes else _characters(found, path)
        return cls(
            torch.tensor(numbers, dtype=torch.int64),
            alphabet,
            path.resolve(),
            hashlib.sha256(found).hexdigest(),
        )

    def split(self, context: int) -> tuple[Tensor, Tensor]:
        """What is trained on and what is held out: the end of the text, but no less than one window."""
        held = max(context + 1, int(HELD_OUT * len(self.tokens)))
        if len(self.tokens) < held + context + 1:
            found = (
                f"{self.path} has {len(self.tokens)} tokens, and a context of {context} needs "
                f"{2 * context + 2}, half of them held out"
            )
            raise ArgumentError("--data", found, "give a longer text, or a smaller --context")
        return self.tokens[:-held], self.tokens[-held:]


def _content(path: Path) -> bytes:
    try:
        found = path.read_bytes()
    except OSError as error:
        raise ArgumentError(
            "--data", f"{path} cannot be read ({error.strerror})", "give a file with text"
        ) from error
    if not found:
        raise ArgumentError("--data", f"{path} is empty", "give a file with text")
    return found


def _characters(content: bytes, path: Path) -> tuple[Alphabet, list[int]]:
    """The characters of UTF-8, ends of lines as \\n."""
    text = _decode(content, path).replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise ArgumentError("--data", f"{path} contains only whitespace", "give a file with text")
    alphabet = Alphabet("".join(sorted(set(text))))
    return alphabet, alphabet.encode(text)


def _decode(content: bytes, path: Path) -> str:
    other = next((name for mark, name in MARKS.items() if content.startswith(mark)), None)
    if other is not None:
        raise ArgumentError(
            "--data", f"{path} is in {other}", f"write it in UTF-8: iconv -f {other} -t UTF-8 {path}"
        )
    if b"\0" in content:
        raise ArgumentError(
            "--data",
            f"{path} has zero bytes, as binary files do",
            "give a file with text, or train on --bytes",
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"{path} is not UTF-8 (byte {error.start} is 0x{content[error.start]:02x})"
        raise ArgumentError(
            "--data", found, "write it in UTF-8 (iconv does that), or train on --bytes"
        ) from error
