"""Accuracy is part of the meaning: float32 within 2e-6 of the float64 reference, for every engine,
and hard Gaussians too.
"""

import pytest
import torch
import torch.utils._pytree as pytree

import regard as r

ENGINES = [r.engines.Sdpa(), r.engines.Tiled(), r.engines.LinearEngine(), r.engines.ReferenceEngine()]
BENIGN = {
    "dot": {},
    "causal": {"support": r.Causal()},
    "window": {"support": r.Window(20, 5)},
    "cosine": {"potential": r.Cosine(scale=8.0)},
    "gaussian": {"potential": r.Gaussian(bandwidth=2.5)},
    "laplace": {"potential": r.Laplace(bandwidth=2.0)},
    "student": {"potential": r.StudentT(bandwidth=2.0, nu=3.0)},
    "additive": {"potential": r.Additive(None, None, torch.linspace(-0.3, 0.3, 32))},
    "rotary": {"potential": r.Rotary(r.Dot())},
    "alibi causal": {"potential": r.Dot() + r.Alibi.heads(2), "support": r.Causal()},
    "alibi": {"potential": r.Dot() + r.Alibi(0.5)},
    "relative": {"potential": r.Dot() + r.RelativeBias(torch.linspace(-1, 1, 21), r.potentials.Clipped(10))},
    "softcap": {"potential": r.SoftCap(r.Dot(), 3.0)},
    "weights": {"log_weights": torch.linspace(-3, 3, 300)},
    "entmax": {"normalizer": r.Entmax(1.5)},
    "entmax 1.2": {"normalizer": r.Entmax(1.2)},
    "entmax 3": {"normalizer": r.Entmax(3.0)},
    "sparsemax": {"normalizer": r.Sparsemax()},
    "sigmoid": {"normalizer": r.Sigmoid()},
    "sinkhorn": {"normalizer": r.Sinkhorn(0.0, 8)},
    "elu": {"normalizer": r.LinearKernel(r.normalizers.Elu())},
    "elu causal": {"normalizer": r.LinearKernel(r.normalizers.Elu()), "support": r.Causal()},
}


def double(value):
    return pytree.tree_map(
        lambda t: t.double() if isinstance(t, torch.Tensor) and t.dtype == torch.float32 else t, value
    )


def errors(q, k, v, declared):
    """Largest error over largest output, for every engine that accepts."""
    exact = r.attend(
        q.double(),
        k.double(),
        v.double(),
        engine=r.engines.ReferenceEngine(),
        **{key: double(value) for key, value in declared.items()},
    )
    found = {}
    for engine in ENGINES:
        try:
            out = r.attend(q, k, v, engine=engine, **declared)
        except r.errors.RefusalError:
            continue
        assert out.dtype == q.dtype
        found[engine.name] = float((out.double() - exact).abs().max() / exact.abs().max())
    return found


@pytest.mark.parametrize("name", BENIGN)
def test_float32(name):
    q, k, v = (torch.randn(2, 2, 300, 32) for _ in range(3))
    found = errors(q, k, v, BENIGN[name])
    assert max(found.values()) <= 2e-6, found


@pytest.mark.parametrize("bandwidth", [1.0, 0.3, 0.1, 0.03, 0.01])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("width", [1, 3, 40])
def test_gaussian_far_away_and_narrow(bandwidth, offset, width):
    """Points of spread one, shifted by an offset, with bandwidths down to a hundredth of the spread."""
    x, v = torch.rand(200, width) + offset, torch.randn(200, 6)
    found = errors(x[:120], x, v, {"potential": r.Gaussian(bandwidth=bandwidth)})
    assert {"sdpa", "tiled", "reference"} <= set(found)
    assert max(found.values()) <= 2e-6, found
    other = torch.rand(150, width) + offset  # no query among the keys: nothing saturates by itself
    assert max(errors(other, x, v, {"potential": r.Gaussian(bandwidth=bandwidth)}).values()) <= 2e-6


def test_projections_keep_their_digits():
    """The offset is taken out before the projection, for tied and for untied weights."""
    x, v = torch.rand(100, 3) + 1000, torch.randn(100, 4)
    w = torch.randn(3, 5)
    for w_k in (w, w + 1e-4 * torch.randn(3, 5)):
        declared = {"potential": r.Gaussian(w, w_k, bandwidth=0.5)}
        found = errors(x, x, v, declared)
        assert max(found.values()) <= 2e-6, found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    ["dot", "gaussian", "laplace", "entmax", "sigmoid", "alibi", "weights", "elu", "sinkhorn", "additive"],
)
def test_half_precision(name, dtype):
    """Half precisions work, return their dtype, and accumulate in float32:
    the error is that of rounding inputs and output.
    """
    q, k, v = (torch.randn(2, 2, 300, 32).to(dtype) for _ in range(3))
    v = v + 1
    declared = pytree.tree_map(
        lambda t: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t, BENIGN[name]
    )
    exact = r.attend(
        q.double(),
        k.double(),
        v.double(),
        engine=r.engines.ReferenceEngine(),
        **{
            key: pytree.tree_map(lambda t: t.double() if isinstance(t, torch.Tensor) else t, value)
            for key, value in declared.items()
        },
    )
    for engine in ENGINES:
        try:
            out = r.attend(q, k, v, engine=engine, **declared)
        except r.errors.RefusalError:
            continue
        assert out.dtype == dtype
        assert (out.double() - exact).abs().max() / exact.abs().max() <= 6 * torch.finfo(dtype).eps, (
            engine.name
        )


@pytest.mark.parametrize("name", ["gaussian", "laplace", "additive", "entmax", "sinkhorn", "alibi causal"])
def test_float32_gradients(name):
    q, k, v = (torch.randn(1, 2, 200, 32) for _ in range(3))
    upstream = torch.randn(1, 2, 200, 32)

    def gradients(dtype, engine):
        inputs = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        declared = {
            key: double(value) if dtype == torch.float64 else value for key, value in BENIGN[name].items()
        }
        return torch.autograd.grad(r.attend(*inputs, engine=engine, **declared), inputs, upstream.to(dtype))

    for mine, exact in zip(
        gradients(torch.float32, None), gradients(torch.float64, r.engines.ReferenceEngine()), strict=True
    ):
        assert (mine.double() - exact).abs().max() / exact.abs().max() < 1e-5
