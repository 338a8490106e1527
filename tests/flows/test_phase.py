"""The phase diagram: its equation against particles, and the transition where it is predicted."""

import math

import pytest
import torch

import regard as r
from regard.dynamics import DormandPrince, Sphere, equiangular
from regard.dynamics.equal_angles import equiangular_gaps
from regard.flows import phases
from tests.dynamics.systems import D, sa, with_common_cosine


def test_many_equations_at_once_are_each_equation():
    beta, rho = torch.tensor([[0.5], [4.0]], dtype=D), torch.tensor([0.0, 0.6], dtype=D)
    found = equiangular_gaps(beta, 7, rho, 1.5)
    for i, b in enumerate((0.5, 4.0)):
        for j, c in enumerate((0.0, 0.6)):
            assert float(found[i, j]) == pytest.approx(equiangular(sa(b), 7, c).gap(1.5), rel=1e-9)


def test_cells_are_what_particles_do():
    n, until = 12, 3.0
    found = phases(n, until, size=6)
    for i, j in ((0, 1), (2, 3), (5, 0), (4, 5)):
        beta, rho = float(found.gamma[i]) * math.log(n), float(found.rho[j])
        x = with_common_cosine(n, rho)
        y = r.flow(sa(beta), x, DormandPrince(1e-9), until, space=Sphere()).at(until)
        assert float(found.share[i, j]) == pytest.approx(1 - (1 - float(y[0] @ y[1])) / (1 - rho), abs=1e-6)
        row = torch.softmax(beta * x[:1] @ x.mT, -1)
        assert float(found.own[i, j]) == pytest.approx(float(row[0, 0]), rel=1e-12)


def test_the_transition_is_where_it_is_predicted():
    """γ(1-ρ) of the half-way line tends to one, and to first order it is known at finite n."""
    distances = []
    for n in (10**3, 10**9):
        found = phases(n, 10.0, size=30)
        crossings = found.crossings()
        assert len(crossings) > 10
        distances.append(max(abs(c - 1) for c in crossings))
        first_order = [g * (1 - c) for g, c in zip(found.corrected(), found.rho.tolist(), strict=True)]
        middle = [(seen, known) for seen, known in zip(crossings, first_order, strict=False)][5:]
        assert all(seen == pytest.approx(known, rel=0.08) for seen, known in middle)
        inside = (found.gamma.unsqueeze(-1) * (1 - found.rho)) < 0.9
        assert float(found.share[inside].min()) > 0.5  # below the line they meet
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.3


def test_own_weight_is_one_half_on_the_line():
    n = 10**6
    found = phases(n, 1.0, size=20)
    beyond = found.gamma.unsqueeze(-1) * math.log(n) * (1 - found.rho) > math.log(n - 1)
    assert torch.equal(found.own > 0.5, beyond)


def test_too_few_tokens():
    with pytest.raises(r.errors.ArgumentError, match="--particles: is 2"):
        phases(2, 1.0)
