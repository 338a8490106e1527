"""cheaper: which cheaper attention is good enough for this layer on these inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
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
)
from regard.compression.compressed import joined
from regard.compression.groups import Group, of_heads
from regard.domains import Neighborhood
from regard.errors import ArgumentError, RefusalError
from regard.lookups import Factored, Identity, Linear, Lookup
from regard.maps import Heads
from regard.measure import Measure
from regard.normalizers import Elu, PositiveRandom
from regard.proofs.approximation import row_errors
from regard.proofs.ratios import ratio_errors
from regard.proofs.setting import equivariant
from regard.proofs.subject import Head, single_heads
from regard.proofs.theorem import Refusal

LEAST = 24
"""Queries below which nothing is said of others."""
Watched = Callable[[Sequence[Candidate]], Iterable[Candidate]]
"""Candidates as they come, with somebody who counts them."""


@dataclass(frozen=True)
class Choice:
    """One candidate on one layer. memory and work: fractions of those of all keys. error: the root mean
    square of the error of the output over that of the output, on queries that neither fit nor calibration
    saw. quantile: the relative error that, by calibration, 95 % of fresh queries stay below; above: the
    fraction of the test queries that did not. divergence: the mean of KL(cheap row | exact row), of all
    heads. proved: the largest bound over the test queries, relative too, where it is below the trivial one.
    refused: why there are no numbers.

    Examples:
        >>> from regard.compression import Recent, cheaper
        >>> layer, tokens = regard.Attention(regard.Dot()), torch.randn(60, 2, dtype=torch.float64)
        >>> (choice,) = cheaper(layer, tokens, candidates=(Recent(30),)).choices
        >>> choice.memory, choice.error > 0
        (0.5, True)
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
    """The choices for one layer, in the order of the candidates; `best(error)` is the one to take.

    Examples:
        >>> from regard.compression import Quantized, Recent, cheaper
        >>> layer, tokens = regard.Attention(regard.Dot()), torch.randn(60, 2, dtype=torch.float64)
        >>> found = cheaper(layer, tokens, candidates=(Recent(8), Quantized(8)))
        >>> found.best(0.1).candidate  # the least memory within ten percent
        Quantized(bits=8)
    """

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
    x: Measure | Tensor,
    context: Measure | Tensor | None = None,
    *,
    candidates: Sequence[Candidate] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Cheaper:
    """A table of cheaper ways for the queries x (m, d) to attend to the context, x where none is given.

    Where positions decide what tokens see, the later half of x asks; what all of these see is the context,
    and what only some of them see stays as it is.

    The queries are dealt at random into three: what is fitted sees the first, the quantile is that of the
    second, and the errors are of the third. Heads(attention, w_o) measures errors after the mixing. Measured
    and calibrated for queries like these; `proved` is proved, of the test queries. dtype: in which the whole
    context would be cached; memory is relative to its bits.

    Examples:
        >>> from regard.compression import Quantized, TopK, cheaper
        >>> layer, tokens = regard.Attention(regard.Dot()), torch.randn(60, 2, dtype=torch.float64)
        >>> found = cheaper(layer, tokens, candidates=(TopK(20), Quantized(8)))
        >>> found.keys, [0 <= choice.error < 1 for choice in found.choices]
        (60, [True, True])
    """
    inner = attention.attention if isinstance(attention, Heads) else attention
    queries, keys = _read(x, context)
    try:
        heads = [Head(head) for head in single_heads(inner)]
        groups = groups_of(heads, queries, keys)
    except Refusal as refusal:
        raise RefusalError("cheaper", [f"{refusal}."]) from None
    if not dtype.is_floating_point:
        raise ArgumentError("dtype", f"is {dtype}", "give the dtype of a cache, such as torch.bfloat16")
    layer = Layer(groups, _mixers(attention, len(heads)), _dealt(groups, seed), dtype)
    return layer.table(usual(groups[0], seed=seed) if candidates is None else candidates)


def groups_of(heads: list[Head], queries: Measure, keys: Measure | None) -> list[Group]:
    """The heads of a declaration as candidates see them."""
    for head in heads:
        if not head.softmax:
            raise Refusal(f"rows of {type(head.normalizer).__name__} are not softmax rows")
    whole = queries if keys is None else keys
    plain = queries.marks is None and whole.marks is None
    if plain and not any(_positional(head, whole) for head in heads):
        return [Group(head, whole, queries.points.unsqueeze(0)) for head in heads]
    if whole.log_weights is not None:
        raise Refusal("weights of keys together with positions are not supported; leave the weights out")
    return of_heads(heads, queries, keys)


def _positional(head: Head, keys: Measure) -> bool:
    try:
        equivariant(head, Neighborhood(keys.points, 0.0))
    except Refusal:
        return True
    return False


class Layer:
    """One layer with its exact outputs, computed once, and queries dealt into three.

    dtype: of the context that memory is relative to.
    """

    def __init__(
        self,
        groups: list[Group],
        mixers: list[Tensor | None],
        parts: tuple[Tensor, ...],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.groups, self.mixers, self.bits = groups, mixers, torch.finfo(dtype).bits
        self.fit, self.calibration, self.test = parts
        self.exact = [group.everything() for group in groups]
        self.outputs = {part: self._outputs(self.exact, rows) for part, rows in enumerate(parts)}
        self.size = float(self.outputs[2].square().sum(-1).mean().sqrt())

    def table(self, candidates: Sequence[Candidate], watched: Watched = iter) -> Cheaper:
        """All candidates; `watched` sees them one by one."""
        if not candidates or not all(isinstance(one, Candidate) for one in candidates):
            raise ArgumentError(
                "candidates", f"are {candidates!r}", "give Merged(size), Quantized(bits) and others"
            )
        found = tuple(self.choice(one) for one in watched(candidates))
        return Cheaper(found, self.groups[0].keys.size, sum(len(part) for part in self._parts))

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        return self.fit, self.calibration, self.test

    def choice(self, candidate: Candidate) -> Choice:
        """What a candidate costs, and what it gets wrong."""
        try:
            fitted = [group.fit(candidate, self.fit) for group in self.groups]
            errors = [self._errors(fitted, part) for part in (1, 2)]
        except (Refusal, ArgumentError, RefusalError) as refusal:
            return Choice(candidate, refused=str(refusal))
        ordered = errors[0].sort().values
        place = min(len(ordered), math.ceil(0.95 * (len(ordered) + 1))) - 1
        heads = [len(group.queries) for group in self.groups]
        found = Choice(
            candidate,
            self._memory(fitted) / self._memory(self.exact),
            _dot(heads, [one.work for one in fitted]) / _dot(heads, [one.work for one in self.exact]),
            float(errors[1].square().mean().sqrt()),
            float(ordered[place]),
            float((errors[1] > ordered[place]).double().mean()),
        )
        return self._with_rows(found, fitted)

    def _memory(self, fitted: list[Fitted]) -> float:
        return sum(one.memory(self.bits) for one in fitted)

    def _errors(self, fitted: list[Fitted], part: int) -> Tensor:
        moved = self._outputs(fitted, self._parts[part]) - self.outputs[part]
        return moved.norm(dim=-1) / self.size

    def _outputs(self, fitted: list[Fitted], rows: Tensor) -> Tensor:
        """Of all heads, mixed."""
        outputs = [
            out for group, one in zip(self.groups, fitted, strict=True) for out in group.outputs(one, rows)
        ]
        mixers = [mixer for mixer in self.mixers if mixer is not None]
        if not mixers:
            return torch.cat(outputs, -1)
        return torch.stack([out @ w for out, w in zip(outputs, mixers, strict=True)]).sum(0)

    def _with_rows(self, choice: Choice, fitted: list[Fitted]) -> Choice:
        """Divergence and bound, where a candidate is a law on the keys and values are as they are."""
        laws, exact = (self._laws(side) for side in (fitted, self.exact))
        if any(law is None for law in laws):
            return choice
        gaps = [_divergence(law, row) for law, row in zip(laws, exact, strict=True)]  # type: ignore[arg-type]
        choice = replace(choice, divergence=float(torch.stack(gaps).mean()))
        if any(group.beside or len(group.queries) > 1 for group in self.groups):
            return choice
        try:
            return replace(choice, proved=self._proved(laws, [one.value_error for one in fitted]))  # type: ignore[arg-type]
        except Refusal:  # values that no theorem is about
            return choice

    def _laws(self, fitted: list[Fitted]) -> list[Tensor | None]:
        return [
            law for group, one in zip(self.groups, fitted, strict=True) for law in group.laws(one, self.test)
        ]

    def _proved(self, laws: list[Tensor], moved: list[Upper]) -> float | None:
        """Σ_h b_h of the mixed values, or √Σ b_h² side by side; nothing where it is no better than their
        diameters.
        """
        parts, trivial = [], []
        for group, law, mixer, off in zip(self.groups, laws, self.mixers, moved, strict=True):
            head, queries = group.head, group.queries[0, self.test]
            stretch = exact(1.0) if mixer is None else product_norm(mixer)
            mixed = head.attention.replace(lookup=_through(head.lookup, mixer))
            asked = (mixed, law, queries, group.keys)
            parts.append(Upper(row_errors(*asked)).minimum(Upper(ratio_errors(*asked))) + stretch * off)
            values = mixed.lookup.values(group.keys.points, group.keys.marks)
            trivial.append(Upper(2 * (values - values.mean(0)).norm(dim=-1).amax()))
        bound, most = (float(self._joined(side).amax()) / self.size for side in (parts, trivial))
        return bound if bound < most else None

    def _joined(self, parts: list[Upper]) -> Upper:
        return joined(parts) if self.mixers[0] is None else total(parts)


# Arguments


def _read(x: object, context: Measure | Tensor | None) -> tuple[Measure, Measure | None]:
    points = x.points if isinstance(x, Measure) else x
    if not isinstance(points, Tensor) or points.ndim != 2 or len(points) < LEAST:
        found = (
            f"has shape {list(points.shape)}" if isinstance(points, Tensor) else f"is a {type(x).__name__}"
        )
        raise ArgumentError(
            "x", found, f"give at least {LEAST} queries (m, d): a third each fits, calibrates, tests"
        )
    if isinstance(x, Measure) and x.log_weights is not None and context is not None:
        raise ArgumentError("x", "has weights", "queries have none; weights belong to the context")
    queries = as_measure("x", x)  # type: ignore[arg-type]
    if context is None:
        return _double(queries), None
    keys = as_measure("context", context)
    if keys.batch_shape:
        raise ArgumentError("context", "has a batch", "give one context (n, d)")
    return _double(queries), _double(keys)


def _double(measure: Measure) -> Measure:
    weights = None if measure.log_weights is None else measure.log_weights.detach().double()
    return Measure(measure.points.detach().double(), weights, measure.marks)


def _dealt(groups: list[Group], seed: int) -> tuple[Tensor, ...]:
    count = groups[0].queries.shape[1]
    if count < LEAST:
        found = f"leaves {count} queries that see what all of them see"
        raise ArgumentError("x", found, f"give more tokens: {LEAST} queries fit, calibrate and test")
    return dealt(count, seed)


def dealt(count: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Rows for fitting, calibrating and testing, at random."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tensor_split(3)


def usual(group: Group, share: float = 0.25, seed: int = 0) -> tuple[Candidate, ...]:
    """A share of the keys, usual features, and usual bits. seed: of the random features."""
    keys, head = group.keys, group.head
    size = max(1, int(share * keys.size))
    form = head.form(keys.dimension)
    width = keys.dimension if form is None or not form.factors else form.factors[-1].shape[0]
    features = (Features(Elu()), Features(PositiveRandom.draw(width, 4 * width, seed, torch.float64)))
    kept = (Recent(size), TopK(size), Merged(size), Nystrom(size), LowRank(max(1, width // 2)))
    return (*kept, *features, Quantized(8), Quantized(4))


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))


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
