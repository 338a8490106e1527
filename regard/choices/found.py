"""What was found of a model: each layer with each candidate, and the whole with choices in all layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from regard.choices.wording import shown_part

MEASURES = ("memory", "work", "error", "quantile", "above", "divergence", "proved")


@dataclass(frozen=True)
class LayerFound:
    """One layer. keys: how many its queries share; queries: how many were run. choices: for each candidate by
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
        """The fraction of the context's memory that a candidate keeps; all of it where there is none."""
        return 1.0 if name is None else float((self.choices or {})[name]["memory"])


@dataclass(frozen=True)
class Applied:
    """The whole model with a choice in every layer. memory: the fraction that is kept, a mean over layers.
    divergence: KL of the exact next-token distribution from the changed one, in nats, with its standard
    error; None where the model predicts no tokens. moved: the relative distance of the last hidden states.
    agreement: how often the most likely token is the same. exact: layers that were left as they are.

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
    """A model on a text. error: the largest relative error of a recommended choice, on 95 % of fresh
    queries. dtype: of the context that memory is relative to.

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
    dtype: torch.dtype = torch.float32

    @property
    def baseline(self) -> str:
        """What memory is relative to: float32 (32 bits per number), for example."""
        return f"{str(self.dtype).removeprefix('torch.')} ({torch.finfo(self.dtype).bits} bits per number)"

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names of the candidates that some layer takes, in order."""
        found: dict[str, None] = {}
        for layer in self.layers:
            found.update(
                {name: None for name, one in (layer.choices or {}).items() if not one.get("refused")}
            )
        return tuple(found)

    @property
    def refused(self) -> dict[str, str]:
        """Names of the candidates that no layer takes, with the reason of one."""
        found: dict[str, str] = {}
        for layer in self.layers:
            found.update({name: one.get("refused", "") for name, one in (layer.choices or {}).items()})
        return {name: why for name, why in found.items() if name not in self.candidates}

    @property
    def recommended(self) -> tuple[str | None, ...]:
        """The choice of each layer."""
        return tuple(layer.best(self.error) for layer in self.layers)

    def sentences(self) -> list[str]:
        """The result in short: what is recommended, and what it changes in the whole model."""
        kept = [layer.memory(name) for layer, name in zip(self.layers, self.recommended, strict=True)]
        cheap = sum(name is not None for name in self.recommended)
        whole = f"{cheap} of {len(self.layers)} layers have a choice within {100 * self.error:g} % error"
        memory = shown_part(sum(kept) / max(1, len(kept)))
        found = [f"{whole}; keys and values take {memory} of their memory in {self.baseline}."]
        if self.applied:
            found.append(_whole(self.applied[0]))
        return found

    def written(self) -> dict[str, Any]:
        """All of it as plain values; numbers that the model does not have are omitted."""
        layers = [
            {**vars(layer), "recommended": name}
            for layer, name in zip(self.layers, self.recommended, strict=True)
        ]
        return {
            "model": self.model,
            "text": self.text,
            "tokens": self.tokens,
            "error": self.error,
            "dtype": str(self.dtype).removeprefix("torch."),
            "layers": layers,
            "applied": [
                {name: value for name, value in vars(one).items() if value is not None}
                for one in self.applied
            ],
        }


def _whole(one: Applied) -> str:
    if one.divergence is None or one.deviation is None or one.agreement is None:
        return f"With these choices in all layers the last hidden states change by {shown_part(one.moved)}."
    error = f" ± {one.deviation:.2g}" if math.isfinite(one.deviation) else ""
    return (
        "With these choices in all layers the next-token distribution changes by "
        f"{one.divergence:.3g}{error} nats (KL), and the most likely token is the same at "
        f"{shown_part(one.agreement)} of the positions."
    )
