"""Multi-head attention with any potential, normalizer and support."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from regard import _check
from regard._kinds import names_wrong_kinds, refuse_unusual
from regard.attention import Attention
from regard.compute.dropout import check_share
from regard.compute.tensors import attend_tokens
from regard.errors import ArgumentError
from regard.maps import Map
from regard.nn.cache import ContextCache, LayerCache, marks_after
from regard.nn.declaration import cross_heads, repeat_groups, self_heads
from regard.nn.digits import working
from regard.nn.frames import Frames
from regard.nn.mechanism import Mechanism
from regard.nn.naming import refuse_torch_names
from regard.nn.next_token import attend_next, is_next, may_go_on
from regard.nn.shaping import center
from regard.nn.visibility import check_batch, check_order, check_pieces
from regard.normalizers import Normalizer
from regard.potentials import Dot, Potential, Rotary
from regard.potentials.base import simple_parts
from regard.potentials.distance import DistancePotential
from regard.potentials.positions import PositionPotential
from regard.supports import Causal, Full, Support


class MultiHeadAttention(nn.Module):
    """x ↦ Σ_h attention_h(x, context) W_o[h] + b_o: heads of one mechanism on projected tokens (vaswani2017,
    3.2.2).

    `mechanism` is an Attention without projections; its tensors are learned where they are an nn.Parameter.
    `kv_heads` fewer than `heads` share keys and values in groups (ainslie2023). shaped=True is the attention
    I + P - uniform of regard.nn.shaped. orthogonal=True: projections and output are orthogonal matrices.
    dropout: the share of weights that is dropped in training, as torch does it; what is left of a row is no
    law, so declarations and proofs are about the module in evaluation mode.
    State: projection (queries, then keys, then values), output, and the tensors of the mechanism.

    Examples:
        >>> from regard.nn import MultiHeadAttention
        >>> layer = MultiHeadAttention(8, 4, kv_heads=2, mechanism=regard.Attention(regard.Gaussian()))
        >>> layer(torch.randn(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @names_wrong_kinds
    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        mechanism: Attention = Attention(Dot()),
        bias: bool = True,
        shaped: bool = False,
        orthogonal: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.width, self.heads, self.kv_heads, self.shaped = (
            width,
            heads,
            heads if kv_heads is None else kv_heads,
            shaped,
        )
        check_heads(width, heads, self.kv_heads)
        check_flags(bias=bias, shaped=shaped, orthogonal=orthogonal)
        check_share("dropout", dropout)
        self.dropout = float(dropout)
        self.head_width = width // heads
        if orthogonal:
            self._check_frames(bias)
        self.projection = (
            Frames(width, 3)
            if orthogonal
            else nn.Linear(width, (heads + 2 * self.kv_heads) * self.head_width, bias)
        )
        self.output = Frames(width) if orthogonal else nn.Linear(width, width, bias)
        self.set_mechanism(mechanism)
        if shaped:
            check_laws(mechanism.normalizer, self.dropout)
        if not orthogonal:
            self._initialize()

    def set_mechanism(self, mechanism: Attention) -> None:
        """Replace the potential, normalizer and support of the layer."""
        self.mechanism = Mechanism(mechanism)
        check_order(mechanism.normalizer, mechanism.support)
        self.goes_on = may_go_on(self, mechanism)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        values: Tensor | None = None,
        *,
        support: Support = Full(),
        added: PositionPotential | None = None,
        cache: LayerCache | ContextCache | None = None,
        **torch_names: Any,
    ) -> Tensor:
        """Tokens (..., n, width) of x attend to themselves, or to a context (..., m, width).

        `values` (..., m, width): tokens that are looked up in place of the context, whose keys are compared;
        torch's module(query, key, value). `support` says what they may see beyond the mechanism's own
        support: Padding(lengths.unsqueeze(-1)), Where(real[:, None, None]). `added` is what scores get beside
        the mechanism's: PairBias(mask), mask (n, m), (heads, n, m) or (batch, 1, n, m).
        """
        plain = context is values is added is None and type(support) is Full and not torch_names
        if plain and isinstance(cache, LayerCache) and is_next(self, x, cache):
            return attend_next(self, x, cache)
        refuse_torch_names(torch_names, self)
        check_tokens("x", x, self.width)
        kind, x = x.dtype, self._received("x", x)
        check_batch(support, x)
        own = self.mechanism.value()
        mechanism = _with_added(own, added)
        allowed = intersection(mechanism.support, support)
        if context is None:
            check_order(mechanism.normalizer, allowed)
        if cache is not None:
            check_pieces(mechanism.normalizer)
        potential = mechanism.potential
        if context is None:
            queries, keys, looked_up, past = self._own(x, allowed, cache, values)
            if cache is not None and turns_once(own.potential, x):
                inner = own.potential.potential
                potential = inner if added is None else inner + added
        else:
            queries, keys, looked_up, past = *self._crossing(x, context, cache, values), 0
            check_batch(support, context)
        marks = None if past == 0 else marks_after(past, x.shape[-2], x.device)
        if self.kv_heads != self.heads and any(
            isinstance(part, DistancePotential) for part in simple_parts(mechanism.potential)
        ):
            keys = repeat_groups(
                keys, self.heads, -3
            )  # queries and keys are moved to one center, head by head
        dropped = self.dropout if self.training else 0.0
        newest = past and x.shape[-2] == 1 and type(allowed) is Causal  # one token after all others sees all
        parts = (potential, mechanism.normalizer, Full() if newest else allowed)
        mixed = attend_tokens(*parts, queries, keys, looked_up, marks, dropped)
        mixed = repeat_groups(
            mixed, self.heads, -3
        )  # where scores know of positions alone, groups of heads see the same
        if mixed.ndim != queries.ndim:
            found = f"has tensors that turn queries {list(queries.shape)} into {list(mixed.shape)}"
            raise ArgumentError(
                "mechanism", found, f"give numbers, or one for each head: a tensor ({self.heads},)"
            )
        if self.shaped:
            mixed = center(mixed, looked_up, allowed, past)
        value: Tensor = self.output(mixed.transpose(-3, -2).flatten(-2))
        return value.to(kind) if isinstance(self.output, Frames) else value

    def declare(self, context: Tensor | None = None) -> Map:
        """The layer as a map of its tokens, to a given context (m, width) where there is one; in float64,
        cut off from its parameters.
        """
        return self_heads(self) if context is None else cross_heads(self, context)

    def _own(
        self, x: Tensor, allowed: Support, cache: LayerCache | ContextCache | None, looked_up: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        if looked_up is not None:
            found = "are given without the context that they belong to"
            raise ArgumentError("values", found, "give the context too: module(x, context, values)")
        queries, keys, values = self._split(self.projection(x), self.heads, self.kv_heads, self.kv_heads)
        if cache is None:
            return queries, keys, values, 0
        if not isinstance(cache, LayerCache):
            raise ArgumentError(
                "cache", f"is a {type(cache).__name__}", "self-attention takes an entry of Cache.tokens"
            )
        if allowed.span(0, 0)[1] > 0:
            raise ArgumentError(
                "cache",
                "is given to attention that sees later tokens",
                "use a mechanism with support=Causal()",
            )
        past = cache.length
        potential = self.mechanism.value().potential
        if turns_once(potential, x):
            marks = marks_after(past, x.shape[-2], x.device)
            queries, keys = potential.features(queries, keys, marks, marks)
        return queries, *cache.extend(keys, values), past

    def _crossing(
        self, x: Tensor, context: Tensor, cache: LayerCache | ContextCache | None, looked_up: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        check_tokens("context", context, self.width)
        context = self._received("context", context)
        looked_up = None if looked_up is context else looked_up
        if self.shaped:
            raise ArgumentError(
                "context",
                "is given to shaped attention, where I + P - uniform acts on one sequence",
                "leave it out",
            )
        if cache is not None and not isinstance(cache, ContextCache):
            raise ArgumentError(
                "cache", f"is a {type(cache).__name__}", "cross-attention takes an entry of Cache.contexts"
            )
        weight, bias = self.projection.weight, self.projection.bias
        (queries,) = self._split(
            nn.functional.linear(x, weight[: self.width], _part(bias, slice(None, self.width))), self.heads
        )
        if looked_up is not None:
            return queries, *self._apart(context, looked_up, cache)
        known = None if cache is None else cache.known(context)
        if known is None:
            both = nn.functional.linear(context, weight[self.width :], _part(bias, slice(self.width, None)))
            keys, values = self._split(both, self.kv_heads, self.kv_heads)
            if cache is not None:
                cache.keep(context, keys, values)
            return queries, keys, values
        return queries, *known

    def _apart(self, context: Tensor, looked_up: Tensor, cache: ContextCache | None) -> tuple[Tensor, Tensor]:
        """Keys of one sequence, values of another."""
        check_tokens("values", looked_up, self.width)
        looked_up = self._received("values", looked_up)
        if cache is not None:
            raise ArgumentError("values", "are given with a cache, which keeps one context", "leave one out")
        if looked_up.shape[-2] != context.shape[-2]:
            found = f"has {looked_up.shape[-2]} tokens and the context {context.shape[-2]}"
            raise ArgumentError("values", found, "give one value for each key")
        middle = self.width + self.kv_heads * self.head_width
        rows = ((context, slice(self.width, middle)), (looked_up, slice(middle, None)))
        weight, bias = self.projection.weight, self.projection.bias
        keys, values = (
            self._split(nn.functional.linear(z, weight[part], _part(bias, part)), self.kv_heads)[0]
            for z, part in rows
        )
        return keys, values

    def _received(self, name: str, x: Tensor) -> Tensor:
        """Tokens in the numbers of the projections; orthogonal ones have float32 at least, and tokens of
        fewer digits are taken to theirs.
        """
        if not isinstance(self.projection, Frames):
            if x.dtype != self.projection.weight.dtype:
                check_kind(name, x, self.projection)
            return x
        if x.dtype != working(self.projection.raw):
            check_kind(name, x, self.projection)
        return x.to(working(x))

    def _split(self, projected: Tensor, *heads: int) -> tuple[Tensor, ...]:
        """(..., n, (h + …) c) as tensors (..., h, n, c)."""
        parts = projected.unflatten(-1, (-1, self.head_width)).transpose(-3, -2).split(heads, -3)
        return tuple(parts)

    def _check_frames(self, bias: bool) -> None:
        if bias or self.kv_heads != self.heads:
            found = "is True, and matrices are orthogonal without biases and with one key head for each head"
            raise ArgumentError("orthogonal", found, "give bias=False and leave out kv_heads")

    def _initialize(self) -> None:
        nn.init.xavier_uniform_(self.projection.weight)
        for layer in (self.projection, self.output):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def extra_repr(self) -> str:
        shared = "" if self.kv_heads == self.heads else f", kv_heads={self.kv_heads}"
        dropped = f", dropout={self.dropout:g}" if self.dropout else ""
        return f"{self.width}, heads={self.heads}{shared}{', shaped=True' if self.shaped else ''}{dropped}"


def _with_added(mechanism: Attention, added: PositionPotential | None) -> Attention:
    """The mechanism with a bias of pairs of positions beside its scores."""
    if added is None:
        return mechanism
    if not isinstance(added, PositionPotential):
        found = f"is {_check.describe(added)}, which is not a bias on pairs of positions"
        raise ArgumentError("added", found, "give PairBias(mask), or make it a part of the mechanism")
    return mechanism.replace(potential=mechanism.potential + added)


def turns_once(potential: Potential, x: Tensor) -> TypeGuard[Rotary]:
    """Whether queries and keys may be turned to their positions before they are kept: where scores are
    products of turned points, and points have the digits for it.
    """
    inner = potential.potential if isinstance(potential, Rotary) else None
    if not isinstance(inner, Dot) or x.dtype.itemsize < 4 or torch.is_autocast_enabled(x.device.type):
        return False
    return inner.w_q is inner.w_k is inner.b_q is inner.b_k is None


def intersection(first: Support, second: Support) -> Support:
    """What both allow; Full where that is everything."""
    if isinstance(second, Full):
        return first
    return second if isinstance(first, Full) else first & second


def check_heads(width: int, heads: int, kv_heads: int) -> None:
    """Heads share the width, and groups of heads share keys."""
    for name, value in (("width", width), ("heads", heads), ("kv_heads", kv_heads)):
        check_count(name, value)
    if width % heads:
        near = [count for count in range(1, width + 1) if width % count == 0]
        best = min(near, key=lambda count: abs(count - heads))
        raise ArgumentError(
            "heads", f"is {heads}, which does not divide the width {width}", f"use {best}, or another width"
        )
    if heads % kv_heads:
        raise ArgumentError(
            "kv_heads",
            f"is {kv_heads}, which does not divide the {heads} heads",
            "each group needs the same number of heads",
        )


def check_count(name: str, value: int) -> None:
    """How many of something there are; True is not a number here."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(name, f"is {value!r}", "give a positive integer")


def check_flags(**flags: bool) -> None:
    """Choices that are True or False: a word such as "no" would count as True."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ArgumentError(name, f"is {value!r}", "give True or False")


def check_laws(normalizer: Normalizer, dropout: float = 0.0) -> None:
    """P - uniform is a difference of laws, which sums to zero in each row."""
    if dropout > 0:
        found = (
            f"is {dropout} in shaped attention I + P - uniform, and rows with dropped weights are not laws"
        )
        raise ArgumentError("dropout", found, "leave it out, or leave out the shaping")
    if not normalizer.laws:
        found = (
            f"has the normalizer {type(normalizer).__name__}, whose rows are not laws, in shaped attention "
            "I + P - uniform"
        )
        raise ArgumentError("mechanism", found, "use Softmax() or another normalizer of laws, or no shaping")


def check_tokens(name: str, x: Tensor, width: int) -> None:
    """Tokens (..., n, width)."""
    if isinstance(x, Tensor):
        refuse_unusual(name, x)
    if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[-1] != width:
        found = f"has shape {list(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
        raise ArgumentError(name, found, f"give tokens (..., n, {width})")
    if not x.dtype.is_floating_point:
        raise ArgumentError(
            name,
            f"has dtype {x.dtype}",
            "give points; ids of tokens go through an Embedding or a LanguageModel",
        )


def check_kind(name: str, x: Tensor, layer: nn.Module) -> None:
    """Points in the numbers of the layer that reads them; autocast converts by itself."""
    kinds = {parameter.dtype for parameter in layer.parameters() if parameter.dtype.is_floating_point}
    if kinds and x.dtype not in kinds and not torch.is_autocast_enabled(x.device.type):
        own = next(iter(layer.parameters())).dtype
        remedy = f"convert one of them: {name}.to({own}) or module.to({x.dtype})"
        raise ArgumentError(name, f"has dtype {x.dtype} and the module {own}", remedy)


def _part(bias: torch.Tensor | None, rows: slice) -> Tensor | None:
    return None if bias is None else bias[rows]
