"""Arithmetic with few digits, by a calculator that means ill: every sum, product and function is off by as
much as proofs allow for, in directions that are drawn. What proofs say of rounding is then seen.
"""

import sys
from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regard import _round
from regard.proofs.near import facts

BITS = 21
UNIT = 2.0 ** (1 - BITS)
"""Of numbers that are moved before they are rounded: one unit is a whole place, not half of one."""
aten = torch.ops.aten
ONE = {
    aten.add,
    aten.sub,
    aten.rsub,
    aten.mul,
    aten.div,
    aten.sqrt,
    aten.rsqrt,
    aten.reciprocal,
    aten.pow,
    aten.add_,
    aten.mul_,
    aten.addcmul_,
    aten.square,
}
FUNCTIONS = {
    aten.exp,
    aten.expm1,
    aten.log,
    aten.log1p,
    aten.tanh,
    aten.sigmoid,
    aten.cosh,
    aten.erfc,
    aten.special_erfc,
    aten.gelu,
}
LOGARITHMS = {aten.logsumexp, aten._log_softmax}
PRODUCTS = {aten.mm, aten.bmm, aten.mv, aten.dot}
ADDED = {aten.addmm: aten.mm, aten.addmm_: aten.mm, aten.baddbmm: aten.bmm, aten.baddbmm_: aten.bmm}
SUMS = {aten.sum, aten.mean}


class Coarse(TorchDispatchMode):
    """Rounds what torch computes to `BITS` digits, up or down; sums are off by a unit for every term."""

    def __init__(self, seed):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.place = seed
        self.drawn = torch.randint(0, 2, (4096,), generator=self.generator).double() * 2 - 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        kind = function.overloadpacket
        if not isinstance(found, torch.Tensor) or found.dtype != torch.float64:
            return found
        if kind is aten.nextafter:  # the next number that few digits can write
            return found + (found - args[0]).sign() * 2 * UNIT * found.abs()
        if kind in ONE:
            return self._rounded(found)
        if kind in FUNCTIONS:
            return self._rounded(found * (1 + 8 * UNIT * self._signs(found)))
        if kind is aten._softmax:  # an exponential, and a sum of as many
            return self._rounded(found * (1 + (8 + found.shape[-1] / 2) * UNIT * self._signs(found)))
        if kind in LOGARITHMS:
            return self._rounded(found + 8 * UNIT * self._signs(found) * (1 + found.abs()))
        if kind in PRODUCTS:
            return self._moved(found, UNIT * self._signs(found) * self._terms(kind, args))
        if kind in ADDED:
            return self._moved(found, UNIT * self._signs(found) * self._terms(ADDED[kind], args[1:], 1))
        if kind in SUMS:
            return self._rounded(
                found + UNIT * self._signs(found) * self._added(function, args, kwargs or {})
            )
        return found

    def _signs(self, like):
        """Of errors: all one way, or each its own."""
        self.place = (self.place * 1103515245 + 12345) % 2**31
        kind = self.place >> 16
        if kind & 1:
            return 1.0 if kind & 2 else -1.0
        start = kind % (len(self.drawn) // 2)
        if like.numel() > len(self.drawn) // 2:
            return torch.randint(0, 2, like.shape, generator=self.generator).double() * 2 - 1
        return self.drawn[start : start + like.numel()].view(like.shape)

    def _terms(self, product, args, more=0):
        """(count - 1) Σ |a b| of products that are added; what is zero rounds nothing."""
        sizes = [part.abs() for part in args]
        counts = product(*((part != 0).double() for part in args))
        return (counts + more - 1).clamp_min(0.0) * product(*sizes)

    def _added(self, function, args, kwargs):
        total = aten.sum if function.overloadpacket is aten.mean else function.overloadpacket
        tensor, *others = args
        count = total((tensor != 0).double(), *others, **kwargs)
        share = tensor.numel() / max(1, count.numel()) if function.overloadpacket is aten.mean else 1
        return (count - 2).clamp_min(0.0) * total(tensor.abs(), *others, **kwargs) / share

    def _moved(self, found, by):
        """What may be in the place of a tensor that somebody has."""
        return found.copy_(self._rounded(found + by))

    def _rounded(self, found):
        """Dekker's splitting, of a number that is moved by less than half of its last place."""
        moved = found + found * (0.49 * UNIT / 2) * self._signs(found)
        large = moved * (2.0 ** (53 - BITS) + 1)
        value = large - (large - moved)
        return found.copy_(torch.where(torch.isnan(value), found, value))


@contextmanager
def large_unit(unit=UNIT):
    """Proofs that take roundings to be as large; nothing is rounded."""
    modules = [module for name, module in sys.modules.items() if name.startswith("regard")]
    patches = [mock.patch.object(module, "UNIT", unit) for module in modules if hasattr(module, "UNIT")]
    patches.append(mock.patch.object(_round, "EPS", 2 * unit))
    _forget()
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
        _forget()


def _forget():
    """What was computed with another unit."""
    _round.gamma.cache_clear()
    facts._kept.clear()


@contextmanager
def coarse(seed):
    """Few digits in all of torch, and proofs that know of it."""
    with large_unit(), Coarse(seed):
        yield


def representable(tensor):
    """The nearest numbers that few digits can write."""
    mantissa, exponent = torch.frexp(tensor)
    return torch.ldexp((mantissa * 2.0**BITS).round() / 2.0**BITS, exponent)
