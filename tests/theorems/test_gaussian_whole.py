"""Gaussian scores on the whole space: worked constants, rows without their own token, attacks with
projections, masks and weights.
"""

import math
import re

import pytest
import torch

import regard as r
from regard.domains import Ball, Neighborhood, Whole
from regard.norms import Frobenius, TokenMax
from regard.proofs import certify, falsify
from regard.proofs.gaussian_rows import lambert_bound
from tests.theorems.exact import SUPPORTS, D, frobenius_norm, generator, normal, token_max_norm


def projected(g, d, c, e, support=None):
    w = normal(g, d, c)
    b = normal(g, c)
    return r.Attention(
        r.Gaussian(w, w, 0.7, b, b), r.Factored(w, normal(g, c, e), normal(g, e)), support=support or r.Full()
    )


@pytest.mark.parametrize(("n", "w"), [(2, 0.2785), (16, 1.3835), (128, 2.8107), (1024, 4.4399)])
def test_worked_constants(n, w):
    found = certify(r.Attention(r.Gaussian(bandwidth=3.0)), Whole(tokens=n), TokenMax())
    assert found.value == pytest.approx(1 + 4 * w, abs=3e-4)
    assert all(hypothesis.checked for hypothesis in found.hypotheses)


@pytest.mark.parametrize("log_value", [-600.0, -30.0, -1.0, 0.0, 1.0, 5.0, 300.0, 699.0, 705.0, 1e6])
def test_lambert_is_above_and_close(log_value):
    w = float(lambert_bound(log_value))
    assert w + math.log(w) >= log_value
    assert w * (1 - 1e-9) + math.log(w * (1 - 1e-9)) < log_value
    assert float(lambert_bound(-math.inf)) == 0
    assert float(lambert_bound(-800.0)) > 0


def test_one_token_is_the_identity():
    assert certify(
        r.Attention(r.Gaussian(bandwidth=1.0)), Whole(tokens=1), TokenMax()
    ).value == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize("n", [5, 33, 129])
def test_growth_with_the_number_of_tokens_is_real(n):
    attention = r.Attention(r.Gaussian(bandwidth=1.0))
    bound = certify(attention, Whole(tokens=n), TokenMax()).value
    x = math.sqrt(2 * (1 + (bound - 1) / 4)) * torch.tensor(
        [0.0] + [1.0, -1.0] * (n // 2), dtype=D
    ).unsqueeze(-1)
    assert 0.45 * bound < token_max_norm(attention, x) < bound


@pytest.mark.parametrize(("seed", "support"), list(enumerate(SUPPORTS)), ids=repr)
def test_attacks_stay_below(seed, support):
    g = generator(seed)
    attention = (
        projected(g, 3, 2, 2, support)
        if seed % 2
        else r.Attention(r.Gaussian(bandwidth=0.5), r.Linear(normal(g, 3, 4)), support=support)
    )
    for norm, exact in ((TokenMax(), token_max_norm), (Frobenius(), frobenius_norm)):
        bound = certify(attention, Whole(tokens=5), norm).value
        assert (
            falsify(attention, Whole(tokens=5), norm, restarts=1, steps=4, width=3, generator=g).value
            <= bound
        )
        for _ in range(4):
            x = normal(g, 5, 3, scale=10 ** float(normal(g, 1)))
            assert exact(attention, x) <= bound


def test_frobenius_takes_the_smaller_form():
    omega = float(lambert_bound(math.log(1) - 1))
    found = certify(r.Attention(r.Gaussian(bandwidth=1.0)), Whole(tokens=2), Frobenius()).value
    assert found == pytest.approx(
        min(math.sqrt(2) * (1 + 2 * omega) + 2 * omega, math.sqrt(2) * (1 + 2 * math.sqrt(2) * omega)),
        rel=1e-9,
    )
    attention = r.Attention(r.Gaussian(bandwidth=1.0))
    pairs = [torch.tensor([[0.0], [float(apart)]], dtype=D) for apart in torch.linspace(0, 4, 41)]
    assert 0.5 * found < max(frobenius_norm(attention, pair) for pair in pairs) <= found


def test_weights_of_tokens_change_the_constant():
    g = generator(3)
    x, weights = normal(g, 4, 2, scale=3.0), torch.tensor([0.0, 3.0, 1.0, -2.0], dtype=D)
    measure = r.Measure(x, weights)
    attention = r.Attention(r.Gaussian(bandwidth=1.0))
    found = certify(attention, Neighborhood(measure, 5.0), TokenMax())
    values = [c.value for c in (found, *found.others) if "whole space" in c.theorem]
    omega = float((weights.exp().sum() - weights.exp().min()) / weights.exp().min())
    assert values == [pytest.approx(1 + 4 * float(lambert_bound(math.log(omega) - 1)), rel=1e-9)]

    def weighted(y):
        return attention(measure.replace(points=y)).points

    for _ in range(8):
        assert token_max_norm(weighted, normal(g, 4, 2, scale=3.0)) <= values[0]


def test_alibi_counts_as_bias():
    attention = r.Attention(r.Gaussian(bandwidth=1.0) + r.Alibi(0.3), support=r.Causal())
    plain = certify(
        r.Attention(r.Gaussian(bandwidth=1.0), support=r.Causal()), Whole(tokens=8), TokenMax()
    ).value
    assert certify(attention, Whole(tokens=8), TokenMax()).value < plain


def test_rows_without_their_own_token_have_no_constant():
    others = r.Attention(r.Gaussian(bandwidth=1.0), support=r.Where(~torch.eye(3, dtype=torch.bool)))
    found = certify(others, Whole(tokens=3), TokenMax())
    assert math.isinf(found.value)
    assert any("row 0 does not see its own token" in why for why in found.refused)
    points = torch.tensor([[0.0], [30.0], [-30.0]], dtype=D)
    assert token_max_norm(others, points) == pytest.approx(1799, abs=5)


@pytest.mark.parametrize(
    ("attention", "domain", "sentence"),
    [
        (
            lambda g: r.Attention(r.Gaussian(normal(g, 2, 2), normal(g, 2, 2), bandwidth=1.0), r.Identity()),
            Whole(tokens=3),
            "w_q and w_k tied",
        ),
        (
            lambda g: r.Attention(r.Gaussian(b_q=normal(g, 2), bandwidth=1.0), r.Linear(normal(g, 2, 2))),
            Whole(tokens=3),
            "w_q and w_k tied",
        ),
        (
            lambda g: r.Attention(r.Gaussian(bandwidth=1.0), r.Linear(normal(g, 2, 2))),
            Whole(),
            r"Whole\(tokens=n\)",
        ),
        (
            lambda g: r.Attention(-1.0 * r.Gaussian(bandwidth=1.0), r.Linear(normal(g, 2, 2))),
            Whole(tokens=3),
            "grows with the distance",
        ),
    ],
    ids=["untied", "biases", "tokens", "sign"],
)
def test_violated_hypotheses(attention, domain, sentence):
    found = certify(attention(generator(1)), domain, TokenMax())
    assert math.isinf(found.value)
    assert any("whole space" in why and re.search(sentence, why) for why in found.refused), found.refused


def test_values_must_factor():
    w = normal(generator(2), 3, 2)
    found = certify(
        r.Attention(r.Gaussian(w, w, bandwidth=1.0), r.Linear(normal(generator(3), 3, 2))),
        Whole(tokens=3),
        TokenMax(),
    )
    assert math.isinf(found.value)
    assert any("Factored(w, u)" in why for why in found.refused)
    # and rightly so: what scores do not see may be far apart
    w = torch.tensor([[1.0], [0.0]], dtype=D)
    x = torch.tensor([[0.0, 0.0], [1.0, 1000.0], [-1.0, -1000.0]], dtype=D)
    assert token_max_norm(r.Attention(r.Gaussian(w, w, bandwidth=1.0)), x) > 100


def test_on_balls_the_smaller_bound_wins():
    attention = r.Attention(r.Gaussian(bandwidth=0.1))
    wide = certify(attention, Ball(100.0, torch.zeros(2, dtype=D), tokens=4), TokenMax())
    narrow = certify(attention, Ball(0.001, torch.zeros(2, dtype=D), tokens=4), TokenMax())
    assert "whole space" in wide.theorem
    assert "whole space" not in narrow.theorem
