"""What theorems are about: one head, or all heads of an attention with what mixes them, in float64,
each fact computed once.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard._enclosed import product_norm, root_of_squares
from regard._object import Object
from regard._upper import Upper, exact, total
from regard.attention import Attention
from regard.errors import ArgumentError
from regard.lookups import Factored, Identity, Linear, Lookup
from regard.maps import Heads
from regard.moments import Mean
from regard.normalizers import SinkSoftmax, Softmax
from regard.parameters import Meaning, leads, one_head, rebuilt, width
from regard.potentials import Potential
from regard.potentials.base import Scaled
from regard.proofs.question import once
from regard.proofs.scores import Form, bilinear
from regard.proofs.theorem import Refusal


class Head:
    """One head: score x ↦ potential / temperature, values Wᵀx + b, and how rows are normalized."""

    def __init__(self, attention: Attention, output: Tensor | None = None) -> None:
        if not isinstance(attention.moment, Mean):
            raise Refusal(
                f"the moment {type(attention.moment).__name__} has no theorem; bounds are for Mean()"
            )
        self.attention, self._output = attention, output
        self.normalizer, self.support, self.lookup = attention.normalizer, attention.support, attention.lookup
        self.facts: dict[
            Any, Any
        ] = {}  # what several theorems need, computed once; a head lives for one question

    @cached_property
    def potential(self) -> Potential:
        """The potential over the temperature of a softmax."""
        if isinstance(self.normalizer, (Softmax, SinkSoftmax)) and float(self.normalizer.temperature) != 1.0:
            return Scaled(self.attention.potential, 1.0 / float(self.normalizer.temperature))
        return self.attention.potential

    @property
    def softmax(self) -> bool:
        """Whether rows are Gibbs laws."""
        return isinstance(self.normalizer, Softmax)

    @cached_property
    def factors(self) -> tuple[Tensor, ...]:
        """The matrices whose product is W, values to outputs; none for the identity."""
        mixing = () if self._output is None else (self._output,)
        return (*_factors(self.lookup), *mixing)

    def matrix(self, width: int) -> Tensor:
        """W (d, e), rounded."""
        if ("matrix", width) not in self.facts:
            product = torch.eye(width, dtype=torch.float64) if not self.factors else self.factors[0]
            for factor in self.factors[1:]:
                product = product @ factor
            self.facts["matrix", width] = product
        return self.facts["matrix", width]

    @cached_property
    def w(self) -> Upper:
        """At least |W|₂."""
        return product_norm(*self.factors)

    @cached_property
    def value_bias(self) -> Tensor | None:
        """What is added to values before they are mixed."""
        return (
            self.lookup.b_v
            if isinstance(self.lookup, Linear)
            else self.lookup.b
            if isinstance(self.lookup, Factored)
            else None
        )

    def form(self, width: int) -> Form | None:
        """The exact bilinear form of the scores, if they have one."""
        if ("form", width) not in self.facts:
            self.facts["form", width] = bilinear.one(self.potential, width)
        return self.facts["form", width]

    def width(self, domain_width: int | None) -> int:
        """The width of a token: from the domain, or from a projection."""
        found = domain_width or width_of_attention(self.attention)
        if found is None:
            raise Refusal(
                "the width of a token is not known; give the potential or lookup a projection, or "
                "say it in the domain: Ball(radius, width=d)"
            )
        return found


class MultiHead:
    """All heads.

    `separate` have the values before mixing, `folded` those after; `mixing` is at least the norm of what
    mixes them.
    """

    def __init__(
        self, declared: Attention | Heads, heads: list[Attention], w_o: Tensor | None, residual: bool
    ) -> None:
        self.declared = declared
        self.separate = [Head(head) for head in heads]
        self.residual, self.w_o = residual, w_o
        self.b_o = (
            declared.b_o.detach().double()
            if isinstance(declared, Heads) and declared.b_o is not None
            else None
        )
        self.folded: list[Head] | None = None
        self.mixing = exact(1.0)
        if w_o is not None:
            self.folded = [Head(head, w_o[h]) for h, head in enumerate(heads)]
            self.mixing = product_norm(w_o.reshape(-1, w_o.shape[-1]))

    def combined(self, separate: list[Upper], folded: list[Upper] | None) -> Upper:
        """The smaller of Σ_h b_h and |W_O| √Σ_h b_h²."""
        joined = self.mixing * root_of_squares(separate)
        return joined if folded is None else joined.minimum(total(folded))


def subject_of(map: Attention | Heads, residual: bool = False) -> MultiHead:
    """The heads of an attention, as theorems see them."""
    return once(("subject", id(map), residual), map, lambda: _subject_of(map, residual))


def _subject_of(map: Attention | Heads, residual: bool) -> MultiHead:
    attention = map.attention if isinstance(map, Heads) else map
    heads = single_heads(attention)
    if not isinstance(map, Heads):
        return MultiHead(map, heads, None, residual)
    w_o = map.w_o.detach().double()
    if len(w_o) not in (1, len(heads)):
        raise Refusal(
            f"w_o has {len(w_o)} heads and the attention {len(heads)}; give w_o (h, e, d) with one mixer "
            "for each head"
        )
    w_o = w_o.expand(len(heads), -1, -1) if len(w_o) == 1 else w_o
    return MultiHead(map, heads, w_o, residual)


def count_heads(attention: Attention) -> int:
    """How many heads an attention has."""
    try:
        found = list(leads(attention))
    except ArgumentError as error:  # a tensor that does not say what it is
        raise Refusal(str(error)) from None
    for _, name, lead in found:
        if len([size for size in lead if size > 1]) > 1:
            raise Refusal(f"{name} has batch dimensions {list(lead)}; bounds are for one sequence with heads")
    counts = sorted({torch.Size(lead).numel() for *_, lead in found} | {1})
    heads = counts[-1]
    if any(heads % count for count in counts):
        raise Refusal(
            f"the head counts {counts} do not divide each other; give as many heads, or groups of them"
        )
    return heads


def single_heads(attention: Attention) -> list[Attention]:
    """An attention for each head, in float64. Grouped keys and values are repeated."""
    heads, exact = count_heads(attention), rebuilt(attention, _in_float64)
    return [one_head(exact, head, heads) for head in range(heads)]


def _in_float64(owner: Object, name: str, meaning: Meaning | None, item: Any) -> Any:
    if not isinstance(item, Tensor):
        return item
    return item.detach().double() if item.dtype.is_floating_point else item.detach()


def _factors(lookup: Lookup) -> tuple[Tensor, ...]:
    if isinstance(lookup, Identity):
        return ()
    if isinstance(lookup, Linear):
        return (lookup.w_v,)
    if isinstance(lookup, Factored):
        return (lookup.w, lookup.u)
    raise Refusal(
        f"values by {type(lookup).__name__} have no known Lipschitz constant; use Identity(), Linear(w_v) "
        "or Factored(w, u)"
    )


def width_of_attention(attention: Attention) -> int | None:
    """The width of a token, from any tensor that runs over its coordinates."""
    return width(attention)
