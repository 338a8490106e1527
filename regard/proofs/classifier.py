"""Classifiers as decisions see them: a map to logits of one token, and the module that computes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard import maps
from regard._check import finite, floating
from regard.attention import Attention
from regard.errors import ArgumentError, RefusalError
from regard.maps import Compose, Map
from regard.proofs.certification import declare
from regard.proofs.locating import in_double
from regard.proofs.theorem import Refusal

READOUT = (
    "a decision is between logits of one token (1, classes): give a readout that makes them, e.g. "
    "readout=Compose((Pool(), Affine(weight))) of regard.maps and regard.nonexpansive for the mean token"
)
EMBEDDED = (
    "a cosine is of one token (1, width): give a readout that makes it, e.g. readout=Pool() of "
    "regard.nonexpansive for the mean token"
)


@dataclass(frozen=True)
class Classifier:
    """whole: from tokens (n, d) to logits (1, classes), as one map. parts: what was given, run as it is.
    remedy: what to do where it gives something else.
    """

    whole: Any
    parts: tuple[Any, ...]
    remedy: str = READOUT

    @cached_property
    def exact(self) -> Any:
        """The map in float64."""
        return in_double(self.whole)

    @cached_property
    def dtype(self) -> torch.dtype:
        """That of the modules that were given; float64 for declarations."""
        modules = [part for part in self.parts if isinstance(part, nn.Module)]
        found = [weight.dtype for module in modules for weight in module.parameters()]
        return found[0] if found else torch.float64

    def run(self, points: Tensor) -> Tensor:
        """The logits of what was given, in its own dtype, (..., classes)."""
        with torch.no_grad():
            value = points.to(self.dtype)
            for part in self.parts:
                value = _run(part, value)
        return self._logits(points, value)

    def logits(self, points: Tensor) -> Tensor:
        """The logits of the declaration in float64."""
        return self._logits(points, self.exact(points.double()))

    def _logits(self, points: Tensor, value: Tensor) -> Tensor:
        if value.shape[:-2] != points.shape[:-2] or value.shape[-2] != 1 or value.shape[-1] < 2:
            found = f"takes {list(points.shape)} to {list(value.shape)}"
            raise ArgumentError("model", found, self.remedy)
        return value.squeeze(-2)

    @cached_property
    def split(self) -> tuple[tuple[Any, ...], Tensor | None, Tensor | None]:
        """The maps before the last affine one, with its weights and bias; all maps where there is none."""
        chain = _flat(self.exact)
        last = chain[-1]
        if len(chain) > 1 and isinstance(last, maps.Affine):
            return chain[:-1], last.w, last.b
        return chain, None, None


def classifier(model: Any, readout: Any = None, verb: str = "decide") -> Classifier:
    """A model and its readout as one classifier."""
    parts = (model,) if readout is None else (model, readout)
    try:
        declared = [part if isinstance(part, (Attention, Map)) else declare.one(part) for part in parts]
    except Refusal as refusal:
        raise RefusalError(verb, [str(refusal)]) from None
    whole = declared[0] if len(declared) == 1 else Compose(tuple(declared))
    return Classifier(whole, parts, EMBEDDED if verb == "certified_cosine" else READOUT)


def _run(part: Any, value: Tensor) -> Tensor:
    """A module on batches as it takes them, a declaration in float64, sequence by sequence."""
    if isinstance(part, nn.Module) and value.ndim == 2:
        found: Tensor = part(value.unsqueeze(0)).squeeze(0)
        return found
    if isinstance(part, nn.Module):
        made: Tensor = part(value)
        return made
    exactly = in_double(part)
    if value.ndim == 2:
        return exactly(value.double())
    return torch.stack([exactly(one) for one in value.double()])


def _flat(map: Any) -> tuple[Any, ...]:
    if not isinstance(map, Compose):
        return (map,)
    return tuple(inner for part in map.maps for inner in _flat(part))


def check_steps(steps: int) -> None:
    """A number of steps of an attack."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ArgumentError("steps", f"is {steps!r}", "give a positive integer")


def check_sequence(name: str, x: Tensor) -> None:
    """One sequence (n, d) of finite numbers."""
    floating(name, x)
    if x.ndim != 2 or 0 in x.shape:
        raise ArgumentError(name, f"has shape {list(x.shape)}", "give one sequence (n, d)")
    finite(name, x)
