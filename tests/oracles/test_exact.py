"""Problems with exact answers, for every engine that accepts them."""

import math

import pytest
import torch

import regard as r
from tests.nouns import D

ENGINES = [r.engines.ReferenceEngine(), r.engines.Sdpa(), r.engines.Tiled(), r.engines.Tiled(pairs=3)]


def vectors():
    """X[i,j] = sin(1+3i+j), A[i,j] = cos(2+3i+j)/2, W[i,j] = sin(3+2(3i+j))."""
    i, j = torch.arange(4, dtype=D).unsqueeze(1), torch.arange(3, dtype=D)
    x = torch.sin(1 + 3 * i + j)
    a = torch.cos(2 + 3 * i[:3] + j) / 2
    return x, a, torch.sin(3 + 2 * (3 * i[:3] + j))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: repr(e))
def test_known_vectors(engine):
    x, a, w = vectors()
    attention = r.Attention(r.Bilinear(a), r.Linear(w))
    first = torch.tensor([-0.09833850540419728, 0.18586633624264476, -0.056356870291770916], dtype=D)
    assert torch.allclose(r.apply(attention, x, engine=engine)[0], first, atol=1e-15)
    law = torch.tensor(
        [0.2291757769640981, 0.27143769617109437, 0.23128781927866496, 0.2680987075861425], dtype=D
    )
    assert torch.allclose(attention.softmatch(x)(x).masses()[0], law, atol=1e-15)


def test_known_sparse_laws():
    scores = torch.tensor([[1.0, 0.5, -1.0, 0.2]], dtype=D)
    entmax = r.Entmax(1.5).weights(scores, r.normalizers.Reference())
    assert torch.allclose(
        entmax, torch.tensor([[0.5928072275, 0.2703373496, 0, 0.1368554229]], dtype=D), atol=1e-10
    )
    sparsemax = r.Sparsemax().weights(scores, r.normalizers.Reference())
    assert torch.allclose(sparsemax, torch.tensor([[0.75, 0.25, 0, 0]], dtype=D), atol=1e-15)
    assert torch.allclose(r.Entmax(2.0).weights(scores, r.normalizers.Reference()), sparsemax, atol=1e-14)


@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 1.9, 2.0, 2.5, 4.0])
def test_entmax_meets_its_optimality_condition(alpha):
    """s_j - p_j^{α-1}/(α-1) is one constant on the support and at least s_j off it: the KKT conditions."""
    scores = 3 * torch.randn(50, 200, dtype=D)
    law = r.Entmax(alpha).weights(scores, r.normalizers.Reference())
    level = scores - law ** (alpha - 1) / (alpha - 1)
    inside = law > 0
    threshold = torch.where(inside, level, torch.full_like(level, -math.inf)).amax(-1, keepdim=True)
    assert torch.allclose(torch.where(inside, level, threshold), threshold.expand_as(level), atol=1e-7)
    assert (scores[~inside] <= threshold.expand_as(scores)[~inside] + 1e-7).all()


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: repr(e))
def test_one_key(engine):
    q, k, v = torch.randn(5, 4, dtype=D), torch.randn(1, 4, dtype=D), torch.randn(1, 3, dtype=D)
    assert torch.allclose(r.attend(q, k, v, engine=engine), v.expand(5, 3), atol=1e-15)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: repr(e))
def test_equal_keys_average_their_values(engine):
    q, k, v = torch.randn(5, 4, dtype=D), torch.randn(4, dtype=D).expand(6, 4), torch.randn(6, 3, dtype=D)
    for potential in (r.Dot(), r.Gaussian(bandwidth=1.0)):
        assert torch.allclose(
            r.attend(q, k, v, potential=potential, engine=engine), v.mean(0).expand(5, 3), atol=1e-14
        )


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: repr(e))
def test_two_keys_are_a_sigmoid(engine):
    q, k, v = torch.randn(5, 4, dtype=D), torch.randn(2, 4, dtype=D), torch.randn(2, 3, dtype=D)
    share = torch.sigmoid(q @ (k[0] - k[1]) / 2).unsqueeze(-1)
    assert torch.allclose(r.attend(q, k, v, engine=engine), share * v[0] + (1 - share) * v[1], atol=1e-14)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: repr(e))
def test_temperature_limits(engine):
    q, k, v = torch.randn(5, 4, dtype=D), torch.randn(6, 4, dtype=D), torch.randn(6, 3, dtype=D)
    cold = r.attend(q, k, v, normalizer=r.Softmax(1e-6), engine=engine)
    assert torch.allclose(cold, v[(q @ k.T).argmax(-1)], atol=1e-12)
    hot = r.attend(q, k, v, normalizer=r.Softmax(1e8), engine=engine)
    assert torch.allclose(hot, v.mean(0).expand(5, 3), atol=1e-6)


def test_gaussian_context():
    """Tilting N(m, S) by e^{θ·y} gives N(m + Sθ, S): attention to many samples comes close,
    the free energy too.
    """
    generator = torch.Generator().manual_seed(0)
    mean, root = torch.tensor([0.3, -0.2], dtype=D), torch.tensor([[0.6, 0.0], [0.2, 0.5]], dtype=D)
    keys = mean + torch.randn(200_000, 2, generator=generator, dtype=D) @ root.T
    cov, x = root @ root.T, torch.tensor([[0.5, 1.0], [-1.0, 0.4]], dtype=D)
    attention = r.Attention(r.Dot(scale=1.0), moment=r.SecondMoment())
    law = attention(x, keys)
    assert torch.allclose(law.mean, mean + x @ cov, atol=0.01)
    assert torch.allclose(law.covariance, cov.expand(2, 2, 2), atol=0.01)
    energy = r.Attention(r.Dot(scale=1.0)).free_energy(x, keys)
    assert torch.allclose(energy, x @ mean + 0.5 * (x @ cov * x).sum(-1), atol=0.01)


@pytest.mark.parametrize("width", [1, 3, 16, 64])
@pytest.mark.parametrize("engine", [None, *ENGINES], ids=lambda e: repr(e))
def test_the_default_bandwidth_divides_by_the_root_of_the_width(width, engine):
    """As the scale of Dot does; the width is that of projected points."""
    generator = torch.Generator().manual_seed(width)
    x, w = (torch.randn(n, width, generator=generator, dtype=D) for n in (6, 5))
    for points, potential in ((x, r.Gaussian()), (x @ w.mT, r.Gaussian(w_q=w.mT, w_k=w.mT))):
        expected = (-torch.cdist(points, points).square() / (2 * math.sqrt(points.shape[-1]))).softmax(-1) @ x
        torch.testing.assert_close(r.attend(x, x, x, potential=potential, engine=engine), expected)


def test_every_verb_takes_the_default_bandwidth():
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=D)
    layer, named = (r.Attention(r.Gaussian(bandwidth=b)) for b in (None, 2**0.25))
    law = r.dynamics.GaussianMeasure(torch.zeros(2, dtype=D), torch.eye(2, dtype=D))
    euler = r.dynamics.Euler(0.5)
    for verb in (
        lambda map: r.certify(map, r.Ball(1.0, tokens=4, width=2), r.Frobenius()).value,
        lambda map: r.certify(map, r.Neighborhood(x, 0.01), r.Frobenius()).value,
        lambda map: r.deviation(map, r.Neighborhood(x, 0.01), r.Frobenius()).value,
        lambda map: float(r.linearize(map, x).norm()),
        lambda map: r.dynamics.score(map, x),
        lambda map: r.dynamics.score_slope(map, law),
        lambda map: r.flow(map, x, euler, 1.0).at(1.0),
        lambda map: r.apply(map, x, engine=r.engines.Fourier(1e-9)),
        lambda map: r.compress(x, map, size=3).certificate.value,
        lambda map: r.apply(map.replace(normalizer=r.LinearKernel(r.normalizers.Elu())), x),
    ):
        torch.testing.assert_close(torch.as_tensor(verb(layer)), torch.as_tensor(verb(named)))


def test_dot_product_is_gaussian_attention_to_a_reweighted_measure():
    """e^{q·k} = e^{|q|²/2} e^{-|q-k|²/2} e^{|k|²/2}: the query's factor cancels."""
    q, mu = torch.randn(4, 3, dtype=D), r.Measure(torch.randn(6, 3, dtype=D))
    dot = r.Attention(r.Dot(scale=1.0))(q, mu)
    gaussian = r.Attention(r.Gaussian(bandwidth=1.0))(q, mu.reweight(lambda y: y.square().sum(-1) / 2))
    assert torch.allclose(dot, gaussian, atol=1e-12)


def test_metric_attention_is_mahalanobis():
    factor = torch.randn(3, 3, dtype=D)
    metric = factor @ factor.T
    x, y = torch.randn(4, 3, dtype=D), torch.randn(5, 3, dtype=D)
    difference = x.unsqueeze(1) - y
    expected = -0.5 * torch.einsum("mni,ij,mnj->mn", difference, metric, difference) / 1.7**2
    assert torch.allclose(r.Gaussian(factor, factor, 1.7).scores(x, y), expected, atol=1e-12)


def test_sinkhorn_is_doubly_stochastic():
    x = torch.randn(8, 3, dtype=D)
    plan = r.Sinkhorn(1e-10, 1000).weights(r.Gaussian(bandwidth=1.0).scores(x, x), r.normalizers.Reference())
    assert torch.allclose(plan.sum(-1), torch.ones(8, dtype=D), atol=1e-12)
    assert torch.allclose(plan.sum(-2), torch.ones(8, dtype=D), atol=1e-8)
    assert torch.allclose(plan, plan.T, atol=1e-8)  # symmetric scores
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=D)
    weighted = r.Sinkhorn(1e-10, 1000).weights(
        torch.randn(8, 4, dtype=D), r.normalizers.Reference(weights.log())
    )
    assert torch.allclose(weighted.mean(0), weights, atol=1e-8)


def test_sinkhorn_says_when_it_cannot():
    """Under a causal support only the identity is doubly stochastic;
    the iteration crawls there and says so.
    """
    x = torch.randn(6, 3, dtype=D)
    with pytest.warns(r.errors.ConvergenceWarning, match="support admits a doubly stochastic"):
        r.attend(x, x, x, normalizer=r.Sinkhorn(max_iterations=20), support=r.Causal())


def test_random_features_converge():
    """FAVOR+ estimates softmax attention without bias; orthogonal features are seeded,
    and more of them are better.
    """
    x = 0.5 * torch.randn(30, 8, dtype=D)
    exact = r.attend(x, x, x)
    errors = []
    for count in (16, 256, 4096):
        trials = [
            r.attend(x, x, x, normalizer=r.LinearKernel(r.normalizers.PositiveRandom.draw(8, count, s, D)))
            for s in range(8)
        ]
        errors.append(float(torch.stack([(t - exact).norm() / exact.norm() for t in trials]).mean()))
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert errors[2] < 0.1
    assert torch.equal(
        r.normalizers.PositiveRandom.draw(8, 20, 3).omega, r.normalizers.PositiveRandom.draw(8, 20, 3).omega
    )
    omega = r.normalizers.PositiveRandom.draw(8, 8, 3, D).omega
    gram = omega @ omega.T
    assert torch.allclose(gram, torch.diag(torch.diagonal(gram)), atol=1e-10)


def test_random_features_are_unbiased():
    """The mean of φ(x)·φ(y) over many draws is e^{x·y}, within five standard errors."""
    x, y = torch.tensor([0.4, -0.3, 0.2], dtype=D), torch.tensor([-0.1, 0.5, 0.6], dtype=D)
    maps = [r.normalizers.PositiveRandom.draw(3, 3, seed, D) for seed in range(4000)]
    draws = torch.stack([(m.log_features(x[None]) + m.log_features(y[None])).exp().sum() for m in maps])
    assert abs(float(draws.mean() - torch.exp(x @ y))) < 5 * float(draws.std()) / 4000**0.5


def test_rotary_scores_depend_on_offsets_only():
    x = torch.randn(5, 8, dtype=D)
    potential = r.Rotary(r.Dot())
    shifted = potential.scores(x, x, torch.arange(5) + 100, torch.arange(5) + 100)
    assert torch.allclose(potential.scores(x, x), shifted, atol=1e-10)


def test_t5_buckets():
    """The buckets that T5 uses, by hand: exact up to 7, then logarithmic,
    keys after the query in the upper half.
    """
    buckets = r.potentials.Logarithmic(32, 128)
    offsets = torch.tensor([0, -1, -7, -8, -15, -16, -127, -1000, 1, 7, 8, 1000])
    assert buckets.index(offsets).tolist() == [0, 1, 7, 8, 9, 10, 15, 15, 17, 23, 24, 31]
