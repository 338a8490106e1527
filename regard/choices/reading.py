"""A model and a text, as `regard cheaper` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.audits.inputs import beginning, longest


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


def read_text(texts: Sequence[str], name: str, tokenizer: Any, model: nn.Module, tokens: int) -> Text:
    """The first tokens of texts that are joined by line breaks, no more than the model takes.

    Examples:
        >>> from regard.choices import read_text
        >>> def letters(words, truncation, max_length):  # as a tokenizer does
        ...     return {"input_ids": [ord(letter) for letter in words][:max_length]}
        >>> verse = ["Of Man's first disobedience", "and the fruit"]
        >>> read_text(verse, "verse", letters, torch.nn.Identity(), tokens=3).ids.tolist()
        [[79, 102, 32]]
    """
    words, most = "\n".join(texts), min(tokens, longest(model, tokenizer))
    found = tokenizer(beginning(tokenizer, words, most), truncation=True, max_length=most)["input_ids"]
    return Text(name, torch.tensor([found]))
