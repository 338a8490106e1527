"""Pairs of the user's own, an original and a changed text: both are run, and the answers compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from regard.audits.checks.base import RUN, STACK, Check, Column, Result, register
from regard.audits.checks.changed_words import compared_pairs
from regard.audits.outputs import CLASSES, EMBEDDING, NEXT

Encode = Callable[[str], dict[str, Any]]


def pairs(model: Any, tokenizer: Any, given: Sequence[tuple[str, str]], encode: Encode) -> Result:
    """Run pairs of texts and compare the answers, in the measure of the model."""
    found = compared_pairs(model, tokenizer, given, encode)
    entries, numbers = found["changes"], dict[str, float]()
    if found["measure"] == EMBEDDING:
        cosines = [entry["cosine"] for entry in entries]
        numbers = {"worst_pair_cosine": min(cosines), "median_pair_cosine": statistics.median(cosines)}
    if found["measure"] == NEXT:
        numbers = {"worst_pair_kl": max(entry["divergence"] for entry in entries)}
    if found["measure"] in (CLASSES, NEXT):
        numbers["changed_pairs"] = sum(entry["changed"] for entry in entries) / len(entries)
    return Result({name: {"": value} for name, value in numbers.items()}, found)


def _column(name: str, title: str, meaning: str, over: str) -> Column:
    title, meaning = f"{title} of your pairs", f"{meaning}, of the pairs of --pairs."
    return Column(name, title, meaning, RUN, STACK, over == "largest", over)


register(
    Check(
        "pairs",
        "What do your own changes do to the answer? (--pairs)",
        (
            _column("worst_pair_cosine", "worst cosine", "Smallest cosine of embeddings", "smallest"),
            _column("median_pair_cosine", "median cosine", "Median cosine of embeddings", "smallest"),
            _column("changed_pairs", "changed answers", "Share with another answer", "largest"),
            _column("worst_pair_kl", "worst KL", "Largest KL of the next token, in nats", "largest"),
        ),
        order=91,
    )
)
