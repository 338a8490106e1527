"""Plug: the function that a module of transformers calls in place of its own attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.hf.arguments import Arguments
from regard.hf.atoms import attend_atoms, has_bias
from regard.hf.bare import run_bare
from regard.hf.heads import Heads
from regard.hf.masks import split_mask, without_mask
from regard.hf.posed import Posed
from regard.hf.recorder import Recorder
from regard.normalizers import Normalizer, SinkSoftmax, Softmax
from regard.potentials import Dot, PairBias, Potential, SoftCap
from regard.supports import Support

Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Plug:
    """Attention with this potential (None: scaled dot products) and normalizer,
    called as transformers calls attention functions.
    """

    potential: Potential | None
    normalizer: Normalizer
    record: Recorder | None

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs (batch, m, heads, e) for queries (batch, heads, m, d), keys and values (batch, groups, n,
        ·); weights if asked for.
        """
        if has_bias(query, key):
            found = self._attend_atoms((query, key, value), attention_mask, options)
            return found.transpose(1, 2).contiguous(), None
        if self.potential is None and (self.record is None or not self.record.recording):
            out = run_bare(self.normalizer, module, (query, key, value), attention_mask, options)
            if out is not None:
                return out.transpose(1, 2).contiguous(), None
        arguments = Arguments.of(options)
        posed = self.pose((query, key, value), attention_mask, arguments, reads_as_causal(module, arguments))
        if self.record is not None and self.record.recording:
            self.record.add(module, posed.statistics())
        if arguments.dropout or arguments.output_attentions:
            out, weights = posed.weighed(arguments.dropout)
            return out.transpose(1, 2).contiguous(), weights if arguments.output_attentions else None
        return posed.attend().transpose(1, 2).contiguous(), None

    def _attend_atoms(self, tensors: Tensors, mask: Tensor | None, options: Any) -> Tensor:
        """Attention to a compressed cache."""
        plain = self.potential is None and isinstance(self.normalizer, Softmax)
        if not plain or float(self.normalizer.temperature) != 1.0:  # type: ignore[attr-defined]
            found = f"is {self.normalizer!r} for a compressed cache"
            raise ArgumentError("normalizer", found, "atoms are for softmax of dot products")
        return attend_atoms(*tensors, mask, Arguments.of(options))

    def pose(self, tensors: Tensors, mask: Tensor | None, arguments: Arguments, causal: bool) -> Posed:
        """What a call with these arguments computes; causal: whether that is meant where no mask is given."""
        self._check_normalizer(causal)
        queries = tensors[0].shape[2]
        causal = (
            causal and mask is None and queries > 1
        )  # a mask says it all, and a single query is the newest
        tensors = _cut_cache(tensors) if causal else tensors
        query, key, _ = tensors
        self._check_potential(query, key)
        heads = Heads.of(query, key, self._divides())
        support, added = _support_and_bias(mask, causal, arguments.sliding_window, queries, key.shape[2])
        potential = self._scores(arguments, heads, added, key.shape[2])
        return Posed(tensors, potential, self._law(arguments, heads), support, heads)

    def _scores(self, arguments: Arguments, heads: Heads, added: Tensor | None, keys: int) -> Potential:
        """The potential under its cap, and the biases on top."""
        potential = Dot(scale=arguments.scaling) if self.potential is None else self.potential
        potential = potential if arguments.softcap is None else SoftCap(potential, arguments.softcap)
        positions = None if arguments.position_bias is None else arguments.position_bias[..., :keys]
        for bias in (positions, added):
            potential = potential if bias is None else potential + PairBias(heads.pairs(bias))
        return potential

    def _law(self, arguments: Arguments, heads: Heads) -> Normalizer:
        """The normalizer, with a slot for the sinks that a module brings."""
        sinks, count = arguments.s_aux, heads.groups * heads.members
        if sinks is None:
            return self.normalizer
        if not isinstance(self.normalizer, Softmax):
            raise ArgumentError(
                "s_aux",
                f"are sinks, and the normalizer is {self.normalizer!r}",
                "only Softmax has a slot for them",
            )
        if sinks.numel() != count:
            raise ArgumentError(
                "s_aux", f"has shape {list(sinks.shape)}", f"give one sink for each of the {count} heads"
            )
        return SinkSoftmax(
            heads.parameters(sinks.flatten() / self.normalizer.temperature), self.normalizer.temperature
        )

    def _divides(self) -> bool:
        """Whether heads may lie in groups: not where a declared parameter may hold one number for each
        head.
        """
        return not any(
            isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((self.potential, self.normalizer))
        )

    def _check_normalizer(self, causal: bool) -> None:
        if causal and not self.normalizer.rowwise:
            found = f"{type(self.normalizer).__name__} lets later queries change earlier rows"
            raise ArgumentError("normalizer", found, "use it in encoders, or one that normalizes each row")

    def _check_potential(self, query: Tensor, key: Tensor) -> None:
        queries, keys = query.shape[2], key.shape[2]
        if self.potential is not None and queries != keys and _reads_marks(self.potential, query, key):
            found = f"depends on positions, and it is unknown where queries stand: {queries} for {keys} keys"
            raise ArgumentError(
                "potential", found, "run with use_cache=False, or leave positions to the model"
            )


def reads_as_causal(module: nn.Module, arguments: Arguments) -> bool:
    """As transformers decides it: the argument, else the module, else yes."""
    return bool(getattr(module, "is_causal", True) if arguments.is_causal is None else arguments.is_causal)


def _cut_cache(tensors: Tensors) -> Tensors:
    """Keys and values cut to the number of queries: causal queries from position 0 see no more, and a
    cache of fixed size has empty slots behind them.
    """
    query, key, value = tensors
    return query, key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]


def _support_and_bias(
    mask: Tensor | None, causal: bool, window: int | None, queries: int, keys: int
) -> tuple[Support, Tensor | None]:
    """What queries see, and what a mask adds to scores."""
    return (
        (without_mask(causal, window, queries, keys), None)
        if mask is None
        else split_mask(mask, queries, keys)
    )


def _reads_marks(potential: Potential, query: Tensor, key: Tensor) -> bool:
    """Whether features change with positions."""
    some = query[:, :, :1].detach(), key[:, :, :1].detach()
    near, far = (
        potential.features(
            *some, torch.tensor([mark], device=key.device), torch.tensor([0], device=key.device)
        )
        for mark in (0, 7)
    )
    leaves = zip(pytree.tree_leaves(near), pytree.tree_leaves(far), strict=True)
    return any(isinstance(a, Tensor) and not torch.equal(a, b) for a, b in leaves)
