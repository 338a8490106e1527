"""Whose rounding it is: a module that differs from its declaration is run again in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from regard.audits.adapters.base import Call, NotCovered
from regard.audits.capture import output_tensor, quiet
from regard.audits.site import TOLERANCE, Site
from regard.proofs.agreement import copy_in


def agreeing(make: Callable[[Call], Site], module: nn.Module, call: Call) -> tuple[Site, float, float]:
    """The site of a call, how far its declaration is from the module, and how far the module's own rounding
    takes it, relative; that is zero where it was not needed.

    A module in float32 that disagrees is called again in float64: where that agrees, the difference was the
    rounding of the module and not a wrong declaration.
    """
    site = make(call)
    gap = site.disagreement()
    if gap <= TOLERANCE:
        return site, gap, 0.0
    again = in_float64(module, call)
    exact = make(again)
    own = exact.disagreement()
    if not own <= TOLERANCE:
        raise NotCovered(f"the declaration differs from the module's own output by {gap:.1e} (relative)")
    ran, true = (output_tensor(one.output).double() for one in (call, again))
    return exact, own, float((ran - true).norm() / true.norm().clamp_min(1e-300))


def in_float64(module: nn.Module, call: Call) -> Call:
    """The same call in float64, by a copy of the module."""
    wide = copy_in(torch.float64, module)
    arguments, options = pytree.tree_map(_double, (call.arguments, call.options))
    with quiet(wide), torch.no_grad():
        return replace(call, arguments=arguments, options=options, output=wide(*arguments, **options))


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.dtype.is_floating_point else value
