"""Mis-specified inputs: a typo, another word, a word left out; how far the tokens go,
and how far the output.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.audits.capture import capture, output_tensor, tokens_in
from regard.audits.checks.base import EXACT, STACK, Check, Column, Result, Scene, register
from regard.audits.checks.influence import INPUTS, token_influence
from regard.audits.inputs import Word
from regard.errors import ArgumentError
from regard.transport import wasserstein

REPLACEMENTS = ("table", "seven", "under", "green", "quickly", "river", "idea", "was")
"""Words that stand in for others."""


def typo(text: str, word: Word, position: int) -> str | None:
    """Two neighboring letters change places."""
    letters = text[word.start : word.end]
    for at in sorted(range(len(letters) - 1), key=lambda i: abs(i - len(letters) // 2)):
        if letters[at] != letters[at + 1]:
            swapped = letters[:at] + letters[at + 1] + letters[at] + letters[at + 2 :]
            return text[: word.start] + swapped + text[word.end :]
    return None


def replacement(text: str, word: Word, position: int) -> str | None:
    """Another word stands there."""
    other = REPLACEMENTS[position % len(REPLACEMENTS)]
    if other == text[word.start : word.end].lower():
        other = REPLACEMENTS[(position + 1) % len(REPLACEMENTS)]
    return text[: word.start] + other + text[word.end :]


def deletion(text: str, word: Word, position: int) -> str | None:
    """The word is left out."""
    shorter = (text[: word.start].rstrip() + text[word.end :]).strip()
    return shorter or None


CHANGES: dict[str, Callable[[str, Word, int], str | None]] = {
    "typo": typo,
    "replacement": replacement,
    "deletion": deletion,
}


@dataclass(frozen=True)
class Passage:
    """The tokens that enter each block of the first stack, and those that leave the last."""

    tokens: list[Tensor]

    @property
    def pooled(self) -> Tensor:
        """The mean output token."""
        return self.tokens[-1].mean(0)


def misspecification(scene: Scene) -> Result:
    """Each word of the text changed in each way: W1 of the tokens layer by layer,
    and how far the mean output token goes.
    """
    _refuse_other_inputs(scene)
    if scene.index >= INPUTS.of(scene):
        return Result()
    here, predicted = _through(scene, scene.options), token_influence(scene)
    entries = [entry for kind in CHANGES for entry in _changes(scene, kind, here, predicted)]
    if not entries:
        return Result()
    stack = next(iter(scene.stacks))
    correlations = {
        f"{kind}_correlation": {stack: correlation([e for e in entries if e["kind"] == kind])}
        for kind in CHANGES
    }
    return Result({**_expansion(stack, entries), **correlations}, {"changes": entries})


def typos(scene: Scene) -> Result:
    """What a quick look takes: typos alone, and nothing that predicts them."""
    _refuse_other_inputs(scene)
    nothing = torch.full((len(scene.tokens),), math.nan)
    entries = _changes(scene, "typo", _through(scene, scene.options), nothing)
    return (
        Result(_expansion(next(iter(scene.stacks)), entries), {"changes": entries}) if entries else Result()
    )


def _refuse_other_inputs(scene: Scene) -> None:
    if scene.text is None or scene.encode is None:
        raise ArgumentError("inputs", "are not texts", "give texts and a tokenizer to see what a typo does")
    if not scene.stacks:
        raise ArgumentError(
            "model", f"has no stack of blocks ({scene.alone})", "other checks do not need one"
        )
    if not scene.words:
        raise ArgumentError(
            "tokenizer", "does not say which token is from which word", "use a fast tokenizer"
        )


def _expansion(stack: str, entries: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The largest ratio of distances after and before the network."""
    ratios = [e["distances"][-1] / e["distances"][0] for e in entries if e["distances"][0] > 0]
    return {"expansion": {stack: max(ratios, default=math.nan)}}


def _changes(scene: Scene, kind: str, here: Passage, predicted: Tensor) -> list[dict[str, Any]]:
    found = []
    assert scene.text is not None
    assert scene.encode is not None
    for position, word in enumerate(scene.words):
        other = CHANGES[kind](scene.text, word, position)
        if other is None:
            continue
        there = _through(scene, scene.encode(other))
        distances = [float(wasserstein(a, b, 1.0)) for a, b in zip(here.tokens, there.tokens, strict=True)]
        found.append(
            {
                "kind": kind,
                "word": scene.text[word.start : word.end],
                "text": other,
                "distances": distances,
                "moved": float((there.pooled - here.pooled).norm()),
                "size": float(here.pooled.norm()),
                "predicted": float(predicted[list(word.tokens)].sum()),
            }
        )
    return found


def _through(scene: Scene, options: dict[str, Any]) -> Passage:
    stack, blocks = next(iter(scene.stacks.items()))
    paths = [block.path for block in blocks]
    trace = capture(scene.model, options, [*paths, scene.end(stack)])
    entering = [tokens_in(trace[path]) for path in paths]
    return Passage(
        [
            tokens.detach().double().cpu()
            for tokens in [*entering, output_tensor(trace[scene.end(stack)].output)]
        ]
    )


def correlation(entries: list[dict[str, Any]]) -> float:
    """Spearman's rank correlation of what the influence predicts and how far the output went."""
    if len(entries) < 3:
        return math.nan
    first, second = (_ranks([entry[name] for entry in entries]) for name in ("predicted", "moved"))
    if len(set(first)) < 2 or len(set(second)) < 2:
        return math.nan
    return statistics.correlation(first, second)


def _ranks(values: list[float]) -> list[float]:
    """The place of each value; equal ones share the mean of theirs."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


def _correlation_column(kind: str) -> Column:
    return Column(
        f"{kind}_correlation",
        f"influence predicts a {kind}",
        "Spearman's rank correlation, over the words of a text, of a word's influence and how far its "
        f"{kind} moved the mean output. "
        f"Measured on the first {INPUTS.usual} inputs (all of them in a thorough audit).",
        EXACT,
        STACK,
        None,
        "mean",
    )


register(
    Check(
        "misspecification",
        "What does a typo do?",
        (
            Column(
                "expansion",
                "largest expansion of a changed word",
                "W1 distance of the output tokens over that of the input tokens, for the worst of all "
                "typos, replacements and deletions "
                f"of the words of the first {INPUTS.usual} inputs (all of them in a thorough audit).",
                EXACT,
                STACK,
                True,
            ),
            *(_correlation_column(kind) for kind in CHANGES),
        ),
        of_input=misspecification,
        quick_input=typos,
        order=90,
    )
)
