"""Decisions: how far one word can move before the answer changes, proved through the whole model, and where
robustness is lost. Made only when it is named: it takes seconds to minutes for every word.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from regard._durations import spoken_time
from regard.audits.checks.base import PROVED, SEARCHED, STACK, Check, Column, Result, Scene, register
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.decisions.asked import Asked

LARGEST = 4_096
"""Up to how many numbers all tokens of the first text may have: beyond, a word takes many minutes."""
SECONDS, NUMBERS = 20.0, 2_304
"""What one bound through six layers takes of a core at so many numbers (python -m benchmarks.decisions); it
grows like their cube.
"""
RADIUS, RESOLUTION = 1e-3, 1.2
"""For embeddings, how far a word moves, relative to its length; for classes, how close proved radii are."""


def decision(scene: Scene) -> Result:
    """Each word of the first text: up to where the answer stays, and the shortest change that was found."""
    if scene.index:
        return Result()
    from regard.decisions.word_answers import answers

    found = answers(_asked(scene), radius=RADIUS, resolution=RESOLUTION)
    stack = next(iter(scene.stacks), "")
    table: dict[str, Any] = {
        "kind": found.kind,
        "label": found.label,
        "radius": found.radius,
        "sentences": found.sentences(),
        "words": [asdict(one) for one in found.words],
        "spent": [{**asdict(one), "share": one.share} for one in found.spent],
    }
    numbers = {"answer_proved": found.weakest.proved, "answer_attack": found.attacked.attack}
    return Result({name: {stack: value} for name, value in numbers.items()}, table)


def _asked(scene: Scene) -> Asked:
    """The first text as the model reads it."""
    from regard.decisions.asked import CLASSES, NEXT, Asked, kind_of
    from regard.decisions.networks import network_of

    if not scene.units or "input_ids" not in scene.options:
        raise ArgumentError("inputs", "are not texts", "give a text and a tokenizer to see what a word does")
    network, x = network_of(scene.model, scene.options)
    if x.numel() > LARGEST:
        taken = spoken_time(SECONDS * (x.numel() / NUMBERS) ** 3)
        found = f"1 has {len(x)} tokens of width {x.shape[-1]}: a bound through six layers would take {taken}"
        remedy = f"give a first text with at most {LARGEST // x.shape[-1]} tokens, or call regard decide"
        raise ArgumentError("inputs", f"{found}, extrapolated from {NUMBERS:,} numbers", remedy)
    moving = sorted({token for word in scene.units for token in word.tokens})
    labels = getattr(getattr(scene.model, "config", None), "id2label", None) or {}
    kind = kind_of(scene.model)
    named = labels if kind in (CLASSES, NEXT) else {}
    name = type(scene.model).__name__
    return Asked(
        kind,
        name,
        scene.text or "",
        list(scene.tokens),
        moving,
        x,
        network,
        None,
        lambda k: str(named.get(k, k)),
    )


register(
    Check(
        "decision",
        "How far can one word move before the answer changes?",
        (
            Column(
                "answer_proved",
                "answer stays, proved",
                "The relative move of any one word of the first text up to which the answer certainly stays; "
                "for an embedding, the cosine to the original that no move of a thousandth goes below.",
                PROVED,
                STACK,
                False,
                "smallest",
                "answer_attack",
            ),
            Column(
                "answer_attack",
                "answer changed, attacked",
                "The shortest relative move of a word that was found to change the answer; for an embedding, "
                "the smallest cosine that was found.",
                SEARCHED,
                STACK,
                False,
                "smallest",
            ),
        ),
        of_input=decision,
        order=90,
        named=True,
    )
)
