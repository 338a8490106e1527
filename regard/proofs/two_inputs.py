"""Two inputs of an attention layer: what theorems say of these two, beside the constant times their distance.

Tokens that stay, with those that come and go counted (`edits`); all laws as near as the second, on its atoms
(`transported`); and, token by token, a radius for each.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from regard._enclosed import lengths
from regard._upper import Upper, exact_lower
from regard.attention import Attention
from regard.certificate import Certificate
from regard.domains import Domain, Edited, NearbyLaws, Radii, Vocabulary
from regard.maps import Heads, Residual
from regard.measure import Measure
from regard.norms import Frobenius, Norm, SequenceNorm, TokenMax, Wasserstein
from regard.proofs.certification import deviation
from regard.proofs.theorem import checked


def near_the_first(
    map: Any, first: Measure, second: Measure, norm: Norm, distance: Upper
) -> list[Certificate]:
    """Bounds of how far the outputs are apart, each from a theorem near the first input; float64 inputs."""
    inner = map.map if isinstance(map, Residual) else map
    if not isinstance(inner, (Attention, Heads)) or not float(distance):
        return []
    plain = first.log_weights is None and second.log_weights is None
    found = []
    if isinstance(norm, Wasserstein) and norm.p == 1.0:
        found.append(_law(map, first, second, norm, distance))
        found += _edit(map, first, second, norm) if plain else []
    if plain and first.size == second.size:
        found += _token_by_token(map, first, second, norm)
    return [one for one in found if math.isfinite(one.value)]


def _law(map: Any, first: Measure, second: Measure, norm: Norm, distance: Upper) -> Certificate:
    domain = NearbyLaws(first, float(distance), Vocabulary(second.points))
    return _named(deviation(map, domain, norm), "all laws as near as the second, on its tokens", domain, norm)


def _edit(map: Any, first: Measure, second: Measure, norm: Norm) -> list[Certificate]:
    """Where tokens stay: those that go, and those that come, from the ones that came."""
    removed, added = _difference(first.points, second.points)
    if len(removed) == first.size:
        return []
    within = Vocabulary(second.points[added]) if added else None
    domain = Edited(first.points, tuple(removed), len(added), within)
    words = f"{len(removed)} tokens go, {len(added)} come"
    return [_named(deviation(map, domain, norm), words, domain, norm)]


def _difference(first: Tensor, second: Tensor) -> tuple[list[int], list[int]]:
    """Rows of the first that the second lacks, and the reverse, each equal row once."""
    waiting: dict[bytes, list[int]] = {}
    for index, row in enumerate(first + 0.0):  # minus zero equals zero
        waiting.setdefault(row.numpy().tobytes(), []).append(index)
    added = []
    for index, row in enumerate(second + 0.0):
        same = waiting.get(row.numpy().tobytes())
        if same:
            same.pop(0)
        else:
            added.append(index)
    return sorted(index for left in waiting.values() for index in left), added


def _token_by_token(map: Any, first: Measure, second: Measure, norm: Norm) -> list[Certificate]:
    """Each token within its own radius; a coupling token by token bounds transport of order p by the largest
    move, and for p ≤ 2 by the root of the mean of squares.
    """
    radii = lengths(second.points - first.points, 1).bound
    domain, words = Radii(first.points, radii), "each token within a radius of its own"
    if isinstance(norm, SequenceNorm):
        return [_named(deviation(map, domain, norm), words, domain, norm)]
    assert isinstance(norm, Wasserstein)
    parts = [(deviation(map, domain, TokenMax()), None)]
    if norm.p <= 2:
        parts.append((deviation(map, domain, Frobenius()), exact_lower(first.size).sqrt()))
    found = []
    for part, share in parts:
        value = Upper(part.value) if share is None else Upper(part.value) / share
        found.append(_named(part, words, domain, norm, float(value)))
    return found


def _named(
    part: Certificate, words: str, domain: Domain, norm: Norm, value: float | None = None
) -> Certificate:
    held = (checked("the second input is in the domain"), *part.hypotheses)
    value = part.value if value is None else value
    quantity = "distance of the outputs"
    return Certificate(value, domain, norm, f"{words}: {part.theorem}", held, (part,), quantity=quantity)
