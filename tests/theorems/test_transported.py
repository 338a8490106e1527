"""Laws of outputs, against laws that are really near; test_measure_dual.py is about the rows."""

import math

import pytest
import torch

from regard._upper import exact
from regard.attention import Attention
from regard.domains import NearbyLaws, Tube
from regard.dynamics.drifts import drift
from regard.lookups import Linear
from regard.maps import Heads, Residual
from regard.measure import Measure
from regard.norms import TokenMax, Wasserstein
from regard.potentials import Bilinear, Dot
from regard.proofs import deviation
from regard.proofs.subject import subject_of
from regard.proofs.theorems.transported import mean_power, own
from regard.transport import wasserstein
from tests.theorems.exact import D, generator, normal
from tests.theorems.laws_nearby import another, ball_of, law


def _head(seed: int, width: int, size: float = 0.5) -> Attention:
    g = generator(seed)
    return Attention(Bilinear(size * normal(g, width, width)), Linear(normal(g, width, width)))


MAPS = {
    "one head": _head(3, 2),
    "heads": Heads(
        Attention(Dot(normal(generator(4), 2, 2, 2), normal(generator(5), 2, 2, 2))),
        normal(generator(6), 2, 2, 2),
    ),
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("residual", [False, True])
def test_laws_of_outputs_stay_within(name, residual):
    """W₁ of the outputs by exact transport, for laws whose W₁ to the given one is at most the radius."""
    map, g = MAPS[name], generator(7)
    whole = Residual(map) if residual else map
    for weighted, radius in ((False, 0.05), (True, 0.4)):
        given = law(g, 4, 2, 1.0, weighted)
        domain = ball_of(given, radius, 1.0)
        bound = deviation(whole, domain, Wasserstein(1.0)).value
        seen = []
        for _ in range(30):
            other = another(g, domain)
            assert float(wasserstein(given, other, 1.0)) <= radius * (1 + 1e-9)
            images = [Measure(drift(whole, one, None), one.log_weights) for one in (given, other)]
            seen.append(float(wasserstein(*images, 1.0)))
        assert max(seen) <= bound <= 60 * max(seen)


def test_one_token_carried_exactly():
    """One atom and no scores: T is linear, and the law of outputs moves by w ρ at the most."""
    x = torch.tensor([[0.2, 0.1]], dtype=D)
    attention = Attention(Bilinear(torch.zeros(2, 2, dtype=D)), Linear(3 * torch.eye(2, dtype=D)))
    found = deviation(attention, ball_of(Measure(x), 0.1, 1.0), Wasserstein(1.0))
    assert found.value == pytest.approx(0.3, rel=1e-6)
    around = deviation(Residual(attention), ball_of(Measure(x), 0.1, 1.0), Wasserstein(1.0))
    assert around.value == pytest.approx(0.4, rel=1e-6)
    with_scores = attention.replace(potential=Bilinear(torch.tensor([[0.5, 0.0], [0.0, 0.2]], dtype=D)))
    domain = ball_of(Measure(x), 1e-6, 1.0)
    own = (
        deviation(with_scores, domain, Wasserstein(1.0)).value
        - deviation(with_scores, domain, TokenMax()).value
    )
    assert own == pytest.approx(3 * 0.5 * 1e-6, rel=1e-6)  # w |A| R² ρ
    assert math.isinf(deviation(attention, domain, Wasserstein(2.0)).value)


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_every_distance_in_a_tube(p):
    """Of laws within ρ in W_p no W_q, q ≤ p, of the outputs is above; two atoms give a mean of powers."""
    g, attention = generator(8), _head(3, 2)
    domain = NearbyLaws(law(g, 2, 2, 1.0, weighted=True), 0.05, Tube(0.05, jumps=False), p)
    orders = [q for q in (1.0, 2.0, 3.0, math.inf) if q <= p]
    bounds = {q: deviation(attention, domain, Wasserstein(q)).value for q in orders}
    assert list(bounds.values()) == sorted(bounds.values())
    for _ in range(20):
        away = normal(g, 2, 2)
        other = Measure(domain.measure.points + 0.05 * away / away.norm(dim=-1, keepdim=True))
        other = Measure(other.points, domain.measure.log_weights)
        images = [Measure(drift(attention, one, None), one.log_weights) for one in (domain.measure, other)]
        for q, bound in bounds.items():
            assert float(wasserstein(*images, q)) <= bound


def test_means_of_powers():
    masses, numbers = exact(torch.tensor([0.25, 0.75], dtype=D)), exact(torch.tensor([4.0, 2.0], dtype=D))
    for order, value in ((1.0, 2.5), (2.0, 7**0.5), (3.0, 22 ** (1 / 3)), (math.inf, 4.0)):
        assert float(mean_power(masses, numbers, order)) == pytest.approx(value, rel=1e-12)


def test_how_fast_a_row_moves_with_its_query_in_a_tube():
    """Atoms at ±1, scores 0.7xy, values 2y, r = 0.1: w|A|(e^{r(|A|R + α)}σ + r)², or w|A|R² with jumps."""
    attention = Attention(Bilinear(torch.tensor([[0.7]], dtype=D)), Linear(torch.tensor([[2.0]], dtype=D)))
    share = 1 / (1 + math.exp(-1.4))
    near = math.exp(0.1 * (0.7 * 1.1 + 0.7)) * 2 * math.sqrt(share * (1 - share)) + 0.1
    for jumps, square in ((False, near**2), (True, 1.1**2)):
        domain = NearbyLaws(torch.tensor([[1.0], [-1.0]], dtype=D), 0.05, Tube(0.1, jumps))
        assert float(own(subject_of(attention), domain)) == pytest.approx(2 * 0.7 * square, rel=1e-9)
