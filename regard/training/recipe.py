"""Recipe: everything that decides what a training does, but for the text."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from regard.errors import ArgumentError

SMALLEST_RATE = 0.1
"""The share of the learning rate that is left at the end."""
LONGEST_WARM_UP = 100
WARM_UP = 0.1
"""The share of all steps over which the learning rate rises, up to LONGEST_WARM_UP steps."""
LARGEST_SEED = 2**31
LARGEST_RATE = 1e30
"""Far above all that train, and far enough below the largest single-precision number for what AdamW
multiplies it with.
"""


@dataclass(frozen=True)
class Recipe:
    """steps: updates in all; every: updates between checkpoints; context: tokens in a window; batch:
    windows in an update; promise: the constant, in token-max norm from points to logits, that the model
    keeps.

    Examples:
        >>> recipe = regard.training.Recipe(steps=100, width=32, layers=2)
        >>> recipe.rate(1) < recipe.rate(20), recipe.due(100)
        (True, True)
    """

    steps: int = 2000
    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 128
    batch: int = 16
    learning_rate: float = 1e-3
    seed: int = 0
    every: int = 500
    bytes: bool = False
    promise: float | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "width", "layers", "heads", "context", "batch", "every"):
            if (value := getattr(self, name)) < 1:
                raise ArgumentError(option(name), f"is {value}", "give a positive number")
        if self.width % self.heads:
            raise ArgumentError(
                "--heads",
                f"is {self.heads}, which does not divide the width {self.width}",
                "choose heads that do",
            )
        if (self.width // self.heads) % 2:
            found = f"is {self.heads}, which gives heads of the odd width {self.width // self.heads}"
            raise ArgumentError(
                "--heads", found, "rotary positions turn pairs of coordinates: make width/heads even"
            )
        if self.promise is not None and not 0 < self.promise < math.inf:
            raise ArgumentError("--promise", f"is {self.promise}", "give a positive number, such as 10")
        if not 0 < self.learning_rate <= LARGEST_RATE:
            found = f"is {self.learning_rate}"
            raise ArgumentError(
                "--learning-rate",
                found,
                f"give a positive number, such as 0.001, and no more than {LARGEST_RATE:g}",
            )
        if not 0 <= self.seed < LARGEST_SEED:
            raise ArgumentError("--seed", f"is {self.seed}", f"give a number from 0 to {LARGEST_SEED - 1}")

    def rate(self, step: int) -> float:
        """The learning rate of update `step` (0, 1, ...): a straight rise,
        then half a cosine down to a tenth.
        """
        rise = max(1, min(LONGEST_WARM_UP, int(WARM_UP * self.steps)))
        if step < rise:
            return self.learning_rate * (step + 1) / rise
        done = (step - rise) / max(1, self.steps - rise)
        return self.learning_rate * (SMALLEST_RATE + (1 - SMALLEST_RATE) * (1 + math.cos(math.pi * done)) / 2)

    def due(self, step: int) -> bool:
        """Whether there is a checkpoint after so many updates."""
        return step % self.every == 0 or step == self.steps

    def written(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def agrees(self, given: dict[str, Any]) -> None:
        """Refuses options that are not those of this recipe: the training would be another."""
        for name, value in given.items():
            if value is not None and value != getattr(self, name):
                found = f"is {value}, and the training in this directory has {getattr(self, name)}"
                raise ArgumentError(
                    option(name), found, "leave it out to go on, or start another training with another --out"
                )


def option(name: str) -> str:
    """A field as it is called at the command line."""
    return f"--{name.replace('_', '-')}"
