"""Sorting coordinates within groups: the constant is one in every norm."""

from __future__ import annotations

from regard._upper import exact
from regard.domains import Domain, Near
from regard.nonexpansive import GroupSort
from regard.norms import Norm
from regard.proofs.setting import moves_of
from regard.proofs.theorem import Bound, Theorem
from regard.proofs.tokenwise import length_of_moves, travel

THEOREM = Theorem(
    name="group_sort",
    title="sorted groups of coordinates",
    statement=r"""
Sorting the coordinates of each token within groups has the constant 1 in Frobenius, TokenMax, TokenSum and
EntryMax norm, in every $W_p$ and for the own token. Where no two coordinates of a group are equal the
derivative is a permutation, so that every direction attains it.
""",
    hypotheses=(),
    source="(anil2019)",
    proof=r"""
Where coordinates of a group differ, the order stays on a neighborhood, and the map is a permutation of
coordinates there: it keeps the lengths of all differences. The map is continuous and the rest is a union of
hyperplanes; a segment between two points meets each of them once or lies in it, and in the second case the
two coordinates are equal along it and may be told apart by their index. So a segment is cut into finitely
many pieces with a permutation on each, the value is a path of the same length as the segment, or no longer
in EntryMax norm, and the straight way between its ends is no longer. Each token goes alone, so that the
constant holds in every norm of the lengths of tokens and for every coupling. The source uses the map for
networks with a constant of one.
""",
)


@THEOREM.constant(GroupSort, Domain, Norm)
def group_sort(map: GroupSort, domain: Domain, norm: Norm) -> Bound:
    """One."""
    return Bound(exact(1.0))


@THEOREM.deviation(GroupSort, Near, Norm)
def move_bound(map: GroupSort, domain: Near, norm: Norm) -> Bound:
    """The move of each token."""
    return Bound(length_of_moves(domain, travel.one(map, domain.measure.points, moves_of(domain)), norm))
