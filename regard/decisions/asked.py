"""What `regard decide` asks of: a model on one text, as a function of the tokens that enter its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.decisions import shipped
from regard.decisions.networks import affine, network_of, one_of
from regard.decisions.reviews import LABELS, typos
from regard.errors import ArgumentError
from regard.maps import Affine, Compose

EMBEDDING, CLASSES, NEXT = "embedding", "classes", "next token"

Logits = Callable[[list[list[str]]], Tensor]
"""Sentences of equally many words to logits (batch, classes)."""


@dataclass(frozen=True)
class Asked:
    """A text as a model reads it.

    kind: what the model says of it. words: the tokens, those that stand for nothing among them; moving: which
    of them are words. x (n, d): as they enter the first layer. model: a module on such tokens, and readout
    what makes the answer of its value. names: of the classes. logits: the model on words themselves, and
    typos: words that are one letter away from one, where they can be made.

    Examples:
        >>> from regard.decisions import shipped_on
        >>> asked = shipped_on("the soup was dull .")  # an Asked
        >>> asked.words[1:], asked.moving, asked.x.shape[0]
        (['the', 'soup', 'was', 'dull', '.'], [1, 2, 3, 4], 6)
    """

    kind: str
    name: str
    text: str
    words: list[str]
    moving: list[int]
    x: Tensor
    model: nn.Module
    readout: Any
    names: Callable[[int], str]
    logits: Logits | None = None
    typos: Callable[[str], list[str]] | None = None


def shipped_on(text: str) -> Asked:
    """The classifier that comes with the package.

    Examples:
        >>> from regard.decisions import shipped_on
        >>> asked = shipped_on("the soup was dull .")
        >>> logits = asked.readout(asked.model(asked.x.to(torch.float32)[None])[0].double())
        >>> asked.names(int(logits.argmax()))
        'negative'
    """
    model = shipped.load()
    words = shipped.words_of(text)
    with torch.no_grad():
        x = model.embed([words])[0].double()
    readout = Compose((one_of(len(x), 0), Affine(*affine(model.readout))))
    moving = [k + 1 for k, word in enumerate(words) if word.isalnum()]
    return Asked(
        CLASSES,
        shipped.NAME,
        text,
        ["", *words],
        moving,
        x,
        model.encoder,
        readout,
        lambda k: LABELS[k],
        model,
        typos,
    )


def loaded_on(name: str, text: str) -> Asked:
    """A model of transformers, from a directory or the hub.

    Examples:
        >>> from regard.audits.checkpoint import demo_directory
        >>> from regard.decisions import loaded_on
        >>> asked = loaded_on(str(demo_directory()), "a cat sat")  # all-MiniLM-L6-v2
        >>> asked.kind, asked.words
        ('embedding', ['[CLS]', 'a', 'cat', 'sat', '[SEP]'])
    """
    from regard.audits.checkpoint import find
    from regard.audits.inputs import beginning, longest, refuse_halves
    from regard.audits.load import load_head, tokenizer_of

    checkpoint = find(name)
    model, tokenizer = load_head(checkpoint), tokenizer_of(checkpoint)
    most = longest(model, tokenizer)
    words = beginning(tokenizer, refuse_halves("--text", text), most)
    encoded = tokenizer(words, return_tensors="pt", truncation=True, max_length=most)
    options = {key: encoded[key] for key in ("input_ids", "attention_mask") if key in encoded}
    ids = options["input_ids"][0].tolist()
    special = set(getattr(tokenizer, "all_special_ids", ()))
    moving = [k for k, one in enumerate(ids) if one not in special]
    if not moving:
        raise ArgumentError("--text", f"has no word: {text!r}", "give a sentence")
    found, x = network_of(model, options)
    names = getattr(model.config, "id2label", None) or {}
    kind = kind_of(model)
    name_of = (lambda k: str(names.get(k, k))) if kind == CLASSES else lambda k: tokenizer.decode([k])
    return Asked(
        kind, checkpoint.name, text, tokenizer.convert_ids_to_tokens(ids), moving, x, found, None, name_of
    )


def kind_of(model: nn.Module) -> str:
    """What a model says of a text."""
    if hasattr(model, "lm_head"):
        return NEXT
    return CLASSES if hasattr(model, "classifier") or hasattr(model, "score") else EMBEDDING
