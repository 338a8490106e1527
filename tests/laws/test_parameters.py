"""Nouns say what their tensors are: heads are found by declarations, and silence is refused with the line to add."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import regard as r
from regard._round import outward, vector_norm_bound
from regard.certify.scores import Slopes, slopes
from regard.parameters import Tokens, parameter
from regard.testing import check_potential

D = torch.float64


class Salience(r.Potential):
    """a(x, y) = x·y + u·y, one vector u (d,), or one for each head (h, d). Abstract: u is declared below, or is not."""

    positional: ClassVar[bool] = False
    u: Tensor

    def features(self, x, y, x_marks, y_marks):
        return x, (y, y @ self.u.unsqueeze(-1))

    def pair(self, queries, keys):
        return queries @ keys[0].mT + keys[1].mT


@dataclass(frozen=True, eq=False, repr=False)
class Silent(Salience):
    """It does not say what u is."""

    u: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Salient(Salience):
    """It does."""

    u: Tensor = parameter(rank=1, widths=(Tokens.KEYS,))


@slopes.rule(Salience)
def _salience(potential, ball):
    """v = x_i + u is the same for all j, z = x_j."""
    alpha = outward(ball.reach + vector_norm_bound(potential.u))
    return Slopes(alpha, 0.0, ball.radius, ball.reach, outward(2 * ball.radius * alpha), 0.0)


def vectors(heads, seed=0, size=0.05):
    return size * torch.randn(heads, 4, generator=torch.Generator().manual_seed(seed), dtype=D)


def jacobian_norm(attention, x):
    found = torch.func.jacrev(lambda z: attention(z))(x)
    return float(torch.linalg.matrix_norm(found.reshape(-1, x.numel()), 2))


DOMAIN = r.Ball(0.2, torch.zeros(4, dtype=D), 3)


def test_a_vector_for_each_head_is_counted_as_heads():
    """64 heads that all see the same are eight times as long as one: no bound of one head holds for them."""
    attention = r.Attention(Salient(vectors(64)))
    found = r.certify(attention, DOMAIN, r.Frobenius())
    one = r.certify(r.Attention(Salient(vectors(64)[0])), DOMAIN, r.Frobenius())
    generator = torch.Generator().manual_seed(1)
    points = [0.2 * torch.nn.functional.normalize(torch.randn(3, 4, generator=generator, dtype=D), dim=-1) for _ in range(20)]
    reached = max(jacobian_norm(attention, x) for x in points)
    attack = r.falsify(attention, DOMAIN, r.Frobenius(), steps=5, restarts=1).value
    assert 7.9 < max(reached, attack) <= found.value <= 1.3 * reached
    assert found.value == pytest.approx(8 * one.value, rel=0.1)


def test_what_says_nothing_is_refused_with_the_line_to_add():
    attention = r.Attention(Silent(vectors(64)))
    line = "write `u: Tensor = parameter(rank=2)` where none of [64, 4] are, rank=1 where the first is"
    for found in (
        r.certify(attention, DOMAIN, r.Frobenius()),
        r.deviation(attention, r.Neighborhood(torch.zeros(3, 4, dtype=D), 0.1), r.Frobenius()),
    ):
        assert math.isinf(found.value)
        assert any("Silent.u: does not say which of its dimensions are heads" in why and line in why for why in found.refused)


def test_what_says_nothing_runs():
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(2), dtype=D)
    told, silent = (r.Attention(kind(vectors(3)), support=r.Causal())(x) for kind in (Salient, Silent))
    assert torch.equal(told, silent)
    assert r.apply(r.Attention(Silent(vectors(3))), x).shape == (3, 5, 4)
    check_potential(Silent(vectors(1)[0]))
