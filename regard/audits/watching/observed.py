"""ObservedSite: attention that was seen to happen and is not declared: its rows are those of the call, its
derivatives those of the module.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from regard.audits.adapters.base import Block, Call, NotCovered
from regard.audits.calling import moving_tensors
from regard.audits.capture import branch, call_again, first_tensor, output_tensor, quiet, replay, tokens_in
from regard.audits.site import in_double
from regard.audits.watching.places import Spot
from regard.audits.watching.seen import Seen, Sight
from regard.audits.watching.watch import watching
from regard.derive import linearize
from regard.derive.chain import Chain
from regard.derive.jacobian import Jacobian

AGAIN = 1e-4
"""How far a second call may be from the first, relative."""


@dataclass(frozen=True, eq=False)
class ObservedSite:
    """spot, layer, kind: where it is; reason: what kept it from being declared; seen: the call of attention;
    trace: the calls of modules on this input.
    """

    spot: Spot
    layer: int
    kind: str
    reason: str
    model: nn.Module
    trace: dict[str, Call]
    sight: Sight
    block: Block | None

    @property
    def path(self) -> str:
        """The name of the layer."""
        return self.spot.name

    @cached_property
    def _resolved(self) -> tuple[Seen, tuple[int, ...]]:
        return self.sight.resolve()

    @property
    def seen(self) -> Seen:
        """The call as a declaration."""
        return self._resolved[0]

    def disagreement(self) -> float:
        """|attend on the tensors of the call - what it returned| / |what it returned|."""
        return self.seen.gap()

    @property
    def heads(self) -> int:
        """How many heads there are."""
        return self.seen.sizes[1]

    @property
    def _call(self) -> Call:
        return self.trace[self.spot.call]

    @cached_property
    def points(self) -> Tensor:
        """The tokens (n, d) that enter the module, in float64."""
        found = first_tensor(self._call)
        return in_double(found.reshape(-1, found.shape[-1]))

    @cached_property
    def context(self) -> Tensor | None:
        """The tokens (m, d) that keys and values come from, where they are others."""
        source = self._context
        return None if source is None else in_double(source.reshape(-1, source.shape[-1]))

    @cached_property
    def _context(self) -> Tensor | None:
        """The argument that values are made of, where it is not the first."""
        first = first_tensor(self._call)
        if self._values_move(first):
            return None
        others = moving_tensors((self._call.arguments, self._call.options))
        return next((part for part in others if part is not first and self._values_move(part)), None)

    def _values_move(self, source: Tensor) -> bool:
        """Whether the values of the call depend on an argument of the module."""
        if source.ndim < 2:
            return False
        leaf = source.detach().reshape(-1, source.shape[-1]).clone().requires_grad_()
        with torch.enable_grad():
            values = self._sight_at({source: leaf}).resolve()[0].tensors[2]
            if not values.requires_grad:
                return False
            return torch.autograd.grad(values.sum(), leaf, allow_unused=True)[0] is not None

    @property
    def scores(self) -> Tensor:
        """The scores (h, n, m) of this input."""
        return self.seen.scores

    @property
    def allowed(self) -> Tensor:
        """Which query may see which key, (h, n, m)."""
        return self.seen.allowed

    @property
    def laws(self) -> Tensor:
        """The attention rows (h, n, m)."""
        return self.seen.laws

    @property
    def blind(self) -> bool:
        """Whether a token sees no key."""
        return not bool(self.allowed.any(-1).all())

    def jacobians(self) -> dict[str, Jacobian]:
        """The derivatives of the layer at this input, by automatic differentiation: in its tokens; for
        cross-attention in queries, in context, and in both.
        """
        if self._context is None:
            return {"layer_constant": self._layer_jacobian()}
        if self._bare:
            raise NotCovered("its output projection is outside the module, and was not found")
        first, context = first_tensor(self._call), self._context
        size = first.numel()
        pair = torch.cat([first.detach().flatten(), context.detach().flatten()]).unsqueeze(0)

        def both(x: Tensor) -> Tensor:
            queries, keys = x.squeeze(0).split([size, context.numel()])
            return self._run({first: queries.reshape(first.shape), context: keys.reshape(context.shape)})

        found = {
            "queries_constant": linearize(lambda x: self._run({first: x}), first.detach()),
            "context_constant": linearize(lambda x: self._run({context: x}), context.detach()),
            "layer_constant": linearize(both, pair),
        }
        self._check_again(found["layer_constant"].value, output_tensor(self._call.output))
        return found

    def _run(self, tokens: dict[Tensor, Tensor]) -> Tensor:
        with quiet(self.model):
            return output_tensor(call_again(self.model.get_submodule(self.spot.path), self._call, tokens))

    def _layer_jacobian(self) -> Jacobian:
        names = self._layer()
        block = Block(self.spot.call, names, (), None) if self.block is None else self.block
        found = linearize(branch(self.model, self.trace, block, names), self._tokens())
        self._check_again(found.value, output_tensor(self.trace[names[-1]].output))
        return found

    def after_norm(self, head: Jacobian) -> Jacobian | None:
        """A head with what stands between the residual stream and attention; None where that is nothing, or
        more than one module.
        """
        names = () if self.block is None else self.block.attention
        if not names or names[0] == self.spot.call or names[0] not in self.trace:
            return None
        norm = self.trace[names[0]]
        left = output_tensor(norm.output)
        if left.shape != self._tokens().shape or not torch.equal(left, self._tokens()):
            return None
        return Chain(head, linearize(replay(self.model, self.trace, names[:1]), tokens_in(norm)))

    def head_jacobian(self, head: int) -> Jacobian:
        """The derivative of one head before the output projection."""
        found = linearize(lambda x: self._heads_at(x)[head], self._tokens())
        self._check_again(found.value, _joined(self.seen.output)[head])
        return found

    def _layer(self) -> tuple[str, ...]:
        """The calls that make the layer: the module, and the projection after it where that is outside."""
        names = () if self.block is None else self.block.attention
        if not self._bare:
            return (self.spot.call,)
        if not names or names[-1] == self.spot.call:
            raise NotCovered("its output projection is outside the module, and was not found")
        if self.block is not None and self.block.through:
            return self.spot.call, names[-1]
        return names[names.index(self.spot.call) :]

    @cached_property
    def _bare(self) -> bool:
        """Whether the module returns its heads side by side, before any output projection."""
        output, heads = output_tensor(self._call.output), self.seen.output
        bare = heads.transpose(1, 2).reshape(-1, heads.shape[1] * heads.shape[3])
        return output.shape == bare.shape and bool(torch.allclose(output, bare.to(output)))

    def _tokens(self) -> Tensor:
        found = first_tensor(self._call)
        return found.detach().reshape(-1, found.shape[-1])

    def _heads_at(self, x: Tensor) -> Tensor:
        """What the heads give on other tokens, (h, n, e)."""
        return _joined(self._sight_at({first_tensor(self._call): x}).at(self._resolved[1]))

    def _sight_at(self, tokens: dict[Tensor, Tensor]) -> Sight:
        module = self.model.get_submodule(self.spot.path)
        with quiet(self.model), watching(dict(module.named_modules())) as watch:
            call_again(module, self._call, tokens)
        if len(watch.noticed) <= self.spot.part:
            raise NotCovered("the module computes its attention differently when it is called again")
        return watch.noticed[self.spot.part].sight

    def _check_again(self, found: Tensor, wanted: Tensor) -> None:
        gap, scale = float((found - wanted.to(found)).norm()), float(wanted.norm())
        if not gap <= AGAIN * scale:
            apart = gap / scale if scale > 0 else gap
            raise NotCovered(
                f"the module returns a different output when it is called again, by {apart:.1e} "
                f"(relative): it "
                "keeps something between calls, or is random"
            )


def _joined(heads: Tensor) -> Tensor:
    """Heads (b, h, n, e) as (h, bn, e)."""
    return heads.transpose(0, 1).flatten(1, 2)
