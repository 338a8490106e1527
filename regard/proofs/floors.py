"""What a theorem near a sequence cannot be below: what the parts that it is made of do there.

A product of constants is at least the product of the slopes of its factors at the sequence itself. Where
another theorem already gave less, the product is not asked for (`rungs`). Nothing here is part of a proof: a
floor that were too high would cost a bound its sharpness, never its truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.attention import Attention
from regard.domains import Domain, Neighborhood
from regard.errors import ArgumentError
from regard.maps import Compose, Map, Residual
from regard.norms import Frobenius, Norm, TokenMax
from regard.proofs.locating import in_double
from regard.proofs.question import once
from regard.proofs.theorem import constants, deviations, least_of

COORDINATES = 256
"""Sequences of more numbers are not differentiated: a column for each would cost more than it saves."""
STEP = 1e-6
"""Of a difference, relative to the tokens: what it misses is far below what it is compared with."""


def constant_floor(map: Any, domain: Domain, norm: Norm) -> float:
    """What no theorem gives less than for the constant of a map; 0 where nothing is known."""
    points = _points(domain, norm)
    if points is None:
        return 0.0
    if isinstance(map, (Compose, Residual)):
        return least_of(constants, map, domain, norm)
    return _slope(map, points, norm)


def deviation_floor(map: Any, domain: Domain, norm: Norm) -> float:
    """The same for the deviation."""
    if isinstance(map, (Compose, Residual)) and _points(domain, norm) is not None:
        return least_of(deviations, map, domain, norm)
    return move_floor((map,), domain, norm)


def product_floor(maps: Sequence[Any], domain: Domain, norm: Norm) -> float:
    """The product of the slopes of maps that follow each other."""
    points, found = _points(domain, norm), 1.0
    if points is None:
        return 0.0
    for map in maps:
        found *= _slope(map, points, norm)
        if not found > 0:
            return 0.0
        points = in_double(map)(points)
    return found


def slope_near(map: Any, domain: Domain, norm: Norm) -> float:
    """How much the map amplifies some change of the sequence of a neighborhood; 0 where it is not known."""
    return product_floor((map,), domain, norm)


def move_floor(maps: Sequence[Any], domain: Domain, norm: Norm) -> float:
    """How far maps that follow each other move a value, where each may use all that the ones before it moved:
    the radius of an image is in the norm of the neighborhood.
    """
    points = _points(domain, norm)
    if points is None:
        return 0.0
    assert isinstance(domain, Neighborhood)
    moved = float(domain.radius)
    for map in maps:
        last = map is maps[-1]
        moved = _moved(map, points, moved, domain.norm, norm if last else domain.norm)
        if not moved > 0:
            return 0.0
        points = in_double(map)(points)
    return moved


def spread(map: Any, domain: Domain) -> float:
    """How far the tokens of the value at a given sequence are apart."""
    points = _points(domain, Frobenius())
    value = None if points is None else _value(map, points)
    return 0.0 if value is None else float(torch.cdist(value, value).max())


def _points(domain: Domain, norm: Norm) -> Tensor | None:
    """The sequence, where it is nothing but tokens, not many, that all may move."""
    if not isinstance(domain, Neighborhood) or not isinstance(norm, (Frobenius, TokenMax)):
        return None
    measure = domain.measure
    plain = measure.log_weights is None and measure.marks is None and domain.radius > 0
    return measure.points if plain and measure.points.numel() <= COORDINATES else None


def _value(map: Any, points: Tensor) -> Tensor | None:
    try:
        value: Tensor = in_double(map)(points)
    except ArgumentError:
        return None
    return value if value.dim() == 2 else None


def _slope(map: Any, points: Tensor, norm: Norm) -> float:
    jacobian = _jacobian(map, points)
    if jacobian is None:
        return 0.0
    if isinstance(norm, Frobenius):
        return float(torch.linalg.matrix_norm(jacobian.flatten(2).flatten(0, 1), 2))
    change = _change_of_row(jacobian)
    return float((jacobian.flatten(2) @ change.flatten()).norm(dim=-1).max())


def _moved(map: Any, points: Tensor, radius: float, domain_norm: Norm, norm: Norm) -> float:
    """How far the change that acts most moves the value, at full length."""
    jacobian = _jacobian(map, points)
    if jacobian is None:
        return 0.0
    change = _change(jacobian) if isinstance(norm, Frobenius) else _change_of_row(jacobian)
    size = change.norm() if isinstance(domain_norm, Frobenius) else change.norm(dim=-1).max()
    moves = in_double(map)(points + radius / size * change) - in_double(map)(points)
    return float(moves.norm() if isinstance(norm, Frobenius) else moves.norm(dim=-1).max())


def _change(jacobian: Tensor) -> Tensor:
    """The change (n, d) that moves the whole value most."""
    _, _, n, d = jacobian.shape
    return torch.linalg.svd(jacobian.reshape(-1, n * d), full_matrices=False).Vh[0].reshape(n, d)


def _change_of_row(jacobian: Tensor) -> Tensor:
    """Every token j moves by one along J_ijᵀu, for the row i of the value that moves farthest, along u."""
    directions = torch.linalg.svd(jacobian.flatten(2), full_matrices=False).U[..., 0]
    pulls = torch.einsum("me,mend->mnd", directions, jacobian)
    row = int(pulls.norm(dim=-1).sum(-1).argmax())
    return torch.nn.functional.normalize(pulls[row], dim=-1, eps=1e-300)


def _jacobian(map: Any, points: Tensor) -> Tensor | None:
    """∂ value (m, e) / ∂ token (n, d), as (m, e, n, d); None where the map cannot be differentiated."""
    if not isinstance(map, (Map, Attention)):
        return None
    key = ("jacobian", id(map), tuple(points.flatten().tolist()))
    return once(key, map, lambda: _differences(map, points))


def _differences(map: Any, points: Tensor) -> Tensor | None:
    n, d = points.shape
    step = STEP * max(float(points.abs().mean()), STEP)
    basis = step * torch.eye(n * d, dtype=torch.float64).reshape(n * d, n, d)
    try:
        ahead, behind = torch.vmap(in_double(map))(torch.cat([points + basis, points - basis])).chunk(2)
    except (ArgumentError, RuntimeError):  # what takes no other sequence, or no batch of them
        return None
    columns = (ahead - behind) / (2 * step)
    if columns.dim() != 3 or not bool(torch.isfinite(columns).all()):
        return None
    return columns.permute(1, 2, 0).unflatten(-1, (n, d))
