"""Modules of a given declaration train the parameters that the declaration holds."""

import pytest
import torch
from torch import nn

import regard as r
from regard.maps import Affine
from regard.nn import Declared, Invertible

D = torch.float64


def affine(parameter):
    return Affine(parameter)


def attention(parameter):
    return r.Attention(r.Dot(scale=0.1), r.Linear(parameter), normalizer=r.Softmax())


@pytest.mark.parametrize("make", [affine, attention])
def test_an_optimizer_over_the_originals_trains_the_module(make):
    original = nn.Parameter(0.1 * torch.eye(2, dtype=D))
    layer, x = Declared(make(original)), torch.ones(3, 2, dtype=D)
    assert [*layer.parameters()] == [original]
    before = layer(x).detach()
    optimizer = torch.optim.SGD([original], lr=0.1)
    layer(x).sum().backward()
    optimizer.step()
    torch.testing.assert_close(layer(x), make(original.detach())(x))
    assert not torch.allclose(layer(x), before)


def test_an_invertible_layer_shares_its_parameters():
    original = nn.Parameter(0.1 * torch.eye(2, dtype=D))
    layer = Invertible(Affine(original))
    assert any(parameter is original for parameter in layer.parameters())
    layer(torch.ones(3, 2, dtype=D))[0].sum().backward()
    assert original.grad is not None


def test_plain_tensors_are_copied():
    plain = torch.eye(2, dtype=D)
    layer = Declared(Affine(plain))
    plain.zero_()
    assert torch.equal(layer(torch.ones(1, 2, dtype=D)), torch.ones(1, 2, dtype=D))
    assert not [*layer.parameters()]
