"""Architecture: the widths of a stack of attention and feed-forward layers,
from which its cost follows in closed form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

from regard.costs.account import (
    EMBEDDING,
    FEED_FORWARD,
    HEAD,
    MIXING,
    NORMALIZATION,
    OUTPUT,
    PROJECTIONS,
    SCORES,
    SOFTMAX,
    Cost,
    Ledger,
    Part,
    element,
    windowed_pairs,
)
from regard.costs.costing import assess
from regard.costs.sizes import Sizes
from regard.errors import ArgumentError

MAY_BE_ZERO = ("vocabulary", "positions", "outputs", "norms", "outer_norms", "hidden", "windowed")


@dataclass(frozen=True)
class Architecture:
    """`layers` of attention with `heads` (`groups` of them for keys and values) of `head_width`, and of
    feed-forward of width `hidden`.

    gated: three matrices a feed-forward and not two (shazeer2020). window: how many tokens of its past a
    token sees, itself included, in `windowed` of the layers, in all where that is None.
    vocabulary, positions: rows of tables that are looked up; outputs: the width of the head, no head where it
    is 0; tied: the head is the table of the vocabulary. norms, outer_norms: vectors of a layer's norms, and
    of those outside; head_norms: one vector for the queries of all heads and one for the keys. pooler: a
    square matrix on one token of a sequence, which is then what the head reads; transform: one on every token
    before the head.

    Examples:
        >>> plain = regard.costs.Architecture(width=512, layers=6, heads=8, hidden=2048)
        >>> plain.crossover  # attention costs as much as all matrices at 6 · 512 tokens
        3072.0
    """

    width: int
    layers: int
    heads: int
    hidden: int
    groups: int | None = None
    head_width: int | None = None
    gated: bool = False
    causal: bool = True
    window: int | None = None
    windowed: int | None = None
    vocabulary: int = 0
    positions: int = 0
    outputs: int = 0
    tied: bool = False
    projection_bias: bool = False
    output_bias: bool = False
    hidden_bias: bool = False
    norms: int = 0
    outer_norms: int = 0
    head_norms: bool = False
    pooler: bool = False
    transform: bool = False
    head_bias: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for one in fields(self):
            _check(one.name, str(one.type), getattr(self, one.name))
        if self.heads % self.key_heads:
            raise ArgumentError(
                "groups", f"are {self.key_heads} for {self.heads} heads", "give a divisor of the heads"
            )
        if self.head_width is None and self.width % self.heads:
            raise ArgumentError(
                "heads", f"are {self.heads}, which do not divide the width {self.width}", "give head_width"
            )
        if self.windowed is not None and (self.window is None or self.windowed > self.layers):
            found = f"is {self.windowed} for {self.layers} layers and the window {self.window}"
            raise ArgumentError("windowed", found, "give a window, and at most as many as there are layers")

    @property
    def key_heads(self) -> int:
        """Heads of keys and values: fewer than queries have where queries are grouped."""
        return self.heads if self.groups is None else self.groups

    @property
    def inner(self) -> int:
        """The width of all heads together."""
        return self.heads * (self.head_width or self.width // self.heads)

    @property
    def key_inner(self) -> int:
        """The width of all keys together."""
        return self.inner // self.heads * self.key_heads

    @property
    def matrices(self) -> int:
        """m: how many a feed-forward layer has."""
        return 3 if self.gated else 2

    @property
    def crossover(self) -> float:
        """T* = (D h c + 2 D g c + h c D + m D F) / (2 h c):
        2D + mF/2 where queries are not grouped and h c = D.
        """
        return (
            self.width
            * (2 * self.inner + 2 * self.key_inner + self.matrices * self.hidden)
            / (2 * self.inner)
        )


def _check(name: str, kind: str, value: Any) -> None:
    """A field of one of the kinds int, int | None and bool has such a value; sizes are positive,
    and some may be zero.
    """
    if kind == "bool" and not isinstance(value, bool):
        raise ArgumentError(name, f"is {value!r}", "give True or False")
    if not kind.startswith("int") or (value is None and kind.endswith("None")):
        return
    if type(value) is not int or value < (0 if name in MAY_BE_ZERO else 1):
        raise ArgumentError(name, f"is {value!r}", "give a positive whole number")


@assess.rule(Architecture)
def _assess(architecture: Architecture, sizes: Sizes, inputs: Any) -> Cost:
    if inputs is not None or sizes.context is not None:
        found = "inputs are given" if inputs is not None else "a context is given"
        raise ArgumentError("sizes", f"{found} for an architecture of self-attention", "leave it out")
    ledger = Ledger(sizes)
    for entry in (*_products(architecture, sizes), *_pairs(architecture, sizes), *_tables(architecture)):
        ledger.book(entry)
    return Cost(
        sizes, ledger.cost().parts, sizes.total * element(architecture.dtype) * _numbers_kept(architecture)
    )


@dataclass(frozen=True)
class _Weight:
    """A matrix a × b that acts on `tokens` vectors, `count` times over; biased: with b numbers more."""

    part: str
    a: int
    b: int
    tokens: int
    count: int = 1
    biased: bool = False
    tied: bool = False


def _weights(a: Architecture, tokens: int, batch: int) -> Iterator[_Weight]:
    """Every matrix of the stack."""
    yield _Weight(PROJECTIONS, a.width, a.inner, tokens, a.layers, a.projection_bias)
    yield _Weight(PROJECTIONS, a.width, a.key_inner, tokens, 2 * a.layers, a.projection_bias)
    yield _Weight(OUTPUT, a.inner, a.width, tokens, a.layers, a.output_bias)
    yield _Weight(FEED_FORWARD, a.width, a.hidden, tokens, (a.matrices - 1) * a.layers, a.hidden_bias)
    yield _Weight(FEED_FORWARD, a.hidden, a.width, tokens, a.layers, a.hidden_bias)
    if a.pooler:
        yield _Weight(HEAD, a.width, a.width, batch, biased=True)
    if a.transform:
        yield _Weight(HEAD, a.width, a.width, tokens, biased=True)
    if a.outputs:
        yield _Weight(
            HEAD, a.width, a.outputs, batch if a.pooler else tokens, biased=a.head_bias, tied=a.tied
        )


def _products(a: Architecture, sizes: Sizes) -> Iterator[Part]:
    unit = element(a.dtype)
    for w in _weights(a, sizes.total, sizes.batch):
        flops = 2 * w.count * w.tokens * w.a * w.b
        owned = w.count * (w.a * w.b * (not w.tied) + w.b * w.biased)
        moved = unit * w.count * (w.a * w.b + w.tokens * (w.a + w.b))
        yield Part(w.part, flops, flops, parameters=owned, weights=unit * owned, moved=moved)


def _pairs(a: Architecture, sizes: Sizes) -> Iterator[Part]:
    pairs, visible = a.layers * sizes.tokens**2, _visible(a, sizes)
    each, unit = 2 * sizes.batch * a.inner, element(a.dtype)
    moved = unit * a.layers * sizes.total * (a.inner + a.key_inner)
    yield Part(SCORES, each * pairs, each * visible, SOFTMAX * sizes.batch * a.heads * pairs, moved=moved)
    yield Part(MIXING, each * pairs, each * visible, moved=moved)


def _visible(a: Architecture, sizes: Sizes) -> int:
    """Pairs that are seen, of all layers."""
    if not (a.causal if sizes.causal is None else sizes.causal):
        return a.layers * sizes.tokens**2
    windowed = (a.layers if a.windowed is None else a.windowed) if a.window else 0
    past = (a.layers - windowed) * windowed_pairs(sizes.tokens, sizes.tokens)
    return past + windowed * windowed_pairs(sizes.tokens, a.window or sizes.tokens)


def _tables(a: Architecture) -> Iterator[Part]:
    norms = a.width * (a.layers * a.norms + a.outer_norms) + a.head_norms * a.layers * 2 * (
        a.inner // a.heads
    )
    for name, count in ((EMBEDDING, a.width * (a.vocabulary + a.positions)), (NORMALIZATION, norms)):
        yield Part(name, parameters=count, weights=count * element(a.dtype))


def _numbers_kept(a: Architecture) -> int:
    """Numbers of each token that the backward pass needs: what norms, products and activations read;
    queries, keys, values, outputs.
    """
    attention = 2 * a.width + 2 * a.inner + 2 * a.key_inner + a.heads
    hidden = 2 * a.width + (4 if a.gated else 2) * a.hidden
    return a.layers * (attention + hidden) + a.width * (2 if a.outputs else 1)
