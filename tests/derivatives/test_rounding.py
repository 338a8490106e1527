"""Certified norms against a Jacobian in sixty digits, where float64 loses most of its own."""

import itertools
from fractions import Fraction

import mpmath
import pytest
import torch

import regard as r
from regard._round import spectral_norm_bound
from regard.derive.jacobian import spectral_norms

D = torch.float64


def exact_norm(x, gaussian):
    """The largest singular value of x ↦ softmax(scores) x in sixty digits; scores are x·y or -|x - y|²/2."""
    with mpmath.workdps(60):
        points = [[mpmath.mpf(v) for v in row] for row in x.tolist()]
        n, d = len(points), len(points[0])
        jacobian = mpmath.zeros(n * d, n * d)
        for i, here in enumerate(points):
            scores = [_score(here, there, gaussian) for there in points]
            top = max(scores)
            masses = [mpmath.exp(s - top) for s in scores]
            laws = [m / mpmath.fsum(masses) for m in masses]
            mean = [mpmath.fsum(p * y[c] for p, y in zip(laws, points, strict=True)) for c in range(d)]
            for j, a, b in itertools.product(range(n), range(d), range(d)):
                away = points[j][a] - mean[a]
                by_key = here[b] - points[j][b] if gaussian else here[b]
                by_query = points[j][b] - here[b] if gaussian else points[j][b]
                jacobian[i * d + a, j * d + b] += laws[j] * ((a == b) + away * by_key)
                jacobian[i * d + a, i * d + b] += laws[j] * away * by_query
        return mpmath.svd_r(jacobian, compute_uv=False)[0]


def _score(x, y, gaussian):
    if gaussian:
        return -mpmath.fsum((a - b) ** 2 for a, b in zip(x, y, strict=True)) / 2
    return mpmath.fsum(a * b for a, b in zip(x, y, strict=True))


def points(kind, size, seed):
    generator = torch.Generator().manual_seed(seed)
    near = torch.randn(4, 2, generator=generator, dtype=D)
    if kind == "offset":
        return near / size + size
    if kind == "clusters":
        return near / size + size * torch.tensor([[1.0, 1.0], [1.0, 1.0], [-1.0, 0.5], [-1.0, 0.5]], dtype=D)
    return near * size


@pytest.mark.parametrize("kind", ["offset", "clusters", "spread"])
@pytest.mark.parametrize("size", [1.0, 1e2, 1e3, 1e4, 1e6, 1e7, 3e7])
@pytest.mark.parametrize("gaussian", [False, True])
def test_a_certified_norm_is_never_below_the_exact_one(kind, size, gaussian):
    potential = r.Gaussian(bandwidth=1.0) if gaussian else r.Dot(scale=1.0)
    for seed in range(4):
        x = points(kind, size, seed)
        value = r.linearize(r.Attention(potential), x).norm_certificate().value
        exact = exact_norm(x, gaussian)
        assert mpmath.mpf(value) >= exact
        if size == 1:
            assert value <= float(exact) * (1 + 1e-10)


def test_products_keep_their_digits_far_from_the_origin():
    x = points("offset", 1e3, 0)
    found = float(r.linearize(r.Attention(r.Dot(scale=1.0)), x).norm())
    assert found == pytest.approx(float(exact_norm(x, False)), rel=1e-8)


def test_a_point_without_digits_has_no_bound():
    x = points("offset", 1e8, 0)
    certificate = r.linearize(r.Attention(r.Dot(scale=1.0)), x).norm_certificate()
    assert certificate.value == float("inf")
    assert "center the points" in str(certificate)


def linear(matrix, tokens=2):
    return r.linearize(lambda x: x @ matrix, torch.ones(tokens, len(matrix), dtype=D))


def test_the_unit_of_rounding_grows_with_the_sums():
    """16 √(d + n) ε."""
    assert linear(torch.eye(7, dtype=D))._units() == pytest.approx(16 * 3 * 2.0**-52, rel=1e-12)


def test_the_randomized_bound_is_its_formula():
    """√θ √e_k with 0.8 √N (θ^{-k/2} + 2kε) = δ; ε the larger of the error and the unit,
    relative to the root.
    """
    jacobian = linear(torch.eye(3, dtype=D))
    for root, error, chance, power in (
        (2.0, 0.0, 1e-6, 40),
        (2.0, 1e-11, 1e-6, 40),
        (5.0, 1e-13, 0.3, 2),
        (5.0, 0.0, 1.0, 400),
    ):
        relative = 2 * max(error, jacobian._units() * root) / root
        share = chance / (0.8 * 6**0.5) - power * relative
        found = jacobian._certificate_of_root(root, error, chance, power)
        stated = root * share ** (-1 / power) * (1 + 18_000 * 2.0**-53)
        assert found.value == pytest.approx(stated, rel=1e-14)
        assert found.probability == 1 - chance
    assert jacobian._certificate_of_root(0.0, 0.0, 1e-6, 40).value == 0


def test_the_randomized_bound_knows_where_rounding_is_all_there_is():
    jacobian = linear(torch.eye(3, dtype=D))
    assert jacobian._certificate_of_root(1.0, 0.0099, 1.0, 2).value < 3
    assert (
        jacobian._certificate_of_root(1.0, 0.0101, 1.0, 2).value
        == jacobian._certificate_of_root(0.0, 1e-9, 1.0, 2).value
        == float("inf")
    )
    with pytest.raises(r.errors.ArgumentError, match=r"rounding alone fails with 2e-0?5"):
        jacobian._certificate_of_root(1.0, 2.5e-7, 1e-5, 20)
    assert jacobian._certificate_of_root(1.0, 2.5e-7, 2.1e-5, 20).value < 3


@pytest.mark.parametrize("root", [0.0, 1.0])
def test_the_randomized_bound_says_how_likely_it_holds(root):
    """A norm that is zero was drawn like others."""
    found = linear(torch.eye(3, dtype=D))._certificate_of_root(root, 0.0, 0.01, 2)
    assert found.probability == 1 - 0.01
    assert (found.value == 0) == (root == 0)


@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (1, 3)])
def test_norms_of_blocks_keep_their_digits_in_all_sizes(size, shape):
    """Squares of the entries are no numbers here."""
    blocks = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1), dtype=D)
    stated = size * torch.linalg.matrix_norm(blocks, 2)
    assert torch.allclose(spectral_norms(size * blocks), stated, rtol=1e-12, atol=0)


def test_the_power_steps_of_a_multiple_of_the_identity_are_exact():
    """Every start is an eigenvector, so the root is the norm itself, whatever the number of steps."""
    jacobian = linear(3 * torch.eye(4, dtype=D))
    for steps in (1, 5, 50):
        found = jacobian.norm_certificate(
            1e-3, steps=steps, dense=0, generator=torch.Generator().manual_seed(0)
        )
        share = 1e-3 / (0.8 * 8**0.5) - 2 * steps * 2 * jacobian._units()
        assert found.value == pytest.approx(3 * share ** (-1 / (2 * steps)), rel=1e-9)
        assert found.probability == 1 - 1e-3
    share = 1e-3 / (0.8 * 8**0.5) - 2 * 200 * 2 * jacobian._units()  # two hundred steps unless told
    assert jacobian.norm_certificate(1e-3, dense=0).value == pytest.approx(3 * share ** (-1 / 400), rel=1e-9)


def test_chances_are_shared_by_the_elements_of_a_batch():
    jacobian = r.linearize(
        r.Attention(r.Dot(scale=0.0)), torch.ones(4, 1, 3, dtype=D)
    )  # one token: the identity
    found = jacobian.norm_certificate(0.1, steps=10, dense=0, generator=torch.Generator().manual_seed(0))
    assert found.probability == pytest.approx(0.9)
    assert len(found.parts) == 4
    assert all(part.probability == 1 - 0.025 for part in found.parts)
    share = 0.025 / (0.8 * 3**0.5) - 20 * 2 * jacobian._units()
    assert found.value == pytest.approx(share ** (-1 / 20), rel=1e-6)


def test_rounding_is_the_response_to_a_nudge():
    """|J' - J| from a few power steps, times units over nudge: from below, and not far."""
    g = torch.Generator().manual_seed(3)
    jacobian = r.linearize(r.Attention(r.Dot(scale=4.0)), torch.randn(4, 3, generator=g, dtype=D))
    other = jacobian.nudge(2.0**-46, torch.Generator().manual_seed(0))
    apart = float(torch.linalg.matrix_norm(other.dense() - jacobian.dense(), 2))
    stated = apart * jacobian._units() * 2.0**46
    found = float(jacobian._rounding())
    assert 0.9 * stated <= found <= stated * (1 + 1e-6)


def test_a_certificate_adds_what_rounding_may_change():
    """The larger of the response and the unit, on top of the norm of the matrix;
    lost beyond a fiftieth of it.
    """
    jacobian = linear(3 * torch.eye(4, dtype=D))
    found = jacobian.norm_certificate()
    assert found.value == pytest.approx(3 * (1 + jacobian._units()), rel=1e-13)
    for error in (0.01 + 0.003 * k for k in range(12)):
        jacobian._rounding = lambda error=error: torch.tensor([error], dtype=D)
        matrix = Fraction(spectral_norm_bound(jacobian.dense()))
        assert matrix + Fraction(error) < Fraction(jacobian.norm_certificate().value) < 3.1
    jacobian._rounding = lambda: torch.tensor([0.0599], dtype=D)
    assert jacobian.norm_certificate().value == pytest.approx(3.0599, rel=1e-9)
    jacobian._rounding = lambda: torch.tensor([0.0601], dtype=D)
    assert jacobian.norm_certificate().value == float("inf")


def test_the_matrix_is_formed_up_to_a_limit():
    """2048 inputs, unless said otherwise; more are drawn for."""
    small, large = (r.linearize(lambda x: x[..., :1], torch.ones(n, 1, dtype=D)) for n in (2048, 2049))
    assert small.norm_certificate().probability == 1
    assert large.norm_certificate(steps=1).probability < 1
    assert linear(torch.eye(3, dtype=D)).norm_certificate(dense=6).probability == 1
    assert linear(torch.eye(3, dtype=D)).norm_certificate(dense=5).probability < 1


def test_one_step_is_enough_and_none_is_not():
    jacobian = linear(torch.eye(3, dtype=D))
    jacobian.norm_certificate(steps=1, dense=0)
    with pytest.raises(r.errors.ArgumentError, match="one or more"):
        jacobian.norm_certificate(steps=0, dense=0)
