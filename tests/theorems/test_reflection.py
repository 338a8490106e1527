"""Reflective attention with tied scores."""

import math

import pytest
import torch

import regard as r
from regard.domains import Ball, Neighborhood, Whole
from regard.maps import Compose, Heads
from regard.measure import Measure
from regard.nonexpansive import IntoBall, Reflected
from regard.norms import Frobenius, TokenMax, TokenSum, Wasserstein
from regard.proofs import THEOREMS, certify, deviation
from regard.proofs.rewriting import as_residual
from regard.proofs.theorem import Refusal
from regard.proofs.theorems.isotropic_reflection import isotropic
from regard.proofs.theorems.reflection import positive_definite
from tests.theorems.exact import generator, normal

D = torch.float64


def _ball(radius, width, tokens, center=None):
    return Ball(radius, torch.zeros(width, dtype=D) if center is None else center, tokens)


def _rung(map, domain, name, norm=Frobenius()):
    """The bound by one theorem."""
    found = certify(map, domain, norm)
    return next(one.value for one in (found, *found.others) if one.theorem == THEOREMS[name].cited)


def _clouds(seed, count, tokens, width):
    """Sequences of unit balls: spread, one against the rest, far from zero, all lengths."""
    g = generator(seed)
    x = normal(g, count, tokens, width)
    x[1::4, 1:] = -x[1::4, :1] + 0.3 * x[1::4, 1:]
    x[2::4] += 3 * normal(g, len(x[2::4]), 1, width)
    x = x / x.norm(dim=-1, keepdim=True)
    x[3::4] *= torch.rand(len(x[3::4]), tokens, 1, generator=g, dtype=D)
    return x


def _norms(map, x):
    """Spectral norms of the derivatives at sequences (b, n, d), by torch."""
    jacobians = torch.func.vmap(torch.func.jacrev(map))(x)
    return torch.linalg.matrix_norm(jacobians.flatten(3).flatten(1, 2), 2)


@pytest.mark.parametrize(("g", "c"), [(0.05, 2.0), (0.3, 1.5), (1.0, 2.0), (2.0, 0.7)])
def test_no_derivative_is_larger(g, c):
    """320 sequences each, far beyond small g too."""
    for tokens, width, seed in ((2, 1, 0), (3, 2, 1), (8, 3, 2), (12, 2, 3)):
        map, domain = Reflected(r.Attention(r.Dot(scale=g)), c), _ball(1.0, width, tokens)
        worst = float(
            _norms(lambda x: x - c * (g * x @ x.mT).softmax(-1) @ x, _clouds(seed, 80, tokens, width)).max()
        )
        assert worst <= _rung(map, domain, "reflection")
        assert worst <= _rung(map, domain, "isotropic_reflection")


def test_no_derivative_is_larger_for_other_tied_scores():
    """A projection of queries and keys alike, and a ball about another point."""
    for seed in range(4):
        w, center = normal(generator(seed), 3, 2), normal(generator(seed + 10), 3)
        map = Reflected(r.Attention(r.Dot(w, w, 0.2)), 2.0)
        for shift in (torch.zeros(3, dtype=D), center):
            points = shift + 0.8 * _clouds(seed, 80, 5, 3)
            worst = float(
                _norms(lambda x, w=w: x - 2 * (0.2 * x @ w @ (x @ w).mT).softmax(-1) @ x, points).max()
            )
            assert worst <= _rung(map, _ball(0.8, 3, 5, shift), "reflection")


def test_formula():
    """e^h + c (h √N + aR²) with the smaller N, about zero and about another point."""
    g, c = 0.4, 1.5
    map = Reflected(r.Attention(r.Dot(scale=g)), c)
    for tokens in (2, 40):
        crowd = min(math.exp(g / 4), tokens / (1 + (tokens - 1) * math.exp(-2 * g)))
        expected = math.exp(g) + c * (g * math.sqrt(crowd) + g)
        assert _rung(map, _ball(1.0, 2, tokens), "reflection") == pytest.approx(expected, rel=1e-9)
        sharp = Reflected(r.Attention(r.Dot(scale=g / 0.49)), c)
        assert _rung(sharp, _ball(0.7, 2, tokens), "reflection") == pytest.approx(expected, rel=1e-9)
    center = torch.tensor([1.5, 0.0], dtype=D)  # reach 2.5
    expected = math.exp(2.5 * g) + c * (2.5 * g * math.exp(6.25 * g / 8) + g)
    shifted = certify(map, Ball(1.0, center), Frobenius())
    assert min(
        rung.value for rung in (shifted, *shifted.others) if rung.theorem == THEOREMS["reflection"].cited
    ) == pytest.approx(expected, rel=1e-9)


def test_the_reflection_at_the_mean_is_an_isometry():
    """Without scores x - 2Px keeps all lengths, and so says the certificate."""
    map = Reflected(r.Attention(r.Dot(scale=0.0)), 2.0)
    x = normal(generator(0), 6, 3)
    assert float(map(x).norm()) == pytest.approx(float(x.norm()), rel=1e-12)
    assert certify(map, _ball(1.0, 3, 6), Frobenius()).value == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(
    ("attention", "step", "why"),
    [
        (r.Attention(r.Dot(), support=r.Causal()), 2.0, "not symmetric; use the support Full"),
        (r.Attention(r.Dot(torch.eye(2, dtype=D), 2 * torch.eye(2, dtype=D))), 2.0, "different projections"),
        (r.Attention(r.Dot(torch.eye(2, dtype=D), None)), 2.0, "different projections"),
        (r.Attention(r.Dot(b_k=torch.tensor([0.0, 1.0], dtype=D))), 2.0, "have a bias"),
        (r.Attention(r.Dot(b_q=torch.tensor([0.0, 1.0], dtype=D))), 2.0, "have a bias"),
        (r.Attention(r.Dot(scale=-1.0)), 2.0, "scale of the scores is negative"),
        (r.Attention(-1.0 * r.Dot()), 2.0, "not one tied bilinear form"),
        (r.Attention(r.Gaussian(bandwidth=1.0)), 2.0, "Gaussian is not one tied bilinear form"),
        (r.Attention(r.Dot() + r.Alibi(0.1)), 2.0, "Alibi is not one tied bilinear form"),
        (r.Attention(r.Bilinear(torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=D))), 2.0, "and positive"),
        (r.Attention(r.Bilinear(torch.tensor([[2.0, 1.0], [0.0, 2.0]], dtype=D))), 2.0, "and positive"),
        (r.Attention(r.Dot(), r.Linear(2 * torch.eye(2, dtype=D))), 2.0, "values are not the tokens"),
        (r.Attention(r.Dot(), normalizer=r.SinkSoftmax(0.0)), 2.0, "not Gibbs laws"),
        (r.Attention(r.Dot()), 2.5, "steps from 0 to 2"),
        (r.Attention(r.Dot()), -0.5, "steps from 0 to 2"),
    ],
)  # fmt: skip
def test_refusals(attention, step, why):
    """What is not tied is only bounded token and attention apart."""
    found = certify(Reflected(attention, step), _ball(1.0, 2, 4), Frobenius())
    assert any(why in sentence for sentence in found.refused)
    assert math.isinf(found.value) or found.theorem.endswith("token and attention apart")


def test_weights_are_refused():
    measure = Measure(normal(generator(0), 3, 2), torch.tensor([0.5, 0.3, 0.2], dtype=D).log())
    found = certify(Reflected(r.Attention(r.Dot())), Neighborhood(measure, 0.1), Frobenius())
    assert any("count differently" in sentence for sentence in found.refused)


def test_identity_written_as_a_matrix_is_the_identity():
    plain, written = (
        r.Attention(r.Dot(scale=0.1)),
        r.Attention(r.Dot(scale=0.1), r.Linear(torch.eye(2, dtype=D))),
    )
    domain = _ball(1.0, 2, 4)
    assert certify(Reflected(written), domain, Frobenius()).value == pytest.approx(
        certify(Reflected(plain), domain, Frobenius()).value, rel=1e-9
    )
    wide = r.Attention(r.Dot(torch.eye(2, dtype=D), torch.eye(2, dtype=D), 0.1))  # tied, and not seen as x·y
    assert isotropic(plain.potential)
    assert not isotropic(wide.potential)
    assert certify(Reflected(wide), domain, Frobenius()).theorem == THEOREMS["reflection"].cited


def test_other_norms_are_apart():
    attention, domain = r.Attention(r.Dot(scale=0.5)), _ball(1.0, 2, 4)
    for norm in (TokenMax(), TokenSum(), Wasserstein(1.0), Wasserstein(2.0), Wasserstein(math.inf)):
        for step in (2.0, -0.5):
            found = certify(Reflected(attention, step), domain, norm).value
            assert found == pytest.approx(1 + abs(step) * certify(attention, domain, norm).value, rel=1e-12)


def test_deviation_is_apart_or_along():
    attention, near = r.Attention(r.Dot(scale=0.5)), Neighborhood(normal(generator(0), 4, 2), 0.1, TokenMax())
    found = deviation(Reflected(attention, 2.0), near, TokenMax())
    assert found.value <= 0.1 + 2 * deviation(attention, near, TokenMax()).value * (1 + 1e-9)
    rungs = [rung for rung in (found, *found.others) if rung.theorem == THEOREMS["reflection"].cited]
    assert rungs[0].value == pytest.approx(0.1 + 2 * deviation(attention, near, TokenMax()).value, rel=1e-9)


def test_a_network_with_it_has_a_taylor_model():
    map = Compose((Reflected(r.Attention(r.Dot(scale=0.3), r.Linear(normal(generator(5), 2, 2))), 0.5),))
    near = Neighborhood(normal(generator(0), 4, 2), 0.05, TokenMax())
    found = deviation(map, near, TokenMax())
    assert any("Taylor" in rung.theorem for rung in (found, *found.others))
    x = near.measure.points
    for seed in range(40):
        other = x + 0.05 * _clouds(seed, 1, 4, 2)[0]
        assert float(TokenMax().of(map(other) - map(x))) <= found.value


def test_as_residual_is_the_same_map():
    g = generator(3)
    x, w = normal(g, 5, 3), normal(g, 3, 3)
    for lookup in (r.Identity(), r.Linear(w)):
        map = Reflected(r.Attention(r.Dot(), lookup), 1.3)
        torch.testing.assert_close(as_residual(map, 3)(x), map(x), rtol=1e-13, atol=1e-13)
    with pytest.raises(Refusal, match="leave the bias out"):
        as_residual(Reflected(r.Attention(r.Dot(), r.Linear(w, normal(g, 3)))), 3)


def test_several_heads_are_refused():
    w = normal(generator(0), 2, 3, 3)
    found = certify(Reflected(r.Attention(r.Dot(w, w))), _ball(1.0, 3, 4), Frobenius())
    assert any("mix them with Heads" in sentence for sentence in found.refused)
    assert math.isinf(found.value)


def test_positive_definite_is_proved_or_not():
    g = generator(0)
    w = normal(g, 6, 6)
    assert positive_definite(w @ w.mT + 1e-6 * torch.eye(6, dtype=D))
    assert not positive_definite(w @ w.mT - 10 * torch.eye(6, dtype=D))
    assert not positive_definite(normal(g, 6, 1) @ normal(g, 6, 1).mT)
    assert not positive_definite(torch.full((2, 2), math.nan, dtype=D))
    assert positive_definite(torch.diag(torch.tensor([1.0, 5e-15], dtype=D)))
    assert not positive_definite(torch.diag(torch.tensor([1.0, 3e-15], dtype=D)))
    ones = torch.ones(4, 4, dtype=D)  # positive, and no digit to spare: not proved
    assert not positive_definite(ones)
    tied = certify(Reflected(r.Attention(r.Bilinear(0.1 * torch.diag(torch.tensor([1.0, 2.0], dtype=D))))),
                   _ball(1.0, 2, 4), Frobenius())  # fmt: skip
    assert tied.theorem == THEOREMS["reflection"].cited


def test_projected_first_it_holds_on_all_of_space():
    map = Compose(
        (IntoBall(1.0), Reflected(r.Attention(r.Dot(torch.eye(3, dtype=D), torch.eye(3, dtype=D), 0.1)), 2.0))
    )
    found = certify(map, Whole(tokens=6), Frobenius()).value
    assert found <= 1.51
    x, y = 30 * normal(generator(1), 200, 6, 3), normal(generator(2), 200, 6, 3)
    for other in (x + y, x + 1e-3 * y):
        ratio = (map(x) - map(other)).flatten(1).norm(dim=-1) / (x - other).flatten(1).norm(dim=-1)
        assert float(ratio.max()) <= found


def test_the_published_map_that_is_not_invertible_is_not_certified():
    """One channel, value weight -0.54: det(I + J) changes sign between tokens (0, R, -R) with R = 1 and
    R = 3, so x + f(x) is no bijection, and a constant below one would be false (zha2021).
    """
    attention = r.Attention(r.Dot(scale=1.0), r.Linear(torch.tensor([[-0.54]], dtype=D)))

    def determinant(radius):
        x = torch.tensor([[0.0], [radius], [-radius]], dtype=D)
        jacobian = torch.func.jacrev(lambda x: x + attention(x))(x).reshape(3, 3)
        return float(torch.linalg.det(jacobian))

    assert determinant(1.0) > 0 > determinant(3.0)
    for norm in (Frobenius(), TokenMax(), TokenSum(), Wasserstein(2.0)):
        assert certify(attention, Ball(3.0, torch.zeros(1, dtype=D), 3), norm).value >= 1


def test_heads_are_not_attention():
    with pytest.raises(r.errors.ArgumentError, match="Attention"):
        Reflected(Heads(r.Attention(r.Dot()), torch.eye(2, dtype=D).unsqueeze(0)))
