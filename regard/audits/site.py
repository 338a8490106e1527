"""Site: one attention layer of a trained model, as a declaration, on one input,
with the check that both agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard._heads import mix_heads
from regard.attention import Attention
from regard.audits.adapters.base import Block, Declared, NotCovered
from regard.compute import apply
from regard.derive import linearize
from regard.derive.jacobian import Jacobian
from regard.lookups import Linear
from regard.maps import Heads, Map, ToContext
from regard.measure import Measure
from regard.normalizers import Reference
from regard.proofs.agreement import relative_gap
from regard.proofs.subject import single_heads
from regard.supports import Where

TOLERANCE = 1e-4
"""How far a declaration's output may be from the module's own, relative to its norm."""


@dataclass(frozen=True)
class Site:
    """path: of the attention module; layer: its number; declared: what the adapter says; block: what stands
    around it.

    The input is one sequence: the batch of `declared` has one element.
    """

    path: str
    layer: int
    kind: str
    declared: Declared
    block: Block | None

    @cached_property
    def attention(self) -> Attention:
        """The declaration in float64, for one sequence."""
        attention = in_double(self.declared.attention)
        support = attention.support
        if isinstance(support, Where) and support.mask.ndim > 2:
            attention = attention.replace(support=Where(_shared(support.mask)))
        return attention

    @cached_property
    def points(self) -> Tensor:
        """The tokens (n, d) that enter the layer, in float64."""
        return in_double(self.declared.points[0])

    @cached_property
    def source(self) -> Measure | Tensor:
        """The tokens with their positions, where these are not 0, 1, ..."""
        marks = self.declared.marks
        return self.points if marks is None else Measure(self.points, marks=marks.reshape(-1))

    @cached_property
    def context(self) -> Tensor | None:
        """The tokens (m, d) that keys and values come from, where they are others."""
        return None if self.declared.context is None else in_double(self.declared.context[0])

    @cached_property
    def w_o(self) -> Tensor:
        """The output projection of each head, (h, e, d)."""
        return in_double(self.declared.w_o)

    @property
    def heads(self) -> int:
        """How many heads there are."""
        return len(self.w_o)

    @property
    def grouped(self) -> bool:
        """Whether several heads share their keys and values."""
        lookup = self.attention.lookup
        return isinstance(lookup, Linear) and len(lookup.w_v) != self.heads

    @cached_property
    def map(self) -> Map:
        """The layer as a map of sequences: heads, joined and mixed;
        cross-attention as a map of its queries.
        """
        b_o = None if self.declared.b_o is None else in_double(self.declared.b_o)
        if self.context is not None:
            return ToContext(self.attention, self.context)
        return Heads(self.attention, self.w_o, b_o)

    def joined(self, points: Tensor) -> Tensor:
        """The layer at its own positions and context: heads, joined and mixed, (n, d)."""
        source = points if isinstance(self.source, Tensor) else self.source.replace(points=points)
        found = apply(self.attention, source, self.context)
        return mix_heads(found.points if isinstance(found, Measure) else found, self.w_o)

    def jacobian(self) -> Jacobian:
        """The derivative of the layer in its tokens, at this input."""
        return (
            linearize(self.map, self.source) if self.context is None else linearize(self.joined, self.points)
        )

    @property
    def blind(self) -> bool:
        """Whether a token sees no key, as padding on the left does:
        theorems about rows do not hold for it.
        """
        return not bool(self.allowed.any(-1).all())

    @cached_property
    def singles(self) -> list[Attention]:
        """Each head alone, before its output projection."""
        return single_heads(self.attention)

    def value(self) -> Tensor:
        """What the heads of the declaration give, (h, n, e), in float64."""
        found = apply(self.attention, self.source, self.context)
        return found.points if isinstance(found, Measure) else found

    def disagreement(self) -> float:
        """|declaration - module| / |module| in the Frobenius norm, on this input."""
        found, own = self.value(), in_double(self.declared.own[0])
        if own.ndim == 2:
            found = mix_heads(found, self.w_o)
            found = found if self.declared.b_o is None else found + in_double(self.declared.b_o)
        return relative_gap(found, own)

    @cached_property
    def scores(self) -> Tensor:
        """The scores (h, n, m) of this input."""
        keys = self.points if self.context is None else self.context
        return self.attention.potential.scores(self.points, keys, self._marks(self.points), self._marks(keys))

    @cached_property
    def allowed(self) -> Tensor:
        """Which query may see which key, (n, m)."""
        keys = self.points if self.context is None else self.context
        found = self.attention.support.allows(self._marks(self.points), self._marks(keys))
        return found.expand(*found.shape[:-2], len(self.points), len(keys))

    @cached_property
    def laws(self) -> Tensor:
        """The attention rows (h, n, m)."""
        return self.attention.normalizer.weights(self.scores, Reference(allowed=self.allowed))

    def positions(self) -> tuple[Tensor, Tensor]:
        """The marks of queries and of keys."""
        return self._marks(self.points), self._marks(self.points if self.context is None else self.context)

    def _marks(self, points: Tensor) -> Tensor:
        marks = self.declared.marks
        return torch.arange(len(points)) if marks is None else marks.reshape(-1)


def in_double(value: Any) -> Any:
    """A declaration with all its real numbers in float64."""

    def exact(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        return part.detach().to("cpu", torch.float64 if part.dtype.is_floating_point else part.dtype)

    return pytree.tree_map(exact, value)


def _shared(mask: Tensor) -> Tensor:
    """The mask (n, m) that all heads share."""
    each = mask.flatten(0, -3)
    if not bool((each == each[:1]).all()):
        raise NotCovered("its heads have masks of their own")
    return each[0]
