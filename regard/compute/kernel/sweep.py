"""Sweeps: functions of blocks, summed over blocks. Their derivatives are sweeps: O(n) memory at every order.

A sweep says what one block computes from its share of each tensor, and where the results go. The reverse
derivative of a sweep is the sweep whose blocks pull cotangents back; the forward derivative is the sweep
whose blocks push tangents; a batch of sweeps is the sweep of the batched block. So reverse, forward and vmap
compose in any order, as often as wanted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard._object import Object, rebuild
from regard._transforms import batches_gradients, forward_rule, push
from regard.compute.kernel.tiles import Index, Tile, Tiling

QUERY, KEY, SHARED = "query", "key", "shared"
"""Cut by rows; cut by columns; given whole to every block."""


@dataclass(frozen=True)
class Take:
    """How a tensor is cut: its role, and how many leading dimensions are mapped over."""

    role: str
    mapped: int = 0

    def view(self, tensor: Tensor, tile: Tile) -> Tensor:
        """The share of one block."""
        if self.role == SHARED:
            return tensor
        cut = tile.rows if self.role == QUERY else tile.columns
        return tensor[(slice(None),) * self.mapped + _element(tensor.shape[self.mapped :], tile.batch)][
            ..., cut, :
        ]


@dataclass(frozen=True)
class Give:
    """Where a result is added: along rows, along columns, or everywhere.

    like: the argument whose shape the sum has, if it is a gradient.
    """

    role: str
    like: int | None = None
    lead: tuple[int, ...] = ()  # the sizes of the leading dimensions that are mapped over

    def total(
        self, result: Tensor, tiling: Tiling, arguments: Sequence[Tensor], takes: Sequence[Take]
    ) -> Tensor:
        """Zeros for the sum of all blocks' results."""
        if self.like is not None:
            own = arguments[self.like].shape[takes[self.like].mapped :]
        elif self.role == SHARED:
            own = result.shape[len(self.lead) :]
        else:
            batch = tuple(result.shape[len(self.lead) : -2]) if tiling.batch is None else tiling.batch
            own = torch.Size(
                (
                    *batch,
                    (tiling.query_marks if self.role == QUERY else tiling.key_marks).shape[-1],
                    result.shape[-1],
                )
            )
        return result.new_zeros((*self.lead, *own))

    def add(self, total: Tensor, result: Tensor, tile: Tile) -> None:
        """Add one block's result where it belongs."""
        Take(self.role, len(self.lead)).view(total, tile).add_(result)


Block = Callable[[Tiling, Tile, tuple[Tensor, ...]], tuple[Tensor, ...]]
"""What one block gives from its share of the arguments; the tiling is asked for masks."""


@dataclass(frozen=True)
class Sweep:
    """What one block computes, how its arguments are cut into blocks, and where its results are added."""

    block: Block
    takes: tuple[Take, ...]
    gives: tuple[Give, ...]

    def reverse_derivative(
        self, arguments: Sequence[Tensor], wanted: tuple[int, ...], given: tuple[int, ...]
    ) -> Sweep:
        """The sweep that gives gradients of the arguments `wanted`.

        It takes the arguments, then cotangents of the results `given`.
        """
        count = len(self.takes)

        def block(tiling: Tiling, tile: Tile, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            own, cotangents = arguments[:count], arguments[count:]

            def some(*moving: Tensor) -> tuple[Tensor, ...]:
                results = self.block(tiling, tile, substitute(own, wanted, moving))
                return tuple(results[index] for index in given)

            results, pull = torch.func.vjp(some, *(own[index] for index in wanted))[:2]
            return pull(tuple(c.expand(r.shape) for c, r in zip(cotangents, results, strict=True)))

        takes = (*self.takes, *(Take(self.gives[i].role, len(self.gives[i].lead)) for i in given))
        gives = (
            Give(self.takes[i].role, i, tuple(arguments[i].shape[: self.takes[i].mapped])) for i in wanted
        )
        return Sweep(block, takes, tuple(gives))

    def forward_derivative(self, moving: tuple[int, ...]) -> Sweep:
        """The sweep that gives tangents of all results.

        It takes the arguments, then tangents of the arguments `moving`.
        """
        count = len(self.takes)

        def block(tiling: Tiling, tile: Tile, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            own, tangents = arguments[:count], arguments[count:]
            some = tuple(own[index] for index in moving)
            return push(lambda *m: self.block(tiling, tile, substitute(own, moving, m)), some, tangents)[1]

        return Sweep(block, (*self.takes, *(self.takes[i] for i in moving)), self.gives)

    def batch(self, size: int, moving: tuple[bool, ...]) -> Sweep:
        """One more mapped dimension, in front; the arguments that `moving` names have it."""

        def block(tiling: Tiling, tile: Tile, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            batched = torch.func.vmap(
                lambda *some: self.block(tiling, tile, some),
                in_dims=tuple(0 if m else None for m in moving),
                randomness="error",
            )
            return batched(*arguments)

        takes = tuple(Take(take.role, take.mapped + m) for take, m in zip(self.takes, moving, strict=True))
        return Sweep(
            block, takes, tuple(Give(give.role, give.like, (size, *give.lead)) for give in self.gives)
        )


def sum_blocks(sweep: Sweep, tiling: Tiling, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a sweep, summed over all blocks of a tiling; differentiable to any order."""
    return _SumBlocks.apply(sweep, tiling, *arguments)


def sum_tiles(
    sweep: Sweep, tiling: Tiling, arguments: Sequence[Tensor], tiles: Iterable[Tile]
) -> tuple[Tensor, ...]:
    """The results of a sweep over some tiles, without derivatives."""
    totals: list[Tensor] = []
    for tile in tiles:
        cut = tuple(take.view(argument, tile) for take, argument in zip(sweep.takes, arguments, strict=True))
        results = sweep.block(tiling, tile, cut)
        if not totals:
            totals = [
                give.total(r, tiling, arguments, sweep.takes)
                for give, r in zip(sweep.gives, results, strict=True)
            ]
        for give, total, result in zip(sweep.gives, totals, results, strict=True):
            give.add(total, result, tile)
    return tuple(totals)


class _SumBlocks(torch.autograd.Function):
    @staticmethod
    def forward(sweep: Sweep, tiling: Tiling, *arguments: Tensor) -> tuple[Tensor, ...]:
        return sum_tiles(sweep, tiling, arguments, tiling.blocks())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.sweep, ctx.tiling, *arguments = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arguments)
        ctx.save_for_forward(*arguments)

    @staticmethod
    @batches_gradients
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        arguments = ctx.saved_tensors
        wanted = places_of(ctx.needs_input_grad[2:])
        given = places_of([c is not None for c in cotangents])
        gradients: list[Any] = [None] * len(ctx.needs_input_grad)
        if wanted and given:
            sweep = ctx.sweep.reverse_derivative(arguments, wanted, given)
            for index, found in zip(
                wanted,
                sum_blocks(sweep, ctx.tiling, [*arguments, *(c for c in cotangents if c is not None)]),
                strict=True,
            ):
                gradients[2 + index] = found
        return tuple(gradients)

    @staticmethod
    @batches_gradients
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        moving = places_of([t is not None for t in tangents[2:]])
        with forward_rule(ctx) as arguments:
            return sum_blocks(
                ctx.sweep.forward_derivative(moving),
                ctx.tiling,
                [*arguments, *(t for t in tangents[2:] if t is not None)],
            )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], sweep: Sweep, tiling: Tiling, *arguments: Tensor
    ) -> tuple[tuple[Tensor, ...], Any]:
        if is_mapped(tiling, in_dims[1]):  # masks that differ between samples: one sample after the other
            return map_one_by_one(_SumBlocks, info.batch_size, in_dims, (sweep, tiling, *arguments))
        moving = tuple(dim is not None for dim in in_dims[2:])
        mapped = [
            a if dim is None else a.movedim(dim, 0) for a, dim in zip(arguments, in_dims[2:], strict=True)
        ]
        results = _SumBlocks.apply(
            sweep.batch(info.batch_size, moving), tiling.fewer_rows(info.batch_size), *mapped
        )
        return results, (0,) * len(results)


def map_one_by_one(
    function: Any, size: int, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], Any]:
    """A batch of calls, one after the other: the vmap rule of last resort."""
    samples = [
        function.apply(*(_sample(a, d, index) for a, d in zip(arguments, in_dims, strict=True)))
        for index in range(size)
    ]
    stacked = tuple(torch.stack(results) for results in zip(*samples, strict=True))
    return stacked, (0,) * len(stacked)


def is_mapped(value: Any, dims: Any) -> bool:
    """Whether vmap maps over any tensor inside an object.

    dims: the same object with mapped dimensions in place of tensors.
    """
    if isinstance(value, Object):
        return any(
            is_mapped(getattr(value, f.name), getattr(dims, f.name)) for f in dataclasses.fields(value)
        )
    if isinstance(value, tuple):
        return any(is_mapped(v, d) for v, d in zip(value, dims, strict=True))
    return isinstance(value, Tensor) and dims is not None


def move_to_front(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """A tensor with its mapped dimension in front; one that is not mapped is repeated, without a copy."""
    return tensor.movedim(dim, 0) if dim is not None else tensor.unsqueeze(0).expand(size, *tensor.shape)


def _sample(value: Any, dims: Any, index: int) -> Any:
    """One sample of a mapped value."""
    if isinstance(value, Object):
        fields = type(value).__dataclass_fields__
        return rebuild(
            type(value),
            tuple(fields),
            tuple(_sample(getattr(value, name), getattr(dims, name), index) for name in fields),
        )
    if isinstance(value, tuple):
        return tuple(_sample(v, d, index) for v, d in zip(value, dims, strict=True))
    return value.select(dims, index) if isinstance(value, Tensor) and dims is not None else value


def substitute(
    arguments: tuple[Tensor, ...], places: tuple[int, ...], moving: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The arguments with some of them replaced."""
    found = list(arguments)
    for index, argument in zip(places, moving, strict=True):
        found[index] = argument
    return tuple(found)


def places_of(flags: Sequence[bool]) -> tuple[int, ...]:
    """Where flags are true."""
    return tuple(index for index, flag in enumerate(flags) if flag)


def _element(shape: torch.Size, batch: Index | None) -> tuple[int, ...]:
    """The index of one element of a batch in a tensor (..., tokens, width) that broadcasts to it."""
    if batch is None:
        return ()
    lead = len(shape) - 2
    return tuple(
        i if size > 1 else 0 for i, size in zip(batch[len(batch) - lead :], shape[:lead], strict=True)
    )
