"""project: how each moment of the attention laws is computed, without the laws where that is possible."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard import _check
from regard._verb import Verb
from regard.compute.engine import Plan, working_dtype
from regard.compute.kernel.tiles import Tiling, rows_per_tile
from regard.compute.problem import Problem
from regard.compute.selection import select
from regard.errors import ArgumentError
from regard.measure import GaussianMeasure, Measure
from regard.moments import Law, Mean, Mode, Sample, SecondMoment, pick
from regard.normalizers import Reference

project = Verb("project")
"""project.one(moment, plan) -> the moments of every query's law."""


@project.rule(Mean)
def _mean(moment: Mean, plan: Plan) -> Tensor:
    return plan.run()


@project.rule(SecondMoment)
def _second(moment: SecondMoment, plan: Plan) -> GaussianMeasure:
    """The same weights average 1, v and v vᵀ; a common center is taken out of v, so nothing cancels."""
    problem = plan.all_keys()
    _need_laws(problem)
    exact = problem.to(working_dtype(problem.dtype))
    center = exact.values.detach().sum(-2, keepdim=True) / max(exact.key_count, 1)
    v = exact.values - center
    squares = (v.unsqueeze(-1) * v.unsqueeze(-2)).flatten(-2)
    augmented = torch.cat([torch.ones_like(v[..., :1]), v, squares], -1)
    moments = select(exact.replace(values=augmented), plan.engine).run()
    mass, mean, second = moments.split(
        [1, v.shape[-1], v.shape[-1] ** 2], -1
    )  # the mass is zero where a query sees nothing
    covariance = second.unflatten(-1, (v.shape[-1],) * 2) - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    return GaussianMeasure((mean + mass * center).to(problem.dtype), covariance.to(problem.dtype))


@project.rule(Law)
def _law(moment: Law, plan: Plan) -> Measure:
    """The law itself has m · n weights: there is no smaller way to say it."""
    problem = plan.all_keys()
    _need_laws(problem)
    exact = problem.to(working_dtype(problem.dtype))
    weights = exact.normalizer.weights(exact.potential.pair(exact.queries, exact.keys), exact.reference())
    if _check.holds((weights.sum(-1) == 0).any()):
        raise ArgumentError(
            "moment",
            "is Law, and some query sees nothing and has no law",
            "use Mean, which gives zero there, or another support",
        )
    points = exact.values.unsqueeze(-3)
    points = points.expand(*points.shape[:-3], *weights.shape[-2:], -1)
    return Measure(points, weights.log(), exact.columns().unsqueeze(-2).expand(points.shape[:-1]))


@project.rule(Mode)
def _mode(moment: Mode, plan: Plan) -> Tensor:
    return _pick_values(plan.all_keys(), lambda weights: weights.argmax(-1))


@project.rule(Sample)
def _sample(moment: Sample, plan: Plan) -> Tensor:
    _need_laws(plan.all_keys())

    def draw(weights: Tensor) -> Tensor:
        flat = weights.reshape(-1, weights.shape[-1])
        flat = torch.where(flat.sum(-1, keepdim=True) > 0, flat, torch.ones_like(flat))
        return torch.multinomial(flat, 1, generator=moment.generator).reshape(weights.shape[:-1])

    return _pick_values(plan.all_keys(), draw)


def _pick_values(problem: Problem, choose: Callable[[Tensor], Tensor]) -> Tensor:
    """One value for each query, picked by its row of weights, block by block.

    Gradients reach the chosen value alone.
    """
    exact = problem.to(working_dtype(problem.dtype))
    if exact.key_count == 0:
        return exact.values.new_zeros(*exact.batch_shape, exact.query_count, exact.values.shape[-1]).to(
            problem.dtype
        )
    width = exact.potential.width(exact.queries, exact.keys)
    rows = (
        rows_per_tile(max(1, exact.batch_shape.numel()), exact.key_count, width)
        if exact.normalizer.rowwise
        else exact.query_count
    )
    tiling = Tiling(exact.support, exact.rows(), exact.columns(), max(1, rows), False)
    picked = [exact.values.new_zeros(*exact.batch_shape, 0, exact.values.shape[-1])]
    for tile in tiling:
        with torch.no_grad():
            queries = pytree.tree_map(lambda t, tile=tile: t[..., tile.rows, :], exact.queries)
            log_queries = None if exact.log_queries is None else exact.log_queries[..., tile.rows]
            reference = Reference(exact.log_counts, tiling.allowed(tile), log_queries)
            weights = exact.normalizer.weights(exact.potential.pair(queries, exact.keys), reference)
            index = choose(weights.expand(*exact.batch_shape, *weights.shape[-2:]))
        value = pick(exact.values.unsqueeze(-3), index)
        picked.append(value.masked_fill(weights.sum(-1, keepdim=True) == 0, 0.0))
    return torch.cat(picked, -2).to(problem.dtype)


def _need_laws(problem: Problem) -> None:
    if not problem.normalizer.laws:
        raise ArgumentError(
            "moment",
            f"needs laws and {type(problem.normalizer).__name__} rows are not",
            "use the moment Mean, or a normalizer whose rows are laws",
        )
