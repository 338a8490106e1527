"""Positive random features: their covariance, and how often outputs are farther off than is said."""

from __future__ import annotations

import math

import pytest
import torch

from regard import Attention, Causal, Dot, Linear, LinearKernel, Measure
from regard.compression import feature_error
from regard.errors import ArgumentError
from regard.normalizers import PositiveRandom
from regard.proofs.theorems import positive_features

D = torch.float64


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def _estimates(queries, keys, count: int, seed: int) -> torch.Tensor:
    features = PositiveRandom.draw(queries.shape[-1], count, seed, D, orthogonal=False)
    return features.log_features(queries).exp() @ features.log_features(keys).exp().mT


def test_relative_errors_have_the_stated_covariances():
    """Of one feature, over many draws of it: (e^{(q+k)·(q+l)} - 1)."""
    query, keys = 0.3 * _t(1, 2, seed=1), 0.4 * _t(3, 2, seed=2)
    features = PositiveRandom.draw(2, 400_000, 0, D, orthogonal=False)
    scale = 0.5 * math.log(400_000)
    each = ((features.log_features(query) + features.log_features(keys)) + 2 * scale).exp()
    errors = each / (keys @ query[0]).exp().unsqueeze(-1) - 1
    assert float(errors.mean(-1).abs().max()) < 0.02
    joint = query + keys
    torch.testing.assert_close(
        errors @ errors.mT / 400_000, torch.expm1(joint @ joint.mT), rtol=0.1, atol=0.02
    )


def _layer(scale: float = 0.3):
    x = scale * _t(8, 3, seed=1)
    return Attention(Dot(_t(3, 3, seed=2), _t(3, 3, seed=3)), Linear(_t(3, 2, seed=4))), x


def test_outputs_are_as_far_off_as_expected_and_rarely_farther_than_proved():
    """The estimate is the mean square of many draws; the bound holds more often than it says."""
    attention, x = _layer()
    count, draws, doubt = 2000, 120, 0.2
    said = feature_error(attention, x, count, doubt=doubt)
    squares, above = torch.zeros(8, dtype=D), 0
    for seed in range(draws):
        features = PositiveRandom.draw(3, count, seed, D, orthogonal=False)
        cheap = attention.replace(normalizer=LinearKernel(features))
        moved = (cheap(x) - attention(x)).norm(dim=-1)
        squares += moved.square() / draws
        above += int(float(moved.max()) > said.certificate.value)
    torch.testing.assert_close(squares.sqrt(), said.expected, rtol=0.35, atol=0)
    assert above <= doubt * draws
    assert said.certificate.probability == 1 - doubt
    assert "features" in repr(said)


def test_one_key_is_exact_and_two_are_known():
    """With one key the output is its value. With two, V and U are sums of four terms."""
    query, keys = torch.zeros(1, 1, dtype=D), torch.tensor([[0.3], [-0.2]], dtype=D)
    values = torch.tensor([[1.0], [0.0]], dtype=D)
    v, u = positive_features.moments(query, keys[:1], torch.zeros(1, 1, dtype=D), values[:1])
    assert float(v[0]) < 1e-25
    torch.testing.assert_close(float(u[0]), math.expm1(0.09), rtol=1e-9, atol=0)
    v, u = positive_features.moments(query, keys, torch.zeros(1, 2, dtype=D), values)
    same, other = math.exp(0.09) + math.exp(0.04), 2 * math.exp(-0.06)
    torch.testing.assert_close(float(v[0]), (same - other) / 16, rtol=1e-9, atol=0)
    torch.testing.assert_close(float(u[0]), (same + other) / 4 - 1, rtol=1e-9, atol=0)
    assert float(v[0]) >= (same - other) / 16
    found = float(positive_features.bounds(v, u, 100, 0.1)[0])
    wanted = math.sqrt(2 * (same - other) / 16 / 10) / (1 - math.sqrt(2 * ((same + other) / 4 - 1) / 10))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)


def test_too_few_features_prove_nothing_and_say_so():
    attention, x = _layer()
    found = feature_error(attention, x, 4).certificate
    assert found.value == math.inf
    needed = int(found.refused[0].split("more than ")[1].split(" ")[0])
    assert feature_error(attention, x, needed).certificate.value == math.inf
    assert feature_error(attention, x, needed + 1).certificate.value < math.inf
    weighted = feature_error(attention, x, 10**5, context=Measure(0.1 * x, _t(8, seed=9)))
    assert weighted.certificate.value < math.inf
    assert weighted.deviation.shape == (8, 8)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"count": 0}, "count"),
        ({"doubt": 0.0}, "doubt"),
        ({"attention": Attention(Dot(), support=Causal())}, "attention"),
        ({"attention": Attention(Dot(torch.ones(2, 3, 3), torch.ones(2, 3, 3)))}, "attention"),
        ({"x": torch.ones(2, 3, 3)}, "attention|x"),
    ],
    ids=str,
)
def test_bad_input(change, named):
    attention, x = _layer()
    given = {"attention": attention, "x": x, "count": 5, "doubt": 0.1} | change
    with pytest.raises(ArgumentError, match=named):
        feature_error(given["attention"], given["x"], given["count"], doubt=given["doubt"])
