"""Mis-specified inputs: a typo, another word, a word left out; how far the tokens go,
and how far the output.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.audits.capture import capture, output_tensor, tokens_in
from regard.audits.changes import CHANGES
from regard.audits.checks.base import RUN, STACK, Check, Column, Result, Scene, register
from regard.audits.checks.influence import INPUTS, token_influence
from regard.audits.sources import not_given
from regard.errors import ArgumentError
from regard.transport import wasserstein


@dataclass(frozen=True)
class Passage:
    """The tokens that enter each block of the first stack, and those that leave the last."""

    tokens: list[Tensor]

    @property
    def pooled(self) -> Tensor:
        """The mean output token."""
        return self.tokens[-1].mean(0)


def misspecification(scene: Scene) -> Result:
    """W1 of the tokens layer by layer and the distance of the mean output tokens, for each unit of the text
    changed in each way.
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
            "model", f"has no stack of blocks ({scene.stackless})", "other checks do not need one"
        )
    if reason := not_given(scene):
        raise ArgumentError("model", f"has words elsewhere ({reason})", "other checks do not need them")
    if not scene.units:
        raise ArgumentError(
            "tokenizer", "does not say which token is from which word", "use a fast tokenizer"
        )


def _expansion(stack: str, entries: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The largest ratio of distances after and before the network."""
    ratios = [e["distances"][-1] / e["distances"][0] for e in entries if e["distances"][0] > 0]
    return {"expansion": {stack: max(ratios, default=math.nan)}}


def _changes(scene: Scene, kind: str, here: Passage, predicted: Tensor) -> list[dict[str, Any]]:
    found = []
    reading, encode = scene.reading, scene.encode
    assert reading is not None
    assert encode is not None
    for unit in reading.units:
        other = CHANGES[kind](reading, unit)
        if other is None:
            continue
        there = _through(scene, encode(other))
        distances = [float(wasserstein(a, b, 1.0)) for a, b in zip(here.tokens, there.tokens, strict=True)]
        found.append(
            {
                "kind": kind,
                "unit": reading.kind,
                "word": reading.letters(unit),
                "text": other,
                "distances": distances,
                "moved": float((there.pooled - here.pooled).norm()),
                "size": float(here.pooled.norm()),
                "predicted": float(predicted[list(unit.tokens)].sum()),
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
        "Spearman's rank correlation, over the words of a text (its tokens where it has no words), of "
        f"their influence and how far their {kind} moved the mean output. "
        f"Measured on the first {INPUTS.usual} inputs (all of them in a thorough audit).",
        RUN,
        STACK,
        None,
        "mean",
    )


register(
    Check(
        "misspecification",
        "What do typos and other changes of a text do?",
        (
            Column(
                "expansion",
                "largest expansion of a change",
                "W1 distance of the output tokens over that of the input tokens, the largest of the "
                "typos, replacements and deletions that were run: of words, or of tokens where a text has "
                f"no words. For the first {INPUTS.usual} inputs (all of them in a thorough audit).",
                RUN,
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
