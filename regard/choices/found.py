"""What was found of a model: each layer with each candidate, and the whole with choices in all layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from regard.choices.wording import shown_part

MEASURES = ("memory", "work", "error", "quantile", "above", "divergence", "proved")


@dataclass(frozen=True)
class LayerFound:
    """One layer. keys: how many its queries share; queries: how many asked. choices: for each candidate by
    name its numbers (None where one does not apply), or {"refused": why}. mixed: whether errors are those
    after the output projection. refused: why there is no choice at all.

    Examples:
        >>> from regard.choices import LayerFound
        >>> four, eight = {"memory": 0.13, "quantile": 0.2}, {"memory": 0.25, "quantile": 0.01}
        >>> layer = LayerFound(0, "layers.0", 61, 60, {"4 bits": four, "8 bits": eight})
        >>> layer.best(0.1), layer.best(0.5), layer.best(0.001)
        ('8 bits', '4 bits', None)
    """

    layer: int
    path: str
    keys: int = 0
    queries: int = 0
    choices: dict[str, dict[str, Any]] | None = None
    mixed: bool = True
    refused: str = ""

    def best(self, error: float) -> str | None:
        """The candidate of least memory whose calibrated error is at most `error`."""
        good = [
            (numbers["memory"], name)
            for name, numbers in (self.choices or {}).items()
            if not numbers.get("refused") and numbers["quantile"] <= error and numbers["memory"] < 1
        ]
        return min(good, default=(1.0, None))[1]

    def memory(self, name: str | None) -> float:
        """The part of the context's numbers that a candidate keeps; all of them where there is none."""
        return 1.0 if name is None else float((self.choices or {})[name]["memory"])


@dataclass(frozen=True)
class Applied:
    """The whole model with a choice in every layer. memory: the part that is kept, a mean over layers.
    divergence: KL from the exact model's law of the next token, in nats, with its standard error; None where
    the model predicts none. moved: how far the last hidden states are, relative. agreement: how often the
    most likely token stays. exact: layers that were left as they are.

    Examples:
        >>> from regard.choices import Applied
        >>> Applied("8 bits", 0.25, 0.002, 0.0003, 0.01, 0.99, exact=0).memory
        0.25
    """

    name: str
    memory: float
    divergence: float | None
    deviation: float | None
    moved: float
    agreement: float | None
    exact: int


@dataclass(frozen=True)
class Found:
    """A model on a text. error: what a recommended choice may get wrong, of 95 % of fresh queries.

    Examples:
        >>> from regard.choices import Applied, Found, LayerFound
        >>> layer = LayerFound(0, "layers.0", 61, 60, {"8 bits": {"memory": 0.25, "quantile": 0.01}})
        >>> whole = Applied("recommended", 0.25, 0.002, 0.0003, 0.01, 0.99, exact=0)
        >>> Found("a model", "a text", 120, 0.1, (layer,), (whole,)).candidates
        ('8 bits',)
    """

    model: str
    text: str
    tokens: int
    error: float
    layers: tuple[LayerFound, ...]
    applied: tuple[Applied, ...]

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names of what some layer takes, in order."""
        found: dict[str, None] = {}
        for layer in self.layers:
            found.update(
                {name: None for name, one in (layer.choices or {}).items() if not one.get("refused")}
            )
        return tuple(found)

    @property
    def refused(self) -> dict[str, str]:
        """Names of what no layer takes, with the reason of one."""
        found: dict[str, str] = {}
        for layer in self.layers:
            found.update({name: one.get("refused", "") for name, one in (layer.choices or {}).items()})
        return {name: why for name, why in found.items() if name not in self.candidates}

    @property
    def recommended(self) -> tuple[str | None, ...]:
        """The choice of each layer."""
        return tuple(layer.best(self.error) for layer in self.layers)

    def sentences(self) -> list[str]:
        """What it comes to."""
        kept = [layer.memory(name) for layer, name in zip(self.layers, self.recommended, strict=True)]
        cheap = sum(name is not None for name in self.recommended)
        whole = f"{cheap} of {len(self.layers)} layers have a choice within {100 * self.error:g} %"
        memory = sum(kept) / max(1, len(kept))
        found = [f"{whole}; all layers together keep {shown_part(memory)} of the context's numbers."]
        if self.applied:
            found.append(_whole(self.applied[0]))
        return found

    def written(self) -> dict[str, Any]:
        """All of it as plain values."""
        layers = [
            {**vars(layer), "recommended": name}
            for layer, name in zip(self.layers, self.recommended, strict=True)
        ]
        return {
            "model": self.model,
            "text": self.text,
            "tokens": self.tokens,
            "error": self.error,
            "layers": layers,
            "applied": [vars(one) for one in self.applied],
        }


def _whole(one: Applied) -> str:
    if one.divergence is None or one.deviation is None or one.agreement is None:
        return f"With these choices in all layers the last hidden states move by {shown_part(one.moved)}."
    error = f" ± {one.deviation:.2g}" if math.isfinite(one.deviation) else ""
    return (
        f"With these choices in all layers the law of the next token moves by {one.divergence:.3g}{error} "
        f"nats, and the most likely token stays in {shown_part(one.agreement)} of the places."
    )
