"""Check: one question the audit asks, and the columns of the report that answer it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor, nn

from regard._durations import spoken_time
from regard.audits.adapters.base import Adapter, Block, Call, Matrices, NotCovered
from regard.audits.adapters.calls import plug_of
from regard.audits.adapters.declaration import plugged, potential_of
from regard.audits.adapters.norms import any_normalize
from regard.audits.adapters.surroundings import may_turn
from regard.audits.calling import moving_tensors
from regard.audits.changes import Reading, Unit
from regard.audits.site import Site
from regard.audits.watching import ObservedSite, Sight, Spot
from regard.errors import ArgumentError
from regard.maps import Normalize

RUN, MEASURED, SEARCHED, PROVED = "run", "measured", "searched", "proved"
STATUSES = {
    RUN: "what happened on these inputs",
    MEASURED: "from the weights, or from derivatives at these inputs, ± rounding or the stated residual",
    SEARCHED: "at least: the worst case that a search found; the true one may be worse",
    PROVED: "at most: a certificate that no case is worse, under its hypotheses; rounded to the safe side",
}
"""Where a number comes from, in one word, and what that word means."""
HEAD, LAYER, STACK = "head", "layer", "stack"
"""What a column has one number for."""
OVER: dict[str, Callable[[list[float]], float]] = {
    "largest": max,
    "smallest": min,
    "mean": statistics.fmean,
    "median": statistics.median,
    "only": lambda values: values[0],
}
"""How the numbers of several inputs become one."""

Measurable = Site | ObservedSite
"""A layer that is declared, or one that was seen to compute attention and is not."""

_checks: dict[str, Check] = {}


@dataclass(frozen=True)
class Column:
    """One quantity of a report.

    kind: one of STATUSES; empty for a number that is declared and not found. over: how the numbers of several
    inputs become one. high_is_alarming: None where neither end is. beside: the column of the same scope that
    this one is compared with; the two are combined alike, over the inputs that have both.
    """

    name: str
    title: str
    meaning: str
    kind: str
    scope: str
    high_is_alarming: bool | None = None
    over: str = "largest"
    beside: str = ""

    @property
    def side(self) -> str:
        """≤ for what is proved and ≥ for what is searched; reversed where small numbers are the bad ones."""
        if self.kind not in (PROVED, SEARCHED):
            return ""
        return "≤" if (self.kind == PROVED) != (self.high_is_alarming is False) else "≥"

    @property
    def explained(self) -> str:
        """What the number is, and what its status means."""
        status = STATUSES.get(self.kind)
        return self.meaning if status is None else f"{self.meaning} {self.kind.capitalize()}: {status}."

    def combined(self, numbers: Iterable[float]) -> float:
        """Return the numbers of several inputs as one; NaN where no input has one."""
        known = [value for value in numbers if not math.isnan(value)]
        return OVER[self.over](known) if known else math.nan


@dataclass(frozen=True)
class Result:
    """What a check found in one place: numbers by column (a list of one for each head, or one number), and a
    table of its own.

    reason: why something of it is missing, where something is.
    """

    numbers: dict[str, Any] = field(default_factory=dict)
    table: Any = None
    reason: str = ""


@dataclass(frozen=True)
class Weights:
    """What the weights of one attention layer say, without an input.

    entering: the norm whose output is all that the layer reads, where one is known; turned: whether rotary
    positions may turn its queries and keys.
    """

    path: str
    layer: int
    matrices: Matrices
    entering: Normalize | None = None
    turned: bool = True

    @classmethod
    def of(cls, adapter: Adapter, model: nn.Module, path: str, layer: int) -> Weights:
        """The weights of the attention module at a path."""
        module = model.get_submodule(path)
        norm = adapter.entering(model, path, module)
        entering = None if norm is None else any_normalize(model.get_submodule(norm))
        matrices, plug = adapter.matrices(model, path, module), plug_of(module)
        if plug is not None and plug.potential is not None:
            matrices = replace(
                matrices, potential=plugged(potential_of(replace(matrices, softcap=None)), plug)
            )
        return cls(path, layer, matrices, entering, may_turn(model, path))


@dataclass(frozen=True, eq=False)
class Scene:
    """One input: the model, how it is called, what its modules did, the blocks around attention,
    and random numbers of its own.

    seen: where attention was seen to happen; alone: why there are no numbers of a block around some
    attention, by its name; direct: attention that reads the residual stream itself, nothing before it;
    thorough: whether to prove on long inputs too, which takes hours; seed: of the random numbers; head: the
    model with the head that it was saved with, where `model` is without; every_word: whether every word of a
    text is changed; texts: how many inputs the audit has.
    """

    model: nn.Module
    options: dict[str, Any]
    trace: dict[str, Call]
    tokens: list[str]
    blocks: list[Block]
    index: int
    text: str | None = None
    reading: Reading | None = None
    encode: Callable[[str], dict[str, Any]] | None = None
    seen: dict[Spot, Sight] = field(default_factory=dict)
    alone: dict[str, str] = field(default_factory=dict)
    direct: frozenset[str] = frozenset()
    thorough: bool = False
    seed: int = 0
    head: nn.Module | None = None
    every_word: bool = False
    texts: int = 1

    @property
    def whole(self) -> nn.Module:
        """The model with its head, which gives the answers."""
        return self.model if self.head is None else self.head

    @property
    def units(self) -> tuple[Unit, ...]:
        """The words of the text, or its tokens where it has no words."""
        return () if self.reading is None else self.reading.units

    @cached_property
    def stacks(self) -> dict[str, list[Block]]:
        """Blocks by the list they are in: one for most models, encoder and decoder for some."""
        found: dict[str, list[Block]] = {}
        for block in self.blocks:
            own = found.setdefault(block.stack, [])
            if block.path not in [other.path for other in own]:
                own.append(block)
        return found

    @property
    def stackless(self) -> str:
        """Why no stack of blocks was found."""
        return next(iter(self.alone.values()), "no attention has a block around it")

    def end(self, stack: str) -> str:
        """The module whose output a stack gives: the norm that reads what its last block returns, where
        there is one.
        """
        last = self.stacks[stack][-1]
        return last.path if last.final is None or not self.follows(last.path, last.final) else last.final

    def follows(self, first: str, second: str) -> bool:
        """Whether a call was given the tokens that another returned, as they were."""
        given = next(moving_tensors(self.trace[first].output), None)
        taken = next(moving_tensors((self.trace[second].arguments, self.trace[second].options)), None)
        if given is None or taken is None or given.shape[-1:] != taken.shape[-1:]:
            return False
        return given.numel() == taken.numel() and torch.equal(given.flatten(), taken.flatten())

    def generator(self, *key: int) -> Generator:
        """Random numbers that depend on the seed of the audit, the input and the key alone."""
        seed = self.seed
        for part in (self.index, *key):
            seed = 1_000_003 * seed + part + 1
        return torch.Generator().manual_seed(seed % 2**63)


@dataclass(frozen=True)
class Check:
    """A name for the command line, a sentence, columns, and up to three measurements: of weights, of a site,
    of a whole input.

    quick_site and quick_input: what of it a quick look takes; nothing where both are missing. named: made
    only where it is asked for by name.
    """

    name: str
    question: str
    columns: tuple[Column, ...] = ()
    of_weights: Callable[[Weights], Result] | None = None
    of_site: Callable[[Scene, Measurable], Result] | None = None
    of_input: Callable[[Scene], Result] | None = None
    order: int = 100
    quick_site: Callable[[Scene, Measurable], Result] | None = None
    quick_input: Callable[[Scene], Result] | None = None
    named: bool = False

    def quickly(self) -> Check | None:
        """The same question as a quick look asks it; None where it does not."""
        if self.quick_site is None and self.quick_input is None:
            return None
        return replace(self, of_weights=None, of_site=self.quick_site, of_input=self.quick_input)

    @property
    def is_quick(self) -> bool:
        """Whether this is the quick form of a check, and that differs from the whole one."""
        whole = _checks.get(self.name)
        return whole is not None and self != whole and self == whole.quickly()


def register(check: Check) -> Check:
    """Make a check known."""
    if check.name in _checks:
        raise ValueError(f"there is a check named {check.name} already")
    _checks[check.name] = check
    return check


def checks() -> tuple[Check, ...]:
    """All checks, in the order of the report."""
    return tuple(sorted(_checks.values(), key=lambda check: (check.order, check.name)))


def provable(scene: Scene, site: Measurable, inputs: int) -> Site | None:
    """The declaration where theorems about rows are asked: on the first inputs alone, and an error where
    they do not hold.
    """
    if scene.index >= inputs:
        return None
    if isinstance(site, ObservedSite):
        raise NotCovered(f"nothing is proved about what is observed and not declared: {site.reason}")
    if site.context is not None:
        raise NotCovered(
            "nothing is proved about cross-attention; its measured constants are in the columns of the layer"
        )
    if site.blind:
        raise ArgumentError(
            "inputs", f"{scene.index + 1} has tokens that see no key", "give the text without padding"
        )
    return site


@dataclass(frozen=True)
class Cost:
    """What something took of one core at so many tokens (python -m benchmarks.lengths); it grows like n²."""

    what: str
    tokens: int
    seconds: float
    gigabytes: float

    def at(self, tokens: int) -> str:
        """What it would take at others; extrapolated."""
        more = (tokens / self.tokens) ** 2
        taken = f"{spoken_time(more * self.seconds)} and {max(0.1, more * self.gigabytes):.1f} GB"
        return f"{taken} {self.what}, extrapolated from {self.tokens:,} tokens"


@dataclass(frozen=True)
class Limit:
    """Up to how much something is done as usual, and in a thorough audit, which may take hours."""

    usual: int
    thorough: int
    cost: Cost | None = None

    def of(self, scene: Scene) -> int:
        """The one that holds for a scene."""
        return self.thorough if scene.thorough else self.usual

    def at_most(self, most: int) -> Limit:
        """The same where there is a reason for no more."""
        return Limit(min(self.usual, most), min(self.thorough, most), self.cost)

    def __str__(self) -> str:
        return f"{self.usual} tokens (--thorough: {self.thorough:,})"


def too_long(scene: Scene, tokens: int, longest: Limit, what: str) -> str:
    """Why something is missing on a long input, and what would help; nothing where it is not too long."""
    if tokens <= longest.of(scene):
        return ""
    found = f"{what} for input {scene.index + 1}, of {tokens:,} tokens; give a text of at most "
    if tokens <= longest.thorough:
        taken = "which takes far longer" if longest.cost is None else f"which takes {longest.cost.at(tokens)}"
        return f"{found}{longest.usual} tokens, or ask for a thorough audit, {taken}"
    taken = "" if longest.cost is None else f": here it would take {longest.cost.at(tokens)}"
    return f"{found}{longest.thorough:,} tokens{taken}"


def as_list(values: Tensor) -> list[float]:
    """A tensor of numbers as a list, for JSON."""
    return [float(value) for value in values.flatten()]
