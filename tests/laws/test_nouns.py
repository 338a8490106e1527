"""Every noun of every family against the laws of its family, the same that regard.testing gives to users."""

import pytest
import torch

import regard as r
from regard.testing import check_map, check_normalizer, check_potential, check_support
from tests.nouns import NONEXPANSIVE, NORMALIZERS, POTENTIALS, SUPPORTS, D


@pytest.mark.parametrize("name", POTENTIALS)
def test_potential(name):
    check_potential(POTENTIALS[name])


@pytest.mark.parametrize("name", NORMALIZERS)
def test_normalizer(name):
    check_normalizer(NORMALIZERS[name])


@pytest.mark.parametrize("kind", [r.Softmax, r.SinkSoftmax, r.Sigmoid])
def test_normalizer_with_heads(kind):
    check_normalizer(kind(torch.tensor([0.5, 2.0], dtype=D)))


@pytest.mark.parametrize("name", SUPPORTS)
def test_support(name):
    check_support(SUPPORTS[name])


@pytest.mark.parametrize("name", NONEXPANSIVE)
def test_map(name):
    check_map(NONEXPANSIVE[name], tokens=1 if name == "unflatten" else 3)


def test_laws_of_maps_can_fail():
    """A map whose constant is not its own: sorting that stretches."""

    def stretched(self, x):
        return 3 * x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(r.nonexpansive.GroupSort, "__call__", lambda self, x: 0.01 * (1e4 * x).sin())
        with pytest.raises(AssertionError, match="exceeds the certificate"):
            check_map(r.nonexpansive.GroupSort(2))
        patch.setattr(r.nonexpansive.IntoBall, "__call__", stretched)
        with pytest.raises(AssertionError, match="lie in the image"):
            check_map(r.nonexpansive.IntoBall(0.2))
        patch.setattr(r.nonexpansive.Pool, "__call__", stretched)
        with pytest.raises(AssertionError, match="as many tokens"):
            check_map(r.nonexpansive.Pool())
        patch.setattr(r.nonexpansive.Center, "__call__", lambda self, x: x[..., :2])
        with pytest.raises(AssertionError, match="as wide as"):
            check_map(r.nonexpansive.Center())


def test_laws_can_fail():
    """A potential that looks at its neighbors, one whose algebra lies,
    a normalizer that forgets the support: all are caught.
    """

    class Neighbors(r.Potential):
        def features(self, x, y, x_marks, y_marks):
            return x, y

        def pair(self, queries, keys):
            return queries @ keys.mT + queries.sum()

    with pytest.raises(AssertionError, match="features of its tokens only"):
        check_potential(Neighbors())

    class Forgetful(r.normalizers.Normalizer):
        laws, variational = True, False

        def weights(self, scores, reference):
            return scores.softmax(-1)

    with pytest.raises(AssertionError, match="outside the support"):
        check_normalizer(Forgetful())

    class Loud(r.normalizers.Normalizer):
        laws, variational = True, False

        def weights(self, scores, reference):
            return scores.exp()

    with pytest.raises(AssertionError, match="rows sum to one"):
        check_normalizer(Loud())

    class Narrow(r.supports.Support):
        def allows(self, queries, keys):
            return keys.unsqueeze(-2) <= queries.unsqueeze(-1)

        def span(self, low, high):
            return low, high

    with pytest.raises(AssertionError, match="span"):
        check_support(Narrow())


def test_sums_are_flat_and_subtraction_cancels():
    p = r.Dot() + (r.Alibi(0.1) + r.Laplace())
    assert len(p.terms) == 3
    x = torch.randn(5, 4, dtype=D)
    assert (p - p).scores(x, x).abs().max() == 0


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_is_a_scaled_potential(temperature):
    x = torch.randn(6, 4, dtype=D)
    warm = r.attend(x, x, x, normalizer=r.Softmax(temperature))
    assert torch.allclose(warm, r.attend(x, x, x, potential=(1 / temperature) * r.Dot()), atol=1e-12)
