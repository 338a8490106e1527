"""Certified norms against a Jacobian in sixty digits, where float64 loses most of its own."""

import itertools

import mpmath
import pytest
import torch

import regard as r

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
    potential = r.Gaussian() if gaussian else r.Dot(scale=1.0)
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
