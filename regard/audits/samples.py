"""Inputs that come with the package, chosen by what a tokenizer knows: sentences, proteins, molecules, code;
sequences of its own vocabulary where it knows none of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import ArgumentError

DOMAINS = ("sentences", "proteins", "molecules", "code")
"""The samples, one text per line in a file of that name; the first that a tokenizer knows is taken."""
UNKNOWN = 0.05
"""A tokenizer that does not know more than this share of the tokens does not know a domain."""
RANDOM = "random tokens"
"""The name of what is audited where a tokenizer knows no domain."""
LOWER_CASED = (
    "the tokenizer lower-cases texts and its vocabulary is upper-case: "
    'write "do_lower_case": false in tokenizer_config.json'
)
DRAWN, LENGTH = 6, 24
"""How many sequences are drawn from a vocabulary, and of how many tokens."""


class RandomTokens(dict[str, Tensor]):
    """Keyword arguments of a model, with tokens that were drawn at random."""


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


def known_samples(tokenizer: Any) -> tuple[str, list[str] | list[RandomTokens]]:
    """A domain that the tokenizer knows, and its texts; proteins and molecules are tried with spaces between
    their letters, too.
    """
    for domain in DOMAINS if getattr(tokenizer, "unk_token_id", None) is not None else DOMAINS[:1]:
        texts = samples(domain)
        for written in (texts, [spaced(text) for text in texts]):
            if (
                unknown_share(tokenizer, [number for text in written for number in _ids(tokenizer, text)])
                <= UNKNOWN
            ):
                return domain, written
    return RANDOM, drawn(tokenizer)


def spaced(text: str) -> str:
    """A text with spaces between its characters."""
    return " ".join(text.replace(" ", ""))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, verbose=False)["input_ids"])


def repair_of(tokenizer: Any, text: str) -> str:
    """What makes a tokenizer know a text: the line to change, or another way to write it."""
    if loses_capitals(tokenizer):
        return LOWER_CASED
    for how, other in (
        ("write spaces between its characters", spaced(text)),
        ("write it in upper case", text.upper()),
        ("write it in lower case", text.lower()),
    ):
        if unknown_share(tokenizer, _ids(tokenizer, other)) <= UNKNOWN:
            return how
    counts = {piece: _unknown_tokens(tokenizer, piece) for piece in text.split()}
    worst = max(counts, key=lambda piece: counts[piece])
    rest = " ".join(piece for piece in text.split() if piece != worst)
    if unknown_share(tokenizer, _ids(tokenizer, rest)) > UNKNOWN:
        return "give texts of the kind that the model was trained on"
    found = f"“{worst}” became {counts[worst]} unknown {'token' if counts[worst] == 1 else 'tokens'}"
    if worst in tokenizer.get_vocab():
        return f'{found}: write "additional_special_tokens": ["{worst}"] in tokenizer_config.json'
    return f"{found} and is not in the vocabulary: omit it, or use the tokenizer of the training"


def loses_capitals(tokenizer: Any) -> bool:
    """Whether texts are lower-cased for a vocabulary that is mostly of upper-case letters."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is None or normalizer.normalize_str("AB") != "ab":
        return False
    special = set(tokenizer.all_special_tokens)
    letters = [token for token in tokenizer.get_vocab() if token.isalpha() and token not in special]
    return 2 * sum(token.isupper() for token in letters) > len(letters)


def _unknown_tokens(tokenizer: Any, text: str) -> int:
    return _ids(tokenizer, text).count(tokenizer.unk_token_id)


def drawn(tokenizer: Any) -> list[RandomTokens]:
    """Sequences of tokens of the vocabulary itself, with the special tokens that a text would have."""
    special = set(tokenizer.all_special_ids)
    known = [number for number in range(len(tokenizer)) if number not in special]
    if not known:
        size = f"has {len(tokenizer)} tokens, all of them special"
        raise ArgumentError("tokenizer", size, "give the tokenizer that the model was trained with")
    generator = torch.Generator().manual_seed(0)
    start, end = _around(tokenizer)
    found: list[RandomTokens] = []
    for _ in range(DRAWN):
        chosen = torch.randint(len(known), (LENGTH,), generator=generator).tolist()
        ids = [*start, *(known[place] for place in chosen), *end]
        found.append(RandomTokens(input_ids=torch.tensor([ids])))
    return found


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text, as an empty one has them."""
    alone = _ids(tokenizer, "")
    ends = {tokenizer.eos_token_id, tokenizer.sep_token_id}
    first = next((place for place, number in enumerate(alone) if number in ends), len(alone))
    return alone[:first], alone[first:]
