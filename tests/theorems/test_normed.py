"""Scores of queries and keys that pass a norm layer: bounded everywhere, steep where tokens are short."""

import math

import pytest
import torch

import regard as r
from regard._upper import Upper
from regard.domains import Ball, Whole
from regard.norms import Frobenius, TokenMax
from regard.proofs import certify, falsify
from regard.proofs.normed_scores import _lengths, feature_bounds
from regard.proofs.scores import BallFacts, slopes
from tests.theorems.exact import SUPPORTS, D, frobenius_norm, generator, in_ball, normal, token_max_norm


def normed_attention(g, d, eps, support=None, rotary=False, whole=False):
    """Gains, biases, a shift and a matrix after the norm of the queries; keys with a gain alone."""
    query = r.normed.Normed(eps, normal(g, 4), normal(g, 4, 2), normal(g, 2))
    key = r.normed.Normed(eps, normal(g, 2))
    potential = r.NormedDot(normal(g, d, 4), normal(g, d, 2), 0.7, normal(g, 4), normal(g, 2), query, key)
    potential = r.Rotary(potential, frequencies=torch.tensor([1.3], dtype=D)) if rotary else potential
    return r.Attention(
        2.0 * potential, r.Linear(normal(g, d, 3), normal(g, 3)), r.Softmax(0.5), support or r.Full()
    )


def facts(center, radius):
    reach = float(center.norm()) + radius
    return BallFacts(center, Upper(radius), Upper(reach * (1 + 1e-12)))


def test_worked_example():
    """One coordinate about 0 without projections: ẑ = z/√(z² + ε), so λ = 1/√ε and |ẑ| ≤ R/√(R² + ε)."""
    eps, radius, gain = 0.25, 1.0, torch.tensor([3.0], dtype=D)
    found = feature_bounds(None, None, r.normed.Normed(eps, gain), facts(torch.zeros(1, dtype=D), radius))
    size = 3.0 * radius / math.sqrt(radius**2 + eps)
    assert float(found.slope) == pytest.approx(3.0 / math.sqrt(eps), rel=1e-12)
    assert float(found.size) == float(found.around) == pytest.approx(size, rel=1e-12)
    assert not found.same


def test_slopes_are_attained_where_the_norm_is_steepest():
    """Queries at the far end, keys at zero: v = scale · q · λ; with a shift features are longer by it."""
    eps, shift = 0.5, torch.tensor([2.0], dtype=D)
    potential = r.NormedDot(scale=1.5, query=r.normed.Normed(eps, shift=shift), key=r.normed.Normed(eps))
    found = slopes.one(potential, facts(torch.zeros(1, dtype=D), 1.0))
    x = torch.tensor([[1.0]], dtype=D)
    y = torch.zeros(1, 1, dtype=D, requires_grad=True)
    (v,) = torch.autograd.grad(potential.scores(x, y).sum(), y)
    assert float(found.alpha) == pytest.approx(float(v), rel=1e-12)
    ends = torch.tensor([[1.0], [-1.0]], dtype=D)
    scores = potential.scores(ends, ends)
    assert float(found.osc) == pytest.approx(float((scores[0] - scores[0, 1]).max()), rel=1e-12)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize(("seed", "support"), list(enumerate([*SUPPORTS, r.Full()])), ids=repr)
def test_attacks_stay_below(seed, support, rotary):
    g = generator(seed)
    attention = normed_attention(g, 3, [1e-2, 0.3][seed % 2], support, rotary)
    center = normal(g, 3, scale=[0.0, 1.0, 5.0, 20.0][seed])
    domain = Ball(1.0, center, tokens=5)
    for norm, exact in ((TokenMax(), token_max_norm), (Frobenius(), frobenius_norm)):
        bound = certify(attention, domain, norm).value
        assert math.isfinite(bound)
        for _ in range(5):
            assert exact(attention, in_ball(g, 5, 3, float(torch.rand(1, generator=g)), center)) <= bound


@pytest.mark.parametrize("seed", range(6))
def test_every_slope_is_above_what_pairs_show(seed):
    """alpha, kappa, reach, nu and osc against gradients at random pairs of a ball."""
    g = generator(40 + seed)
    potential = normed_attention(g, 3, 0.05, rotary=seed % 2 == 1).potential.potential
    center = normal(g, 3, scale=float(seed))
    found = slopes.one(potential, facts(center, 0.7))
    x = in_ball(g, 40, 3, 0.7, center).requires_grad_()
    y = in_ball(g, 40, 3, 0.7, center).requires_grad_()
    scores = potential.scores(x, y)
    rows = range(0, 40, 8)
    v = torch.stack([torch.autograd.grad(scores[i].sum(), y, retain_graph=True)[0] for i in rows])
    z = torch.stack([torch.autograd.grad(scores[:, j].sum(), x, retain_graph=True)[0] for j in rows], 1)
    for bound, seen in (
        (found.alpha, v.norm(dim=-1).max()),
        (found.reach, z.norm(dim=-1).max()),
        (found.nu, (v[:, :, None] - v[:, None]).norm(dim=-1).max() / 2),
        (found.kappa, (z[:, :, None] - z[:, None]).norm(dim=-1).max() / 2),
        (found.osc, (scores.amax(1) - scores.amin(1)).detach().max()),
    ):
        assert float(seen) <= float(bound)


def test_an_ascent_stays_below_and_comes_near():
    norm = r.normed.Normed(1.0)
    attention = r.Attention(r.NormedDot(scale=1.0, query=norm, key=norm))
    domain = Ball(0.5, torch.zeros(1, dtype=D), tokens=4)
    found = certify(attention, domain, TokenMax())
    witness = falsify(attention, domain, TokenMax(), restarts=2, steps=8)
    assert 0.6 * found.value < witness.value <= found.value


def test_linear_keys_have_one_slope_for_all():
    """v does not depend on the key where keys pass no norm; turned by positions it does."""
    potential = r.NormedDot(query=r.normed.Normed(0.1))
    ball = facts(torch.ones(2, dtype=D), 0.5)
    assert float(slopes.one(potential, ball).nu) == 0.0
    assert float(slopes.one(r.Rotary(potential), ball).nu) > 0.0


def test_after_a_norm_layer_every_input_is_covered():
    """The norm keeps tokens in a ball, so that the composition has a constant on the whole space."""
    attention = normed_attention(generator(3), 3, 1e-2, rotary=True)
    layer = r.maps.Compose((r.maps.Normalize(1e-2, torch.ones(3, dtype=D)), attention))
    assert math.isfinite(certify(layer, Whole(tokens=4), TokenMax()).value)
    assert math.isinf(certify(attention, Whole(tokens=4), TokenMax()).value)


def test_values_behind_a_norm_are_refused_with_a_sentence():
    lookup = r.lookups.NormedLinear(normal(generator(0), 3, 2), r.normed.Normed())
    found = certify(r.Attention(r.Dot(), lookup), Ball(1.0, torch.zeros(3, dtype=D)), TokenMax())
    assert math.isinf(found.value)
    assert any("NormedLinear" in why for why in found.refused)


def test_a_norm_over_all_heads_is_one_with_columns():
    """The norm of two heads' projections together, from its definition."""
    g = generator(9)
    x, w, gain = normal(g, 5, 3), normal(g, 3, 4), normal(g, 4)
    u = torch.eye(4, dtype=D).unflatten(1, (2, 2)).movedim(1, 0)
    side = r.normed.Normed(1e-3, gain, u)
    whole = torch.nn.functional.rms_norm(x @ w, (4,), gain, 1e-3).unflatten(1, (2, 2)).movedim(1, 0)
    found = r.NormedDot(w, w, 1.0, query=side, key=side).scores(x, x)
    assert torch.allclose(found, whole @ whole.mT, atol=1e-12)


def test_near_a_sequence_slopes_are_those_of_its_tokens():
    """The ball of the tokens holds zero, where norms are steepest; the tokens themselves are far from it."""
    norm = r.normed.Normed(1e-6)
    attention = r.Attention(r.NormedDot(query=norm, key=norm))
    points = torch.tensor([[3.0, 0.0], [-3.0, 0.1], [0.0, 3.0]], dtype=D)
    found = certify(attention, r.Neighborhood(points, 0.0), Frobenius()).value
    assert frobenius_norm(attention, points) <= found < 20
    assert certify(attention, Ball(3.1, torch.zeros(2, dtype=D), 3), Frobenius()).value > 1000


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_attacks_near_a_sequence_stay_below(seed, rotary):
    """Every sequence of the neighborhood, and one that is made short on purpose."""
    g = generator(70 + seed)
    attention = normed_attention(g, 3, 1e-3, SUPPORTS[seed % len(SUPPORTS)], rotary)
    points = normal(g, 5, 3)
    for radius in (0.0, 0.3):
        domain = r.Radii(points, torch.full((5,), radius, dtype=D))
        for norm, exact in ((TokenMax(), token_max_norm), (Frobenius(), frobenius_norm)):
            bound = certify(attention, domain, norm).value
            assert math.isfinite(bound)
            for step in range(6):
                move = normal(g, 5, 3) if step else -points
                move = radius * move / move.norm(dim=-1, keepdim=True)
                assert exact(attention, points + move) <= bound


def test_projections_stretch_what_is_not_normed():
    """|5x + b| of a token of length at most 2: slope 5, at most 10 + |b|, within 5 of a point."""
    ball = BallFacts(torch.tensor([1.0, 0.0], dtype=D), Upper(1.0), Upper(2.0))
    w, b = 5 * torch.eye(2, dtype=D), torch.tensor([0.5, 0.0], dtype=D)
    found = feature_bounds(w, b, None, ball)
    sizes = [float(one) for one in (found.slope, found.size, found.around)]
    assert sizes == pytest.approx([5.0, 10.5, 5.0], rel=1e-9)
    assert min(a - b for a, b in zip(sizes, (5.0, 10.5, 5.0), strict=True)) >= 0


def test_projections_stretch_moves():
    """A token at 2 that moves by 0.3 behind 5 has lengths between 8.5 and 11.5, both attained."""
    places, w = torch.tensor([[2.0, 0.0]], dtype=D), 5 * torch.eye(2, dtype=D)
    nearest, farthest = _lengths(w, None, places, Upper(torch.tensor([0.3], dtype=D)))
    assert nearest <= 8.5 <= 11.5 <= farthest
    assert [nearest, farthest] == pytest.approx([8.5, 11.5], rel=1e-9)
