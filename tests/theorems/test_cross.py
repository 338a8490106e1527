"""Attention to a context: queries move, keys move, both move."""

import math

import pytest
import torch

from regard.attention import Attention
from regard.domains import Ball, Neighborhood, Radii, Whole
from regard.lookups import Linear
from regard.maps import FromQueries, Joint, ToContext
from regard.measure import Measure
from regard.normalizers import Sparsemax
from regard.norms import EntryMax, Frobenius, TokenMax, TokenSum, Wasserstein
from regard.potentials import Alibi, Bilinear, Cosine, Dot, Gaussian, Laplace, Rotary, SoftCap
from regard.proofs import certify, falsify
from regard.supports import Causal

D = torch.float64


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def _attention(potential=None, seed: int = 0) -> Attention:
    potential = (
        Dot(_t(3, 2, seed=seed), _t(3, 2, seed=seed + 1), b_q=_t(2, seed=seed + 2), b_k=_t(2, seed=seed + 3))
        if potential is None
        else potential
    )
    return Attention(potential, Linear(_t(3, 2, seed=seed + 4), _t(2, seed=seed + 5)))


POTENTIALS = {
    "dot": None,
    "rotary": Rotary(Dot(_t(3, 2), _t(3, 2, seed=1))),
    "softcap": SoftCap(Dot(), 1.0),
    "gaussian": Gaussian(bandwidth=1.3),
    "laplace": Laplace(bandwidth=1.5),
    "alibi": Dot() + Alibi(0.4),
}

NORMS = (TokenMax(), Frobenius())
CASES = [(name, NORMS[index % 2]) for index, name in enumerate((*POTENTIALS, "alibi", "dot"))]
"""Every potential; both norms for the plain ones."""


def test_worked_example():
    """Two keys ±1 on a line: tanh(a x) has slope a, and w a R² = a; attained at zero."""
    a = torch.tensor([[0.7]], dtype=D)
    map = ToContext(Attention(Bilinear(a)), torch.tensor([[1.0], [-1.0]], dtype=D))
    bound = certify(map, Whole(), TokenMax()).value
    assert bound == pytest.approx(0.7)
    found = (map(torch.tensor([[1e-4]], dtype=D)) - map(torch.tensor([[-1e-4]], dtype=D))).norm() / 2e-4
    assert float(found) == pytest.approx(bound, rel=1e-6)


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_queries(name, norm):
    map = ToContext(_attention(POTENTIALS[name]), _t(5, 3, seed=9) + 1)
    domain = Ball(2.0, _t(3, seed=8), tokens=3)
    assert (
        falsify(map, domain, norm, steps=4, restarts=1).value <= certify(map, domain, norm).value < math.inf
    )


def test_queries_anywhere():
    map = ToContext(_attention(), Measure(_t(5, 3, seed=9), _t(5, seed=7).log_softmax(-1)))
    for norm in (TokenMax(), Wasserstein(1.0)):
        bound = certify(map, Whole(4), norm).value
        found = falsify(map, Whole(4), norm, width=3, steps=10, restarts=1).value
        assert 0.1 * bound <= found <= bound
    assert math.isfinite(
        certify(ToContext(_attention(Cosine(scale=2.0, eps=0.1)), _t(5, 3)), Whole(), TokenMax()).value
    )
    assert math.isfinite(
        certify(ToContext(_attention(Laplace(bandwidth=2.0)), _t(5, 3)), Whole(), TokenMax()).value
    )


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_keys(name, norm):
    map, x = FromQueries(_attention(POTENTIALS[name]), _t(6, 3, seed=9) - 1), _t(4, 3, seed=3)
    for domain in (Ball(1.0, _t(3, seed=8), tokens=4), Neighborhood(x, 0.2, TokenMax())):
        assert (
            falsify(map, domain, norm, steps=4, restarts=1, width=3).value
            <= certify(map, domain, norm).value
            < math.inf
        )
    masked = FromQueries(_attention(POTENTIALS[name]).replace(support=Causal()), _t(6, 3, seed=9))
    assert (
        falsify(masked, Ball(1.0, tokens=4), norm, steps=3, restarts=1, width=3).value
        <= certify(masked, Ball(1.0, torch.zeros(3, dtype=D), tokens=4), norm).value
    )


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_both(name, norm):
    map, x = Joint(_attention(POTENTIALS[name]), 2), _t(5, 3, seed=3)
    for domain in (
        Ball(0.8, 0.5 * _t(3, seed=8), tokens=5),
        Neighborhood(x, 0.2),
        Radii(x, torch.tensor([0.1, 0.3, 0.0, 0.2, 0.0], dtype=D)),
    ):
        bound = certify(map, domain, norm).value
        assert 0.02 * bound <= falsify(map, domain, norm, steps=4, restarts=1).value <= bound < math.inf


def test_a_crowd_of_queries():
    """Every query copies the one key: the Frobenius constant is √m, and it is attained."""
    map = FromQueries(Attention(Dot()), _t(9, 2))
    bound = certify(map, Ball(1.0, tokens=1), Frobenius())
    assert certify(map, Ball(1e-9, torch.zeros(2, dtype=D), tokens=1), Frobenius()).value == pytest.approx(
        3.0, rel=1e-6
    )
    assert falsify(map, Ball(1.0, tokens=1), Frobenius(), width=2, steps=3).value == pytest.approx(
        3.0, rel=1e-6
    )
    assert bound.value >= 3.0


def test_refusals():
    context = _t(4, 3)
    assert "not Gibbs laws" in str(
        certify(ToContext(_attention().replace(normalizer=Sparsemax()), context), Whole(), TokenMax())
    )
    assert "has no bound here" in str(
        certify(ToContext(_attention(SoftCap(Dot(), 1.0)), context), Whole(), TokenMax())
    )
    assert "keys are not bounded" in str(certify(FromQueries(_attention(), context), Whole(), TokenMax()))
    assert "in Frobenius() and TokenMax()" in str(
        certify(FromQueries(_attention(), context), Ball(1.0), TokenSum())
    )
    assert "no key" in str(certify(Joint(_attention(), 3), Ball(1.0, tokens=3), TokenMax()))
    assert "not entry by entry" in str(certify(ToContext(_attention(), context), Whole(), EntryMax()))
    assert "not functions of the law" in str(
        certify(ToContext(_attention().replace(support=Causal()), context), Whole(), Wasserstein(1.0))
    )
