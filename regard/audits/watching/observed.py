"""ObservedSite: attention that was seen to happen and is not declared: its rows are those of the call, its
derivatives those of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from regard.audits.adapters.base import Block, Call, NotCovered
from regard.audits.capture import Function, branch, output_tensor, replay, tokens_in
from regard.audits.site import in_double
from regard.audits.watching.places import Spot
from regard.audits.watching.reads import Reads, reads
from regard.audits.watching.seen import Seen, Sight
from regard.derive import linearize
from regard.derive.chain import Chain
from regard.derive.jacobian import Jacobian
from regard.proofs.agreement import relative_gap

AGAIN = 1e-4
"""How far a second call may be from the first, relative."""


@dataclass(frozen=True, eq=False)
class ObservedSite:
    """spot, layer, kind: where it is; reason: what kept it from being declared; sight: the call of
    attention; trace: the calls of modules on this input; several: whether one call of the module computes
    other attention too.
    """

    spot: Spot
    layer: int
    kind: str
    reason: str
    model: nn.Module
    trace: dict[str, Call]
    sight: Sight
    block: Block | None
    several: bool = False

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
    def reads(self) -> Reads:
        """What moves it."""
        return reads(self.model, self._call, self.spot, self.several)

    @cached_property
    def points(self) -> Tensor:
        """The tokens (n, d) that it reads, in float64; those of its queries, where keys have others."""
        found: Tensor = in_double(self.reads.sources[0])
        return found

    @cached_property
    def context(self) -> Tensor | None:
        """The tokens (m, d) that keys and values come from, where they are others."""
        others = self.reads.sources[1:]
        return in_double(others[0]) if others else None

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
        reads = self.reads
        first, *others = reads.sources
        if not others and not reads.inside:
            return {"layer_constant": self._layer_jacobian()}
        if not reads.inside and self._bare:
            raise NotCovered("its output projection is outside the module, and was not found")

        def mixed(*tokens: Tensor) -> Tensor:
            return reads.layer(reads.run(tokens))

        found = {"layer_constant": _linearized(mixed, reads.sources)}
        if others:
            found["queries_constant"] = _linearized(lambda x: mixed(x, *others), [first])
            found["context_constant"] = _linearized(lambda *context: mixed(first, *context), others)
        if not reads.inside:
            self._check_again(found["layer_constant"].value, output_tensor(self._call.output))
        return found

    def _layer_jacobian(self) -> Jacobian:
        names = self._layer()
        block = Block(self.spot.call, names, (), None) if self.block is None else self.block
        found = linearize(branch(self.model, self.trace, block, names), self.reads.sources[0])
        self._check_again(found.value, output_tensor(self.trace[names[-1]].output))
        return found

    @property
    def _branch(self) -> tuple[str, ...]:
        """The calls of its branch in the block, where it begins before the module; none otherwise."""
        names = () if self.block is None else self.block.attention
        return names if names and names[0] != self.spot.call else ()

    @property
    def norm_missing(self) -> bool:
        """Whether its branch begins before the module, and no norm was found that gives it its tokens."""
        return bool(self._branch) and self._norm is None

    def branch_jacobian(self) -> Jacobian | None:
        """The attention branch of the block with the norm before attention; None where there is none."""
        names, reads, norm = self._branch, self.reads, self._norm
        whole = not self.several and self.context is None and set(names) <= self.trace.keys()
        if self.block is not None and names and whole:
            tokens = tokens_in(self.trace[names[0]])
            return linearize(branch(self.model, self.trace, self.block, names), tokens)
        if self.norm_missing:
            raise NotCovered("no constant of the branch: the norm before its queries was not found")
        if norm is None:
            return None
        stream = norm[1], *reads.sources[1:]
        return _linearized(lambda x, *rest: reads.layer(reads.run((norm[0](x), *rest))), stream)

    @cached_property
    def _norm(self) -> tuple[Function, Tensor] | None:
        """What stands between the residual stream and attention, where it is one module, and its tokens."""
        names = self._branch
        if self.reads.norm is not None or not names or names[0] not in self.trace:
            return self.reads.norm
        left, own = output_tensor(self.trace[names[0]].output), self.reads.sources[0]
        if left.shape != own.shape or not torch.equal(left, own):
            return None
        return replay(self.model, self.trace, names[:1]), tokens_in(self.trace[names[0]])

    @property
    def stream(self) -> Tensor:
        """The tokens before the norm in front of it, in float64; its own where there is none."""
        found: Tensor = in_double(self.reads.sources[0] if self._norm is None else self._norm[1])
        return found

    def after_norm(self, head: int, alone: Jacobian) -> Jacobian | None:
        """A head with the norm between the residual stream and attention; None where there is none."""
        norm = self._norm
        if norm is None:
            return None
        if self.context is None:
            return Chain(alone, linearize(*norm))
        stream = norm[1], *self.reads.sources[1:]
        return _linearized(lambda x, *rest: self._heads_at(norm[0](x), *rest)[head], stream)

    def head_jacobian(self, head: int) -> Jacobian:
        """The derivative of one head before the output projection, in all that it reads."""
        found = _linearized(lambda *tokens: self._heads_at(*tokens)[head], self.reads.sources)
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

    def _heads_at(self, *tokens: Tensor) -> Tensor:
        """What the heads give on other tokens, (h, n, e)."""
        return _joined(self.reads.run(tokens).sight.at(self._resolved[1]))

    def _check_again(self, found: Tensor, wanted: Tensor) -> None:
        apart = relative_gap(found, wanted.to(found))
        if apart > AGAIN:
            raise NotCovered(
                f"the module returns a different output when it is called again, by {apart:.1e} "
                f"(relative): it "
                "keeps something between calls, or is random"
            )


def _joined(heads: Tensor) -> Tensor:
    """Heads (b, h, n, e) as (h, bn, e)."""
    return heads.transpose(0, 1).flatten(1, 2)


def _linearized(run: Callable[..., Tensor], tokens: Sequence[Tensor]) -> Jacobian:
    """The derivative of a function of several tensors in all of them together, as one row."""
    if len(tokens) == 1:
        return linearize(run, tokens[0])
    sizes = [part.numel() for part in tokens]

    def together(x: Tensor) -> Tensor:
        parts = x.squeeze(0).split(sizes)
        return run(*(part.reshape(own.shape) for part, own in zip(parts, tokens, strict=True)))

    return linearize(together, torch.cat([part.flatten() for part in tokens]).unsqueeze(0))
