"""The Boltzmann–Gibbs transformation in W₁, against exact transport between measures of different sizes."""

import math

import pytest
import torch

import regard as r
from regard.domains import Ball, Whole
from regard.proofs import certify
from regard.tilt import Tilt
from regard.transport import wasserstein


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def in_ball(generator, size, center, radius):
    points = draw(generator, size, len(center))
    lengths = points.norm(dim=-1, keepdim=True)
    return center + points * (
        radius * torch.rand(size, 1, generator=generator, dtype=torch.float64) ** 0.3 / lengths
    )


POTENTIALS = {
    "dot": lambda g: r.Dot(),
    "projected": lambda g: r.Dot(0.7 * draw(g, 2, 3), 0.7 * draw(g, 2, 3), b_q=draw(g, 3), b_k=draw(g, 3)),
    "bilinear": lambda g: 0.5 * r.Bilinear(draw(g, 2, 2)),
    "gaussian": lambda g: r.Gaussian(bandwidth=1.5),
    "laplace": lambda g: r.Laplace(bandwidth=2.0),
    "cosine": lambda g: r.Cosine(eps=0.5),
    "additive": lambda g: r.Additive(0.3 * draw(g, 2, 3), 0.3 * draw(g, 2, 3), draw(g, 3)),
    "capped": lambda g: r.SoftCap(r.Dot(), 2.0),
}


def test_worked_example():
    """a(y) = 2y on [-1/2, 1/2]: e²(1 + 2)."""
    one = torch.tensor([2.0], dtype=torch.float64)
    certificate = certify(
        Tilt(r.Dot(), one), Ball(0.5, torch.zeros(1, dtype=torch.float64)), r.Wasserstein(1.0)
    )
    assert certificate.value == pytest.approx(3 * math.e**2, rel=1e-9)
    assert certificate.value >= 3 * math.e**2
    assert "vuckovic2020" in certificate.theorem


@pytest.mark.parametrize("name", POTENTIALS)
def test_search_stays_below(name):
    generator = torch.Generator().manual_seed(len(name))
    for trial in range(12):
        center = draw(generator, 2) * (trial % 3)
        query = draw(generator, 2) * (1 + trial % 2)  # often outside the ball
        tilt, domain = Tilt(POTENTIALS[name](generator), query), Ball(0.8, center)
        constant = certify(tilt, domain, r.Wasserstein(1.0)).value
        assert math.isfinite(constant)
        for sizes in ((1, 4), (3, 5), (4, 4)):
            mu, nu = (
                r.Measure(in_ball(generator, size, center, 0.8), draw(generator, size)) for size in sizes
            )
            assert (
                float(wasserstein(tilt(mu), tilt(nu)))
                <= constant * float(wasserstein(mu, nu)) * (1 + 1e-9) + 1e-12
            )


def test_tightness():
    """One atom moves from the light end towards the heavy one: a third of the bound at slope one,
    all of it as the slope vanishes.
    """
    found = {}
    for slope in (0.01, 1.0):
        tilt = Tilt(r.Dot(), torch.tensor([slope], dtype=torch.float64))
        constant = certify(tilt, Ball(1.0, torch.zeros(1, dtype=torch.float64)), r.Wasserstein(1.0)).value
        ends = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
        best = 0.0
        for share in torch.linspace(0.001, 0.5, 60, dtype=torch.float64):
            weights = torch.tensor([1 - share, share], dtype=torch.float64)
            mu = r.Measure(ends, weights.log())
            nu = r.Measure(ends, (weights + torch.tensor([1e-4, -1e-4], dtype=torch.float64)).log())
            best = max(best, float(wasserstein(tilt(mu), tilt(nu))) / float(wasserstein(mu, nu)))
        assert best <= constant
        found[slope] = best / constant
    assert found[0.01] > 0.95
    assert found[1.0] > 0.3


@pytest.mark.parametrize(
    ("potential", "domain", "p", "sentence"),
    [
        (r.Dot(), Ball(1.0), 2.0, "use Wasserstein(1.0)"),
        (r.Dot(), Ball(1.0), math.inf, "use Wasserstein(1.0)"),
        (r.Dot(), Whole(), 1.0, "use Ball(radius)"),
        (r.Dot() + r.Alibi(0.5), Ball(1.0), 1.0, "masks and positions are not functions of the law"),
        (r.Dot(torch.ones(2, 2, 2), torch.ones(2, 2, 2)), Ball(1.0), 1.0, "has 2 heads"),
        (r.Potential.of(lambda x, y: (x - y).sum(-1)), Ball(1.0), 1.0, "nothing is known about the slopes"),
        (r.Dot(), Ball(1.0, torch.zeros(3)), 1.0, "the query has width 2 and tokens 3"),
    ],
)
def test_refusals(potential, domain, p, sentence):
    certificate = certify(Tilt(potential, torch.ones(2, dtype=torch.float64)), domain, r.Wasserstein(p))
    assert certificate.value == math.inf
    assert any(sentence in why for why in certificate.refused), certificate.refused


def test_a_tilt_is_a_row_of_attention():
    generator = torch.Generator().manual_seed(0)
    mu = r.Measure(draw(generator, 5, 2), draw(generator, 5))
    query = draw(generator, 2)
    attention = r.Attention(r.Gaussian(bandwidth=0.7))
    expected = attention.weights(query.unsqueeze(0), mu).squeeze(0)
    assert (Tilt(attention.potential, query)(mu).masses() - expected).abs().max() < 1e-14


def test_bad_input():
    with pytest.raises(r.errors.ArgumentError, match="query: has shape"):
        Tilt(r.Dot(), torch.ones(2, 2))
    with pytest.raises(r.errors.ArgumentError, match="potential: is a float"):
        Tilt(1.0, torch.ones(2))
