"""Seen: one computation of attention, as a declaration on the tensors that it was given; Sight: the same
before anybody has looked at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard.audits.adapters.base import NotCovered
from regard.audits.failure import failure
from regard.audits.site import in_double
from regard.compute.tensors import attend
from regard.errors import ArgumentError
from regard.normalizers import Normalizer, Reference
from regard.potentials import Potential
from regard.proofs.agreement import relative_gap
from regard.supports import Support

TOLERANCE = 1e-4
"""How far `attend` on the tensors of a call may be from what the call returned, relative to its norm."""
LARGEST = 4096
"""How many queries, or keys, a call may have in all its windows together."""

Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Seen:
    """Queries (b, h, n, c), keys (b, h, m, c) and values (b, h, m, e) of one call, what is done to them, and
    the output (b, h, n, e) that it gave.

    b is one, or the number of windows that a sequence was cut into: these do not see each other.
    """

    tensors: Tensors
    potential: Potential
    normalizer: Normalizer
    support: Support
    output: Tensor

    @cached_property
    def double(self) -> Seen:
        """The same in float64, without its graph."""
        parts = (self.tensors, self.potential, self.normalizer, self.support, self.output)
        return Seen(*pytree.tree_map(in_double, parts))

    def gap(self) -> float:
        """|attend - call| / |call| in the Frobenius norm."""
        own = self.double
        found = attend(*own.tensors, potential=own.potential, normalizer=own.normalizer, support=own.support)
        return relative_gap(found, own.output)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(b, h, n, m)."""
        batch, heads, queries, _ = self.tensors[0].shape
        return batch, heads, queries, self.tensors[1].shape[2]

    @cached_property
    def scores(self) -> Tensor:
        """The scores (h, bn, bm); zero between windows."""
        own = self.double
        _, _, n, m = self.sizes
        found = own.potential.scores(*own.tensors[:2], torch.arange(n), torch.arange(m))
        return self._side_by_side(found.nan_to_num(nan=0.0))

    @cached_property
    def allowed(self) -> Tensor:
        """Which query may see which key, (h, bn, bm)."""
        _, _, n, m = self.sizes
        return self._side_by_side(self.double.support.allows(torch.arange(n), torch.arange(m)))

    @cached_property
    def laws(self) -> Tensor:
        """The attention rows (h, bn, bm)."""
        return self.double.normalizer.weights(self.scores, Reference(allowed=self.allowed))

    def _side_by_side(self, pairs: Tensor) -> Tensor:
        """Pairs (b, h, n, m) as (h, bn, bm)."""
        batch, heads, n, m = self.sizes
        if batch * max(n, m) > LARGEST:
            raise NotCovered(f"its {batch} windows have {batch * max(n, m)} tokens, more than {LARGEST}")
        pairs = pairs.expand(batch, heads, n, m)
        if batch == 1:
            return pairs[0]
        return torch.stack([torch.block_diag(*pairs[:, head].unbind()) for head in range(heads)]).to(
            pairs.dtype
        )


@dataclass(eq=False)
class Sight:
    """A computation of attention that was noticed: what it may be, the likeliest first, and what was noticed
    inside of it.

    name: how a reader would call it; output (b, h, n, e) with its graph; causes: why nothing more is known.
    """

    name: str
    output: Tensor | None
    readings: Callable[[], Iterator[Seen]]
    inside: list[Sight] = field(default_factory=list)

    def resolve(self) -> tuple[Seen, tuple[int, ...]]:
        """The first reading that gives what the call returned, and where in the sight it is; NotCovered
        where none does.
        """
        reason, closest = "", float("inf")
        try:
            for seen in self.readings():
                gap = seen.gap()
                if gap <= TOLERANCE:
                    return seen, ()
                closest = min(closest, gap)
            reason = _unlike(self.output, closest)
        except (ArgumentError, NotCovered) as error:
            reason = str(error)
        except RuntimeError as error:
            reason = failure(error)
        return self._inner(reason)

    def _inner(self, reason: str) -> tuple[Seen, tuple[int, ...]]:
        if len(self.inside) == 1:
            seen, way = self.inside[0].resolve()
            return seen, (0, *way)
        raise NotCovered(f"{self.name} was called in a way that is not known here ({reason})")

    def at(self, way: tuple[int, ...]) -> Tensor:
        """The output of what `resolve` found, here or in another run."""
        found = self
        for step in way:
            found = found.inside[step]
        if found.output is None:
            raise NotCovered(f"{found.name} returned no output of heads")
        return found.output


def _unlike(output: Tensor | None, closest: float) -> str:
    """Why no reading is what a call returned."""
    if output is not None and not bool(output.isfinite().all()):
        return "what it returned has NaN or infinity in it"
    return (
        f"what it returned differs from that by {closest:.1e}"
        if closest < float("inf")
        else "it cannot be read"
    )


def four(part: Tensor) -> Tensor:
    """A tensor (..., n, d) as (b, h, n, d): what is in front of heads are windows."""
    if part.ndim < 4:
        return part.reshape(*(1,) * (4 - part.ndim), *part.shape)
    return part if part.ndim == 4 else part.flatten(0, part.ndim - 4)
