"""The ways in which rotary positions may turn the queries and keys of a call: frequencies from the model or
from the call, two orders of coordinates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from regard.audits.adapters.base import Call
from regard.audits.adapters.surroundings import ancestors
from regard.potentials import Dot, Rotary


@dataclass(frozen=True)
class Way:
    """frequencies (f,): of the first 2f coordinates, None for no turn; positions (n,); paired: whether pairs
    that stand side by side are first taken apart, all first ones before all second ones.
    """

    frequencies: Tensor | None
    interleaved: bool
    positions: Tensor
    paired: bool = False

    def order(self, width: int) -> Tensor | None:
        """Which coordinate comes where before they turn; None where each stays in its place."""
        if not self.paired or width % 2:
            return None
        return torch.arange(width).unflatten(0, (-1, 2)).T.flatten()

    def turn(self, given: Tensor) -> Tensor:
        """Tokens (h, n, c), turned."""
        if self.frequencies is None or 2 * len(self.frequencies) > given.shape[-1]:
            return given
        order = self.order(given.shape[-1])
        given = given if order is None else given[..., order]
        rotary = Rotary(Dot(), frequencies=self.frequencies, interleaved=self.interleaved)
        return rotary.rotate(given, self.positions)


def turnings(model: nn.Module, path: str, call: Call, tokens: int) -> Iterator[Way]:
    """All ways that are worth a try, none first."""
    positions = torch.arange(tokens)
    yield Way(None, False, positions)
    for frequencies in _frequencies(model, path, call):
        for interleaved, paired in ((False, False), (True, False), (False, True)):
            yield Way(frequencies, interleaved, positions, paired)


def _tables(model: nn.Module, path: str) -> Iterator[Tensor]:
    """Tables of sines and cosines (positions, 2f) by their first row, zeros and then ones, in the module and
    in what holds it.
    """
    for above in [path, *ancestors(path)]:
        for child in (model.get_submodule(above), *model.get_submodule(above).children()):
            for own in (*child.buffers(recurse=False), *child.parameters(recurse=False)):
                if own.ndim == 2 and len(own) > 1 and own.shape[-1] % 2 == 0:
                    zeros, ones = own.detach()[0].chunk(2)
                    if bool((zeros == 0).all() and (ones == 1).all()):
                        yield own.detach()


def _frequencies(model: nn.Module, path: str, call: Call) -> Iterator[Tensor]:
    """Those that modules above hold, the nearest first, and those of the call itself."""
    for above in ["", *ancestors(path)][::-1]:
        for child in model.get_submodule(above).children():
            for name, buffer in child.named_buffers(recurse=False):
                if name.endswith("inv_freq") and buffer.ndim == 1:
                    yield buffer.detach().double().cpu()
    for table in _tables(model, path):
        half = table.shape[-1] // 2
        yield torch.atan2(table[1, :half], table[1, half:]).double().cpu()
    for leaf in pytree.tree_leaves((call.arguments, call.options)):
        if isinstance(leaf, Tensor) and leaf.is_complex() and leaf.shape[-2] > 1:
            yield leaf.detach().reshape(-1, *leaf.shape[-2:])[0, 1].angle().double().cpu()
