"""Cases that once hurt; each stays as a test."""

import math

import pytest
import torch

import regard as r
from tests.nouns import D


def test_rotary_of_wrapped_distances():
    """Distances may shift their features, rotations may not: Rotary(2 g) = 2 Rotary(g),
    and the same through a soft cap.
    """
    x = torch.randn(5, 4, dtype=D)
    g = r.Gaussian(torch.randn(4, 4, dtype=D), torch.randn(4, 4, dtype=D), bandwidth=1.0)
    rotated = r.Rotary(g).scores(x, x)
    assert torch.allclose(r.Rotary(2.0 * g).scores(x, x), 2 * rotated, atol=1e-10)
    assert torch.allclose(r.Rotary(r.SoftCap(g, 5.0)).scores(x, x), 5 * torch.tanh(rotated / 5), atol=1e-10)


def test_composed_kernels_keep_positions():
    """A moved point keeps its mark, so a causal kernel after a causal kernel is the same as two
    transports.
    """
    x = torch.randn(5, 4, dtype=D)
    kernel = r.Attention(r.Dot(), support=r.Causal()).kernel(x)
    mu = r.Measure(x)
    assert torch.allclose(((mu @ kernel) @ kernel).points, (mu @ (kernel @ kernel)).points, atol=1e-12)


def test_a_scale_is_a_factor_for_feature_kernels():
    x = torch.randn(6, 4, dtype=D)
    linear = r.LinearKernel(r.normalizers.Elu())
    one, other = (
        r.attend(x, x, x, potential=p, normalizer=linear) for p in (4.0 * r.Dot(scale=1.0), r.Dot(scale=4.0))
    )
    assert torch.allclose(one, other, atol=1e-12)
    one, other = (r.attend(x, x, x, potential=p, normalizer=linear) for p in (-r.Dot(), r.Dot(scale=-0.5)))
    assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("engine", [r.engines.LinearEngine(), r.engines.Tiled(), r.engines.ReferenceEngine()])
def test_a_late_large_key_hides_no_early_one(engine):
    """Under a causal support the first row sees only small features;
    they must not underflow beside a huge later key.
    """
    x = torch.randn(300, 4)
    k = x.clone()
    k[200] *= 40
    features = r.LinearKernel(r.normalizers.PositiveRandom.draw(4, 64, 0))
    out = r.attend(x, k, torch.ones(300, 1), normalizer=features, support=r.Causal(), engine=engine)
    assert torch.allclose(out, torch.ones(300, 1), atol=1e-5)


def test_second_moment_of_nothing():
    x = torch.randn(5, 4, dtype=D)
    law = r.Attention(r.Dot(), support=r.Where(torch.zeros(5, 5, dtype=torch.bool)), moment=r.SecondMoment())(
        x
    )
    assert torch.equal(law.mean, torch.zeros(5, 4, dtype=D))
    assert torch.equal(law.covariance, torch.zeros(5, 4, 4, dtype=D))
    nothing = r.Attention(r.Dot(), moment=r.SecondMoment())(x, x[:0])
    assert torch.equal(nothing.mean, torch.zeros(5, 4, dtype=D))


def test_no_keys_at_all():
    x = torch.randn(5, 4)
    for normalizer in (r.Softmax(), r.LinearKernel(r.normalizers.Elu()), r.Entmax()):
        energy = r.Attention(r.Dot(), normalizer=normalizer).free_energy(x, x[:0])
        assert torch.equal(energy, torch.full((5,), -math.inf))
    assert torch.equal(r.Attention(r.Dot(), moment=r.Mode())(x, x[:0]), torch.zeros(5, 4))


def test_a_law_of_nothing_is_an_error_that_says_so():
    x = torch.randn(5, 4)
    hidden = r.Where(torch.zeros(5, 5, dtype=torch.bool))
    with pytest.raises(r.errors.ArgumentError, match="moment: is Law, and some query sees nothing"):
        r.Attention(r.Dot(), support=hidden, moment=r.Law())(x)
    with pytest.raises(r.errors.ArgumentError, match="support: leaves a query that sees nothing"):
        r.Attention(r.Dot(), support=hidden).kernel(x)(x)


def test_kernels_with_heads():
    w, w_v, x = torch.randn(3, 4, 2, dtype=D), torch.randn(3, 4, 5, dtype=D), torch.randn(6, 4, dtype=D)
    attention = r.Attention(r.Dot(w, w), r.Linear(w_v))
    assert torch.allclose(attention.kernel(x)(x).points.squeeze(-2), attention(x), atol=1e-12)
    grouped = r.Dot(torch.randn(6, 4, 2, dtype=D), w)
    assert grouped.scores(x, x).shape == (6, 6, 6)


def test_free_energy_of_sinkhorn_and_its_dtype():
    x = torch.randn(5, 4)
    assert r.Attention(r.Dot(), normalizer=r.Sinkhorn()).free_energy(x).shape == (5,)
    assert r.Attention(r.Gaussian(bandwidth=0.01)).free_energy(x).dtype == torch.float32


def test_gaps_are_laws_and_not_negative():
    x = torch.randn(5, 4)
    attention = r.Attention(r.Dot())
    with pytest.raises(r.errors.ArgumentError, match="law: has rows that are not probability laws"):
        attention.law_gap(torch.zeros(5, 5), x)
    rows = attention.softmatch(x)(x).masses()
    assert (attention.law_gap(rows, x) >= 0).all()
    assert (
        attention.law_gap(torch.eye(5), r.Measure(x, torch.tensor([0, 0, 0, 0, -torch.inf])))[4] == math.inf
    )


def test_log_weights_of_a_batch_are_not_groups():
    """(batch, n) beside (batch, heads, n, d): an error, never a silent grouping."""
    q = torch.randn(2, 4, 5, 8)
    with pytest.raises(r.errors.ArgumentError, match="have batch shapes"):
        r.attend(q, q, q, log_weights=torch.randn(2, 5))
    assert r.attend(q, q, q, log_weights=torch.randn(2, 1, 5)).shape == q.shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: r.Attention(r.Dot())(x, x.double()), "context: has dtype torch.float64"),
        (lambda x: r.Softmax("hot"), "temperature: is hot"),
        (lambda x: r.measure.GaussianMeasure(torch.zeros(2), 1.0), "covariance: is a float"),
        (lambda x: r.attend(x, x, x, engine="sdpa"), "engine: is 'sdpa'; give an engine value"),
        (lambda x: r.apply(r.Attention(r.Dot()), x, engine=r.engines.Sdpa), "engine: is <class"),
    ],
)
def test_errors_that_were_raw(call, message):
    with pytest.raises(r.errors.ArgumentError, match=message):
        call(torch.randn(4, 3))


def test_operators_refuse_strangers():
    with pytest.raises(TypeError):
        r.Causal() & torch.ones(2)
    with pytest.raises(TypeError):
        r.Attention(r.Dot()).kernel(torch.randn(3, 2)) @ 3
    with pytest.raises(TypeError):
        r.Dot() + 3
    with pytest.raises(TypeError, match="abstract"):
        r.Potential()
    assert len(sum([r.Dot(), r.Gaussian(bandwidth=1.0), r.Alibi(0.1)]).terms) == 3


def test_merging_counts_only_for_softmax():
    """Entmax and sigmoid count keys: three copies are not one key of triple weight among fewer."""
    x = torch.randn(5, 4, dtype=D)
    doubled = r.Measure(torch.cat([x, x[:1], x[:1]]))
    q = torch.randn(3, 4, dtype=D)
    assert torch.allclose(
        r.Attention(r.Dot())(q, doubled), r.Attention(r.Dot())(q, doubled.merge()), atol=1e-12
    )
    sigmoid = r.Attention(r.Dot(), normalizer=r.Sigmoid())
    assert not torch.allclose(sigmoid(q, doubled), sigmoid(q, doubled.merge()), atol=1e-3)


@pytest.mark.parametrize("engine", [r.engines.Sdpa(), r.engines.Tiled(), r.engines.ReferenceEngine()])
def test_heads_may_come_from_anywhere(engine):
    """A temperature for each head, marks for each sample, weights for each sample:
    the output has their batch, in every engine.
    """
    x = torch.randn(5, 4, dtype=D)
    heads = r.attend(x, x, x, normalizer=r.Softmax(torch.tensor([0.5, 1.0, 2.0], dtype=D)), engine=engine)
    assert heads.shape == (3, 5, 4)
    assert torch.allclose(heads[1], r.attend(x, x, x), atol=1e-12)
    marks = torch.stack([torch.arange(5), torch.arange(5).flip(0)])
    causal = r.apply(
        r.Attention(r.Dot(), support=r.Causal()), r.Measure(x.expand(2, 5, 4), marks=marks), engine=engine
    ).points
    assert torch.allclose(causal[0], r.attend(x, x, x, support=r.Causal()), atol=1e-12)
    assert torch.allclose(
        causal[1].flip(0), r.attend(x.flip(0), x.flip(0), x.flip(0), support=r.Causal()), atol=1e-12
    )


def test_free_energy_of_long_and_empty_rows():
    """More rows than a block, a support without a row axis,
    and a learned temperature whose gradient an empty row must not spoil.
    """
    x = torch.randn(300, 4, dtype=D)
    energy = r.Attention(r.Dot(), support=r.Padding(torch.tensor(7))).free_energy(x)
    assert torch.allclose(energy, (x @ x[:7].T / 2).logsumexp(-1) - math.log(300), atol=1e-10)
    temperature = torch.tensor(1.5, dtype=D, requires_grad=True)
    for potential in (r.Dot(), r.Laplace()):
        seen = r.Where(torch.ones(5, 5, dtype=torch.bool).tril(-1))
        energy = r.Attention(potential, normalizer=r.Softmax(temperature), support=seen).free_energy(x[:5])
        assert energy[0] == -math.inf
        assert torch.isfinite(torch.autograd.grad(energy[1:].sum(), temperature, retain_graph=True)[0])
        assert torch.isfinite(torch.autograd.grad(energy, temperature, torch.ones_like(energy))[0])


def test_a_learned_temperature_reaches_position_biases():
    """The fused kernel gives no gradient to what a temperature divides beside the scores,
    so it must refuse.
    """
    x = torch.randn(5, 4, dtype=D)
    temperature = torch.tensor(1.5, dtype=D, requires_grad=True)
    declared = {"potential": r.Dot() + r.Alibi(0.5), "normalizer": r.Softmax(temperature)}
    mine, theirs = (
        torch.autograd.grad(r.attend(x, x, x, engine=e, **declared).square().sum(), temperature)[0]
        for e in (None, r.engines.ReferenceEngine())
    )
    assert torch.allclose(mine, theirs, atol=1e-10)


def test_a_hidden_first_block_has_no_say():
    """Scores far below zero after a block of keys that nobody sees:
    the running maximum must not start at zero.
    """
    x, k = torch.randn(6, 4, dtype=D), torch.randn(200, 4, dtype=D) + 1
    weights = torch.zeros(200, dtype=D)
    weights[:64] = -math.inf
    declared = {"potential": r.Laplace(bandwidth=1e-3), "log_weights": weights}
    assert torch.allclose(
        r.attend(x, k, k, engine=r.engines.Tiled(pairs=1), **declared),
        r.attend(x, k, k, engine=r.engines.ReferenceEngine(), **declared),
    )


def test_padding_looks_at_marks():
    """Keys with marks beyond their number are not padding."""
    mu = r.Measure(torch.randn(3, 4, dtype=D), marks=torch.tensor([5, 6, 7]))
    attention = r.Attention(r.Dot(), support=r.Padding(torch.tensor(10)))
    assert torch.allclose(
        r.apply(attention, mu, engine=r.engines.Sdpa()).points,
        r.apply(attention, mu, engine=r.engines.ReferenceEngine()).points,
        atol=1e-12,
    )


def test_learned_marks_get_their_gradient():
    x, marks = torch.randn(5, 4, dtype=D), torch.rand(5, dtype=D, requires_grad=True)
    attention = r.Attention(r.Dot() + r.Alibi(1.0))
    mine, theirs = (
        torch.autograd.grad(
            r.apply(attention, r.Measure(x, marks=marks), engine=e).points.square().sum(), marks
        )[0]
        for e in (None, r.engines.ReferenceEngine())
    )
    assert theirs.abs().max() > 1e-3
    assert torch.allclose(mine, theirs, atol=1e-10)


def test_couplings_are_not_kernels():
    with pytest.raises(r.errors.ArgumentError, match="couples the queries"):
        r.Attention(r.Dot(), normalizer=r.Sinkhorn()).kernel(torch.randn(3, 2))


@pytest.mark.parametrize(
    "potential", [r.Gaussian(bandwidth=1.0), r.StudentT(nu=2.0), r.SoftCap(r.Gaussian(bandwidth=1.0), 5.0)]
)
def test_curvature_where_query_meets_key(potential):
    """The square of a distance is smooth at zero; so is the attention to it."""
    k = torch.randn(5, 2, dtype=D)
    q = k[:1].clone().requires_grad_()

    def call(q):
        return r.attend(q, k, k, potential=potential, engine=r.engines.ReferenceEngine())

    assert torch.autograd.gradgradcheck(call, (q,), atol=1e-5)
    assert torch.autograd.gradgradcheck(lambda q: r.attend(q, k, k, potential=potential), (q,), atol=1e-5)


def test_half_precision_keeps_norms_and_marks():
    q = torch.randn(64, 64).half() * 60
    exact = r.attend(q.double(), q.double(), q.double(), potential=r.Cosine(scale=10.0))
    for engine in (r.engines.Sdpa(), r.engines.Tiled(), r.engines.ReferenceEngine()):
        out = r.attend(q, q, q, potential=r.Cosine(scale=10.0), engine=engine)
        assert (out.double() - exact).abs().max() / exact.abs().max() < 5e-3
    x, marks = torch.randn(64, 8), torch.arange(64).double() + 1.7e9
    plain = r.apply(r.Attention(r.Dot() + r.Alibi(0.3), support=r.Causal()), x)
    for engine in (r.engines.Sdpa(), r.engines.Tiled(), r.engines.ReferenceEngine()):
        late = r.apply(
            r.Attention(r.Dot() + r.Alibi(0.3), support=r.Causal()),
            r.Measure(x.bfloat16(), marks=marks),
            engine=engine,
        ).points
        assert (late.float() - plain).abs().max() < 0.05
    far = r.apply(r.Attention(r.Dot() + r.Alibi(0.3)), r.Measure(x, marks=torch.arange(64) + 2**25)).points
    assert torch.allclose(far, r.apply(r.Attention(r.Dot() + r.Alibi(0.3)), x), atol=1e-5)


@pytest.mark.parametrize("alpha", [1.0001, 1.001, 1.01, 1.05])
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_entmax_close_to_softmax(alpha, dtype):
    x = torch.randn(4, 100, 4, dtype=dtype).requires_grad_()
    out = r.attend(x, x, x, normalizer=r.Entmax(alpha))
    assert torch.isfinite(torch.autograd.grad(out.square().sum(), x)[0]).all()
    assert torch.allclose(out, r.attend(x, x, x), atol=15 * (alpha - 1) + 1e-6)


def test_gates_at_zero():
    """A learned factor that starts at zero, and a scale of zero beside learned weights."""
    x = torch.randn(6, 4, dtype=D)
    gate = torch.tensor(0.0, dtype=D, requires_grad=True)
    weights = torch.zeros(6, dtype=D, requires_grad=True)
    for declared, moving in (
        ({"potential": r.Dot() + gate * r.Cosine()}, gate),
        ({"potential": r.Dot(scale=0.0), "log_weights": weights}, weights),
    ):
        mine, theirs = (
            torch.autograd.grad(r.attend(x, x, x, engine=e, **declared).square().sum(), moving)[0]
            for e in (r.engines.Sdpa(), r.engines.ReferenceEngine())
        )
        assert torch.isfinite(mine).all()
        assert torch.allclose(mine, theirs, atol=1e-10)


def test_nothing_counts():
    """All log-weights -inf: zero output, and gradients without NaN."""
    x = torch.randn(5, 4, dtype=D)
    for normalizer in (r.Sinkhorn(0.0, 3), r.Sigmoid(), r.Softmax(), r.Entmax()):
        for engine in (None, r.engines.ReferenceEngine()):
            weights = torch.full((5,), -math.inf, dtype=D, requires_grad=True)
            out = r.attend(x, x, x, normalizer=normalizer, log_weights=weights, engine=engine)
            assert torch.equal(out, torch.zeros_like(out))
            assert torch.isfinite(torch.autograd.grad(out.sum(), weights)[0]).all()
    energy = r.Attention(
        r.Dot(), normalizer=r.LinearKernel(r.normalizers.Elu()), support=r.Padding(torch.tensor(0))
    ).free_energy(x.requires_grad_())
    assert torch.equal(energy, torch.full((5,), -math.inf, dtype=D))
    assert torch.isfinite(torch.autograd.grad(energy, x, torch.zeros_like(energy))[0]).all()


def test_gap_gradient_beside_keys_that_count_zero():
    x = torch.randn(4, 3, dtype=D)
    mu = r.Measure(x, torch.tensor([0.0, 0.0, -math.inf, 0.0], dtype=D))
    law = torch.tensor([0.5, 0.25, 0.0, 0.25], dtype=D).expand(4, 4).clone().requires_grad_()
    gap = r.Attention(r.Dot()).law_gap(law, x, mu)
    assert torch.isfinite(torch.autograd.grad(gap.sum(), law)[0]).all()


@pytest.mark.parametrize(
    "support",
    [
        r.Window(2, 1),
        r.Document(torch.tensor([0, 0, 1, 1, 1, 2])),
        r.Where(torch.ones(6, 6, dtype=torch.bool).tril()),
    ],
)
def test_blocks_of_masks_compile(support):
    x = torch.randn(2, 6, 4)
    torch._dynamo.reset()
    call = torch.compile(
        lambda x: r.attend(
            x, x, x, potential=r.Dot() + r.Alibi(0.1), support=support, engine=r.engines.Sdpa()
        ),
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.allclose(
        call(x), r.attend(x, x, x, potential=r.Dot() + r.Alibi(0.1), support=support), atol=1e-6
    )


def test_wide_parameters_are_named():
    x = torch.randn(4, 3)
    for declared in (
        {"potential": r.Gaussian(bandwidth=torch.tensor(1.0, dtype=D))},
        {"log_weights": torch.zeros(4, dtype=D)},
    ):
        with pytest.raises(r.errors.ArgumentError, match="has float64 tensors and the points are"):
            r.attend(x, x, x, **declared)


def test_moments_of_values_with_heads():
    x = torch.randn(6, 4, dtype=D)
    attention = r.Attention(r.Dot(), r.Linear(torch.randn(3, 4, 2, dtype=D)))
    assert attention.replace(moment=r.Mode())(x).shape == (3, 6, 2)
    assert attention.replace(moment=r.Sample(torch.Generator().manual_seed(0)))(x).shape == (3, 6, 2)
    assert torch.allclose(
        attention.replace(moment=r.Law())(r.Measure(x)).mean(), attention(x).mean(-2), atol=1e-12
    )
    grouped = r.Attention(
        r.Dot(torch.randn(4, 4, 2, dtype=D), torch.randn(2, 4, 2, dtype=D)),
        r.Linear(torch.randn(2, 4, 3, dtype=D)),
    )
    assert torch.allclose(grouped.kernel(x)(x).points.squeeze(-2), grouped(x), atol=1e-12)


def test_sinkhorn_never_compiles_unasked():
    """Inside Tiled, too, FlexAttention must be asked for by name."""
    from regard.compute.selection import select
    from regard.compute.tensors import pose_tensors

    x = torch.randn(8, 4)
    problem = pose_tensors(x, x, x, r.SoftCap(r.Dot(), 5.0), r.Softmax(), r.Full(), None)
    with torch.no_grad():
        assert select(problem).engine.name == "tiled"


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_projected_gaussians_keep_their_digits(offset):
    """A bandwidth of a hundredth of the spread, after a projection."""
    x, w, v = torch.rand(100, 3) + offset, torch.randn(3, 5), torch.randn(100, 4)
    potential = r.Gaussian(w, w, bandwidth=0.02)
    exact = r.attend(
        x.double(),
        x.double(),
        v.double(),
        potential=r.Gaussian(w.double(), w.double(), bandwidth=0.02),
        engine=r.engines.ReferenceEngine(),
    )
    for engine in (r.engines.Sdpa(), r.engines.Tiled(), r.engines.ReferenceEngine()):
        found = r.attend(x, x, v, potential=potential, engine=engine)
        assert found.dtype == torch.float32
        assert (found.double() - exact).abs().max() / exact.abs().max() < 2e-6


@pytest.mark.parametrize(
    "normalizer", [r.Softmax(), r.Entmax(1.5), r.Entmax(2.5), r.Sparsemax(), r.Sigmoid()]
)
def test_energies_have_finite_gradients(normalizer):
    """Masked pairs, keys that count zero, a query that sees nothing:
    the gradient of the free energy is finite where the energy is.
    """
    x = torch.randn(2, 6, 4, dtype=D, requires_grad=True)
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    seen[2] = False
    weights = torch.tensor([0, -math.inf, 1, 0, 0, 2.0], dtype=D)
    energy = r.Attention(r.Dot(), normalizer=normalizer, support=r.Where(seen)).free_energy(
        r.Measure(x, weights)
    )
    assert energy.shape == (2, 6)
    assert (energy[:, 2] == -math.inf).all()
    finite = torch.where(energy > -math.inf, energy, torch.zeros_like(energy))
    assert torch.isfinite(torch.autograd.grad(finite.sum(), x)[0]).all()
