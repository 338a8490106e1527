"""Norm layers where a mean is large and tokens are short: their direction is known to a few digits only."""

from dataclasses import replace

import mpmath
import pytest
import torch

from regard import maps
from regard.proofs.ball_model.beginning import at_rest
from regard.proofs.ball_model.norms import Token, _Moves, normalize
from tests.ball_model.networks import drawn
from tests.coarse import coarse, representable

OFFSET, SHORT = 1e6, 1e-3


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def moves_of(x, shape):
    g = x - x.mean(-1, keepdim=True)
    square = g.square().sum(-1)
    return _Moves(replace(at_rest(x), shape=shape), Token(g, square, square / 4 + 0.1, 0.1), True)


def along_and_across(x, v):
    """v·g/|g|² and |v - mean - (v·g)g/|g|²| in 50 digits."""
    with mpmath.workdps(50):
        token, move = ([mpmath.mpf(number) for number in row.tolist()] for row in (x, v))
        mean, other = mpmath.fsum(token) / len(token), mpmath.fsum(move) / len(move)
        g = [number - mean for number in token]
        line = mpmath.fdot(move, g) / mpmath.fdot(g, g)
        rest = [m - other - line * c for m, c in zip(move, g, strict=True)]
        return abs(line), mpmath.norm(rest)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("way", ["along", "across"])
def test_ellipsoids_in_a_direction_that_is_not_known(way, seed):
    """A segment across the computed token has a part along the true one, by the mean that was lost."""
    x = OFFSET + SHORT * drawn(generator(seed), 1, 4)
    g = (x - x.mean(-1, keepdim=True))[0]
    v = g / g.norm()
    if way == "across":
        v = drawn(generator(seed + 10), 4)
        v = v - (v @ g) / (g @ g) * g
    v = 1e-4 * v / v.norm()
    moves = moves_of(x, (v.unsqueeze(-1) * v).unsqueeze(0))
    line, rest = along_and_across(x[0], v)
    assert line <= float(moves.along_rest)
    assert rest <= float(moves.rest)


@pytest.mark.parametrize("seed", range(3))
def test_a_large_bias_is_rounded_with_what_it_is_added_to(seed):
    """Weights that are small beside the bias, in few digits."""
    g = generator(seed)
    x, weight = representable(drawn(g, 2, 3)), representable(2.0**-12 * drawn(g, 3))
    map = maps.Normalize(1e-5, weight, representable(drawn(g, 3)))
    with coarse(seed):
        after = normalize(at_rest(x), map)
    off = (map(x) - after.center).norm(dim=-1)
    assert bool((off <= torch.linalg.eigvalsh(after.shape)[:, 0].clamp_min(0.0).sqrt()).all())
    assert float(off.max()) > 0
