"""Kernels as sums of features: known spectra, best approximations, and the Gaussian form of dot products."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from regard import Attention, Bilinear, Causal, Cosine, Dot, Gaussian, Linear, Measure, Sigmoid, Softmax
from regard.compression import gaussian_form, mercer
from regard.errors import ArgumentError, RefusalError

D = torch.float64


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def _gauss(nodes: int = 60) -> Measure:
    """The standard Gaussian law on the line, by quadrature."""
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    return Measure(torch.tensor(points).unsqueeze(-1), torch.tensor(weights).log())


@pytest.mark.parametrize("bandwidth", [1.0, 2.0])
def test_the_spectrum_of_a_gaussian_kernel_under_a_gaussian_law(bandwidth):
    """λ_k = √(2a/A) (b/A)^k, a = 1/4, b = 1/2h², A = a + b + √(a² + 2ab)."""
    found = mercer(Attention(Gaussian(bandwidth=bandwidth)), _gauss())
    a, b = 0.25, 0.5 / bandwidth**2
    whole = a + b + math.sqrt(a * a + 2 * a * b)
    wanted = torch.tensor([math.sqrt(2 * a / whole) * (b / whole) ** k for k in range(8)], dtype=D)
    torch.testing.assert_close((found.values * found.log_scale.exp())[:8], wanted, rtol=1e-6, atol=1e-9)
    assert found.symmetric
    assert found.positive
    assert "Mercer" in repr(found)


SCORES = {
    "tied dot": (Dot(_t(3, 3, seed=1), _t(3, 3, seed=1)), True, True),
    "cosine": (Cosine(), True, True),
    "indefinite": (Bilinear(torch.diag(torch.tensor([1.0, -1.0, 0.5], dtype=D))), True, False),
    "general": (Bilinear(_t(3, 3, seed=2)), False, False),
}


@pytest.mark.parametrize("name", SCORES)
def test_features_are_orthonormal_and_sum_to_the_kernel(name):
    potential, symmetric, positive = SCORES[name]
    context = Measure(_t(9, 3, seed=3), _t(9, seed=4))
    found = mercer(Attention(potential), context)
    assert (found.symmetric, found.positive) == (symmetric, positive)
    kernel = potential.scores(context.points, context.points).exp()
    torch.testing.assert_close(found.kernel(9) * found.log_scale.exp(), kernel, rtol=1e-9, atol=1e-9)
    for functions in (found.left, found.right):
        gram = functions.mT @ (context.masses().unsqueeze(-1) * functions)
        torch.testing.assert_close(gram, torch.eye(9, dtype=D), rtol=0, atol=1e-9)
    assert float(found.relative_error(9)) < 1e-6


def test_errors_are_those_of_the_best_kernels():
    """Eckart and Young: the error of k features, measured, and no other kernel of that rank is nearer."""
    x = _t(12, 3, seed=1)
    found = mercer(Attention(Bilinear(_t(3, 3, seed=2))), x)
    whole = found.kernel(12)
    for count in (0, 1, 4, 12):
        error = (found.kernel(count) - whole).norm() / whole.norm()
        torch.testing.assert_close(found.errors()[count], error, rtol=1e-6, atol=1e-9)
    count = int(found.count(0.01))
    assert found.errors()[count] <= 0.01 < found.errors()[count - 1]
    other = whole[:, :count] @ torch.linalg.lstsq(whole[:, :count], whole).solution  # of the same rank
    assert (other - whole).norm() / whole.norm() >= found.errors()[count]
    many, few = found.effective_dimension(1e-6), found.effective_dimension(1.0)
    assert 12 >= many > few >= 0.5


def test_copies_and_heads():
    x = _t(6, 3, seed=1)
    one, twice = (mercer(Attention(Gaussian(bandwidth=1.0)), points) for points in (x, torch.cat([x, x])))
    torch.testing.assert_close(one.values, twice.values[:6])
    heads = mercer(Attention(Gaussian(bandwidth=torch.tensor([1.0, 2.0], dtype=D))), x)
    assert heads.values.shape == (2, 6)
    torch.testing.assert_close(heads.values[0], one.values)
    hot = mercer(Attention(Gaussian(bandwidth=1.0), normalizer=Softmax(temperature=4.0)), x)
    torch.testing.assert_close(hot.values, heads.values[1])


def test_outputs_of_few_features():
    x, w = 0.5 * _t(20, 2, seed=1), _t(2, 2, seed=2)
    attention = Attention(Gaussian(bandwidth=1.5), Linear(w))
    found = mercer(attention, x)
    radius = float((x @ w).norm(dim=-1).max())
    kernel = found.kernel(10)
    moved = (kernel / kernel.sum(-1, keepdim=True)) @ (x @ w) - attention(x)
    assert float(moved.norm(dim=-1).max()) <= found.output_error(10, radius).value
    with pytest.raises(RefusalError, match="features"):
        mercer(Attention(Dot(scale=9.0)), x).output_error(1, 1.0)


@pytest.mark.parametrize("heads", [(), (2,)], ids=["one", "heads"])
def test_dot_products_are_gaussian_attention_to_a_reweighted_context(heads):
    w_q, w_k, w_v = (_t(*heads, 3, 4, seed=seed) for seed in range(3))
    potential = Dot(w_q, w_k, b_q=_t(*heads, 4, seed=5), b_k=_t(*heads, 4, seed=6))
    attention = Attention(potential, Linear(w_v))
    x, context = _t(5, 3, seed=7), Measure(_t(8, 3, seed=8), _t(8, seed=9))
    same, reweighted = gaussian_form(attention, context)
    assert isinstance(same.potential, Gaussian)
    torch.testing.assert_close(same(x, reweighted), attention(x, context), rtol=1e-10, atol=1e-10)
    causal, marked = gaussian_form(Attention(Dot(), support=Causal()), x)
    torch.testing.assert_close(causal(x, marked), Attention(Dot(), support=Causal())(x))


def test_bad_input():
    x = _t(4, 3)
    for attention in (Attention(Dot(), normalizer=Sigmoid()), Attention(Dot(), support=Causal())):
        with pytest.raises(ArgumentError, match="attention"):
            mercer(attention, x)
    for potential in (Gaussian(bandwidth=1.0), Dot(scale=-1.0)):
        with pytest.raises(ArgumentError, match="attention"):
            gaussian_form(Attention(potential), x)
    found = mercer(Attention(Dot()), x)
    with pytest.raises(ArgumentError, match="error"):
        found.count(0.0)
    with pytest.raises(ArgumentError, match="regularization"):
        found.effective_dimension(0.0)
