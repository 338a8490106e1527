"""Cases that once gave a wrong number."""

import pytest
import torch
from torch.func import jacrev, jvp, vmap

import regard as r
from tests.nouns import D


def dense_norm(f, x):
    return float(torch.linalg.matrix_norm(jacrev(f)(x).reshape(-1, x.numel()), 2))


@pytest.mark.parametrize("scale", [0.0, -1.0, 2.0])
@pytest.mark.parametrize("support", [r.Full(), r.Causal(), r.Window(2, 1)], ids=repr)
def test_scales_of_every_sign(scale, support):
    """The kernel masks before it scales: a negative scale turned -inf into +inf."""
    x, t = torch.randn(6, 16, dtype=D), torch.randn(6, 16, dtype=D)
    for potential in (r.Dot(scale=scale), scale * r.Cosine(scale=2.0), scale * r.Gaussian(bandwidth=2.0)):
        a = r.Attention(potential, support=support)
        f = lambda x, a=a: r.apply(a, x, engine=r.engines.ReferenceEngine())  # noqa: E731
        assert torch.allclose(a(x), f(x))
        jacobian = r.linearize(a, x)
        assert torch.allclose(jacobian.mv(t), jvp(f, (x,), (t,))[1], atol=1e-10)
        assert float(jacobian.norm(tolerance=1e-8)) == pytest.approx(dense_norm(f, x), rel=1e-7)


RANDOM = r.normalizers.PositiveRandom.draw(4, 16, 0, D)


@pytest.mark.parametrize(
    ("feature_map", "potential"),
    [
        (r.normalizers.Elu(), r.Gaussian(bandwidth=1.5)),
        (r.normalizers.Elu(), r.Gaussian(bandwidth=1.0) + r.Dot()),
        (r.normalizers.Elu(), r.Rotary(r.Gaussian(bandwidth=2.0))),
        (RANDOM, r.Gaussian(bandwidth=1.5)),
        (RANDOM, 0.5 * r.Gaussian(bandwidth=1.0)),
    ],
    ids=repr,
)
def test_linear_kernels_of_distances(feature_map, potential):
    """φ(q)·φ(k) depends on the origin, which must not follow the data: not in a derivative,
    and not from the future.
    """
    a = r.Attention(potential, normalizer=r.LinearKernel(feature_map), support=r.Causal())
    x, t, step = torch.randn(6, 4, dtype=D), torch.randn(6, 4, dtype=D), 1e-5
    for engine in (r.engines.ReferenceEngine(), r.engines.LinearEngine(), r.engines.Tiled()):
        f = lambda x, e=engine: r.apply(a, x, engine=e)  # noqa: E731
        assert torch.allclose(
            jvp(f, (x,), (t,))[1], (f(x + step * t) - f(x - step * t)) / (2 * step), atol=1e-7
        )
    later = x.clone()
    later[5] += 10
    assert torch.allclose(a(x)[:5], a(later)[:5])


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].cos()


@pytest.mark.parametrize("f", [Once.apply, lambda z: z + Once.apply(z)], ids=["alone", "in a sum"])
def test_backward_without_a_graph_is_noticed(f):
    jacobian = r.linearize(f, torch.randn(4, 3, dtype=D))
    assert torch.isfinite(jacobian.rmv(torch.ones(4, 3, dtype=D))).all()
    for ask in (lambda: jacobian.mv(torch.ones(4, 3, dtype=D)), jacobian.norm, jacobian.norm_certificate):
        with pytest.raises(r.errors.ArgumentError, match="map"):
            ask()


@pytest.mark.parametrize(
    ("shape", "f"),
    [
        ((3, 4, 2), lambda x: torch.einsum("bnd,hde->bhne", x, torch.ones(3, 2, 2, dtype=D).cumsum(0)).sin()),
        ((3, 3, 4, 2), lambda x: x.sin().cumsum(1)),
        ((2, 3, 4, 2), lambda x: x.square()),
        ((5, 3), lambda x: x.sin() @ torch.ones(3, 4, dtype=D).cumsum(1)),
        ((3, 4, 2), lambda x: x.square().sum(1)),
    ],
    ids=["heads inside", "more dimensions", "square", "vectors", "pooled"],
)
def test_batches_of_functions(shape, f):
    """Leading dimensions are independent problems, whatever the others are."""
    x = torch.randn(*shape, dtype=D)
    jacobian = r.linearize(f, x, batch=1)
    exact = torch.tensor(
        [
            dense_norm(lambda z, i=i: f(torch.cat([x[:i], z.unsqueeze(0), x[i + 1 :]]))[i], x[i])
            for i in range(shape[0])
        ],
        dtype=D,
    )
    assert torch.allclose(jacobian.norm(tolerance=1e-9).value, exact, rtol=1e-7)
    parts = jacobian.norm_certificate().parts
    assert all(float(e) <= p.value <= float(e) * (1 + 1e-7) for e, p in zip(exact, parts, strict=True))


@pytest.mark.parametrize("size", [1e-170, 1e-90, 1e90, 1e160])
def test_extreme_sizes(size):
    """Squares leave the floating range long before the numbers do."""
    x, w = torch.randn(5, 3, dtype=D), torch.randn(3, 3, dtype=D)
    exact = dense_norm(r.Attention(r.Dot(), r.Linear(w)), x)
    jacobian = r.linearize(r.Attention(r.Dot(), r.Linear(size * w)), x)
    assert float(jacobian.norm(tolerance=1e-6)) / size == pytest.approx(exact, rel=1e-5)
    for dense in (0, 100):
        assert exact * (1 - 1e-12) <= jacobian.norm_certificate(dense=dense).value / size <= 1.2 * exact
    usual = r.linearize(r.Attention(r.Dot(), r.Linear(w)), x)
    assert torch.allclose(jacobian.influence() / size, usual.influence())
    assert float(jacobian.norm(r.TokenMax())) / size == pytest.approx(float(usual.norm(r.TokenMax())))


def test_fewer_outputs_than_inputs():
    x = torch.randn(40, dtype=D)
    assert float(r.linearize(lambda y: y.sin().sum().reshape(1), x).norm(tolerance=1e-9)) == pytest.approx(
        float(x.cos().norm())
    )
    a, z = r.Attention(r.Dot(), r.Linear(torch.randn(18, 3, dtype=D))), torch.randn(1, 18, dtype=D)
    assert float(r.linearize(a, z).norm(tolerance=1e-9)) == pytest.approx(dense_norm(a, z))


def test_copies_of_singular_values():
    """Equal, nearly equal and graded spectra; identical tokens."""
    x = torch.randn(1, 4, dtype=D).expand(5, 4).clone()
    assert torch.allclose(r.linearize(r.Attention(r.Dot()), x).singular(4).value, torch.ones(4, dtype=D))
    generator = torch.Generator().manual_seed(0)
    for trial in range(60):
        n = int(torch.randint(2, 9, (), generator=generator))
        spectra = [
            torch.ones(n),
            1 + 1e-8 * torch.rand(n, generator=generator),
            10.0 ** -torch.arange(n),
            torch.tensor([2.0] * (n - 1) + [0.0]),
        ]
        values = spectra[trial % 4].double().sort(descending=True).values
        u, v = (torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=D))[0] for _ in range(2))
        matrix = u @ torch.diag(values) @ v.T
        count = int(torch.randint(1, n + 1, (), generator=generator))
        found = r.linearize(lambda z, m=matrix: m @ z, torch.zeros(n, dtype=D)).singular(
            count, tolerance=1e-9, generator=generator
        )
        assert torch.allclose(found.value, values[:count], rtol=1e-6, atol=1e-9), (trial, values, found)


def test_what_happens_later_does_not_matter():
    x, w, t = torch.randn(5, 16, dtype=D), torch.randn(16, 16, dtype=D), torch.randn(5, 16, dtype=D)
    mine, theirs = (r.linearize(r.Attention(r.Dot(z, z)), y) for z, y in ((w, x), (w.clone(), x.clone())))
    function = r.linearize(torch.sin, x)
    before = function.second(t)
    x.mul_(3)
    w.mul_(2)
    for ask in (
        lambda j: j.mv(t),
        lambda j: j.rmv(t),
        lambda j: j.second(t),
        lambda j: j.influence(),
        lambda j: j.block(1, 2),
    ):
        assert torch.allclose(ask(mine), ask(theirs))
    assert torch.equal(function.second(t), before)
    still = r.linearize(lambda z: z, x).mv(t)
    assert still is not t
    assert still.data_ptr() != t.data_ptr()


def test_products_are_not_differentiated_in_silence():
    x = torch.randn(5, 4, dtype=D)
    jacobian = r.linearize(r.Attention(r.Dot()), x)
    with pytest.raises(r.errors.ArgumentError, match="being differentiated"):
        jacrev(jacobian.mv)(x)
    with pytest.raises(r.errors.ArgumentError, match="being differentiated"):
        jacobian.rmv(x.clone().requires_grad_())
    with pytest.raises(r.errors.ArgumentError, match=r"transform of torch\.func"):
        vmap(lambda z: r.linearize(r.Attention(r.Dot()), z).value)(x.unsqueeze(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    x = torch.randn(6, 4, dtype=dtype)
    exact = r.linearize(r.Attention(r.Dot()), x.double())
    jacobian = r.linearize(r.Attention(r.Dot()), x)
    assert jacobian.mv(x).dtype == jacobian.rmv(x).dtype == dtype
    assert torch.allclose(jacobian.mv(x).double(), exact.mv(x.double()), rtol=0.05, atol=0.05)
    assert jacobian.norm_certificate().value >= float(exact.norm()) * (1 - 1e-9)


def test_without_grad_mode():
    x = torch.randn(5, 4, dtype=D)
    expected = r.linearize(r.Attention(r.Laplace()), x)
    with torch.no_grad():
        jacobian = r.linearize(r.Attention(r.Laplace()), x)
        assert torch.allclose(jacobian.influence(), expected.influence())
        assert torch.allclose(jacobian.block(0, 3), expected.block(0, 3))
        assert torch.allclose(jacobian.mv(x), expected.mv(x))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (3, 0)])
def test_nothing(shape):
    jacobian = r.linearize(r.Attention(r.Dot()), torch.zeros(*shape, dtype=D))
    assert float(jacobian.norm().value.sum()) == 0
    assert jacobian.norm_certificate().value == 0
    assert jacobian.influence().numel() == shape[-2] ** 2 * (shape[0] if len(shape) == 3 else 1)
    assert float(jacobian.norm(r.TokenMax()).value.sum()) == 0
    with pytest.raises(r.errors.ArgumentError, match="context"):
        r.derive.row_statistics(r.Attention(r.Dot()), torch.randn(3, 4), torch.zeros(0, 4))


def test_values_that_do_not_depend_on_the_batch():
    x, t = torch.randn(2, 5, 16, dtype=D), torch.randn(2, 5, 16, dtype=D)
    jacobian = r.linearize(r.Attention(r.Alibi(0.3), r.Table(torch.randn(5, 2, dtype=D))), x)
    assert torch.equal(jacobian.mv(t), torch.zeros(2, 5, 2, dtype=D))
    assert torch.equal(jacobian.norm().value, torch.zeros(2, dtype=D))


def test_coupled_rows_with_heads_and_a_batch():
    w = 0.3 * torch.randn(2, 4, 3, dtype=D)
    a = r.Attention(r.Dot(w, w), r.Linear(w), normalizer=r.Sinkhorn(1e-9, 500))
    x = torch.randn(3, 1, 5, 4, dtype=D)
    jacobian = r.linearize(a, x)
    influence = jacobian.influence()
    assert influence.shape == (3, 2, 5, 5)
    alone = r.linearize(a, x[1, 0]).influence()
    assert torch.allclose(influence[1], alone, atol=1e-7)
    assert jacobian.norm(r.TokenSum()).value.shape == (3, 1)


class Stopped(torch.nn.Module):
    """4x, of which autograd sees half."""

    def forward(self, x):
        with torch.no_grad():
            rest = 2 * x
        return 2 * x + rest


@pytest.mark.parametrize(
    ("f", "dtype"),
    [
        (lambda x: 2 * x + 2 * x.detach(), D),
        (lambda x: x + (x.round() - x).detach(), D),
        (lambda x: x + 0.01 * x.detach()[:1], D),
        (lambda x: torch.relu(x - x[0, 0]) - torch.relu(x[0, 0] - x).detach(), D),
        (lambda x: torch.from_numpy(3 * x.detach().numpy()), D),
        (Stopped(), torch.float32),
        (lambda x: 1e9 + 2 * x + 2 * x.detach(), D),
        (lambda x: torch.cat([torch.full((1, 3), 1e10, dtype=D), 2 * x + 2 * x.detach()]), D),
    ],
    ids=[
        *["detach", "straight through", "small part", "beside a kink", "numpy", "module"],
        *["a large constant", "a large constant in another entry"],
    ],
)
def test_a_derivative_that_autograd_does_not_take_is_not_certified(f, dtype):
    jacobian = r.linearize(f, torch.randn(4, 3, dtype=dtype))
    assert torch.isfinite(jacobian.norm().value)  # of autograd's derivative, an estimate
    with pytest.raises(r.errors.ArgumentError, match="map: has another derivative than autograd takes"):
        jacobian.norm_certificate()


@pytest.mark.parametrize(
    ("f", "point", "runs"),
    [
        (torch.relu, torch.zeros(4, 3, dtype=D), 6),
        (torch.relu, torch.randn(4, 3, dtype=D), 6),
        (lambda x: x + x.abs(), torch.zeros(4, 3, dtype=D), 6),
        (lambda x: x.max(-1).values, torch.randn(4, 3, dtype=D), 6),
        (lambda x: x.norm(dim=-1), torch.randn(4, 3, dtype=D), 6),
        (lambda x: (1e5 * x).sin(), torch.randn(4, 3, dtype=D), 20),
        (lambda x: 1e12 + x, torch.randn(4, 3, dtype=D), 10),
        (lambda x: (x.float() @ torch.ones(3, 2)).sin().double(), torch.randn(4, 3, dtype=D), 20),
        (lambda x: torch.ones_like(x), torch.randn(4, 3, dtype=D), 10),
        (lambda x: x.square() @ torch.ones(3, 2, dtype=D), 1e90 * torch.randn(4, 3, dtype=D), 6),
    ],
    ids=["kinks", "relu", "abs", "max", "lengths", "sharp", "offset", "float32 inside", "constant", "huge"],
)
def test_plain_functions_keep_their_certificates(f, point, runs):
    """Kinks, rounding and curvature are no disagreement; the comparison costs four runs, and more where its
    first step is too long or too short.
    """
    ran = []
    jacobian = r.linearize(lambda x: ran.append(0) or f(x), point)
    found, exact = jacobian.norm_certificate(), float(torch.linalg.matrix_norm(jacobian.dense(), 2))
    assert exact <= found.value <= exact * (1 + 1e-4) + 1e-300
    assert any("autograd's derivative is that of the map" in str(one) for one in found.hypotheses)
    assert len(ran) <= runs


def test_closed_forms_need_no_autograd():
    layer, x = r.Attention(r.Dot()), torch.randn(4, 3, dtype=D)
    said = [str(one) for one in r.linearize(layer, x).norm_certificate().hypotheses]
    assert not any("autograd" in one for one in said)
    coupled = r.Attention(r.Dot(), normalizer=r.Sinkhorn())
    said = [str(one) for one in r.linearize(coupled, 0.2 * x).norm_certificate().hypotheses]
    assert any("autograd" in one for one in said)
