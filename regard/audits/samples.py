"""Inputs that come with the package, chosen by what a tokenizer knows: sentences, proteins, molecules, code;
sequences of its own vocabulary where it knows none of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DOMAINS = ("sentences", "proteins", "molecules", "code")
"""The samples, one text per line in a file of that name; the first that a tokenizer knows is taken."""
UNKNOWN = 0.05
"""A tokenizer that does not know more than this share of the tokens does not know a domain."""
DRAWN, LENGTH = 6, 24
"""How many sequences are drawn from a vocabulary, and of how many tokens."""


def samples(domain: str) -> list[str]:
    """The texts of a domain."""
    return (Path(__file__).parent / f"{domain}.txt").read_text(encoding="utf-8").splitlines()


def unknown_share(tokenizer: Any, ids: list[int]) -> float:
    """The share of unknown tokens among those that come from the text."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None:
        return 0.0
    special = set(getattr(tokenizer, "all_special_ids", ())) - {unknown}
    own = [number for number in ids if number not in special]
    return sum(number == unknown for number in own) / len(own) if own else 0.0


def known_samples(tokenizer: Any) -> tuple[str, list[str] | list[dict[str, Tensor]]]:
    """A domain that the tokenizer knows, and its texts."""
    for domain in DOMAINS if getattr(tokenizer, "unk_token_id", None) is not None else DOMAINS[:1]:
        texts = samples(domain)
        ids = [number for text in texts for number in tokenizer(text, verbose=False)["input_ids"]]
        if unknown_share(tokenizer, ids) <= UNKNOWN:
            return domain, texts
    return "vocabulary", drawn(tokenizer)


def drawn(tokenizer: Any) -> list[dict[str, Tensor]]:
    """Sequences of tokens of the vocabulary itself, with the special tokens that a text would have."""
    special = set(tokenizer.all_special_ids)
    known = [number for number in range(len(tokenizer)) if number not in special]
    generator = torch.Generator().manual_seed(0)
    (start, end), found = _around(tokenizer), []
    for _ in range(DRAWN):
        chosen = torch.randint(len(known), (LENGTH,), generator=generator).tolist()
        ids = [*start, *(known[place] for place in chosen), *end]
        found.append({"input_ids": torch.tensor([ids])})
    return found


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text, as an empty one has them."""
    alone = [int(number) for number in tokenizer("", verbose=False)["input_ids"]]
    ends = {tokenizer.eos_token_id, tokenizer.sep_token_id}
    first = next((place for place, number in enumerate(alone) if number in ends), len(alone))
    return alone[:first], alone[first:]
