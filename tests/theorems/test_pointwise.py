"""Activations."""

from dataclasses import dataclass

import pytest
import torch

from regard.domains import Ball, Neighborhood, Whole
from regard.maps import Activation, Gelu, Pointwise, Relu, Silu, Tanh
from regard.norms import EntryMax, Frobenius, TokenMax, TokenSum, Wasserstein
from regard.proofs import certify, deviation, falsify
from regard.proofs.falsification import falsify_deviation

D = torch.float64
ALL = [Relu(), Gelu(), Gelu(tanh=True), Silu(), Silu(1.702), Silu(-0.5), Tanh()]


@pytest.mark.parametrize("activation", ALL, ids=repr)
def test_no_slope_is_larger_and_one_is_as_large(activation):
    bound = certify(Pointwise(activation), Whole(), TokenMax()).value
    x = torch.linspace(-30, 30, 600_001, dtype=D).requires_grad_()
    (slopes,) = torch.autograd.grad(activation(x).sum(), x)
    assert 0.99999 * bound <= float(slopes.abs().max()) <= bound


@pytest.mark.parametrize("norm", [Frobenius(), TokenMax(), TokenSum(), EntryMax(), Wasserstein(1.0)])
def test_never_exceeded(norm):
    map, domain = Pointwise(Gelu()), Ball(4.0, torch.tensor([1.0, 1.4, 1.5], dtype=D), tokens=2)
    bound = certify(map, domain, norm).value
    assert 0.9 * bound <= falsify(map, domain, norm, steps=30, restarts=4).value <= bound


def test_deviation():
    map, domain = Pointwise(Silu()), Neighborhood(torch.full((3, 2), 2.4, dtype=D), 0.05, TokenMax())
    bound = deviation(map, domain, TokenMax()).value
    assert 0.99 * bound <= falsify_deviation(map, domain, TokenMax(), restarts=2).value <= bound


def test_unknown_activation_is_refused():
    @dataclass(frozen=True, eq=False, repr=False)
    class Square(Activation):
        def __call__(self, x):
            return x * x

    refused = certify(Pointwise(Square()), Whole(), TokenMax())
    assert refused.value == float("inf")
    assert "@steepness.rule(Square)" in str(refused)
