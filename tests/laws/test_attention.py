"""The declaration: Proposition 9, the variational identity, weights as copies, permutations, moments,
pytrees.
"""

import math

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st

import regard as r
from regard.compute.engine import Plan, all_engines
from tests.nouns import LOOKUPS, NORMALIZERS, POTENTIALS, SUPPORTS, D


def cloud(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("potential", POTENTIALS)
def test_proposition_9(potential, lookup):
    """m(Q) [Π(Ψ_G(m(K)) L)] = (1/M) Σ δ_{attention(q_i, K, V)}: the composition of kernels is attention."""
    attention = r.Attention(POTENTIALS[potential], LOOKUPS[lookup])
    queries, keys = r.Measure(cloud(5, 4)), r.Measure(cloud(6, 4, seed=1))
    transported = queries @ attention.kernel(keys)
    values = LOOKUPS[lookup].values(keys.points, None)
    by_hand = POTENTIALS[potential].scores(queries.points, keys.points).softmax(-1) @ values
    assert torch.allclose(transported.points, by_hand, atol=1e-12)
    assert torch.allclose(transported.masses(), torch.full((5,), 0.2, dtype=D))
    assert torch.allclose(attention(queries, keys).points, by_hand, atol=1e-11)
    assert torch.allclose(attention(queries.points, keys.points), by_hand, atol=1e-11)


@pytest.mark.parametrize(
    "normalizer", [n for n, value in NORMALIZERS.items() if value.laws and value.rowwise]
)
@pytest.mark.parametrize("support", ["full", "causal", "window"])
def test_kernel_is_attention_for_every_law(normalizer, support):
    attention = r.Attention(r.Dot(), LOOKUPS["linear"], NORMALIZERS[normalizer], SUPPORTS[support])
    x = r.Measure(cloud(6, 4), cloud(6, seed=3))
    assert torch.allclose((x @ attention.kernel(x)).points, attention(x).points, atol=1e-10)


@given(seed=st.integers(0, 10**6), n=st.integers(1, 8), m=st.integers(1, 5), scale=st.floats(0.1, 10))
@settings(max_examples=80, deadline=None)
def test_gibbs_variational_identity(seed, n, m, scale):
    """ν(a) - KL(ν | μ) = log μ(G) - KL(ν | Ψ_G(μ)), for every law ν, to 1e-12 of its terms."""
    g = torch.Generator().manual_seed(seed)
    x, mu = (
        torch.randn(m, 3, generator=g, dtype=D),
        r.Measure(torch.randn(n, 3, generator=g, dtype=D), torch.randn(n, generator=g, dtype=D)),
    )
    nu = torch.randn(m, n, generator=g, dtype=D).softmax(-1)
    attention = r.Attention(r.Dot(scale=scale))
    scores, row = attention.potential.scores(x, mu.points), attention.kernel(mu).first.first(x).masses()
    left = (nu * scores).sum(-1) - (nu * (nu.log() - mu.log_masses())).sum(-1)
    energy = attention.free_energy(x, mu)
    divergence = (nu * (nu.log() - row.log())).sum(-1)
    size = 1 + scores.abs().max()
    assert torch.allclose(left, energy - divergence, atol=float(1e-12 * size))
    assert torch.allclose(attention.law_gap(nu, x, mu), divergence, atol=float(1e-12 * size))
    assert torch.allclose(attention.law_gap(row, x, mu), torch.zeros(m, dtype=D), atol=float(1e-12 * size))
    assert (
        (nu - row).abs().sum(-1) <= (2 * attention.law_gap(nu, x, mu).clamp_min(0)).sqrt() + 1e-9
    ).all()  # Pinsker


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("potential", ["dot", "gaussian untied", "laplace", "alibi", "softcap"])
def test_free_energy(potential, support):
    """log μ(G) on what the query sees, the same from every engine;
    its gradient in the scores is the attention row.
    """
    x = r.Measure(cloud(2, 1, 6, 4), cloud(2, 1, 6, seed=1))
    attention = r.Attention(POTENTIALS[potential], support=SUPPORTS[support])
    scores = attention.potential.scores(x.points, x.points)
    allowed = SUPPORTS[support].allows(torch.arange(6), torch.arange(6))
    expected = (scores + x.log_masses().unsqueeze(-2)).masked_fill(~allowed, -math.inf).logsumexp(-1)
    assert torch.allclose(attention.free_energy(x), expected, atol=1e-11)


def test_free_energy_differentiates_to_the_row():
    """∂F_i/∂log w_j is the attention weight P_ij, through the fused kernel; temperature multiplies."""
    x, y = cloud(4, 3), cloud(7, 3, seed=1)
    log_weights = cloud(7, seed=2).requires_grad_()
    for attention in (r.Attention(r.Dot()), r.Attention(r.Gaussian(bandwidth=2.0)), r.Attention(r.Laplace())):
        energy = attention.free_energy(x, r.Measure(y, log_weights))
        rows = torch.stack([torch.autograd.grad(e, log_weights, retain_graph=True)[0] for e in energy])
        weights = attention.kernel(r.Measure(y, log_weights.detach())).first.first(x).masses()
        share = log_weights.detach().softmax(-1)
        assert torch.allclose(
            rows, weights - share, atol=1e-11
        )  # the measure is normalized, so the total is taken off
    warm = r.Attention(r.Dot(), normalizer=r.Softmax(2.0))
    assert torch.allclose(
        warm.free_energy(x, y), 2 * r.Attention(0.5 * r.Dot()).free_energy(x, y), atol=1e-11
    )


@pytest.mark.parametrize("normalizer", [n for n, v in NORMALIZERS.items() if v.variational and v.rowwise])
def test_free_energy_of_other_normalizers_is_their_best_objective(normalizer):
    x = cloud(5, 4)
    attention = r.Attention(r.Dot(), normalizer=NORMALIZERS[normalizer])
    plans = [engine.plan(_posed(attention, x)) for engine in all_engines() if engine.name != "flex"]
    values = [plan.free_energy() for plan in plans if isinstance(plan, Plan)]
    assert len(values) >= 2
    for value in values[1:]:
        assert torch.allclose(value, values[0], atol=1e-9)


def _posed(attention, x):
    from regard.compute.application import problem_of

    return problem_of(attention, x, None)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_uniform_weights_are_no_weights(normalizer):
    x = cloud(6, 4)
    attention = r.Attention(r.Dot(), normalizer=NORMALIZERS[normalizer])
    assert torch.allclose(attention(r.Measure(x, torch.zeros(6, dtype=D))).points, attention(x), atol=1e-7)


@pytest.mark.parametrize(
    "potential", ["dot", "gaussian", "cosine", "laplace", "student", "additive", "bilinear", "function"]
)
def test_permutation_equivariance(potential):
    """Attention(P Q, R K, R V) = P Attention(Q, K, V), and self-attention is equivariant."""
    attention = r.Attention(POTENTIALS[potential], LOOKUPS["linear"])
    x, y = cloud(5, 4), cloud(6, 4, seed=1)
    p, s = torch.randperm(5), torch.randperm(6)
    assert torch.allclose(attention(x[p], y[s]), attention(x, y)[p], atol=1e-12)
    assert torch.allclose(attention(x[p]), attention(x)[p], atol=1e-12)


@pytest.mark.parametrize("potential", ["alibi", "relative logarithmic", "rotary"])
def test_positions_break_the_symmetry(potential):
    attention = r.Attention(
        r.Dot() + POTENTIALS[potential] if potential != "rotary" else POTENTIALS[potential]
    )
    x, p = cloud(6, 4), torch.tensor([1, 0, 2, 3, 4, 5])
    assert not torch.allclose(attention(x[p]), attention(x)[p], atol=1e-3)
    assert torch.allclose(attention(r.Measure(x[p], marks=p)).points, attention(x)[p], atol=1e-12)


def test_moments():
    x, y = cloud(5, 4), r.Measure(cloud(6, 4, seed=1), cloud(6, seed=2))
    plain = r.Attention(r.Dot(), LOOKUPS["linear"])
    law = r.apply(plain.replace(moment=r.Law()), x, y)
    assert torch.allclose(law.mean(), plain(x, y), atol=1e-12)
    second = plain.replace(moment=r.SecondMoment())(x, y)
    assert torch.allclose(second.mean, law.mean(), atol=1e-12)
    assert torch.allclose(second.covariance, law.covariance(), atol=1e-11)
    mode = plain.replace(moment=r.Mode())(x, y)
    values = LOOKUPS["linear"].values(y.points, None)
    assert torch.allclose(mode, values[(r.Dot().scores(x, y.points) + y.log_masses()).argmax(-1)])
    draws = torch.stack(
        [plain.replace(moment=r.Sample(torch.Generator().manual_seed(i)))(x, y) for i in range(4000)]
    )
    assert torch.allclose(draws.mean(0), plain(x, y), atol=0.15)
    again = [plain.replace(moment=r.Sample(torch.Generator().manual_seed(7)))(x, y) for _ in range(2)]
    assert torch.equal(*again)
    mixed = r.apply(plain.replace(moment=r.Law()), r.Measure(x), y)
    assert torch.allclose(mixed.mean(), plain(x, y).mean(0), atol=1e-12)
    hard = r.Attention(r.Dot(), moment=r.Mode(), support=r.Padding(torch.tensor(0)))
    assert torch.equal(hard(x), torch.zeros_like(x))


def test_second_moment_does_not_cancel():
    """Values far from the origin: the covariance keeps its digits."""
    x = cloud(6, 4) + 1e6
    attention = r.Attention(r.Gaussian(bandwidth=1.0), moment=r.SecondMoment())
    shifted = r.Attention(r.Gaussian(bandwidth=1.0), moment=r.SecondMoment())
    assert torch.allclose(attention(x).covariance, shifted(x - 1e6).covariance, atol=1e-8)


def test_heads_broadcast():
    w_q, w_k, w_v = cloud(3, 4, 2), cloud(3, 4, 2, seed=1), cloud(3, 4, 5, seed=2)
    x = cloud(7, 4, seed=3)
    heads = r.Attention(r.Dot(w_q, w_k), r.Linear(w_v))(x)
    assert heads.shape == (3, 7, 5)
    one = r.Attention(r.Dot(w_q[1], w_k[1]), r.Linear(w_v[1]))(x)
    assert torch.allclose(heads[1], one, atol=1e-12)
    grouped = r.Attention(r.Dot(cloud(6, 4, 2), w_k), r.Linear(w_v))(x)
    assert grouped.shape == (6, 7, 5)
    assert torch.allclose(
        grouped[3], r.Attention(r.Dot(cloud(6, 4, 2)[3], w_k[1]), r.Linear(w_v[1]))(x), atol=1e-12
    )


def test_declarations_are_values():
    attention = r.Attention(
        r.Dot(cloud(4, 3), cloud(4, 3, seed=1)), r.Linear(cloud(4, 2)), support=r.Causal()
    )
    leaves, tree = pytree.tree_flatten(attention)
    assert len(leaves) == 3
    rebuilt = pytree.tree_unflatten(leaves, tree)
    x = cloud(5, 4, seed=5)
    assert torch.equal(rebuilt(x), attention(x))
    assert "w_q=float64[4, 3]" in repr(attention)
    assert "support=Causal()" in repr(attention)
    with pytest.raises(AttributeError):
        attention.support = r.Full()
    gradient = torch.func.grad(lambda a: a.potential.scores(x, x).sum())(attention)
    assert gradient.potential.w_q.shape == (4, 3)
