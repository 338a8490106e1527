"""Changed words: two letters swapped, another word, a word left out. The model runs each changed text, and
its answer is compared with the answer to the text itself, in the model's own measure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.audits.capture import capture, output_tensor, tokens_in
from regard.audits.changes import CHANGES, Unit
from regard.audits.checks.base import RUN, STACK, Check, Column, Result, Scene, register
from regard.audits.checks.influence import INPUTS, token_influence
from regard.audits.outputs import CLASSES, EMBEDDING, NEXT, answers, cosines, divergences, kind_of, names_of
from regard.audits.sources import not_given
from regard.errors import ArgumentError
from regard.transport import wasserstein

UNITS, TOKENS = 33, 50_000
"""At most so many words of a text are changed, each in every way, and about so many tokens are run in all."""
LEAST = 4
"""Words that are changed in every text, however long it is."""
ROWS = 8_192
"""How many rows of the embedding table are compared at once."""
FOLLOWED = 12
"""Words whose changes are followed through the layers, in a text of at most LONGEST tokens."""
LONGEST = 128


def changed_words(scene: Scene) -> Result:
    """Run the changed texts of one input and compare the answers; follow some of them through the layers."""
    _refuse_other_inputs(scene)
    units = _sampled(scene)
    found = _run(scene, [(kind, unit) for unit in units for kind in CHANGES])
    if not found["changes"]:
        return Result({}, None, "no word of the text can be changed")
    numbers = _numbers(scene, found)
    found["words"], found["possible"] = len(units), len(scene.units)
    found["nearest"] = _nearest(scene, units) if scene.index == 0 else []
    try:
        followed = _followed(scene, units)
    except ArgumentError as reason:
        return Result(numbers, found, f"its changes are not followed through the layers: {reason}")
    if followed:
        stack = next(iter(scene.stacks))
        numbers["expansion"] = {stack: _expansion(followed)}
        for kind in CHANGES:
            numbers[f"{kind}_correlation"] = {stack: correlation([e for e in followed if e["kind"] == kind])}
    return Result(numbers, {**found, "followed": followed})


def swapped_letters(scene: Scene) -> Result:
    """Run the typos alone: the quick form."""
    _refuse_other_inputs(scene)
    units = _sampled(scene)
    found = _run(scene, [("typo", unit) for unit in units])
    if not found["changes"]:
        return Result({}, None, "no word of the text has two letters that can change places")
    found["words"], found["possible"] = len(units), len(scene.units)
    return Result(_numbers(scene, found), {**found, "followed": []})


def _refuse_other_inputs(scene: Scene) -> None:
    if scene.text is None or scene.encode is None:
        raise ArgumentError("inputs", "are not texts", "give texts and a tokenizer to see what a typo does")
    if not scene.units:
        raise ArgumentError(
            "tokenizer", "does not say which token is from which word", "use a fast tokenizer"
        )


def _sampled(scene: Scene) -> list[Unit]:
    """The words of a text that are changed: all of a short text, or a random sample."""
    every = list(scene.units)
    most = max(LEAST, min(UNITS, TOKENS // (len(CHANGES) * max(1, len(scene.tokens)) * scene.texts)))
    if scene.every_word or len(every) <= most:
        return every
    chosen = torch.randperm(len(every), generator=scene.generator(1))[:most]
    return [every[k] for k in sorted(chosen.tolist())]


def _run(scene: Scene, wanted: list[tuple[str, Unit]]) -> dict[str, Any]:
    """Return the table of a text: the kind of its answer, the answer, and an entry for each changed text."""
    reading, encode, model = scene.reading, scene.encode, scene.whole
    assert reading is not None
    assert encode is not None
    changed = [(kind, unit, other) for kind, unit in wanted if (other := CHANGES[kind](reading, unit))]
    texts = [other for _, _, other in changed]
    found = compared(model, reading.tokenizer, reading.text, texts, encode)
    entries = [
        {"kind": kind, "word": reading.letters(unit), "text": other, **entry}
        for (kind, unit, other), entry in zip(changed, found["changes"], strict=True)
    ]
    return {**found, "unit": reading.kind, "changes": entries}


def compared(model: Any, tokenizer: Any, text: str, texts: list[str], encode: Any) -> dict[str, Any]:
    """Run a text and changed ones, and compare each answer with the answer to the text."""
    kind, name = kind_of(model), names_of(model, tokenizer)
    original, *others = answers(model, [encode(one) for one in [text, *texts]])
    found = {"measure": kind, "changes": [_compare(kind, name, original, other) for other in others]}
    return found if kind == EMBEDDING else {**found, "answer": name(int(original.argmax()))}


def compared_pairs(
    model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]], encode: Any
) -> dict[str, Any]:
    """Run pairs of texts, and compare the answer to the second with the answer to the first."""
    kind, name = kind_of(model), names_of(model, tokenizer)
    outputs = answers(model, [encode(one) for pair in pairs for one in pair])
    entries = [
        {
            "kind": "pair",
            "original": first,
            "text": second,
            **_compare(kind, name, *outputs[2 * k : 2 * k + 2]),
        }
        for k, (first, second) in enumerate(pairs)
    ]
    return {"measure": kind, "changes": entries}


def _compare(kind: str, name: Callable[[int], str], original: Tensor, other: Tensor) -> dict[str, Any]:
    """Compare two answers: the cosine of embeddings, the label, or the next token and the divergence of its
    distribution.
    """
    if kind == EMBEDDING:
        return {"cosine": float(cosines(original, other[None]))}
    top = int(other.argmax())
    entry = {"answer": name(top), "changed": top != int(original.argmax())}
    return {**entry, "divergence": float(divergences(original, other[None]))} if kind == NEXT else entry


def _numbers(scene: Scene, found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The columns of a text, by the measure of its model."""
    entries = found["changes"]
    place = next(iter(scene.stacks), "")
    named = {
        EMBEDDING: {"worst_cosine": min, "median_cosine": statistics.median},
        NEXT: {"worst_kl": max, "median_kl": statistics.median},
    }.get(found["measure"], {})
    key = "cosine" if found["measure"] == EMBEDDING else "divergence"
    numbers = {name: {place: float(of([e[key] for e in entries]))} for name, of in named.items()}
    rate = {CLASSES: "changed_labels", NEXT: "changed_top1"}.get(found["measure"])
    if rate is not None:
        numbers[rate] = {place: sum(entry["changed"] for entry in entries) / len(entries)}
    return numbers


def _nearest(scene: Scene, units: list[Unit]) -> list[float]:
    """The smallest and the largest distance, over the changed words, between the vector of a word's first
    token and the nearest other one in the embedding table, relative to its length.
    """
    table = getattr(scene.model, "get_input_embeddings", lambda: None)()
    if not isinstance(table, torch.nn.Embedding) or "input_ids" not in scene.options:
        return []
    own = scene.options["input_ids"][0, [unit.tokens[0] for unit in units]]
    vectors = table.weight[own].detach()
    far = torch.full((len(own),), math.inf, device=vectors.device)
    for first in range(0, table.num_embeddings, ROWS):
        rows = table.weight[first : first + ROWS].detach()
        gaps = torch.cdist(vectors, rows)
        gaps[own.unsqueeze(1) == torch.arange(first, first + len(rows), device=own.device)] = math.inf
        far = torch.minimum(far, gaps.amin(1))
    relative = far / vectors.norm(dim=-1)
    return [float(relative.min()), float(relative.max())]


@dataclass(frozen=True)
class Passage:
    """The tokens that enter each block of the first stack, and those that leave the last."""

    tokens: list[Tensor]

    @property
    def pooled(self) -> Tensor:
        """The mean output token."""
        return self.tokens[-1].mean(0)


def _followed(scene: Scene, units: list[Unit]) -> list[dict[str, Any]]:
    """W₁ of the tokens layer by layer and the distance of the mean output tokens, for some changed words."""
    if scene.index >= INPUTS.of(scene):
        return []
    if not scene.stacks:
        raise ArgumentError(
            "model", f"has no stack of blocks ({scene.stackless})", "other checks do not need one"
        )
    if reason := not_given(scene):
        raise ArgumentError("model", f"has words elsewhere ({reason})", "other checks do not need them")
    if len(scene.tokens) > LONGEST and not scene.thorough:
        found = f"has {len(scene.tokens)} tokens"
        raise ArgumentError("text", found, f"give one of at most {LONGEST}, or --thorough")
    here, predicted = _through(scene, scene.options), token_influence(scene)
    chosen = units if scene.thorough else units[:FOLLOWED]
    return list(_distances(scene, chosen, here, predicted))


def _distances(scene: Scene, units: list[Unit], here: Passage, predicted: Tensor) -> Iterator[dict[str, Any]]:
    reading, encode = scene.reading, scene.encode
    assert reading is not None
    assert encode is not None
    for kind in CHANGES:
        for unit in units:
            other = CHANGES[kind](reading, unit)
            if other is None:
                continue
            there = _through(scene, encode(other))
            pairs = zip(here.tokens, there.tokens, strict=True)
            yield {
                "kind": kind,
                "word": reading.letters(unit),
                "text": other,
                "distances": [float(wasserstein(a, b, 1.0)) for a, b in pairs],
                "moved": float((there.pooled - here.pooled).norm()),
                "size": float(here.pooled.norm()),
                "predicted": float(predicted[list(unit.tokens)].sum()),
            }


def _expansion(entries: list[dict[str, Any]]) -> float:
    """The largest ratio of distances after and before the network."""
    ratios = [e["distances"][-1] / e["distances"][0] for e in entries if e["distances"][0] > 0]
    return max(ratios, default=math.nan)


def _through(scene: Scene, options: dict[str, Any]) -> Passage:
    stack, blocks = next(iter(scene.stacks.items()))
    paths = [block.path for block in blocks]
    trace = capture(scene.model, options, [*paths, scene.end(stack)])
    entering = [tokens_in(trace[path]) for path in paths]
    leaving = output_tensor(trace[scene.end(stack)].output)
    return Passage([tokens.detach().double().cpu() for tokens in [*entering, leaving]])


def correlation(entries: list[dict[str, Any]]) -> float:
    """Spearman's rank correlation of the influence of a word and how much its change moved the output."""
    if len(entries) < 3:
        return math.nan
    first, second = (_ranks([entry[name] for entry in entries]) for name in ("predicted", "moved"))
    if len(set(first)) < 2 or len(set(second)) < 2:
        return math.nan
    return statistics.correlation(first, second)


def _ranks(values: list[float]) -> list[float]:
    """The place of each value; equal ones share the mean of theirs."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


SAMPLE = (
    "the changed words of every text, or tokens of a text without words, each in three ways "
    f"(a sample of at most {UNITS} of a text)"
)
OVER_LAYERS = (
    f"Run on up to {FOLLOWED} words (or tokens) of each of the first {INPUTS.usual} inputs (thorough: all)."
)


def _correlation_column(kind: str) -> Column:
    return Column(
        f"{kind}_correlation",
        f"influence predicts a {kind}",
        "Spearman's rank correlation, over the words of a text (its tokens where it has no words), of "
        f"their influence and how much their {kind} moved the mean output. {OVER_LAYERS}",
        RUN,
        STACK,
        None,
        "mean",
    )


def _answer_column(name: str, title: str, what: str, bad: str) -> Column:
    """A column over all changed words; bad: the end that is alarming, "largest" or "smallest", of a rate
    "mean", of a typical value "median".
    """
    low = "cosine" in name
    return Column(name, f"{title} after one change", f"{what} Over {SAMPLE}.", RUN, STACK, not low, bad)


COSINE = "cosine between the embeddings (mean output tokens) of a text and of the changed text."
KL = "Kullback–Leibler divergence, in nats, of the next token's distribution from that of the text itself."
ANSWERS = (
    _answer_column("worst_cosine", "worst cosine", f"Smallest {COSINE}", "smallest"),
    _answer_column("median_cosine", "median cosine", f"Median {COSINE}", "median"),
    _answer_column("changed_labels", "labels flipped", "Share of texts that get another label.", "mean"),
    _answer_column(
        "changed_top1", "next tokens changed", "Share of texts with another most probable next token.", "mean"
    ),
    _answer_column("worst_kl", "worst KL", f"Largest {KL}", "largest"),
    _answer_column("median_kl", "median KL", f"Median {KL}", "median"),
)


register(
    Check(
        "words",
        "What do typos and other changes of a text do to the answer?",
        (
            *ANSWERS,
            Column(
                "expansion",
                "largest expansion of a change",
                "W1 distance of the output tokens over that of the input tokens, the largest of the typos, "
                f"replacements and deletions. {OVER_LAYERS}",
                RUN,
                STACK,
                True,
            ),
            *(_correlation_column(kind) for kind in CHANGES),
        ),
        of_input=changed_words,
        quick_input=swapped_letters,
        order=90,
    )
)
