"""Whether a module computes what it was declared as: both are run on the same sequences."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from regard._verb import Verb
from regard.certificate import Hypothesis
from regard.domains import Ball, Domain, Edited, Near, NearbyLaws, TokenSet
from regard.errors import ArgumentError
from regard.proofs.intact import parametrized
from regard.proofs.locating import in_double
from regard.proofs.modules import eps_of
from regard.proofs.places import project
from regard.proofs.setting import width_of
from regard.proofs.shapes import widths
from regard.proofs.theorem import assumed, checked

TOLERANCE = 1e-5
"""The relative difference that is accepted between a module and its declaration; 6e-8 in float64."""
TOKENS, WIDTH = 3, 4
"""The size of sequences where neither the domain nor the map states it."""

Way = Callable[[nn.Module, Tensor], Tensor]
"""How a module is called on sequences (batch, n, d)."""

slack = Verb("slack")
"""slack.one(module) -> upper bound on the error of its tokens that is not rounding."""


@slack.rule(object)
def _of_parts(module: Any) -> float:
    parts = module.children() if isinstance(module, nn.Module) else ()
    return max((slack.one(part) for part in parts), default=0.0)


REMEDY = "declare what it does (regard.declare.rule), or give the declaration itself"


class CannotRun(Exception):
    """A module or its declaration raised this error on sequences (batch, n, d)."""

    def __init__(self, raised: Exception) -> None:
        self.raised = raised
        super().__init__(f"{type(raised).__name__}: {' '.join(str(raised).split())[:120]}")


@dataclass(frozen=True)
class Agreement:
    """How a module takes batches, and its relative differences from the declaration, without gradients and
    with them, in the dtype of the run.
    """

    way: Way
    gaps: tuple[float, float]
    kind: torch.dtype

    @property
    def gap(self) -> float:
        """The larger of the two differences."""
        return max(self.gaps)

    @property
    def rounding(self) -> float:
        """The largest difference that counts as rounding in this dtype."""
        return 4.0 * float(torch.finfo(self.kind).eps) ** 0.5

    @property
    def tolerance(self) -> float:
        """The largest difference that is accepted."""
        return min(TOLERANCE, self.rounding)

    @property
    def holds(self) -> bool:
        """Whether the module is its declaration, within the tolerance."""
        return self.gap <= self.tolerance

    def hypothesis(self, module: nn.Module, where: str) -> Hypothesis:
        """What was checked, and how closely."""
        within = f"{self.tolerance if self.holds else self.rounding:.1g}"
        run = f"run in {name_of(self.kind)} with and without gradients at {where}"
        return checked(f"{type(module).__name__} equals its declaration within {within} (relative), {run}")


def relative_gap(found: Tensor, wanted: Tensor, room: float = 0.0) -> float:
    """|found - wanted| / |wanted| in the Frobenius norm, where the difference exceeds `room`; the absolute
    difference where the value is zero.
    """
    scale, gap = float(wanted.norm()), float((found - wanted).norm()) - room
    gap = gap / scale if scale > 0 else gap
    return math.inf if math.isnan(gap) else max(gap, 0.0)


def run_check(module: Any, map: Any, domain: Domain) -> Hypothesis:
    """Run a module on two sequences of a domain and compare it with its declaration; an error where they
    differ, and an assumption where it cannot be run.
    """
    name = type(module).__name__
    if not isinstance(module, nn.Module):
        return assumed(f"{name} computes its declaration: only modules are run")
    try:
        found = agreement("map", module, map, two_sequences(domain, map))
    except CannotRun as error:
        return assumed(f"{name} computes its declaration: it was not run on the domain ({error})")
    return found.hypothesis(module, "two sequences of the domain")


def agreement(name: str, module: nn.Module, map: Any, both: Tensor) -> Agreement:
    """Compare a module with its declaration in float64 at two sequences (2, n, d); an ArgumentError under
    `name` where they differ.

    A module that differs in its own dtype is run again as a copy in a wider one: if the copy agrees, the
    difference was rounding.
    """
    _refuse_other_eps(name, module)
    with torch.random.fork_rng(devices=[]):
        own = found = _compare(name, module, map, both)
        for kind in (torch.float32, torch.float64):
            if not found.holds and torch.finfo(kind).eps < torch.finfo(own.kind).eps:
                found = _compare_copy(module, map, both, kind) or found
        copied = found is not own
        if not found.holds and (copied or own.gap > own.rounding):
            raise _differs(name, module, found)
        own = _compare(name, module, map, both, (found.way,)) if copied else own
        if own.gap > own.rounding:
            remedy = "convert it to a wider dtype, e.g. module.double()"
            raise ArgumentError(name, f"differs by {own.gap:.2g} in {name_of(own.kind)}, by rounding", remedy)
    return found


def _refuse_other_eps(name: str, module: nn.Module) -> None:
    """Refuse an RMSNorm whose eps is that of another dtype than its declaration assumes."""
    used = torch.finfo(torch.promote_types(kind_of(module), torch.float32)).eps
    for part in module.modules():
        if isinstance(part, nn.RMSNorm) and part.eps is None and eps_of(part) != used:
            found = (
                f"has an RMSNorm without eps, which PyTorch gives {used:.2g} for inputs in "
                f"{name_of(kind_of(module))}, and its declaration {eps_of(part):.2g}"
            )
            raise ArgumentError(name, found, f"give it one: nn.RMSNorm(..., eps={used:.2g})")


def _differs(name: str, module: nn.Module, found: Agreement) -> ArgumentError:
    without, within = (gap <= found.tolerance for gap in found.gaps)
    how = "without gradients" if within else "with gradients" if without else "run"
    said = (
        f"differs by {found.gap:.2g} (relative) from what it is declared as, {how} in {name_of(found.kind)}"
    )
    remedy = REMEDY
    if module.training:
        remedy = f"call module.eval() if training changes it, or {REMEDY}"
    elif within:
        remedy = f"call torch.backends.mha.set_fastpath_enabled(False) if it has fused layers, or {REMEDY}"
    return ArgumentError(name, said, remedy)


# How modules are called


def batched(module: nn.Module, batch: Tensor) -> Tensor:
    """A module on sequences (batch, n, d), in its own dtype."""
    weight = next(module.parameters(), None)
    given = batch if weight is None else batch.to(weight)
    alone = isinstance(module, nn.MultiheadAttention)  # which takes queries, keys and values
    found = module(given, given, given, need_weights=False) if alone else module(given)
    found = found[0] if isinstance(found, tuple) else found
    if not isinstance(found, Tensor):
        raise TypeError(f"it returns a {type(found).__name__}")
    return found


def crosswise(module: nn.Module, batch: Tensor) -> Tensor:
    """The same for a module that takes (n, batch, d)."""
    return batched(module, batch.transpose(0, 1)).transpose(0, 1)


def one_by_one(module: nn.Module, batch: Tensor) -> Tensor:
    """The same for a module that takes one sequence (n, d)."""
    return torch.stack([batched(module, one) for one in batch])


WAYS: tuple[Way, ...] = (batched, crosswise, one_by_one)


def kind_of(module: nn.Module) -> torch.dtype:
    """The dtype of a module; that of numbers that are made where it has no parameters."""
    return next((weight.dtype for weight in module.parameters()), torch.get_default_dtype())


def name_of(kind: torch.dtype) -> str:
    """Without "torch."."""
    return str(kind).rpartition(".")[-1]


def _compare(name: str, module: nn.Module, map: Any, both: Tensor, ways: Sequence[Way] = WAYS) -> Agreement:
    """The first way that agrees, or the one that is closest."""
    kind = kind_of(module)
    expected = _declared_values(map, both.to(kind).double())
    room = 10 * slack.one(module) * expected[..., 0].numel() ** 0.5
    found: list[Agreement] = []
    error: Exception | None = None
    for way in ways:
        if way is one_by_one and found:
            break
        try:
            values = [_value(module, way, both.to(kind), grad) for grad in (False, True)]
        except Exception as raised:  # of the module, on a batch that it does not take
            error = error or raised
            continue
        if all(value.shape == expected.shape for value in values):
            first, second = (relative_gap(value, expected, room) for value in values)
            found.append(Agreement(way, (first, second), kind))
    if not found and error is not None:
        raise CannotRun(error)
    if not found:
        shape = list(expected[0].shape)
        raise ArgumentError(name, f"gives another shape than its declaration, {shape}", REMEDY)
    return next((one for one in found if one.holds), min(found, key=lambda one: one.gap))


def _declared_values(map: Any, both: Tensor) -> Tensor:
    exactly = in_double(map)
    try:
        with torch.no_grad():
            return torch.stack([exactly(one) for one in both])
    except (ArgumentError, RuntimeError) as error:  # a width that neither the domain nor the map states
        raise CannotRun(error) from None


def _value(module: nn.Module, way: Way, both: Tensor, grad: bool) -> Tensor:
    given = both.detach().clone().requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        return way(module, given).detach().to("cpu", torch.float64)


def _compare_copy(module: nn.Module, map: Any, both: Tensor, kind: torch.dtype) -> Agreement | None:
    """The same for a copy in another dtype; None where there is no copy that runs."""
    try:
        return _compare("map", copy_in(kind, module), map, both)
    except Exception:  # a module that cannot be copied, or is made for one dtype
        return None


def copy_in(kind: torch.dtype, module: nn.Module) -> nn.Module:
    """A copy in another dtype, with the weights as they are read: parametrizations are not computed anew.

    A parametrized module and its copy share a class, so torch's own removal would break the original. The
    copy of an RMSNorm without eps keeps the value that the original computes with.
    """
    copied = copy.deepcopy(module)
    for part in [*copied.modules()]:
        if isinstance(part, nn.RMSNorm):
            part.eps = eps_of(part)
        weights = {name: nn.Parameter(getattr(part, name).detach().clone()) for name in parametrized(part)}
        if weights:
            part.__class__ = type_before_parametrizations(part)
            del part.parametrizations
        for name, weight in weights.items():
            part.register_parameter(name, weight)
    return copied.to(kind)


# Where they are compared


def two_sequences(domain: Domain, map: Any) -> Tensor:
    """Two sequences of a domain, (2, n, d): the given one, or random ones."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(domain, Edited):
        return torch.stack([domain.points.detach().double()] * 2)
    if isinstance(domain, (Near, NearbyLaws)):
        points = domain.measure.points
        away = points + torch.randn(points.shape, generator=generator, dtype=torch.float64)
        return torch.stack([points, project.one(domain, away) if isinstance(domain, Near) else points])
    assert isinstance(domain, TokenSet)
    center = domain.center if isinstance(domain, Ball) else None
    width = width_of(domain) or widths.one(map, None).takes or WIDTH
    away = torch.randn(2, domain.tokens or TOKENS, width, generator=generator, dtype=torch.float64)
    away = away if center is None else away + center.detach().double()
    return torch.stack([project.one(domain, one) for one in away])
