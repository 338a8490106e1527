"""What `regard decide` asks of: a model on one text, as a function of the tokens that enter its layers."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.audits.inputs import ids_name
from regard.audits.outputs import CLASSES, answers, kind_of, names_of
from regard.decisions import shipped
from regard.decisions.nearest import Nearest, nearest_token
from regard.decisions.networks import affine, network_of, one_of
from regard.decisions.reviews import LABELS
from regard.decisions.typos import typos
from regard.errors import ArgumentError
from regard.maps import Affine, Compose

if TYPE_CHECKING:
    from regard.audits.checks.base import Scene
    from regard.audits.inputs import Input

Run = Callable[[list[str]], Tensor]
"""From texts to logits (batch, classes), or to embeddings (batch, width)."""


@dataclass(frozen=True)
class Asked:
    """A text as a model reads it.

    kind: what the model computes for it. words: the tokens, those that stand for nothing among them; moving:
    which of them are words. x (n, d): as they enter the first layer. model: a module on such tokens, and
    readout what makes the answer of its value. names: of the classes. spans: where the words of the text
    begin and end. run: the model on whole texts. nearest: the nearest other word at a place. refused: why
    nothing is proved, where x and moving are empty. cuts: whether the model reads only the beginning of a
    text. unit: what the text is made of, words or tokens (residues, atoms). spells: whether the tokenizer
    knows a changed text; None where any may be run. notes: what is wrong with how the tokenizer reads the
    text, with the repair.

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
    spans: tuple[tuple[int, int], ...] = ()
    run: Run | None = None
    nearest: Nearest | None = None
    refused: str = ""
    cuts: Callable[[str], bool] = lambda text: False
    unit: str = "word"
    spells: Callable[[str], bool] | None = None
    notes: tuple[str, ...] = ()

    def identity(self) -> str:
        """A fingerprint of the weights, the tokens and the version, on which results depend."""
        from regard import __version__

        found = hashlib.blake2b(repr((__version__, self.kind, self.text)).encode())
        for tensor in (self.x, *self.model.state_dict().values()):
            found.update(
                tensor.detach().cpu().contiguous().flatten().view(dtype=torch.uint8).numpy().tobytes()
            )
        return found.hexdigest()


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

    def run(texts: list[str]) -> Tensor:
        with torch.no_grad():
            return model([shipped.words_of(one) for one in texts])

    def nearest(place: int) -> tuple[str, float]:  # any letters are a word of this classifier
        others = typos(words[place - 1])
        if not others:
            return "", math.nan
        with torch.no_grad():
            moved = model.embed([[*words[: place - 1], one, *words[place:]] for one in others])[:, place]
        far = (moved - x[place]).norm(dim=-1) / x[place].norm()
        return others[int(far.argmin())], float(far.min())

    return Asked(
        CLASSES,
        shipped.NAME,
        text,
        ["", *words],
        [k + 1 for k, word in enumerate(words) if word.isalnum()],
        x,
        model.encoder,
        Compose((one_of(len(x), 0), Affine(*affine(model.readout)))),
        lambda k: LABELS[k],
        tuple(match.span() for match in re.finditer(r"[^\W\d_]+", text)),
        run,
        nearest,
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
    from regard.audits.inputs import inputs_of, notes_on
    from regard.audits.load import load_head, tokenizer_of

    checkpoint = find(name)
    model, tokenizer = load_head(checkpoint), tokenizer_of(checkpoint)
    (item,) = inputs_of(model, [text], tokenizer)
    return replace(read_by(model, item, checkpoint.name), notes=tuple(notes_on([item], tokenizer)))


def read_by(model: nn.Module, item: Input | Scene, name: str) -> Asked:
    """A text as a model of transformers reads it."""
    reading, encode = item.reading, item.encode
    named = ids_name(model)
    if reading is None or encode is None or named not in item.options:
        raise ArgumentError("inputs", "are not texts", "give a text and a tokenizer to see what a word does")
    text, tokenizer = reading.text, reading.tokenizer
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        found = f"{type(model).__name__} has an encoder and a decoder"
        raise ArgumentError("MODEL", found, "give an encoder, a classifier or a decoder")
    special = set(getattr(tokenizer, "all_special_ids", ()))
    ids = item.options[named][0].tolist()
    moving = [k for k, one in enumerate(ids) if one not in special]
    if not moving:
        remedy = getattr(item, "repair", "") or "give a sentence"
        raise ArgumentError("--text", f"has no word that the tokenizer knows: {text!r}", remedy)
    spans = [(word.start, word.end) for word in reading.units]
    asked = Asked(
        kind_of(model),
        name,
        text,
        item.tokens,
        moving,
        torch.zeros(0, 0),
        model,
        None,
        names_of(model, tokenizer),
        tuple(spans or [match.span() for match in re.finditer(r"\w+", text)]),
        lambda texts: answers(model, [encode(one) for one in texts]),
        cuts=lambda other: len(tokenizer(other, verbose=False)["input_ids"]) > reading.longest,
        unit=reading.kind,
        spells=None if reading.kind == "word" else reading.knows,
    )
    try:
        network, x = network_of(model, {"input_ids": item.options[named]})
    except ArgumentError as refusal:
        return replace(asked, moving=[], refused=f"the model {refusal.found}; {refusal.remedy}")
    except AttributeError as error:  # layers of another family, with the names of one that is read
        found = f"the model is a {type(model).__name__}, whose layers are not read ({error})"
        return replace(asked, moving=[], refused=found)
    return replace(asked, x=x, model=network, nearest=nearest_token(network, x, tokenizer))
