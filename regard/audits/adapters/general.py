"""Modules that no family's adapter knows, read by their structure: which columns of which linear layer are
queries, keys and values is found by what the module handed to attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.audits.adapters.base import Adapter, Block, Call, Declared, Matrices, NotCovered
from regard.audits.adapters.columns import Side, Source, Turned, find_side, find_turned, linear_layers
from regard.audits.adapters.inner_norms import inner_norms
from regard.audits.adapters.masks import Pairs, Related, bias_of, support_of
from regard.audits.adapters.norms import any_normalize
from regard.audits.adapters.turnings import Way, turnings
from regard.audits.calling import moving_tensors
from regard.lookups import Linear, NormedLinear
from regard.potentials import Dot, NormedDot, Potential, Rotary, SoftCap
from regard.potentials.base import Sum
from regard.supports import Causal, Full

if TYPE_CHECKING:
    from regard.audits.watching import Seen

CLOSE = 1e-4
"""How far an output projection may be from what the module returned, relative."""


@dataclass(frozen=True)
class General(Adapter):
    """learned: the matrices that were found on an input, or why there are none; before: the norm whose output
    is all that the module read there; after: the linear layer that was given all that it returned.
    """

    learned: Matrices | str = "nothing of it has been read yet"
    before: str | None = None
    after: str | None = None

    def declare(self, model: nn.Module, path: str, module: nn.Module, call: Call) -> Declared:
        return _Reading(model, path, module, call, self.after).declared()

    def learn(
        self,
        model: nn.Module,
        path: str,
        module: nn.Module,
        call: Call,
        before: str | None,
        after: str | None = None,
    ) -> General:
        """The same with what a call says about its matrices; before: what gave the first of its tokens,
        after: what took all that it returned.
        """
        try:
            reading = _Reading(model, path, module, call, after)
            found = reading.matrices()
        except NotCovered as reason:
            return General(str(reason), after=after)
        known = before is not None and any_normalize(model.get_submodule(before)) is not None
        entering = before if known and reading.context is reading.points else None
        return General(found, entering, after)

    def entering(self, model: nn.Module, path: str, module: nn.Module) -> str | None:
        return self.before

    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        if isinstance(self.learned, str):
            raise NotCovered(self.learned)
        return self.learned

    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        return None

    def parameters(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Form:
    """How scores are made of queries and keys: scale · q·k, a cap on it, and what is added."""

    scale: float
    softcap: float | None
    bias: Tensor | None


def form_of(potential: Potential, width: int) -> Form:
    """The form of the scores of a call; NotCovered where they are something else."""
    terms = list(potential.terms) if isinstance(potential, Sum) else [potential]
    added = [term.bias for term in terms if hasattr(term, "bias")]
    rest = [term for term in terms if not hasattr(term, "bias")]
    cap = rest[0].cap if len(rest) == 1 and isinstance(rest[0], SoftCap) else None
    core = rest[0].potential if len(rest) == 1 and isinstance(rest[0], SoftCap) else rest[0] if rest else None
    if len(rest) != 1 or not isinstance(core, Dot):
        raise NotCovered("it computes its scores itself, and they were seen without their queries and keys")
    return Form(float(core.factor(width)), None if cap is None else float(cap), sum(added) if added else None)


@dataclass(frozen=True)
class Piece:
    """A part of the scores: products of these queries and keys."""

    query: Turned
    key: Turned

    @property
    def plain(self) -> bool:
        """Whether both are linear in tokens."""
        return self.query.side.norm is None and self.key.side.norm is None

    def unturned(self, scale: float) -> Potential:
        """Its scores at one position."""
        query, key = self.query.side, self.key.side
        if self.plain:
            return Dot(query.weight, key.weight, scale, query.bias, key.bias)
        return NormedDot(query.weight, key.weight, scale, query.bias, key.bias, query.norm, key.norm)

    def potential(self, scale: float) -> Potential:
        """Its scores."""
        found = self.unturned(scale)
        if self.query.frequencies is None:
            return found
        return Rotary(found, frequencies=self.query.frequencies, interleaved=self.query.interleaved)


class _Reading:
    """What one call of a module says about its weights."""

    def __init__(
        self, model: nn.Module, path: str, module: nn.Module, call: Call, after: str | None = None
    ) -> None:
        if call.sight is None:
            raise NotCovered(f"no adapter knows {type(module).__name__}")
        self.outer = linear_layers(model.get_submodule(after)) if after else []
        self.model, self.path, self.module, self.call = model, path, module, call
        self.seen: Seen = call.sight.resolve()[0]
        if self.seen.sizes[0] != 1:
            raise NotCovered("it attends in windows")
        self.form = form_of(self.seen.double.potential, self.seen.tensors[0].shape[-1])
        self.layers, self.norms = linear_layers(module), inner_norms(module)
        self.points = self._tokens(first=True)[0]

    def _tokens(self, first: bool) -> list[Tensor]:
        """The tokens (n, d) that a module was given: the first, or all."""
        found = [
            part.detach().double().reshape(-1, part.shape[-1])
            for part in moving_tensors((self.call.arguments, self.call.options))
            if part.ndim >= 2
        ]
        if not found:
            raise NotCovered("it was given no tokens")
        return found[:1] if first else found

    def matrices(self) -> Matrices:
        """All that weights say."""
        pieces, value = self._pieces(), self._value()
        if value.norm is not None or len(pieces) > 1:
            raise NotCovered(
                "its keys and values pass through a norm on the way, so no weight matrix describes them"
            )
        w_o, b_o = self._output()
        query, key = pieces[0].query.side, pieces[0].key.side
        return Matrices(
            query.weight,
            key.weight,
            value.weight,
            w_o,
            self.form.scale,
            query.bias,
            key.bias,
            value.bias,
            b_o,
            self.form.softcap,
            None if pieces[0].plain else pieces[0].unturned(self.form.scale),
        )

    def declared(self) -> Declared:
        """The declaration of the call."""
        pieces, value, (w_o, b_o) = self._pieces(), self._value(), self._output()
        parts = [piece.potential(self.form.scale) for piece in pieces]
        potential = parts[0] if len(parts) == 1 else Sum(tuple(parts))
        potential = potential if self.form.softcap is None else SoftCap(potential, self.form.softcap)
        pairs = self._pairs()
        bias = bias_of(pairs, len(w_o))
        attention = Attention(
            potential if bias is None else potential + bias,
            Linear(value.weight, value.bias)
            if value.norm is None
            else NormedLinear(value.weight, value.norm, value.bias),
            normalizer=self.seen.double.normalizer,
            support=support_of(pairs.allowed),
        )
        output = self._own()
        context = None if self.context is self.points else self.context.unsqueeze(0)
        return Declared(attention, w_o, b_o, self.points.unsqueeze(0), context, None, output)

    def _pairs(self) -> Pairs:
        _, _, n, m = self.seen.sizes
        support, bias = self.seen.double.support, self.form.bias
        bias = None if bias is None else bias.expand(1, -1, n, m)
        if isinstance(support, (Full, Causal)) and min(n, m) > 1:
            return Pairs(Related(support, (1, n, m), torch.device("cpu")), bias)
        allowed = support.allows(torch.arange(n), torch.arange(m))
        return Pairs(allowed.expand(1, allowed.shape[-3] if allowed.ndim > 2 else 1, n, m), bias)

    @property
    def context(self) -> Tensor:
        """What values are made of."""
        self._value()
        return self._source

    def _value(self) -> Side:
        wanted = self.seen.double.tensors[2][0]
        for source in self._tokens(first=False):
            found = find_side(Source(source, self.layers, self.norms), wanted)
            if found is not None:
                first = source.shape == self.points.shape and torch.equal(source, self.points)
                self._source = self.points if first else source
                return found
        raise NotCovered(f"its values are not {self._linear('v')}")

    def _pieces(self) -> list[Piece]:
        """Queries and keys, turned by positions or not: whole, or the coordinates that turn apart from those
        before them.
        """
        self._value()
        q, k, _ = (part[0] for part in self.seen.double.tensors)
        ways = list(turnings(self.model, self.path, self.call, len(self.points)))
        try:
            return [self._piece(q, k, ways)]
        except NotCovered as reason:
            for turning in {2 * len(way.frequencies) for way in ways if way.frequencies is not None}:
                still = q.shape[-1] - turning
                if still > 0:
                    with suppress(NotCovered):
                        return [
                            self._piece(q[..., :still], k[..., :still], ways[:1]),
                            self._piece(q[..., still:], k[..., still:], ways[1:]),
                        ]
            raise reason from None

    def _piece(self, q: Tensor, k: Tensor, ways: list[Way]) -> Piece:
        """Some coordinates of queries and keys."""
        query = find_turned(Source(self.points, self.layers, self.norms), q, ways)
        if query is None:
            raise NotCovered(f"its queries are not {self._linear('q')}")
        same = [way for way in ways if way.frequencies is query.frequencies]
        same = [way for way in same if way.interleaved == query.interleaved]
        key = find_turned(Source(self._source, self.layers, self.norms), k, same)
        if key is None:
            raise NotCovered(f"its keys are not {self._linear('k')}")
        return Piece(query, key)

    def _linear(self, letter: str) -> str:
        """What queries, keys or values are not, and what may be between."""
        norms = [name for name, _ in self.module.named_children() if "norm" in name.lower()]
        between = [name for name in norms if name.lower().startswith((letter, "kv", "qk", "norm"))] or norms
        what = "a linear function of its tokens that regard can read"
        return f"{what}: {', '.join(between)} stands between" if between else what

    def _output(self) -> tuple[Tensor, Tensor | None]:
        """The output projection: what takes the heads to what the module returned, or to what it returns
        after a residual connection, with a norm or without; or the layer outside that takes them from it.
        """
        heads = self.seen.double.output[0]
        joined = heads.transpose(0, 1).flatten(1)
        output = next(moving_tensors(self.call.output), None)
        if self.outer and output is not None and _near(joined, _sequence(output)):
            ((_, weight, bias),) = self.outer
            self._bare = False
            return weight.unflatten(0, (len(heads), -1)), bias
        for _, weight, bias in self.layers if output is not None else ():
            if len(weight) != joined.shape[-1] or output is None or weight.shape[-1] != output.shape[-1]:
                continue
            found = joined @ weight if bias is None else joined @ weight + bias
            for way, given in enumerate(self._endings(found)):
                if _near(given, _sequence(output)):
                    self._bare = way == 0
                    return weight.unflatten(0, (len(heads), -1)), bias
        raise NotCovered("what it returns is not its heads under a linear layer of its own or the next one")

    def _endings(self, projected: Tensor) -> Iterator[Tensor]:
        """What a module may make of its projected heads: nothing more, or a part of its block."""
        yield projected
        for tokens in self._tokens(first=False):
            if tokens.shape == projected.shape:
                yield tokens + projected
                yield from (norm(tokens + projected) for norm in self.norms if norm.fits(1, tokens.shape[-1]))

    def _own(self) -> Tensor:
        """What the declaration must reproduce: what the module returned, or its heads where it goes on."""
        if not self._bare:
            return self.seen.output.detach()
        output = next(moving_tensors(self.call.output)).detach()
        return output.reshape(1, -1, output.shape[-1])


def _sequence(output: Tensor) -> Tensor:
    """What a module returned as tokens (n, e)."""
    return output.detach().double().reshape(-1, output.shape[-1])


def _near(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and float((found - wanted).norm()) <= CLOSE * float(wanted.norm())
