"""Classifiers as decisions see them: a map to logits of one token, and the module that computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard import maps
from regard._check import finite, floating
from regard.attention import Attention
from regard.certificate import Hypothesis
from regard.errors import ArgumentError, RefusalError
from regard.maps import Compose, Map
from regard.proofs.agreement import Agreement, CannotRun, Way, agreement, name_of
from regard.proofs.certification import declare
from regard.proofs.locating import in_double, steps
from regard.proofs.theorem import Refusal

READOUT = (
    "a decision is between logits of one token (1, classes): give a readout that makes them, e.g. "
    "readout=Compose((Pool(), Affine(weight))) of regard.maps and regard.nonexpansive for the mean token"
)
EMBEDDED = (
    "a cosine is of one token (1, width): give a readout that makes it, e.g. readout=Pool() of "
    "regard.nonexpansive for the mean token"
)


SAMPLES = 8
"""Neighbors of an input at which rounding is measured."""


@dataclass(frozen=True)
class Classifier:
    """whole: from tokens (n, d) to logits (1, classes), as one map. parts: what was given, run as it is;
    ways: how each of them is called on a batch. agreed: what was checked of the modules among them. remedy:
    what to do where it gives something else.
    """

    whole: Any
    parts: tuple[Any, ...]
    ways: tuple[Way, ...]
    agreed: tuple[Hypothesis, ...] = ()
    remedy: str = READOUT

    @cached_property
    def exact(self) -> Any:
        """The map in float64."""
        return in_double(self.whole)

    @cached_property
    def dtype(self) -> torch.dtype:
        """That of the modules that were given; float64 for declarations."""
        return _dtype(self.parts)

    @property
    def kind(self) -> str:
        """The name of that dtype."""
        return name_of(self.dtype)

    def run(self, points: Tensor) -> Tensor:
        """The logits of what was given, in its own dtype, (..., classes)."""
        batch = points.reshape(-1, *points.shape[-2:])
        with torch.no_grad():
            value = batch.to(self.dtype)
            for part, way in zip(self.parts, self.ways, strict=True):
                value = way(part, value)
        return self._logits(batch, value).reshape(*points.shape[:-2], -1)

    def rounding(self, x: Tensor) -> Tensor:
        """How much logits near each sequence (..., n, d) are assumed to differ from those in float64.

        Twice the largest difference at the sequence and at `SAMPLES` neighbors; zero in float64 itself.
        Rounding of one input may be small by chance; neighbors differ from it in their last digits alone.
        """
        if self.dtype == torch.float64:
            return torch.zeros(x.shape[:-2], dtype=torch.float64)
        generator = torch.Generator(x.device).manual_seed(0)
        last, found = 4 * torch.finfo(self.dtype).eps, self._rounded(x)
        for _ in range(SAMPLES):
            drawn = torch.rand(x.shape[-2:], generator=generator, dtype=torch.float64, device=x.device)
            near = (x.double() * (1 + last * (2 * drawn - 1))).to(self.dtype)
            found = torch.maximum(found, self._rounded(near))
        return 2 * found

    def _rounded(self, x: Tensor) -> Tensor:
        """The largest difference of a logit at each sequence itself."""
        return (self.run(x).double() - self.logits(x).detach()).abs().amax(-1)

    def logits(self, points: Tensor) -> Tensor:
        """The logits of the declaration in float64."""
        return self._logits(points, self.exact(points.double()))

    def _logits(self, points: Tensor, value: Tensor) -> Tensor:
        if value.shape[:-2] != points.shape[:-2] or value.shape[-2] != 1:
            argument = "readout" if len(self.parts) > 1 else "model"
            found = f"gives {list(value.shape[-2:])} for a sequence {list(points.shape[-2:])}"
            raise ArgumentError(argument, found, self.remedy)
        if value.shape[-1] < 2:
            remedy = "a decision is between logits of two classes or more, and a cosine of two coordinates"
            raise ArgumentError("readout" if len(self.parts) > 1 else "model", "gives one number", remedy)
        return value.squeeze(-2)

    @cached_property
    def split(self) -> tuple[tuple[Any, ...], Tensor | None, Tensor | None]:
        """The maps before the last affine one, with its weights and bias; all maps where there is none."""
        chain = steps(self.exact)
        last = chain[-1]
        if len(chain) > 1 and isinstance(last, maps.Affine):
            return chain[:-1], last.w, last.b
        return chain, None, None


def classifier(model: Any, x: Tensor, readout: Any = None, verb: str = "decide") -> Classifier:
    """A model and its readout as one classifier; modules are compared with their declarations at x (n, d)."""
    parts = {"model": model} if readout is None else {"model": model, "readout": readout}
    ways, declared, agreed, value = list[Way](), [], [], x.detach().double()
    for name, part in parts.items():
        _check_weights(name, part)
        map = part if isinstance(part, (Attention, Map)) else _declared(name, part, verb)
        after = _value(name, map, value)
        if isinstance(part, nn.Module):
            found = _agreement(name, part, map, value)
            agreed.append(found.hypothesis(part, "x and x/2"))
        ways.append(found.way if isinstance(part, nn.Module) else _sequences)
        declared.append(map)
        value = after
    whole = declared[0] if len(declared) == 1 else Compose(tuple(declared))
    remedy = EMBEDDED if verb == "certified_cosine" else READOUT
    return Classifier(whole, tuple(parts.values()), tuple(ways), tuple(agreed), remedy)


def _check_weights(name: str, part: Any) -> None:
    for where, weight in part.named_parameters() if isinstance(part, nn.Module) else ():
        if not bool(weight.isfinite().all()):
            raise ArgumentError(name, f"has NaN or infinity in {where}", "train or load it anew")


def _declared(name: str, part: Any, verb: str) -> Any:
    try:
        return declare.one(part)
    except Refusal as refusal:
        said = f"readout: {refusal}" if name == "readout" else str(refusal)
        raise RefusalError(verb, [said]) from None


def _value(name: str, map: Any, x: Tensor) -> Tensor:
    """The value of a declaration in float64."""
    try:
        found: Tensor = in_double(map)(x)
    except ArgumentError as error:
        found_one = f"does not take {list(x.shape)} ({error.argument}: {error.found})"
        raise ArgumentError(name, found_one, error.remedy) from None
    return found.detach()


def _agreement(name: str, module: nn.Module, map: Any, x: Tensor) -> Agreement:
    """How a module takes batches; an error where it is not its declaration at x and x/2."""
    try:
        return agreement(name, module, map, torch.stack([x, 0.5 * x]))
    except CannotRun as error:
        raise error.raised from None


def _dtype(parts: Sequence[Any]) -> torch.dtype:
    """That of the modules; float64 for declarations."""
    modules = [part for part in parts if isinstance(part, nn.Module)]
    found = [weight.dtype for module in modules for weight in module.parameters()]
    return found[0] if found else torch.float64


def _sequences(map: Any, batch: Tensor) -> Tensor:
    """A declaration in float64, sequence by sequence."""
    exactly = in_double(map)
    return torch.stack([exactly(one) for one in batch.double()])


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


def check_held(x: Tensor, kind: torch.dtype) -> None:
    """Numbers that a model's dtype holds: inputs near others are none that it could run."""
    if not bool((x.to(kind).to(x.dtype) == x).all()):
        name = name_of(kind)
        found = f"has numbers that {name}, in which the model runs, does not hold"
        remedy = f"give x.to(torch.{name}) and make the domain of that, or the model {name_of(x.dtype)}"
        raise ArgumentError("x", found, remedy)
