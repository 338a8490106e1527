"""Decisions: what typos of the first text do, run, and how far one token can move before the answer changes,
proved through the whole model. Made only when it is named: a proof takes seconds to minutes for every token.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from regard._durations import spoken_time
from regard.audits.checks.base import PROVED, RUN, SEARCHED, STACK, Check, Column, Result, Scene, register
from regard.audits.files import saved_class
from regard.audits.inputs import Input
from regard.audits.steps import tell

if TYPE_CHECKING:
    from torch import Tensor, nn

LARGEST = 4_096
"""Up to how many numbers all tokens of the first text may have: beyond, a token takes many minutes."""
SECONDS, NUMBERS, LAYERS = 20.0, 2_304, 6
"""One bound through so many layers takes so many seconds of a core at so many numbers (python -m
benchmarks.decisions); it grows like the cube of these numbers, but is never below LEAST.
"""
LEAST = 0.5
OF_EMBEDDINGS, OF_ANSWERS = 2, 10
"""About how many bounds are computed for a token."""
READ = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "gpt2")
"""The model types whose layers are read."""
ANSWERS = ("ForSequenceClassification", "LMHeadModel", "ForCausalLM")
"""How architectures end that give answers, and no embeddings."""
RADIUS, RESOLUTION = 1e-3, 1.2
"""For embeddings, how far a token moves, relative to its length; for classes, how close proved radii are."""


def answer_radius(scene: Scene) -> Result:
    """The first text: what its typos do, which moves cannot change its answer, and the shortest that does."""
    if scene.index:
        return Result()
    from regard.decisions.asked import read_by
    from regard.decisions.word_answers import answers

    asked = read_by(scene.whole, scene, type(scene.whole).__name__)
    asked = replace(asked, refused=asked.refused or _too_long(asked.x))
    found = answers(
        asked,
        lambda what, done, total: tell(f"{what} ({done:,} of {total:,})"),
        radius=RADIUS,
        resolution=RESOLUTION,
    )
    stack, typos = next(iter(scene.stacks), ""), found.typos or []
    table: dict[str, Any] = {
        "kind": found.kind,
        "unit": found.unit,
        "label": found.label,
        "radius": found.radius,
        "level": found.level,
        "question": found.question,
        "sentences": found.sentences()[
            : 1 if found.refused else 2
        ],  # why nothing is proved is the reason below
        "typos": [asdict(one) for one in typos],
        "words": [asdict(one) for one in found.words],
        "spent": [{**asdict(one), "share": one.share} for one in found.spent],
    }
    numbers = dict[str, float]()
    if typos:
        numbers["typos_changed"] = sum(one.changed for one in typos) / sum(one.count for one in typos)
    if found.words:
        numbers |= {"answer_proved": found.weakest.proved, "answer_attack": found.attacked.attack}
    return Result({name: {stack: value} for name, value in numbers.items()}, table, found.refused)


def _too_long(x: Tensor) -> str:
    """Why nothing is proved of a long text; nothing where it is not too long."""
    if x.numel() <= LARGEST:
        return ""
    taken = spoken_time(SECONDS * (x.numel() / NUMBERS) ** 3)
    return (
        f"the first text has {len(x)} tokens of width {x.shape[-1]}: a bound through six layers would take "
        f"{taken}, extrapolated from {NUMBERS:,} numbers; give a first text with at most "
        f"{LARGEST // x.shape[-1]} tokens, or call regard decide"
    )


def predicted_seconds(model: nn.Module, item: Input) -> float | None:
    """What this check would take of a core for a text, extrapolated; None where it would be refused."""
    config = getattr(model, "config", None)
    if item.text is None or not item.units or getattr(config, "model_type", "") not in READ:
        return None
    numbers = len(item.tokens) * config.hidden_size  # type: ignore[union-attr]
    if numbers > LARGEST:
        return None
    tokens = len({token for word in item.units for token in word.tokens})
    bounds = tokens * (OF_ANSWERS if saved_class(config).endswith(ANSWERS) else OF_EMBEDDINGS)
    layers = config.num_hidden_layers  # type: ignore[union-attr]
    return float(bounds * max(LEAST, SECONDS * (numbers / NUMBERS) ** 3) * layers / LAYERS)


register(
    Check(
        "radius",
        "What do typos do to the answer, and how far can one token move before it changes?",
        (
            Column(
                "typos_changed",
                "typos that change the answer",
                "The share of the one-letter typos of the first text that change its answer, each of them "
                "run; for an embedding, the share that takes the cosine to the original below 0.9.",
                RUN,
                STACK,
                True,
            ),
            Column(
                "answer_proved",
                "answer stays, proved",
                "How far the vector of any one token of the first text can move, relative to its length, "
                "while the answer certainly stays; for an embedding, the cosine to the original that no move "
                "of a thousandth goes below. A typo is a far larger move.",
                PROVED,
                STACK,
                False,
                "smallest",
                "answer_attack",
            ),
            Column(
                "answer_attack",
                "answer changed, attacked",
                "The shortest relative move of a token that was found to change the answer; for an "
                "embedding, the smallest cosine that was found.",
                SEARCHED,
                STACK,
                False,
                "smallest",
            ),
        ),
        of_input=answer_radius,
        order=90,
        named=True,
    )
)
