"""cheaper: which cheaper attention is good enough for this layer on these inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard._enclosed import product_norm
from regard._upper import Upper, exact, total
from regard.attention import Attention, as_measure
from regard.compression.candidates import (
    Candidate,
    Features,
    Fitted,
    LowRank,
    Merged,
    Nystrom,
    Quantized,
    Recent,
    TopK,
    exact_rows,
    kept_exactly,
)
from regard.compression.compressed import joined
from regard.domains import Neighborhood
from regard.errors import ArgumentError, RefusalError
from regard.lookups import Factored, Identity, Linear, Lookup
from regard.maps import Heads
from regard.measure import Measure
from regard.normalizers import Elu, PositiveRandom
from regard.proofs.approximation import row_errors
from regard.proofs.setting import equivariant
from regard.proofs.subject import Head, single_heads
from regard.proofs.theorem import Refusal

LEAST = 24
"""Queries below which nothing is said of others."""


@dataclass(frozen=True)
class Choice:
    """One candidate on one layer. memory and work: parts of those of all keys. error: the root mean square
    of the error of the output over that of the output, on queries that neither fit nor calibration saw.
    quantile: the relative error that calibration says 95 % of fresh queries stay below; above: how many of
    the test queries did not. divergence: the mean of KL(cheap row | exact row), of all heads. proved: the
    largest bound over the test queries, relative too, where it is below the trivial one. refused: why there
    are no numbers.
    """

    candidate: Candidate
    memory: float = math.nan
    work: float = math.nan
    error: float = math.nan
    quantile: float = math.nan
    above: float = math.nan
    divergence: float = math.nan
    proved: float | None = None
    refused: str = ""


@dataclass(frozen=True)
class Cheaper:
    """The choices for one layer, in the order of the candidates; `best(error)` is the one to take."""

    choices: tuple[Choice, ...]
    keys: int
    queries: int

    def best(self, error: float) -> Choice | None:
        """The choice of least memory whose calibrated error is at most `error`, None where there is none."""
        good = [choice for choice in self.choices if choice.quantile <= error and choice.memory < 1]
        return min(good, key=lambda choice: choice.memory, default=None)

    def __str__(self) -> str:
        head = ("memory", "work", "error", "95 % below", "above", "KL", "proved")
        lines = [f"{'':28}" + "".join(f"{name:>12}" for name in head)]
        return "\n".join(lines + [_line(choice) for choice in self.choices])

    __repr__ = __str__


def cheaper(
    attention: Attention | Heads,
    x: Tensor,
    context: Measure | Tensor | None = None,
    *,
    candidates: Sequence[Candidate] | None = None,
    seed: int = 0,
) -> Cheaper:
    """A table of cheaper ways for the queries x (m, d) to attend to the context, x where none is given.

    The queries are dealt at random into three: what is fitted sees the first, the quantile is that of the
    second, and the errors are of the third. Heads(attention, w_o) measures errors after the mixing. Measured
    and calibrated for queries like these; `proved` is proved, of the test queries.
    """
    queries, keys = _read(x, context)
    inner = attention.attention if isinstance(attention, Heads) else attention
    try:
        heads = [Head(head) for head in single_heads(inner)]
        for head in heads:
            equivariant(
                head, Neighborhood(keys.points, 0.0), "give the part of the context that all queries see"
            )
            if not head.softmax:
                raise Refusal(f"rows of {type(head.normalizer).__name__} are not softmax rows")
    except Refusal as refusal:
        raise RefusalError("cheaper", [f"{refusal}."]) from None
    if candidates is None:
        candidates = _usual(heads[0], keys)
    if not candidates or not all(isinstance(one, Candidate) for one in candidates):
        raise ArgumentError(
            "candidates", f"are {candidates!r}", "give Merged(size), Quantized(bits) and others"
        )
    layer = _Layer(heads, _mixers(attention, len(heads)), keys, _dealt(queries, seed))
    return Cheaper(tuple(layer.choice(one) for one in candidates), keys.size, len(queries))


class _Layer:
    """One layer with its exact rows and outputs, computed once."""

    def __init__(
        self, heads: list[Head], mixers: list[Tensor | None], keys: Measure, parts: tuple[Tensor, ...]
    ) -> None:
        self.heads, self.mixers, self.keys = heads, mixers, keys
        self.fit, self.calibration, self.test = parts
        self.outputs = [self._mixed([head.attention(part, keys) for head in heads]) for part in parts]
        self.size = float(self.outputs[2].square().sum(-1).mean().sqrt())

    def choice(self, candidate: Candidate) -> Choice:
        try:
            fitted = [candidate.fit(head, self.keys, self.fit) for head in self.heads]
            errors = [self._errors(fitted, part) for part in (1, 2)]
        except (Refusal, ArgumentError, RefusalError) as refusal:
            return Choice(candidate, refused=str(refusal))
        ordered = errors[0].sort().values
        place = min(len(ordered), math.ceil(0.95 * (len(ordered) + 1))) - 1
        whole = sum(kept_exactly(head, self.keys) for head in self.heads)
        found = Choice(
            candidate,
            sum(one.numbers for one in fitted) / whole,
            sum(one.work for one in fitted) / whole,
            float(errors[1].square().mean().sqrt()),
            float(ordered[place]),
            float((errors[1] > ordered[place]).double().mean()),
        )
        return self._with_rows(found, fitted)

    def _errors(self, fitted: list[Fitted], part: int) -> Tensor:
        queries = (self.fit, self.calibration, self.test)[part]
        moved = self._mixed([one.outputs(queries) for one in fitted]) - self.outputs[part]
        return moved.norm(dim=-1) / self.size

    def _mixed(self, outputs: list[Tensor]) -> Tensor:
        mixers = [mixer for mixer in self.mixers if mixer is not None]
        if not mixers:
            return torch.cat(outputs, -1)
        return torch.stack([out @ w for out, w in zip(outputs, mixers, strict=True)]).sum(0)

    def _with_rows(self, choice: Choice, fitted: list[Fitted]) -> Choice:
        """Divergence and bound, where a candidate is a law on the keys and values are as they are."""
        if any(one.rows is None for one in fitted):
            return choice
        laws = [one.rows(self.test) for one in fitted]  # type: ignore[misc]
        gaps = [
            _divergence(law, exact_rows(head, self.keys, self.test))
            for law, head in zip(laws, self.heads, strict=True)
        ]
        choice = replace(choice, divergence=float(torch.stack(gaps).mean()))
        try:
            return replace(choice, proved=self._proved(laws, [one.value_error for one in fitted]))
        except Refusal:  # values that no theorem is about
            return choice

    def _proved(self, laws: list[Tensor], moved: list[Upper]) -> float | None:
        """Σ_h b_h of the mixed values, or √Σ b_h² side by side; nothing where it is no better than their
        diameters.
        """
        parts, trivial = [], []
        for head, law, mixer, off in zip(self.heads, laws, self.mixers, moved, strict=True):
            stretch = exact(1.0) if mixer is None else product_norm(mixer)
            mixed = head.attention.replace(lookup=_through(head.lookup, mixer))
            parts.append(Upper(row_errors(mixed, law, self.test, self.keys)) + stretch * off)
            values = mixed.lookup.values(self.keys.points, self.keys.marks)
            trivial.append(Upper(2 * (values - values.mean(0)).norm(dim=-1).amax()))
        bound, most = (float(self._joined(side).amax()) / self.size for side in (parts, trivial))
        return bound if bound < most else None

    def _joined(self, parts: list[Upper]) -> Upper:
        return joined(parts) if self.mixers[0] is None else total(parts)


# Arguments


def _read(x: object, context: Measure | Tensor | None) -> tuple[Tensor, Measure]:
    if not isinstance(x, Tensor) or x.ndim != 2 or len(x) < LEAST:
        found = f"has shape {list(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
        raise ArgumentError(
            "x", found, f"give at least {LEAST} queries (m, d): a third each fits, calibrates, tests"
        )
    keys = as_measure("context", x if context is None else context)
    if keys.batch_shape or keys.marks is not None:
        raise ArgumentError("context", "has a batch or marks", "give one context (n, d) without marks")
    weights = None if keys.log_weights is None else keys.log_weights.detach().double()
    return x.detach().double(), Measure(keys.points.detach().double(), weights)


def _dealt(queries: Tensor, seed: int) -> tuple[Tensor, ...]:
    order = torch.randperm(len(queries), generator=torch.Generator().manual_seed(seed))
    return tuple(queries[part] for part in order.tensor_split(3))


def _usual(head: Head, keys: Measure) -> tuple[Candidate, ...]:
    """A quarter of the keys, usual features, and usual bits."""
    size = max(1, keys.size // 4)
    form = head.form(keys.dimension)
    width = keys.dimension if form is None or not form.factors else form.factors[-1].shape[0]
    features = (Features(Elu()), Features(PositiveRandom.draw(width, 4 * width, 0, torch.float64)))
    kept = (Recent(size), TopK(size), Merged(size), Nystrom(size), LowRank(max(1, width // 2)))
    return (*kept, *features, Quantized(8), Quantized(4))


def _mixers(attention: Attention | Heads, count: int) -> list[Tensor | None]:
    if not isinstance(attention, Heads):
        return [None] * count
    w_o = attention.w_o.detach().double()
    return list(w_o.expand(count, -1, -1))


def _through(lookup: Lookup, mixer: Tensor | None) -> Lookup:
    """Values after the mixing; biases do not move a difference of two laws' means."""
    if mixer is None:
        return lookup
    if isinstance(lookup, Identity):
        return Linear(mixer)
    if isinstance(lookup, Linear):
        return Factored(lookup.w_v, mixer)
    raise Refusal(f"values by {type(lookup).__name__} are not mixed here; use Identity() or Linear(w_v)")


def _divergence(law: Tensor, exact: Tensor) -> Tensor:
    """The mean of KL(law | exact) over rows."""
    terms = torch.where(law > 0, law * (law.clamp_min(1e-300).log() - exact.clamp_min(1e-300).log()), 0.0)
    return terms.sum(-1).mean().clamp_min(0.0)


def _line(choice: Choice) -> str:
    name = repr(choice.candidate)[:27]
    if choice.refused:
        return f"{name:28}{choice.refused}"
    numbers = (choice.memory, choice.work, choice.error, choice.quantile, choice.above, choice.divergence)
    cells = [f"{value:12.3g}" for value in numbers]
    return (
        f"{name:28}"
        + "".join(cells)
        + ("           –" if choice.proved is None else f"{choice.proved:12.3g}")
    )
