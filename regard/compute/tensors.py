"""attend: the tensor door, for people who call F.scaled_dot_product_attention today."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard import _check
from regard.attention import Attention
from regard.compute.application import select
from regard.compute.engine import Engine
from regard.compute.problem import Problem, Tokens, pose
from regard.errors import ArgumentError
from regard.normalizers import Normalizer, Softmax
from regard.potentials import Dot, Potential
from regard.supports import Full, Support


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    potential: Potential = Dot(),
    normalizer: Normalizer = Softmax(),
    support: Support = Full(),
    log_weights: Tensor | None = None,
    engine: Engine | None = None,
) -> Tensor:
    """Attention of queries q (..., m, d) to keys k (..., n, d) with values v (..., n, e): (..., m, e).

    Shapes broadcast as in F.scaled_dot_product_attention; fewer heads of k and v than of q (a divisor) are grouped queries.
    log_weights (..., n) says how often each key counts. Shapes are checked, values are not: NaN propagates, as in torch.
    """
    q, k, v = lowered(q, k, v)
    return _solved(pose_tensors(q, k, v, potential, normalizer, support, log_weights), engine)


def attend_tokens(attention: Attention, queries: Tokens, keys: Tokens, values: Tensor) -> Tensor:
    """The same at given marks: potential, normalizer and support of an attention on tokens that are projected already."""
    q, k, values = lowered(queries.points, keys.points, values)
    queries, keys = queries.replace(points=q), keys.replace(points=k)
    return _solved(pose(attention.potential, attention.normalizer, attention.support, queries, keys, values), None)


def lowered(*tensors: Any) -> tuple[Any, ...]:
    """Cast once, as autocast asks of the fused kernel; inside, biases and sums keep their precision."""
    if not (isinstance(tensors[0], Tensor) and torch.is_autocast_enabled(tensors[0].device.type)):
        return tensors
    low = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(t.to(low) if isinstance(t, Tensor) and t.dtype == torch.float32 else t for t in tensors)


def _solved(problem: Problem, engine: Engine | None) -> Tensor:
    kind = problem.device.type
    if not torch.is_autocast_enabled(kind):
        return select(problem, engine).run(problem)
    with torch.autocast(kind, enabled=False):
        return select(problem, engine).run(problem)


def pose_tensors(
    q: Tensor, k: Tensor, v: Tensor, potential: Potential, normalizer: Normalizer, support: Support, log_weights: Tensor | None
) -> Problem:
    """The problem that attend poses."""
    for name, value, kind in (("potential", potential, Potential), ("normalizer", normalizer, Normalizer), ("support", support, Support)):
        if not isinstance(value, kind):
            example = "Where(mask)" if name == "support" and isinstance(value, Tensor) else _EXAMPLES[kind.__name__]
            raise ArgumentError(name, f"is {_check.describe(value)}", f"give a {kind.__name__} value, e.g. {name}=regard.{example}")
    q, k, v = (_check.floating(name, t) for name, t in (("q", q), ("k", k), ("v", v)))
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim < 2:
            raise ArgumentError(name, f"has shape {list(t.shape)}", f"give {name} as (..., tokens, width)")
    if k.shape[-2] != v.shape[-2]:
        raise ArgumentError("v", f"has {v.shape[-2]} rows for {k.shape[-2]} keys", "give one value for each key")
    if not q.dtype == k.dtype == v.dtype:
        raise ArgumentError("q, k and v", f"have dtypes {q.dtype}, {k.dtype} and {v.dtype}", "convert them to one dtype")
    if log_weights is not None:
        _check.floating("log_weights", log_weights)
        if log_weights.ndim < 1 or log_weights.shape[-1] != k.shape[-2]:
            raise ArgumentError("log_weights", f"has shape {list(log_weights.shape)}", f"give one entry for each key: (..., {k.shape[-2]})")
        _check.same_device("log_weights", log_weights, "k", k)
    return pose(potential, normalizer, support, Tokens(q), Tokens(k, log_weights), v)


_EXAMPLES = {"Potential": "Gaussian(bandwidth=2.0)", "Normalizer": "Entmax(1.5)", "Support": "Causal()"}
