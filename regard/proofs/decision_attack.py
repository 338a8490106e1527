"""Attacks on decisions: moves of an input, as short as can be found, after which another logit leads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard.norms import EntryMax, SequenceNorm, TokenMax, TokenSum
from regard.proofs.places import units


class ShortestChange:
    """Moves that are as short as can be found and change the decision."""

    def __init__(self, whole: Any, label: Tensor, norm: SequenceNorm, token: int | None) -> None:
        self.whole, self.label, self.norm, self.token = whole, label.unsqueeze(-1), norm, token

    def find(self, points: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Straight to the boundary as the gradient sees it, then along shorter and shorter spheres."""
        move = self._straight(points, steps)
        best, moved = self._cut(points, move)
        size = torch.where(best.isfinite(), best, self.norm.of(move))
        move = moved - points
        for _ in range(steps):
            leaf = (points + move).requires_grad_()
            margin = self._margin(leaf)
            (uphill,) = torch.autograd.grad(margin.sum(), leaf)
            length = torch.where(margin.detach() < 0, self.norm.of(leaf.detach() - points), math.inf)
            moved = torch.where(_wide(length < best), leaf.detach(), moved)
            best, size = torch.minimum(best, length), torch.minimum(size, length)
            move = move - 0.3 * _wide(size) * self._steepest(uphill)
            move = move * _wide(0.98 * size / self.norm.of(move).clamp_min(1e-300))
        return best, moved

    def _straight(self, points: Tensor, steps: int) -> Tensor:
        move = torch.zeros_like(points)
        for _ in range(steps):
            leaf = (points + move).requires_grad_()
            margin = self._margin(leaf)
            (uphill,) = torch.autograd.grad(margin.sum(), leaf)
            rate = self._rate(uphill).clamp_min(1e-12)
            need = torch.where(margin > 0, margin.detach() / rate * 1.02 + 1e-9, 0.0)
            move = move - _wide(need.clamp_max(1e3)) * self._steepest(uphill)
        return move

    def _cut(self, points: Tensor, move: Tensor) -> tuple[Tensor, Tensor]:
        """The shortest part of each move that changes the decision, by bisection; ∞ where all of it does
        not.
        """
        changed = self._margin(points + move) < 0
        low, high = (
            torch.zeros_like(changed, dtype=points.dtype),
            torch.ones_like(changed, dtype=points.dtype),
        )
        for _ in range(12):
            middle = (low + high) / 2
            over = self._margin(points + _wide(middle) * move) < 0
            low, high = torch.where(over, low, middle), torch.where(over, middle, high)
        moved = points + _wide(high) * move
        return torch.where(changed, self.norm.of(moved - points), math.inf), moved

    def _margin(self, points: Tensor) -> Tensor:
        logits = self.whole(points).squeeze(-2)
        own = logits.gather(-1, self.label).squeeze(-1)
        others = logits.scatter(-1, self.label, -math.inf)
        return own - others.amax(-1)

    def _allowed(self, z: Tensor) -> Tensor:
        if self.token is None:
            return z
        kept = torch.zeros_like(z)
        kept[..., self.token, :] = z[..., self.token, :]
        return kept

    def _steepest(self, uphill: Tensor) -> Tensor:
        """The move of norm one along which the margin grows fastest."""
        z = self._allowed(uphill)
        if isinstance(self.norm, TokenMax):
            return units(z)
        if isinstance(self.norm, EntryMax):
            return z.sign()
        if isinstance(self.norm, TokenSum):
            lengths = z.norm(dim=-1)
            first = torch.nn.functional.one_hot(lengths.argmax(-1), lengths.shape[-1]).unsqueeze(-1)
            return first * units(z)
        return z / torch.linalg.vector_norm(z, dim=(-2, -1), keepdim=True).clamp_min(1e-300)

    def _rate(self, uphill: Tensor) -> Tensor:
        """How fast the margin grows along it."""
        return (self._allowed(uphill) * self._steepest(uphill)).sum((-2, -1))


def _wide(values: Tensor) -> Tensor:
    """One number for each sequence, against tokens."""
    return values[..., None, None]
