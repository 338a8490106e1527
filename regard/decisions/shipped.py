"""The classifier that comes with the package: opinions in short sentences, three layers of width 32.

A word is the mean of vectors of its groups of three letters, so that a typo moves it and does not replace it.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, MissingExtraError

WEIGHTS = Path(__file__).with_name("reviews.safetensors")
NAME = "the shipped classifier of opinions"
BUCKETS, WIDTH, LONGEST, LAYERS, HEADS = 1024, 32, 28, 3, 4
START = "^"
"""Stands before every sentence; its value is what the readout sees."""


def words_of(text: str) -> list[str]:
    """Words and signs, in small letters."""
    found = re.findall(r"[^\W\d_]+|\d+|[^\w\s]", text.lower())
    if not any(word.isalnum() for word in found):
        raise ArgumentError("--text", f"has no word: {text!r}", "give a sentence")
    if len(found) >= LONGEST:
        raise ArgumentError(
            "--text", f"has {len(found)} words", f"give fewer than {LONGEST}, as the classifier was trained"
        )
    return found


def groups_of(word: str) -> list[int]:
    """The numbers of the groups of three letters of a word with its two ends."""
    whole = f"<{word}>" if word != START else START
    found = [whole[k : k + 3] for k in range(max(1, len(whole) - 2))]
    return [zlib.crc32(part.encode()) % BUCKETS for part in found]


class Reviews(nn.Module):
    """From words to the two logits of `LABELS`."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.letters = nn.EmbeddingBag(BUCKETS, width, mode="mean")
        self.positions = nn.Embedding(LONGEST, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, HEADS, 2 * width, 0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.readout = nn.Linear(width, 2)

    def embed(self, sentences: list[list[str]]) -> Tensor:
        """Sentences of equally many words as tokens (batch, n + 1, d), as they enter the first layer."""
        groups = [groups_of(word) for words in sentences for word in (START, *words)]
        starts = torch.tensor([0, *(len(one) for one in groups)]).cumsum(0)[:-1]
        numbers = torch.tensor([number for one in groups for number in one])
        letters = self.letters(numbers, starts).unflatten(0, (len(sentences), -1))
        made: Tensor = self.norm(letters + self.positions.weight[: letters.shape[1]])
        return made

    def forward(self, sentences: list[list[str]]) -> Tensor:
        """Logits (batch, 2)."""
        found: Tensor = self.readout(self.encoder(self.embed(sentences))[:, 0])
        return found


def load(path: Path = WEIGHTS, width: int = WIDTH, layers: int = LAYERS) -> Reviews:
    """The classifier with its weights."""
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise MissingExtraError("safetensors", "hf") from error
    model = Reviews(width, layers)
    model.load_state_dict(load_file(path))
    return model.eval()
