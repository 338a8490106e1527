"""linearize: the derivative of a map at a point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from regard import _check
from regard._kinds import names_wrong_kinds
from regard._verb import Verb
from regard.attention import Attention, as_measure
from regard.certificate import Hypothesis
from regard.compute import apply
from regard.compute.application import problem_of
from regard.compute.engine import working_dtype
from regard.compute.engines.sdpa import FusedPlan, Sdpa
from regard.derive.blocks import AttentionBlocks
from regard.derive.graph import (
    GraphJacobian,
    check_index,
    check_vector,
    double,
    nudge_tensor,
    second_derivative,
)
from regard.derive.heads import HeadsJacobian
from regard.derive.influence import Influence
from regard.derive.jacobian import Jacobian
from regard.derive.softmax import AbsorbedProducts, FusedProducts
from regard.errors import ArgumentError
from regard.maps import Heads
from regard.measure import Measure
from regard.moments import Mean

linearization = Verb("linearization")
"""linearization.one(map, x, context, batch) -> Jacobian; a rule for each kind of map."""


@names_wrong_kinds
def linearize(
    map: Attention | Callable[[Tensor], Tensor],
    x: Measure | Tensor,
    context: Measure | Tensor | None = None,
    *,
    batch: int | None = None,
) -> Jacobian:
    """The derivative of a map at x: an Attention, a torch.nn.Module, or any function of one tensor.

    With a context, attention is differentiated in x and the context is held fixed; weights and marks of a
    Measure are always held fixed.
    batch: how many leading dimensions of x are a batch of independent problems; None means all but the last
    two for an Attention, which treats them so, and none for a function, which may mix them.

    Examples:
        >>> x = torch.randn(5, 4, dtype=torch.float64)
        >>> jacobian = regard.linearize(regard.Attention(regard.Dot()), x)
        >>> float(jacobian.norm()) <= jacobian.norm_certificate().value
        True
        >>> jacobian.influence().shape  # which token moves which
        torch.Size([5, 5])
    """
    return linearization.one(map, x, context, batch)


@linearization.rule(Attention)
def _attention(attention: Attention, x: Any, context: Any, batch: int | None) -> Jacobian:
    source = as_measure("x", x)
    _check_no_transform(source.points)
    if batch is not None and batch not in (0, source.points.ndim - 2):
        raise ArgumentError(
            "batch",
            f"is {batch}",
            f"attention takes all {source.points.ndim - 2} leading dimensions as a batch, or 0 of them",
        )
    return AttentionJacobian(
        attention, source, None if context is None else as_measure("context", context), batch
    )


@linearization.rule(Heads)
def _heads(heads: Heads, x: Any, context: Any, batch: int | None) -> Jacobian:
    """At one sequence from the closed forms of attention; a Measure keeps its marks."""
    points = x.points if isinstance(x, Measure) else x
    mean = isinstance(heads.attention.moment, Mean)
    if context is not None or batch or not mean or not isinstance(points, Tensor) or points.ndim != 2:
        return _function(heads, x, context, batch)
    return HeadsJacobian(_attention(heads.attention, x, None, 0), heads.w_o, heads.b_o)


@linearization.rule(object)
def _function(function: Any, x: Any, context: Any, batch: int | None) -> Jacobian:
    if not callable(function):
        raise ArgumentError(
            "map",
            f"is a {type(function).__name__}",
            "give an Attention, a torch.nn.Module or a function of one tensor",
        )
    if context is not None:
        raise ArgumentError(
            "context", "was given with a function", "only attention has a context: put it into the function"
        )
    if isinstance(function, nn.Module):
        _check_not_random(function)
    batch = 0 if batch is None else batch
    point = _check_no_transform(_check.floating("x", x))
    if not 0 <= batch <= max(0, point.ndim - 1):
        raise ArgumentError("batch", f"is {batch}", f"x has {point.ndim} dimensions")
    return GraphJacobian(function, point, batch)


def _check_not_random(module: nn.Module) -> None:
    """Refuse a module whose dropout is on: each product would be that of another map."""
    for part in module.modules():
        share = part.p if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "dropout", 0.0)
        if part.training and isinstance(share, float) and share > 0:
            found = f"is a module with dropout in training mode ({type(part).__name__}), which is random"
            raise ArgumentError("map", found, "call module.eval() first")


def _check_no_transform(points: Tensor) -> Tensor:
    if torch._C._functorch.is_functorch_wrapped_tensor(points):
        raise ArgumentError(
            "x",
            "is under a transform of torch.func",
            "linearize outside it, or use torch.func.jvp and vjp inside",
        )
    return points


class AttentionJacobian(Jacobian):
    """The derivative of attention in its points: closed forms for softmax of dot products,
    retained graphs for the rest.
    """

    def __init__(self, attention: Attention, x: Measure, context: Measure | None, batch: int | None) -> None:
        # Copies: what happens to the caller's tensors later must not reach a derivative that was taken now.
        attention, x, context = pytree.tree_map(
            lambda t: t.detach().clone() if isinstance(t, Tensor) else t, (attention, x, context)
        )
        self._attention, self._x, self._context, self._batch = attention, x, context, batch
        self.point = x.points
        self.batch_shape = self.point.shape[:-2] if batch is None else self.point.shape[:batch]
        leaf = self.point.detach().requires_grad_()
        with torch.enable_grad():
            problem = problem_of(attention, x.replace(points=leaf), context)
            problem = problem.to(working_dtype(problem.dtype))
            closed = isinstance(attention.moment, Mean) and leaf.device.type == "cpu"
            closed = closed and 0 not in (problem.query_count, problem.key_count, *problem.batch_shape)
            plan = Sdpa().plan(problem) if closed else None
        self._products: FusedProducts | AbsorbedProducts | GraphJacobian
        if isinstance(plan, FusedPlan):
            self._products = FusedProducts(leaf, plan, attention, context is None).cheaper_form()
        else:
            self._products = GraphJacobian(self._run, self.point, 0)
        self.value = self._products.value.to(self.point.dtype)
        self.value = self.value.expand(
            torch.broadcast_shapes(self.value.shape, (*self.batch_shape, *self.value.shape[-2:]))
        )
        self._closed: AttentionBlocks | None = None

    def _run(self, points: Tensor) -> Tensor:
        result = apply(self._attention, self._x.replace(points=points), self._context)
        return (
            result.points
            if isinstance(result, Measure) and isinstance(self._attention.moment, Mean)
            else result
        )

    def trusted(self) -> tuple[Hypothesis, ...]:
        return self._products.trusted() if isinstance(self._products, GraphJacobian) else ()

    def mv(self, tangent: Tensor) -> Tensor:
        check_vector("tangent", tangent, self.shape_in)
        if isinstance(self._products, GraphJacobian):
            return self._products.mv(tangent).expand(self.shape_out)
        return self._products.push(tangent).to(self.value.dtype).expand(self.shape_out)

    def rmv(self, cotangent: Tensor) -> Tensor:
        check_vector("cotangent", cotangent, self.shape_out)
        own = cotangent.sum_to_size(self._products.value.shape)  # the value may not depend on the batch
        return (
            self._products.rmv(own)
            if isinstance(self._products, GraphJacobian)
            else self._products.pull(own).to(self.dtype)
        )

    def second(self, tangent: Tensor) -> Tensor:
        """D²f[t, t]: for softmax, 2 Cov(v', s') + Cov(v,
        s'') + E[(v - o)(s' - E s')²] + E v'' under each row.
        """
        return second_derivative(self._run, self.point, check_vector("tangent", tangent, self.shape_in))

    def block(self, i: int, j: int) -> Tensor:
        i, j = check_index("i", i, self.value.shape[-2]), check_index("j", j, self.point.shape[-2])
        blocks = self._blocks()
        return (
            self._products_as_graph().block(i, j)
            if blocks is None
            else blocks.block(i, j).to(self.value.dtype)
        )

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        blocks = self._blocks()
        return self._products_as_graph().rows() if blocks is None else blocks.rows()

    def influence(self) -> Influence:
        """|J_ij|₂, how much output token i moves for a step of input token j: (..., m, n)."""
        if 0 in (self.size_in, self.size_out):
            return super().influence()
        blocks = self._blocks()
        return (
            self._products_as_graph().influence()
            if blocks is None
            else Influence.of(blocks.influence().to(self.value.dtype))
        )

    def _blocks(self) -> AttentionBlocks | None:
        """The closed forms, where rows do not depend on each other."""
        if not self._attention.normalizer.rowwise or not isinstance(self._attention.moment, Mean):
            return None
        if self._closed is None:
            self._closed = AttentionBlocks(self._attention, self._x, self._context)
        return self._closed

    def _products_as_graph(self) -> GraphJacobian:
        same = [a == b for a, b in zip(self.batch_shape, self.value.shape, strict=False)]
        return GraphJacobian(self._run, self.point, len(self.batch_shape) if all(same) else same.index(False))

    def in_double(self) -> Jacobian:
        attention, x, context = pytree.tree_map(double, (self._attention, self._x, self._context))
        return AttentionJacobian(attention, x, context, self._batch)

    def nudge(self, relative: float, generator: torch.Generator) -> Jacobian:
        def nudge(value: Any) -> Any:
            return (
                nudge_tensor(value, relative, generator)
                if isinstance(value, Tensor) and value.dtype.is_floating_point
                else value
            )

        points = nudge(self.point)
        context = None if self._context is None else self._context.replace(points=nudge(self._context.points))
        return AttentionJacobian(
            pytree.tree_map(nudge, self._attention), self._x.replace(points=points), context, self._batch
        )
