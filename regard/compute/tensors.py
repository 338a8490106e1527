"""attend: the tensor door, for people who call F.scaled_dot_product_attention today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard import _check
from regard._kinds import names_wrong_kinds
from regard.compute.direct import direct
from regard.compute.dropout import attend_with_dropout, check_share
from regard.compute.engine import Engine, Marks
from regard.compute.problem import Problem, pose
from regard.compute.selection import select
from regard.errors import ArgumentError
from regard.normalizers import Normalizer, Softmax
from regard.potentials import Dot, Potential
from regard.supports import Full, Support


@names_wrong_kinds
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
    dropout: float = 0.0,
    **torch_names: Any,
) -> Tensor:
    """Attention of queries q (..., m, d) to keys k (..., n, d) with values v (..., n, e): (..., m, e).

    Shapes broadcast as in F.scaled_dot_product_attention; fewer heads of k and v than of q (a divisor) are
    grouped queries. log_weights (..., n) says how often each key counts. dropout: the share of weights that
    is dropped at random, for training. Shapes are checked, values are not. A NaN in a key or value makes
    every row NaN that sees it. A NaN in a query makes its own row NaN; where PyTorch's fused CPU kernel runs,
    the row is zero, as in F.scaled_dot_product_attention.

    Examples:
        >>> q, k, v = (torch.randn(1, 4, 16, 8) for _ in range(3))
        >>> same = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> torch.allclose(regard.attend(q, k, v), same, atol=1e-6)
        True
        >>> regard.attend(q, k, v, normalizer=regard.Entmax(1.5), support=regard.Causal()).shape
        torch.Size([1, 4, 16, 8])
    """
    for name in torch_names:
        raise torch_name(name, "attend", _OWN)
    if engine is None and log_weights is None and dropout == 0:
        found = direct(q, k, v, potential, normalizer, support)
        if found is not None:
            return found
    q, k, v = cast_for_autocast(q, k, v)
    if not isinstance(engine, Engine):
        return _run(pose_tensors(q, k, v, potential, normalizer, support, log_weights), engine, dropout)
    with engine.posing(q, k) as marks:
        problem = pose_tensors(q, k, v, potential, normalizer, support, log_weights, marks)
    return _run(problem, engine, dropout)


def attend_tokens(
    potential: Potential,
    normalizer: Normalizer,
    support: Support,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_marks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """The same on projected tokens, where queries may stand anywhere.

    query_marks (..., m): where the queries stand among the keys; None means 0, 1, 2, ... in order.
    """
    if dropout == 0:
        found = direct(q, k, v, potential, normalizer, support, query_marks)
        if found is not None:
            return found
    q, k, v = cast_for_autocast(q, k, v)
    return _run(pose(potential, normalizer, support, q, k, v, query_marks=query_marks), None, dropout)


def cast_for_autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in the dtype that autocast asks for."""
    if not (isinstance(tensors[0], Tensor) and _is_autocast(tensors[0].device.type)):
        return tensors
    low = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(t.to(low) if isinstance(t, Tensor) and t.dtype == torch.float32 else t for t in tensors)


def _is_autocast(kind: str) -> bool:
    """Whether autocast is on for a kind of device; torch has no answer for those it does not know."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _run(problem: Problem, engine: Engine | None, dropout: float) -> Tensor:
    """The outputs, with autocast off: every dtype is chosen by the plan."""
    kind = problem.device.type
    if not _is_autocast(kind):
        return _outputs(problem, engine, dropout)
    with torch.autocast(kind, enabled=False):
        return _outputs(problem, engine, dropout)


def _outputs(problem: Problem, engine: Engine | None, dropout: float) -> Tensor:
    """Those of a plan, or of the definition where weights are dropped."""
    if dropout == 0:
        return select(problem, engine).run()
    check_share("dropout", dropout)
    if engine is not None:
        found = f"is {engine!r}, and weights are dropped where all of them are held at once"
        raise ArgumentError("engine", found, "leave it out, or the dropout")
    return attend_with_dropout(problem, dropout)


def pose_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    potential: Potential,
    normalizer: Normalizer,
    support: Support,
    log_weights: Tensor | None,
    marks: Marks = (None, None),
) -> Problem:
    """The problem that attend poses."""
    for name, value, kind in (
        ("potential", potential, Potential),
        ("normalizer", normalizer, Normalizer),
        ("support", support, Support),
    ):
        if not isinstance(value, kind):
            example = (
                "Where(mask)" if name == "support" and isinstance(value, Tensor) else _EXAMPLES[kind.__name__]
            )
            raise ArgumentError(
                name,
                f"is {_check.describe(value)}",
                f"give a {kind.__name__} value, e.g. {name}=regard.{example}",
            )
    q, k, v = (_check.floating(name, t) for name, t in (("q", q), ("k", k), ("v", v)))
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim < 2:
            raise ArgumentError(name, f"has shape {list(t.shape)}", f"give {name} as (..., tokens, width)")
    if k.shape[-2] != v.shape[-2]:
        raise ArgumentError(
            "v", f"has {v.shape[-2]} rows for {k.shape[-2]} keys", "give one value for each key"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ArgumentError(
            "q, k and v", f"have dtypes {q.dtype}, {k.dtype} and {v.dtype}", "convert them to one dtype"
        )
    if log_weights is not None:
        _check.floating("log_weights", log_weights)
        if log_weights.ndim < 1 or log_weights.shape[-1] != k.shape[-2]:
            raise ArgumentError(
                "log_weights",
                f"has shape {list(log_weights.shape)}",
                f"give one entry for each key: (..., {k.shape[-2]})",
            )
        _check.same_device("log_weights", log_weights, "k", k)
    places = dict(zip(("query_marks", "key_marks"), marks, strict=True))
    return pose(potential, normalizer, support, q, k, v, log_counts=log_weights, **places)


_EXAMPLES = {"Potential": "Gaussian(bandwidth=2.0)", "Normalizer": "Entmax(1.5)", "Support": "Causal()"}
_OWN = "potential, normalizer, support, log_weights, engine and dropout"
_TORCH = {
    "is_causal": "write support=regard.Causal()",
    "attn_mask": (
        "write support=regard.Where(mask) for a boolean mask, which is True where a key is seen; one that is "
        "added to scores is a potential: potential=regard.Dot() + regard.PairBias(mask)"
    ),
    "key_padding_mask": (
        "write support=regard.Where(~mask[:, None, None]): there True means padding, here a key that is "
        "seen; or support=regard.Padding(lengths[:, None])"
    ),
    "dropout_p": (
        "write dropout=0.1, while training only; the weights that are left are not a probability law, so "
        "declarations, derivatives and certificates describe attention without dropout"
    ),
    "scale": "write potential=regard.Dot(scale=...)",
    "enable_gqa": "leave it out: fewer heads of keys than of queries are grouped",
    "need_weights": "leave it out: regard.Attention(potential).weights(q, k) gives rows of weights",
    "average_attn_weights": "leave it out: regard.Attention(potential).weights(q, k) gives rows of weights",
}
"""How the options of F.scaled_dot_product_attention and nn.MultiheadAttention are written here."""


def torch_name(name: str, where: str, own: str, remedies: Mapping[str, str] = {}) -> ArgumentError:
    """The error for an argument that is torch's, or nobody's: how it is written here."""
    remedy = {**_TORCH, **remedies}.get(name)
    if remedy is None:
        return ArgumentError(name, f"is not an argument of {where}", f"it takes {own}")
    return ArgumentError(name, "is torch's name", remedy)
