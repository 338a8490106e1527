"""Contraction coefficients in W₁: exact transport, with different numbers of atoms, stays below."""

import math

import pytest
import torch

import regard as r
from regard._upper import relative_error
from regard.domains import Ball, Whole
from regard.maps import ToContext
from regard.proofs.theorems.contraction import contraction
from regard.transport import wasserstein


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


POTENTIALS = {
    "dot": lambda g: r.Dot(scale=0.4),
    "projected": lambda g: r.Dot(0.6 * draw(g, 3, 2), 0.6 * draw(g, 3, 2), b_q=draw(g, 2), b_k=draw(g, 2)),
    "gaussian": lambda g: r.Gaussian(bandwidth=2.0),
    "sum": lambda g: (
        0.5 * (r.Gaussian(0.7 * draw(g, 3, 2), 0.7 * draw(g, 3, 2), bandwidth=2.0) + 0.3 * r.Dot())
    ),
    "laplace": lambda g: r.Laplace(bandwidth=2.0),
    "student": lambda g: r.StudentT(bandwidth=2.0, nu=3.0),
    "capped": lambda g: r.SoftCap(r.Dot(scale=0.5), 1.0),
}


def test_worked_example():
    """Two keys at ±1, scores a·x·y: R κ = a, and the law at x is a coin of mean tanh(ax): slope a at zero,
    so it is attained.
    """
    keys = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    certificate = contraction(r.Attention(r.Dot(scale=0.7)).softmatch(keys), Whole())
    assert certificate.value == pytest.approx(0.7, rel=1e-9)
    kernel = r.Attention(r.Dot(scale=0.7)).softmatch(keys)
    laws = [kernel(torch.tensor([[point]], dtype=torch.float64)) for point in (-1e-4, 1e-4)]
    reached = float(wasserstein(*(r.Measure(law.points[0], law.log_weights[0]) for law in laws))) / 2e-4
    assert 0.999 * certificate.value < reached <= certificate.value


@pytest.mark.parametrize("name", POTENTIALS)
def test_measures_stay_below(name):
    generator = torch.Generator().manual_seed(len(name))
    for _ in range(6):
        keys = r.Measure(draw(generator, 4, 3) + draw(generator, 3), draw(generator, 4))
        attention = r.Attention(
            POTENTIALS[name](generator), r.Linear(draw(generator, 3, 2), draw(generator, 2))
        )
        softmatch = attention.softmatch(keys)
        domain = Ball(2.0, draw(generator, 3))
        for kernel in (
            softmatch,
            softmatch @ attention.lookup,
            attention.kernel(keys),
            ToContext(attention, keys),
        ):
            tau = contraction(kernel, domain).value
            assert math.isfinite(tau)
            kernel = attention.kernel(keys) if isinstance(kernel, ToContext) else kernel
            for sizes in ((1, 1), (2, 3)):
                points = [
                    domain.center + 1.1 * torch.nn.functional.normalize(draw(generator, size, 3), dim=-1)
                    for size in sizes
                ]
                mu, nu = (r.Measure(x, draw(generator, len(x))) for x in points)
                assert float(wasserstein(mu @ kernel, nu @ kernel)) <= tau * float(wasserstein(mu, nu)) * (
                    1 + 1e-9
                )


def test_lookups_are_their_norm():
    generator = torch.Generator().manual_seed(0)
    w, u = draw(generator, 3, 2), draw(generator, 2, 4)
    assert contraction(r.Identity(), Whole()).value == 1.0
    assert contraction(r.Linear(w), Whole()).value == pytest.approx(
        float(torch.linalg.matrix_norm(w, 2)), rel=1e-9
    )
    assert contraction(r.Factored(w, u), Whole()).value == pytest.approx(
        float(torch.linalg.matrix_norm(w @ u, 2)), rel=1e-9
    )


def test_composition_multiplies():
    generator = torch.Generator().manual_seed(1)
    first, second = r.Linear(draw(generator, 3, 3)), r.Linear(draw(generator, 3, 2))
    both = contraction(first @ second, Ball(1.0, torch.zeros(3, dtype=torch.float64)))
    parts = [contraction(first, Whole()).value, contraction(second, Whole()).value]
    assert both.value == pytest.approx(math.prod(parts), rel=1e-9)
    assert [part.value for part in both.parts] == pytest.approx(parts)
    assert "contraction coefficient" in both.tree()


def test_the_second_kernel_acts_where_the_first_leads():
    """A Laplace softmatch needs its queries in a ball: a lookup before it hands it the ball of the values."""
    generator = torch.Generator().manual_seed(2)
    lookup = r.Linear(5 * draw(generator, 3, 3), 10 * draw(generator, 3))
    softmatch = r.Attention(r.StudentT(bandwidth=2.0, nu=3.0)).softmatch(draw(generator, 4, 3))
    certificate = contraction(lookup @ softmatch, Ball(1.0, torch.zeros(3, dtype=torch.float64)))
    assert math.isfinite(certificate.value)
    place = certificate.parts[1].domain
    ends = torch.nn.functional.normalize(draw(generator, 200, 3), dim=-1)
    assert float((lookup.values(ends, None) - place.center).norm(dim=-1).max()) <= place.radius


@pytest.mark.parametrize(
    ("kernel", "domain", "sentence"),
    [
        (
            r.Attention(r.Dot(), support=r.Causal()).softmatch(torch.ones(2, 2)),
            Whole(),
            "masks and positions",
        ),
        (r.Attention(r.Dot() + r.Alibi(0.5)).softmatch(torch.ones(2, 2)), Whole(), "masks and positions"),
        (
            r.Attention(r.Dot(), normalizer=r.Sparsemax()).softmatch(torch.ones(2, 2)),
            Whole(),
            "rows of Sparsemax are not Gibbs laws",
        ),
        (r.Attention(r.Laplace()).softmatch(torch.ones(2, 2)), Whole(), "use Ball(radius)"),
        (r.Attention(r.Dot()).softmatch(torch.ones(3, 2, 2)), Whole(), "give one set of keys"),
        (
            r.Attention(r.Dot(torch.ones(2, 2, 2), torch.ones(2, 2, 2))).softmatch(torch.ones(2, 2)),
            Whole(),
            "there are 2 heads",
        ),
        (r.Table(torch.ones(2, 2)), Whole(), "no known Lipschitz constant"),
        (r.Mode(), Whole(), "nothing is known about Mode"),
    ],
)
def test_refusals(kernel, domain, sentence):
    certificate = contraction(kernel, domain)
    assert certificate.value == math.inf
    assert any(sentence in why for why in certificate.refused), certificate.refused


def test_bad_input():
    with pytest.raises(r.errors.ArgumentError, match="kernel: is a Attention"):
        contraction(r.Attention(r.Dot()), Whole())


def test_the_coefficient_is_the_radius_of_the_keys_times_that_of_the_slopes():
    """R κ for bilinear scores, about the mean or the middle of the box; for Gaussian ones A = I/b²;
    others by their slopes.
    """
    generator = torch.Generator().manual_seed(5)
    keys, a = draw(generator, 4, 3) + 5.0, draw(generator, 3, 3)
    centers = (keys.mean(0), 0.5 * (keys.amax(0) + keys.amin(0)))
    radii = [float((keys - center).norm(dim=-1).max()) for center in centers]
    kappas = [float(((keys - center) @ a.mT).norm(dim=-1).max()) for center in centers]
    found = contraction(r.Attention(r.Bilinear(a)).softmatch(keys), Whole()).value
    assert found == pytest.approx(
        min(radius * kappa for radius, kappa in zip(radii, kappas, strict=True)), rel=1e-9
    )
    found = contraction(r.Attention(r.Gaussian(bandwidth=2.0)).softmatch(keys), Whole()).value
    assert found == pytest.approx(min(radii) ** 2 / 4, rel=1e-9)
    query = draw(generator, 3)
    found = contraction(r.Attention(r.Laplace(bandwidth=2.0)).softmatch(keys), Ball(1.0, query)).value
    assert found == pytest.approx(min(radii) / 2, rel=1e-9)


@pytest.mark.parametrize("far", [0.0, 5.0])
def test_slopes_are_taken_where_queries_and_keys_are(far):
    """Student's t before its steepest point: the ball about the keys that reaches the farthest query,
    or the farthest key.
    """
    keys = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64) + far
    potential = r.StudentT(nu=3.0, bandwidth=20.0)
    for up, radius, reach in ((3.0, 0.5, 3.5), (0.1, 0.5, 1.0)):
        domain = Ball(radius, torch.tensor([far, up + far], dtype=torch.float64))
        apart = 2 * reach  # two tokens of a ball of this radius
        slope = 4 * apart / (3 * 400 + apart**2)
        assert contraction(r.Attention(potential).softmatch(keys), domain).value == pytest.approx(
            slope, rel=1e-9
        )


def test_laws_of_a_lookup_live_in_the_image_of_the_ball():
    """B(Wᵀc + b, |W| R), which the second kernel is told."""
    generator = torch.Generator().manual_seed(6)
    w, b, center = draw(generator, 3, 2), draw(generator, 2), draw(generator, 3)
    both = contraction(r.Linear(w, b) @ r.Identity(), Ball(0.7, center))
    place = both.parts[1].domain
    assert torch.allclose(place.center, center @ w + b, atol=1e-13)
    assert place.radius == pytest.approx(0.7 * float(torch.linalg.matrix_norm(w, 2)), rel=1e-9)


def test_laws_of_a_softmatch_live_in_the_smaller_ball_of_the_keys():
    keys = torch.tensor([[0.0], [0.1], [0.2], [4.0]], dtype=torch.float64)
    both = contraction(r.Attention(r.Dot()).softmatch(keys) @ r.Identity(), Whole())
    assert both.parts[1].domain.radius == pytest.approx(2.0, rel=1e-9)
    assert float(both.parts[1].domain.center) == pytest.approx(2.0)


def test_laws_of_a_lookup_at_a_point_are_known_to_their_rounding():
    """A ball of radius 0 goes to one of γ(8d + 64) (|c||W|_F + |Wᵀc + b|)."""
    generator = torch.Generator().manual_seed(6)
    w, u, b, center = (draw(generator, *shape) for shape in ((3, 2), (2, 4), (4,), (3,)))
    for lookup, size, inner in (
        (r.Linear(w @ u, b), float((w @ u).norm()), 3),
        (r.Factored(w, u, b), float(w.norm() * u.norm()), 5),
    ):
        place = contraction(lookup @ r.Identity(), Ball(0.0, center)).parts[1].domain
        stated = float(center.norm()) * size + float((center @ w @ u + b).norm())
        assert place.radius == pytest.approx(float(relative_error(8 * inner + 64)) * stated, rel=1e-6, abs=0)


def test_means_of_laws_on_two_points_are_as_far_apart_as_the_laws():
    """τ = 1 for the mean, attained by laws at single points; and so the kernel of an attention is its
    softmatch and its lookup.
    """
    points = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    means = [r.Measure(point.unsqueeze(0)) @ r.Mean() for point in points]
    assert float(wasserstein(*means)) == pytest.approx(5.0)
    assert contraction(r.Mean(), Whole()).value == contraction(r.Law(), Whole()).value == 1.0
    keys = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    attention = r.Attention(r.Dot(scale=0.7), r.Linear(torch.tensor([[3.0]], dtype=torch.float64)))
    assert contraction(attention.kernel(keys), Whole()).value == pytest.approx(3 * 0.7, rel=1e-9)
