"""The derivatives of a site by what moves: tokens before or after the norm in front of attention, queries,
context, or both.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from regard._heads import mix_heads
from regard.attention import Attention
from regard.audits.calling import path_and_turn
from regard.audits.capture import Function, output_tensor, tokens_in
from regard.audits.checks.base import Scene
from regard.audits.site import Site, in_double
from regard.compute import apply
from regard.derive import linearize
from regard.derive.chain import Chain
from regard.derive.jacobian import Jacobian
from regard.measure import Measure
from regard.parameters import spread_heads


@dataclass(frozen=True, eq=False)
class Moving:
    """A site of a scene, and the derivatives of its heads and of the layer."""

    scene: Scene
    site: Site

    @cached_property
    def before(self) -> tuple[str, ...]:
        """The modules between the residual stream and attention: a norm, or none."""
        block = self.site.block
        branch = () if block is None else block.attention
        known = self.site.path in branch and branch[0] in self.scene.trace
        found = branch[: branch.index(self.site.path)] if known else ()
        if not found or block is None or not block.through:
            return found
        left = output_tensor(self.scene.trace[found[-1]].output)  # what is found may leave something out
        return found if left.shape == self.site.points.shape and self._enters(left) else ()

    def _enters(self, tokens: Tensor) -> bool:
        return bool(torch.allclose(in_double(tokens), self.site.points))

    @cached_property
    def stream(self) -> Tensor:
        """The tokens that enter the first of them, in float64."""
        found: Tensor = in_double(tokens_in(self.scene.trace[self.before[0]]))
        return found

    @cached_property
    def norm(self) -> Function:
        """Those modules, in float64."""
        own = [copy.deepcopy(self.scene.model.get_submodule(path_and_turn(name)[0])) for name in self.before]
        return nn.Sequential(*own).to("cpu", torch.float64).eval()

    def heads(self) -> Jacobian:
        """Of every head, as a batch, by all that it reads."""
        attention = spread_heads(self.site.attention, self.site.heads)
        if self.site.context is not None:
            return self._together(attention, normalized=False)
        return linearize(attention, self._at(self._each(self.site.points)))

    def heads_after_norm(self, heads: Jacobian) -> Jacobian:
        """The same with the norm in front."""
        if self.site.context is not None:
            return self._together(spread_heads(self.site.attention, self.site.heads), normalized=True)
        return Chain(heads, linearize(self.norm, self._each(self.stream), batch=1))

    def both(self, normalized: bool = False) -> Jacobian:
        """Cross-attention, joined and mixed, by its queries and its context together."""
        return linearize(lambda pair: self._mixed(*self._parts(pair, normalized)), self._pair(normalized))

    def by_context(self) -> Jacobian:
        """Cross-attention, joined and mixed, by its context alone."""
        assert self.site.context is not None
        return linearize(lambda context: self._mixed(self.site.points, context), self.site.context)

    def _together(self, attention: Attention, normalized: bool) -> Jacobian:
        """Heads of cross-attention by queries and context, as a batch of pairs."""

        def run(pairs: Tensor) -> Tensor:
            queries, context = self._parts(pairs, normalized)
            return _points(apply(attention, self._at(queries), context)).flatten(-2).unsqueeze(-2)

        return linearize(run, self._each(self._pair(normalized)), batch=1)

    def _pair(self, normalized: bool) -> Tensor:
        """Queries and context as one row (1, n · d + m · d'): their norm is that of both."""
        assert self.site.context is not None
        queries = self.stream if normalized else self.site.points
        return torch.cat([queries.flatten(), self.site.context.flatten()]).unsqueeze(0)

    def _parts(self, pair: Tensor, normalized: bool) -> tuple[Tensor, Tensor]:
        assert self.site.context is not None
        size = self.site.points.shape
        queries, context = pair.squeeze(-2).split([size.numel(), self.site.context.numel()], -1)
        queries = queries.unflatten(-1, size)
        found = self.norm(queries) if normalized else queries
        return found, context.unflatten(-1, self.site.context.shape)

    def _mixed(self, queries: Tensor, context: Tensor) -> Tensor:
        return mix_heads(_points(apply(self.site.attention, self._at(queries), context)), self.site.w_o)

    def _each(self, points: Tensor) -> Tensor:
        """The same points once for each head."""
        return points.expand(self.site.heads, *points.shape)

    def _at(self, points: Tensor) -> Measure | Tensor:
        """Points at the positions of the site."""
        source = self.site.source
        return points if isinstance(source, Tensor) else source.replace(points=points)


def _points(found: Measure | Tensor) -> Tensor:
    return found.points if isinstance(found, Measure) else found
