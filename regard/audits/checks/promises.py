"""Promises: the constants that layers of regard.nn were built to keep, proved again from the weights, and
attacked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from regard.audits.checks.base import PROVED, SEARCHED, STACK, Check, Column, Result, Scene, register
from regard.domains import Whole
from regard.proofs import falsify

RESTARTS, STEPS, TOKENS = 3, 20, 6
"""Of the attack: it is there to be seen, not to be the strongest."""


def promises(scene: Scene) -> Result:
    """For each part with a promise: what was promised, what its weights prove, what an attack finds."""
    found = {path: _measure(part) for path, part in promised(scene.model)} if scene.index == 0 else {}
    names = ("promised", "promise_proved", "promise_attacked")
    return Result(
        {name: {path: values[name] for path, values in found.items()} for name in names} if found else {}
    )


def promised(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The parts of a model that have a promise, and are not inside another."""
    if "regard.nn" not in sys.modules:  # then nothing in the model is from there
        return
    from regard.nn import LanguageModel, Promised

    inside: list[str] = []
    for path, part in model.named_modules():
        own = isinstance(part, Promised) or (
            isinstance(part, LanguageModel) and part.design.promise is not None
        )
        if own and not any(path.startswith(f"{outer}.") or not outer for outer in inside):
            inside.append(path)
            yield path, part


def _measure(part: Any) -> dict[str, float]:
    from regard.nn import LanguageModel

    language = isinstance(part, LanguageModel)
    promise = part.design.promise if language else part.promise
    declared = part.declare_logits() if language else part.declare()
    tokens = TOKENS if language or part.tokens is None else part.tokens
    witness = falsify(declared, Whole(tokens=tokens), promise.norm, steps=STEPS, restarts=RESTARTS)
    return {
        "promised": promise.value,
        "promise_proved": part.certificate().value,
        "promise_attacked": witness.value,
    }


register(
    Check(
        "promises",
        "Do layers keep the constants they were built for?",
        (
            Column(
                "promised",
                "promise",
                "The Lipschitz constant that a part was built to keep, in the norm of its promise.",
                "",
                STACK,
            ),
            Column(
                "promise_proved",
                "promise, proved",
                "The constant proved from the weights as they are now, for all inputs. If it is above the "
                "promise, the promise is broken.",
                PROVED,
                STACK,
                beside="promised",
            ),
            Column(
                "promise_attacked",
                "promise, attacked",
                f"The largest constant that gradient ascent found on sequences of {TOKENS} tokens, or of as "
                "many as the part is made for: from below.",
                SEARCHED,
                STACK,
                beside="promised",
            ),
        ),
        of_input=promises,
        order=80,
    )
)
