"""A model and a text, as `regard cheaper` takes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.audits.inputs import beginning, longest, read_file


@dataclass(frozen=True)
class Text:
    """A text that a model reads: its tokens (1, n), and where it came from.

    Examples:
        >>> from regard.choices import Text
        >>> Text("a text", torch.tensor([[1, 2, 3]])).options["input_ids"].shape
        torch.Size([1, 3])
    """

    name: str
    ids: Tensor

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the model."""
        return {"input_ids": self.ids}


def read_text(path: Path, tokenizer: Any, model: nn.Module, tokens: int) -> Text:
    """The first tokens of a file, no more than the model takes.

    Examples:
        >>> import pathlib, tempfile
        >>> from regard.choices import read_text
        >>> def letters(words, truncation, max_length):  # what a tokenizer does
        ...     return {"input_ids": [ord(letter) for letter in words][:max_length]}
        >>> with tempfile.TemporaryDirectory() as place:
        ...     path = pathlib.Path(place, "verse.txt")
        ...     _ = path.write_text("Of Man's first disobedience")
        ...     read_text(path, letters, torch.nn.Identity(), tokens=3).ids.tolist()
        [[79, 102, 32]]
    """
    words, most = read_file(path), min(tokens, longest(model, tokenizer))
    found = tokenizer(beginning(tokenizer, words, most), truncation=True, max_length=most)["input_ids"]
    return Text(path.name, torch.tensor([found]))
