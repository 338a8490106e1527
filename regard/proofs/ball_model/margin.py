"""The least value of linear functionals over a state: margins between classes, and how far a value moves."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._round import largest_eigenvalue_bound
from regard._upper import UNIT, Lower, Upper, relative_error, sizes
from regard.proofs.ball_model.state import State

FEW = 8
"""For how many functionals the least value of the quadratic part is found by duality."""


def least(state: State, directions: Tensor, offsets: Tensor) -> Tensor:
    """No value of a·x + b over the state is less, for directions a (d, m) and a state of one token."""
    center = state.center[0] @ directions + offsets
    rounding = relative_error(state.width + 4) * (
        computed_lengths(state.center[0]) * computed_lengths(directions.mT) + sizes(offsets)
    )
    wide = directions.unsqueeze(0)
    rest = state.rest(wide, curved=False)[0] + rounding
    plain = state.first(wide)[0]
    if state.curved is None:
        return _below(center, plain + rest)
    curved = state.curved.reach(wide, state.own)[0]
    found = _below(center, plain + curved + rest)
    slopes, forms = (state.linear[0].mT @ directions).mT, state.curved.along(wide)[0]
    lost = relative_error(state.width + 4) * state.size[0] * computed_lengths(directions.mT)
    for k in found.argsort()[:FEW].tolist():
        low = quadratic_minimum(slopes[k], forms[k])
        if math.isfinite(low):
            down = Upper(-min(low, 0.0)) + lost[k] + rest[k]
            found[k] = torch.maximum(found[k], _below(center[k], down))
    return found


def _below(value: Tensor, less: Upper) -> Tensor:
    found = value - less.bound
    return found - 4 * UNIT * (value.abs() + less.bound)


def quadratic_minimum(slope: Tensor, form: Tensor) -> float:
    """No value of g·u + uᵀMu with |u| ≤ 1 is less (M9): for every μ ≥ 0 with X = M + μI ≥ σ > 0 and every v,

    -(2g·v - vᵀXv + |g - Xv|²/σ)/4 - μ, the dual at μ with v for X⁻¹g.
    """
    form = 0.5 * (form + form.mT)
    size = float(computed_lengths(form.flatten()))
    length = float(computed_lengths(slope))
    lowest = -largest_eigenvalue_bound(-form)
    if not math.isfinite(lowest + length):
        return -math.inf
    values, vectors = torch.linalg.eigh(form)
    along = vectors.mT @ slope
    base = max(0.0, -lowest)
    extra = _best_shift(values, along, base, length + size)
    return max(_dual(slope, form, mu, mu + lowest) for mu in (base + extra, base + length + size))


def _best_shift(values: Tensor, along: Tensor, base: float, size: float) -> float:
    """About the best μ - base, by ever finer grids of logarithms."""
    exponent, step = -2.0, 0.5
    for _ in range(4):
        shifts = size * 10.0 ** (exponent + step * torch.arange(-12, 13, dtype=torch.float64))
        whole = (values + base + shifts.unsqueeze(-1)).clamp_min(1e-300)
        scores = -(along.square() / whole).sum(-1) / 4 - shifts
        exponent, step = exponent + step * (int(scores.argmax()) - 12), step / 8
    return float(size * 10.0**exponent)


def _dual(slope: Tensor, form: Tensor, mu: float, sigma: float) -> float:
    sigma = sigma * (1 - 8 * UNIT) - 4 * UNIT * mu
    if not sigma > 0:
        return -math.inf
    eye = torch.eye(len(slope), dtype=torch.float64)
    solved = torch.linalg.solve(form + mu * eye, slope)
    turned = form @ solved + mu * solved
    size = computed_lengths(solved) * (computed_lengths(form.flatten()) + Upper(mu)) + computed_lengths(slope)
    unit = relative_error(2 * len(slope) + 16)
    residual = computed_lengths(slope - turned) + unit * size
    value = float((2 * slope - turned) @ solved)
    above = Upper(max(value, 0.0)) + unit * size * (2 * computed_lengths(solved))
    above = above + residual.square() / Lower(sigma)
    found = Upper(float(above / 4)) + Upper(mu)
    return -float(found)
