"""Gradients can be differentiated again, in every engine; nothing is cut off in silence."""

import pytest
import torch

import regard as r
from tests.nouns import D

DECLARED = {
    "dot": {},
    "gaussian causal": {"potential": r.Gaussian(bandwidth=1.5), "support": r.Causal()},
    "window": {"support": r.Window(1, 1), "potential": r.Dot() + r.Alibi(0.2)},
    "laplace": {"potential": r.Laplace(bandwidth=2.0)},
    "additive": {"potential": r.Additive(None, None, torch.linspace(-1, 1, 3, dtype=D))},
    "softcap": {"potential": r.SoftCap(r.Dot(), 2.0), "support": r.Causal()},
    "entmax": {"normalizer": r.Entmax(1.5)},
    "sigmoid": {"normalizer": r.Sigmoid()},
    "sinkhorn": {"normalizer": r.Sinkhorn(0.0, 3)},
    "elu": {"normalizer": r.LinearKernel(r.normalizers.Elu())},
}


@pytest.mark.parametrize("name", DECLARED)
def test_gradcheck(name):
    q, k, v = (torch.randn(2, 4, 3, dtype=D, requires_grad=True) for _ in range(3))
    weights = torch.randn(4, dtype=D, requires_grad=True)

    def call(q, k, v, weights):
        return r.attend(q, k, v, log_weights=weights, **DECLARED[name])

    assert torch.autograd.gradcheck(call, (q, k, v, weights), atol=1e-6)
    assert torch.autograd.gradgradcheck(call, (q, k, v, weights), atol=1e-5)


def test_hessian_and_penalty():
    x = torch.randn(5, 4, dtype=D)
    for potential in (r.Dot(), r.Laplace(), r.SoftCap(r.Dot(), 2.0)):
        attention = r.Attention(potential)

        def energy(z, engine, attention=attention):
            return r.apply(attention, z, engine=engine).square().sum()

        mine, theirs = (
            torch.autograd.functional.hessian(lambda z, e=e: energy(z, e), x)
            for e in (None, r.engines.ReferenceEngine())
        )
        assert theirs.abs().max() > 0.1
        assert torch.allclose(mine, theirs, atol=1e-8)


def test_free_energy_twice():
    """The Hessian of the free energy in θ is the covariance of the keys under the attention row."""
    theta, y = torch.randn(3, dtype=D), torch.randn(6, 3, dtype=D)
    attention = r.Attention(r.Dot(scale=1.0))
    hessian = torch.autograd.functional.hessian(lambda t: attention.free_energy(t[None], y).sum(), theta)
    law = attention.replace(moment=r.SecondMoment())(theta[None], y)
    assert torch.allclose(hessian, law.covariance[0], atol=1e-10)


def test_captured_tensors_are_not_lost():
    """A function that captured a parameter runs where the gradient is kept, and says why;
    as a parameter it runs in tiles.
    """
    w = torch.tensor(0.5, requires_grad=True)
    x = torch.randn(5, 4)
    captured = r.Potential.of(lambda q, k: -w * (q - k).abs().sum(-1))
    explained = r.explain(r.Attention(captured), x)
    assert explained.engine.name == "reference"
    assert "Potential.of(f, tensor)" in explained.refusals["tiled"]
    declared = r.Potential.of(lambda q, k, w: -w * (q - k).abs().sum(-1), w)
    assert r.explain(r.Attention(declared), x).engine.name == "tiled"
    one, other = (
        torch.autograd.grad(r.attend(x, x, x, potential=p).square().sum(), w)[0] for p in (captured, declared)
    )
    assert torch.allclose(one, other, atol=1e-5)
    assert one.abs() > 1e-3
