"""What attention reads: the arguments of its module, or where that computes more than this attention, the
tokens that enter the linear layers of its queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard.audits.adapters.base import Call, NotCovered
from regard.audits.calling import moving_tensors, path_and_turn
from regard.audits.capture import Function, first_tensor, output_tensor
from regard.audits.watching.places import Spot
from regard.audits.watching.rerun import Rerun, is_linear, rerun

CLOSE = 1e-4
"""How far two tensors that are one may be apart, relative, after rounding."""


@dataclass(frozen=True, eq=False)
class Reads:
    """sources: the tokens (n, d) of queries, and those that keys and values are made of where these are
    others; run: the module on others; norm: the norm in front of the queries, on its tokens, with the tokens.

    inside: whether sources enter layers inside of the module; projection: which of these takes the heads.
    """

    sources: tuple[Tensor, ...]
    run: Callable[[Sequence[Tensor]], Rerun]
    inside: bool = False
    projection: str | None = None
    norm: tuple[Function, Tensor] | None = None

    def layer(self, found: Rerun) -> Tensor:
        """All heads together, mixed by the output projection, (n, d)."""
        if not self.inside:
            return output_tensor(found.output)
        if self.projection is None:
            raise NotCovered("no linear layer of its module takes its heads as they are")
        return rows(found.left[self.projection])


def reads(model: nn.Module, call: Call, spot: Spot, several: bool) -> Reads:
    """What the attention at a spot reads; several: whether its module computes other attention too."""
    layers = _Layers(model, call, spot)
    alone = not several and next(moving_tensors((call.arguments, call.options)), None) is not None
    return _arguments(model, call, spot) if alone and not layers.go_on() else layers.reads()


def rows(tokens: Tensor) -> Tensor:
    """Tokens (..., d) one below the other."""
    return tokens.reshape(-1, tokens.shape[-1])


# Arguments of a module


def _arguments(model: nn.Module, call: Call, spot: Spot) -> Reads:
    first = first_tensor(call)
    every = {id(part): part for part in moving_tensors((call.arguments, call.options)) if part.ndim >= 2}
    parts = [first, *(part for part in every.values() if part is not first)]
    sources = _sources(model, call, spot, parts) if len(parts) > 1 else parts

    def run(tokens: Sequence[Tensor]) -> Rerun:
        return rerun(model, call, spot, dict(zip(sources, tokens, strict=True)))

    return Reads(tuple(rows(part.detach()) for part in sources), run)


def _sources(model: nn.Module, call: Call, spot: Spot, parts: list[Tensor]) -> list[Tensor]:
    """The first argument, others that values are made of where it is not enough for these, and those of
    queries and keys that no other makes; that of queries first. Tables of positions, which turn queries and
    keys, and what is added to tokens are none of these.
    """
    leaves = {part: rows(part.detach()).clone().requires_grad_() for part in parts}
    with torch.enable_grad():
        seen = rerun(model, call, spot, leaves).sight.resolve()[0]
    queries, keys, values = ({part for part in parts if _moves(side, leaves[part])} for side in seen.tensors)
    found, (batch, _, n, m) = parts[:1], seen.sizes
    missing = batch * m - (len(leaves[parts[0]]) if parts[0] in values else 0)
    for part in parts[1:]:
        if part in values and missing > 0:
            found.append(part)
            missing -= len(leaves[part])
    for side in (queries, keys):
        if not side & set(found):
            found += [part for part in parts if part in side][:1]
    return sorted(found, key=lambda part: part not in queries if queries else len(leaves[part]) != batch * n)


def _moves(value: Tensor, leaf: Tensor) -> bool:
    """Whether a value depends on a leaf."""
    if not value.requires_grad:
        return False
    return torch.autograd.grad(value.sum(), leaf, retain_graph=True, allow_unused=True)[0] is not None


# Layers inside of a module


class _Layers:
    """The linear layers and norms inside of a module, as they are called."""

    def __init__(self, model: nn.Module, call: Call, spot: Spot) -> None:
        self.model, self.call, self.spot = model, call, spot

    @cached_property
    def plain(self) -> Rerun:
        """The call as it was."""
        with torch.no_grad():
            return rerun(self.model, self.call, self.spot, {}, lambda name, tokens: tokens)

    @cached_property
    def first(self) -> dict[str, str]:
        """For each layer the first that is given the same tokens."""
        found: dict[Any, str] = {}
        return {name: found.setdefault(_memory(tokens), name) for name, tokens in self.plain.entered.items()}

    @cached_property
    def projection(self) -> str | None:
        """The linear layer that takes the heads side by side."""
        heads = self.plain.sight.resolve()[0].output
        joined = rows(heads.transpose(1, 2).flatten(2))
        found = (name for name, tokens in self.plain.entered.items() if _equal(rows(tokens), joined))
        return next((name for name in found if self._is_linear(name) and name in self.plain.left), None)

    def go_on(self) -> bool:
        """Whether the module returns more than its heads under their projection: tokens also pass beside."""
        first = first_tensor(self.call)
        if first.ndim < 2 or self.projection is None:
            return False
        if _equal(rows(self.plain.left[self.projection]), output_tensor(self.call.output)):
            return False
        leaf = rows(first.detach()).clone().requires_grad_()
        with torch.enable_grad():
            found = rerun(self.model, self.call, self.spot, {first: leaf}, lambda name, tokens: tokens)
        output, mixed = output_tensor(found.output), found.left[self.projection]
        drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
        whole, ends = torch.autograd.grad(output, (leaf, mixed), drawn, retain_graph=True, allow_unused=True)
        through = None if ends is None else torch.autograd.grad(mixed, leaf, ends, allow_unused=True)[0]
        return whole is not None and (through is None or not _equal(through, whole))

    def reads(self) -> Reads:
        """The tokens that enter the layers of queries, keys and values."""
        names = self._sources()
        before = self._norm(names[0])

        def run(tokens: Sequence[Tensor]) -> Rerun:
            return self._at(dict(zip(names, tokens, strict=True)))

        sources = tuple(rows(self.plain.entered[name]) for name in names)
        return Reads(sources, run, True, self.projection, before)

    def _at(self, tokens: dict[str, Tensor]) -> Rerun:
        """The call with other tokens for some layers, and all that are given the same."""
        first = self.first

        def enter(name: str, own: Tensor) -> Tensor:
            found = tokens.get(first[name])
            return own if found is None else found.reshape(own.shape)

        return rerun(self.model, self.call, self.spot, {}, enter)

    def _sources(self) -> list[str]:
        """The layers from whose tokens queries, keys and values come: one for each of these."""
        leaves: dict[str, Tensor] = {}
        first = self.first  # from a run before this one

        def enter(name: str, own: Tensor) -> Tensor:
            if not self._is_linear(name):
                return own
            leaf = leaves.setdefault(first[name], own.detach().clone().requires_grad_())
            return leaf.reshape(own.shape)

        with torch.enable_grad():
            seen = rerun(self.model, self.call, self.spot, {}, enter).sight.resolve()[0]
        known = all(side.requires_grad for side in seen.tensors)
        found: list[str] = []
        for side in seen.tensors if known else (seen.output,):
            own = [name for name, leaf in leaves.items() if _moves(side, leaf)]
            if len(own) != 1:
                raise NotCovered(
                    "it is not known what it reads: its module computes more than this attention, and its "
                    f"queries, keys and values come from {len(own) or 'no'} linear layers"
                )
            found += own
        return list(dict.fromkeys(found))

    def _norm(self, name: str) -> tuple[Function, Tensor] | None:
        """The norm whose output is the tokens of a layer."""
        plain, own = self.plain, _memory(self.plain.entered[name])
        norms = (one for one, left in plain.left.items() if _memory(left) == own and not self._is_linear(one))
        found = next(norms, None)
        if found is None:
            return None
        module, tokens = self._layer(found), plain.entered[found]
        return lambda x: rows(module(x.reshape(tokens.shape))), rows(tokens)

    def _layer(self, name: str) -> nn.Module:
        return self.model.get_submodule(self.spot.path).get_submodule(path_and_turn(name)[0])

    def _is_linear(self, name: str) -> bool:
        return is_linear(self._layer(name))


def _memory(tokens: Tensor) -> tuple[int, int]:
    """Equal for tensors that are one, while both are kept."""
    return tokens.data_ptr(), tokens.numel()


def _equal(one: Tensor, other: Tensor) -> bool:
    one, other = one.detach(), other.detach()
    same = one.shape == other.shape
    return same and float((one - other.to(one)).norm()) <= CLOSE * float(one.norm())
