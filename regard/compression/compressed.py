"""Compressed: few atoms that stand for many keys, with a proof of what that changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard._enclosed import lengths
from regard._upper import Upper, stack
from regard.attention import as_measure
from regard.certificate import Certificate, round_up
from regard.domains import Ball, Domain
from regard.errors import ArgumentError
from regard.measure import Measure
from regard.norms import TokenMax
from regard.proofs.atoms import Atoms
from regard.proofs.theorem import Bound, checked
from regard.proofs.theorems import tangent_atoms

HELD = (
    checked("softmax rows"),
    checked("scores and values affine in the keys"),
    checked("rounding of the atoms is covered, and that of both attentions in float64"),
)
PAIRS = 4_000_000
"""Numbers that one block of queries and atoms may take."""


@dataclass(frozen=True, eq=False, repr=False)
class Compressed:
    """What `compress` makes. measure: the atoms, (k, d), or (h, k, d) for heads, where atoms without mass
    fill up. log_mass: the logarithm of their mass beside that of the keys, which `Measure` does not keep; at
    most zero, but for rounding. groups (n,), or (h, n): the atom of each key, -1 for keys without mass.
    certificate: how far outputs are from those of all keys.

    Examples:
        >>> keys = torch.rand(400, 2, dtype=torch.float64)
        >>> few = regard.compress(keys, regard.Attention(regard.Dot()), size=20, domain=regard.Ball(1.0))
        >>> few.size, few.groups.shape, few.certificate.value > 0
        (20, torch.Size([400]), True)
    """

    measure: Measure
    log_mass: Tensor
    groups: Tensor
    certificate: Certificate
    atoms: tuple[Atoms, ...] = field(default=())

    @property
    def size(self) -> int:
        """How many atoms there are; of several heads, those of the largest."""
        return self.measure.size

    @property
    def count(self) -> int:
        """How many keys there were."""
        return self.groups.shape[-1]

    def bounds(self, queries: Tensor) -> Tensor:
        """For each query (m, d) how far its output is from that of all keys, at most: (m,), proved, in the
        time of a row of atoms.
        """
        points = _tokens("queries", queries, self.atoms[0].anchors.shape[-1])
        room = max(1, PAIRS // (self.size * max(1, self.atoms[0].values.shape[-1])))
        found = [
            joined([tangent_atoms.row_bounds(atoms, block) for atoms in self.atoms]).bound
            for block in points.split(room)
        ]
        return torch.cat(found)

    def mix(self, other: Measure | Tensor, share: float | None = None) -> Compressed:
        """The same with new keys, which stand for themselves: (1 - share) of what was compressed and `share`
        of the others; without a share each key counts as one, also those that were compressed.
        """
        added = as_measure("other", other)
        if added.batch_shape or added.marks is not None or added.dimension != self.measure.dimension:
            found = f"has shape {list(added.points.shape)}" + ("" if added.marks is None else " and marks")
            remedy = f"give one measure without marks on vectors of {self.measure.dimension} numbers"
            raise ArgumentError("other", found, remedy)
        share = added.size / (added.size + self.count) if share is None else share
        if not 0 < share < 1:
            raise ArgumentError("share", f"is {share}", "give a number between 0 and 1")
        groups = self.size + torch.arange(added.size).expand(*self.groups.shape[:-1], -1)
        rates = [_rate(share, float(mass)) for mass in self.log_mass.reshape(-1)]
        atoms = tuple(one.with_keys(added, rate) for one, rate in zip(self.atoms, rates, strict=True))
        certificate = _again(atoms, self.certificate)
        mass = torch.log((1 - share) * self.log_mass.exp() + share)
        return assembled(
            atoms, mass, torch.cat([self.groups, groups], -1), certificate, self.measure.points.dtype
        )

    def __repr__(self) -> str:
        bound = round_up(self.certificate.value)
        return f"Compressed({self.count} keys in {self.size} atoms, output error ≤ {bound})"


def assembled(
    atoms: Sequence[Atoms], log_mass: Tensor, groups: Tensor, certificate: Certificate, dtype: torch.dtype
) -> Compressed:
    """The atoms of all heads as one measure, a batch of them for several heads."""
    most = max(len(one.points) for one in atoms)
    points = torch.stack([_filled(one.points, most, 0.0) for one in atoms])
    logs = torch.stack([_filled(one.log_weights, most, -math.inf) for one in atoms])
    if len(atoms) == 1 and groups.ndim == 1:
        points, logs = points[0], logs[0]
    return Compressed(Measure(points.to(dtype), logs.to(dtype)), log_mass, groups, certificate, tuple(atoms))


def joined(parts: Sequence[Upper]) -> Upper:
    """Heads side by side: √Σ b_h²."""
    if len(parts) == 1:
        return parts[0]
    return lengths(stack([Upper(part.bound) for part in parts], -1).value)


def over_ball(atoms: Sequence[Atoms], ball: Ball) -> Upper:
    """Every query of a ball, all heads."""
    width = atoms[0].anchors.shape[-1]
    center = torch.zeros(width, dtype=torch.float64) if ball.center is None else ball.center.detach().double()
    return joined([tangent_atoms.ball_bound(one, center, ball.radius) for one in atoms])


def certified(value: Upper, domain: Domain, note: str = "") -> Certificate:
    """The theorem's certificate."""
    bound = Bound(value, HELD, note=note)
    return tangent_atoms.THEOREM.certificate(bound, domain, TokenMax(), "output error")


def _again(atoms: Sequence[Atoms], before: Certificate) -> Certificate:
    """The bound of more atoms on the same domain."""
    if isinstance(before.domain, Ball):
        return certified(over_ball(atoms, before.domain), before.domain)
    points = before.domain.measure.points
    rows = joined([tangent_atoms.row_bounds(one, points) for one in atoms])
    return certified(rows.amax(), before.domain, "one query at a time")


def _rate(share: float, log_mass: float) -> float:
    """The share among atoms whose mass is e^log_mass times that of the keys."""
    return share / (share + (1 - share) * math.exp(log_mass))


def _filled(tensor: Tensor, count: int, value: float) -> Tensor:
    missing = count - len(tensor)
    return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), value)]) if missing else tensor


def _tokens(name: str, tokens: object, width: int) -> Tensor:
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.shape[-1] != width:
        found = f"has shape {list(tokens.shape)}" if isinstance(tokens, Tensor) else f"is {tokens!r}"
        raise ArgumentError(name, found, f"give tokens (m, {width})")
    return tokens.detach().double()
