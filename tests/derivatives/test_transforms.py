"""Every derivative transform of torch, through every engine, equals the same transform of the definition."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import regard as r
from tests.nouns import NORMALIZERS, POTENTIALS, SUPPORTS, D

ENGINES = [r.engines.Sdpa(), r.engines.Tiled(), r.engines.Tiled(pairs=40), r.engines.LinearEngine()]


def tensors():
    return tuple(torch.randn(2, 6, w, dtype=D) for w in (4, 4, 3))


def scalar(f):
    return lambda *a: f(*a).sin().sum()


FIRST = {
    "jvp": lambda f, a, t: jvp(f, a, t)[1],
    "vjp": lambda f, a, t: torch.cat([x.flatten() for x in vjp(f, *a)[1](f(*a).cos())]),
    "jacrev": lambda f, a, t: jacrev(f, 1)(*a),
    "jacfwd": lambda f, a, t: jacfwd(f, 0)(*a),
    "grad in vmap": lambda f, a, t: vmap(grad(scalar(f), 1))(*a),
    "jvp in vmap": lambda f, a, t: vmap(lambda s: jvp(f, a, tuple(s * x for x in t))[1])(
        torch.linspace(-1, 1, 3, dtype=D)
    ),
}
SECOND = {
    "jvp of jvp": lambda f, a, t: jvp(lambda *b: jvp(f, b, t)[1], a, t)[1],
    "hessian": lambda f, a, t: hessian(scalar(f), 1)(*a),
    "reverse over reverse": lambda f, a, t: jacrev(jacrev(scalar(f), 1), 0)(*a),
    "reverse over forward": lambda f, a, t: jacrev(lambda *b: jvp(scalar(f), b, t)[1], 2)(*a),
    "forward over reverse": lambda f, a, t: torch.cat(
        [x.flatten() for x in jvp(grad(scalar(f), (0, 1, 2)), a, t)[1]]
    ),
}


def compare(transforms, **declared):
    """Each accepting engine against the reference."""
    points = tensors()
    tangents = tuple(torch.randn_like(x) for x in points)

    def through(engine):
        return lambda q, k, v: r.attend(q, k, v, engine=engine, **declared)

    accepted = 0
    for engine in ENGINES:
        try:
            through(engine)(*points)
        except r.errors.RefusalError:
            continue
        accepted += 1
        for name, transform in transforms.items():
            found = transform(through(engine), points, tangents)
            expected = transform(through(r.engines.ReferenceEngine()), points, tangents)
            assert torch.allclose(found, expected, rtol=1e-7, atol=1e-8), (engine.name, name)
    assert accepted


@pytest.mark.parametrize("name", POTENTIALS)
def test_potentials(name):
    compare(FIRST | SECOND, potential=POTENTIALS[name])


@pytest.mark.parametrize("name", [name for name in NORMALIZERS if name != "sinkhorn"])
def test_normalizers(name):
    compare(FIRST | SECOND, normalizer=NORMALIZERS[name])


def test_sinkhorn():
    """All its steps, differentiated."""
    few = {
        name: (FIRST | SECOND)[name]
        for name in ("jvp", "vjp", "jacrev", "grad in vmap", "jvp of jvp", "forward over reverse")
    }
    compare(few, normalizer=r.Sinkhorn(0.0, 6))


@pytest.mark.parametrize(
    "name",
    [name for name, support in SUPPORTS.items() if "batched" not in name and name != "causal and padding"],
)
def test_supports(name):
    some = {key: (FIRST | SECOND)[key] for key in ("jvp", "jacrev", "grad in vmap", "jvp of jvp", "hessian")}
    compare(some, support=SUPPORTS[name])
    compare(some, support=SUPPORTS[name], potential=r.Laplace(bandwidth=2.0))
    compare(some, support=SUPPORTS[name], normalizer=r.Entmax(1.5))


def test_third_order():
    """Nothing special happens at two."""
    f = lambda engine: (  # noqa: E731
        lambda x: r.attend(x, x, x, engine=engine, potential=r.Gaussian(bandwidth=2.0)).sin().sum()
    )
    x, t = torch.randn(4, 3, dtype=D), torch.randn(4, 3, dtype=D)

    def third(f):
        return jvp(lambda x: jvp(lambda x: jvp(f, (x,), (t,))[1], (x,), (t,))[1], (x,), (t,))[1]

    for engine in (r.engines.Sdpa(), r.engines.Tiled()):
        assert torch.allclose(third(f(engine)), third(f(r.engines.ReferenceEngine())), rtol=1e-8)
        mixed = jacrev(lambda x, e=engine: jvp(jacrev(f(e)), (x,), (t,))[1])(x)
        assert torch.allclose(
            mixed, jacrev(lambda x: jvp(jacrev(f(r.engines.ReferenceEngine())), (x,), (t,))[1])(x), rtol=1e-8
        )


@pytest.mark.parametrize(
    "engine",
    [r.engines.Sdpa(), r.engines.Tiled(), r.engines.Tiled(pairs=40)],
    ids=["sdpa", "tiled", "small tiles"],
)
@pytest.mark.parametrize(
    "declared",
    [
        {"potential": "dot"},
        {"potential": "dot heads", "support": r.Causal()},
        {"potential": "gaussian untied", "support": r.Window(2, 1)},
        {"potential": "rotary gaussian"},
        {"potential": "student"},
        {"potential": "additive", "support": r.Causal()},
        {"potential": "softcap", "normalizer": r.Entmax(1.5)},
        {"potential": "relative", "normalizer": r.Sigmoid()},
        {"potential": "dot projected", "normalizer": r.Sinkhorn(0.0, 4)},
    ],
    ids=lambda d: f"{d['potential']}, {', '.join(repr(v) for k, v in d.items() if k != 'potential')}",
)
def test_gradcheck(engine, declared):
    """torch's own checks, forward, backward and double, for q, k, v, log-weights and every parameter."""
    import torch.utils._pytree as pytree

    declared = declared | {"potential": POTENTIALS[declared["potential"]]}
    leaves, tree = pytree.tree_flatten(declared["potential"])
    places = [i for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.dtype == D]

    def call(q, k, v, weights, *parameters):
        filled = list(leaves)
        for i, p in zip(places, parameters, strict=True):
            filled[i] = p
        return r.attend(
            q,
            k,
            v,
            log_weights=weights,
            engine=engine,
            **(declared | {"potential": pytree.tree_unflatten(filled, tree)}),
        )

    inputs = [torch.randn(2, n, w, dtype=D).requires_grad_() for n, w in ((3, 4), (4, 4), (4, 2))]
    inputs += [
        torch.randn(2, 4, dtype=D).requires_grad_(),
        *(leaves[i].clone().requires_grad_() for i in places),
    ]
    try:
        call(*inputs)
    except r.errors.RefusalError:
        pytest.skip("the engine refuses this declaration")
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(
        call, inputs, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True
    )


def test_forward_ad_and_gradient_penalty():
    """Dual tensors, and a loss on a gradient, without torch.func."""
    x, t = torch.randn(5, 4, dtype=D), torch.randn(5, 4, dtype=D)
    a = r.Attention(r.Dot(), support=r.Causal())
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(a(forward_ad.make_dual(x, t))).tangent
    step = 1e-6
    assert torch.allclose(found, (a(x + step * t) - a(x - step * t)) / (2 * step), atol=1e-8)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(a(leaf).sin().sum(), leaf, create_graph=True)
    (penalty,) = torch.autograd.grad(gradient.square().sum(), leaf)
    reference = grad(
        lambda x: (
            grad(lambda x: r.apply(a, x, engine=r.engines.ReferenceEngine()).sin().sum())(x).square().sum()
        )
    )(x)
    assert torch.allclose(penalty, reference)


def test_balanced_coupling_is_differentiated_not_its_iteration():
    """Equal scores are balanced before the first step:
    differentiating the steps taken would give the derivative of row softmax.
    """
    a = r.Attention(r.Dot(), normalizer=r.Sinkhorn(1e-12, 1000))
    x, t, step = 1e-9 * torch.randn(5, 3, dtype=D) + 1.0, torch.randn(5, 3, dtype=D), 1e-5
    for engine in (r.engines.ReferenceEngine(), r.engines.Tiled()):
        run = lambda z, e=engine: r.apply(a, z, engine=e)  # noqa: E731
        difference = (run(x + step * t) - run(x - step * t)) / (2 * step)
        assert torch.allclose(jvp(run, (x,), (t,))[1], difference, atol=1e-8)
        leaf, pull = x.clone().requires_grad_(), torch.randn(5, 3, dtype=D)
        (gradient,) = torch.autograd.grad(run(leaf), leaf, pull)
        assert torch.allclose((gradient * t).sum(), (pull * difference).sum(), atol=1e-7)


@pytest.mark.parametrize(
    "engine", [r.engines.Sdpa(), r.engines.Tiled(), r.engines.ReferenceEngine()], ids=lambda e: e.name
)
@pytest.mark.parametrize(
    "normalizer", [r.Softmax(), r.Entmax(1.5), r.Sigmoid()], ids=lambda n: type(n).__name__
)
def test_no_nan(engine, normalizer):
    """Masked keys, saturated rows, one token: derivatives of both orders are finite."""
    weights = torch.zeros(4, dtype=D)
    weights[1] = -torch.inf
    cases = [
        (1.0, 4, {"support": r.Causal(), "log_weights": weights}),
        (1.0, 4, {"support": r.Window(0, 0) & r.Padding(torch.tensor(2))}),
        (200.0, 4, {}),  # logits of ±1e4
        (1.0, 1, {}),
    ]
    for size, n, declared in cases:
        x = size * torch.randn(n, 4, dtype=D)
        t = torch.randn(n, 4, dtype=D)
        f = lambda x, d=declared: r.attend(x, x, x, normalizer=normalizer, engine=engine, **d)  # noqa: E731
        try:
            f(x)
        except r.errors.RefusalError:
            continue
        assert torch.isfinite(jvp(f, (x,), (t,))[1]).all()
        assert torch.isfinite(jvp(lambda x, f=f, t=t: jvp(f, (x,), (t,))[1], (x,), (t,))[1]).all()
        assert torch.isfinite(jvp(grad(lambda x, f=f: f(x).square().sum()), (x,), (t,))[1]).all()


def test_captured_tensors_are_not_lost():
    """A tensor that a function hides from the declaration is seen, in forward mode too, at every level."""
    x, w, t = torch.randn(4, 3, dtype=D), torch.randn(3, dtype=D), torch.randn(3, dtype=D)

    def through(w):
        return r.attend(x, x, x, potential=r.Potential.of(lambda q, k: (q * k * w).sum(-1)))

    shown = lambda w: r.attend(x, x, x, potential=r.Potential.of(lambda q, k, w: (q * k * w).sum(-1), w))  # noqa: E731
    assert torch.allclose(jvp(through, (w,), (t,))[1], jvp(shown, (w,), (t,))[1])
    assert torch.allclose(jacrev(jacfwd(through))(w), jacrev(jacfwd(shown))(w))
    inner = lambda w: jvp(lambda y: through(w) * y.sum(), (x,), (x,))[1]  # noqa: E731 (the outer level captured inside the inner one)
    assert torch.allclose(jvp(inner, (w,), (t,))[1], jvp(lambda w: shown(w) * x.sum(), (w,), (t,))[1])


def test_bias_on_positions_moves_in_forward_mode():
    """A dual parameter has no requires_grad; the fused kernel must refuse it all the same."""
    table, t = torch.randn(7, dtype=D), torch.randn(7, dtype=D)
    x = torch.randn(5, 4, dtype=D)
    f = lambda table: r.attend(x, x, x, potential=r.Dot() + r.RelativeBias(table, r.potentials.Clipped(3)))  # noqa: E731
    step = 1e-6
    assert torch.allclose(
        jvp(f, (table,), (t,))[1], (f(table + step * t) - f(table - step * t)) / (2 * step), atol=1e-8
    )


def test_vmap_over_masks():
    """Supports that differ between samples."""
    x, lengths = torch.randn(3, 5, 4, dtype=D), torch.tensor([5, 2, 3])
    for potential in (r.Dot(), r.Laplace()):
        f = lambda x, n, p=potential: r.attend(x, x, x, potential=p, support=r.Causal() & r.Padding(n))  # noqa: E731
        expected = torch.stack([f(x[i], lengths[i]) for i in range(3)])
        assert torch.allclose(vmap(f)(x, lengths), expected)
        slopes = torch.stack(
            [grad(lambda x, n, f=f: f(x, n).sin().sum())(x[i], lengths[i]) for i in range(3)]
        )
        assert torch.allclose(vmap(grad(lambda x, n, f=f: f(x, n).sin().sum()))(x, lengths), slopes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision(dtype):
    """Derivatives keep the dtype of their inputs, and are as good as it allows."""
    x, t = torch.randn(40, 16, dtype=D), torch.randn(40, 16, dtype=D)
    exact = jvp(lambda x: r.attend(x, x, x, support=r.Causal()), (x,), (t,))[1]
    low = jvp(lambda x: r.attend(x, x, x, support=r.Causal()), (x.to(dtype),), (t.to(dtype),))[1]
    assert low.dtype == dtype
    assert (low.double() - exact).norm() <= 30 * torch.finfo(dtype).eps * exact.norm()
    leaf = x.to(dtype).requires_grad_()
    (first,) = torch.autograd.grad(r.attend(leaf, leaf, leaf).square().sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    assert second.dtype == dtype
    assert torch.isfinite(second).all()
