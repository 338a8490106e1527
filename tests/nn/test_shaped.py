"""Shaped attention: I + P - uniform as a matrix, the drift of covariances it was made for,
and depth without collapse.
"""

import math

import pytest
import torch
from torch import nn

import regard as r
from regard.nn import (
    Design,
    Encoder,
    EncoderLayer,
    MultiHeadAttention,
    Shaping,
    UnitVariance,
    initialize,
    shaped,
)

D = torch.float64


@pytest.mark.parametrize(
    "support",
    [r.Full(), r.Causal(), r.Padding(torch.tensor(4)), r.Causal() & r.Padding(torch.tensor(3))],
    ids=repr,
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_it_is_the_dense_matrix(support, kv_heads):
    n, c, heads = 5, 2, 4
    module = MultiHeadAttention(
        8, heads, kv_heads=kv_heads, mechanism=r.Attention(r.Dot(), support=support), shaped=True
    ).double()
    x = torch.randn(2, n, 8, dtype=D)
    sizes = [count * c for count in (heads, kv_heads, kv_heads)]
    q, k, v = (part.unflatten(-1, (-1, c)).transpose(1, 2) for part in module.projection(x).split(sizes, -1))
    k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
    seen = support.allows(torch.arange(n), torch.arange(n)).expand(n, n)
    uniform = seen.to(D) / seen.sum(-1, keepdim=True)
    law = (q @ k.mT / math.sqrt(c)).masked_fill(~seen, -math.inf).softmax(-1)
    matrix = torch.eye(n, dtype=D) + law - uniform
    torch.testing.assert_close(
        module(x), module.output((matrix @ v).transpose(1, 2).flatten(-2)), rtol=1e-10, atol=1e-11
    )
    assert float((matrix.sum(-1) - 1).detach().abs().max()) < 1e-12  # rows still add up to one


def test_a_layer_is_the_formula():
    design = shaped(Design(8, 2), 0.5, 0.6)
    layer, x = EncoderLayer(design).double(), torch.randn(3, 8, dtype=D)
    shaping = design.shaping
    assert shaping.kept == pytest.approx(0.8)
    assert layer.attention.mechanism.value().potential.scale == pytest.approx(1 / (0.5 * math.sqrt(8 * 4)))
    middle = 0.8 * x + 0.6 * layer.attention(layer.attention_branch.norm(x))
    torch.testing.assert_close(
        layer(x), 0.8 * middle + 0.6 * layer.feed_forward(layer.hidden_branch.norm(middle))
    )
    assert isinstance(design.initialization, UnitVariance)


# The drift of covariances. One layer without norm and feed-forward is x' = λx + γ A(x) x W with γ² + λ² = 1,
# in width n. Scores are of order n^(-1/2), Gaussian, with E Y_ad Y_be = V_ab V_de / (n τ²) where V_ab = <x_a,
# x_b>/n. To second order in them, the law of token a is 1/m + (y - mean y)/m + ..., and what W mixes has zero
# mean, so that E V' - V = drift(V)/n + O(1/n²) (noci2023, 3).


def drift(v, branch, temperature):
    """n times the mean change of covariances (m, m) in one layer: what centered scores do twice,
    and once with their variance.
    """
    m, ones = len(v), torch.ones(len(v), dtype=D)
    center = torch.eye(m, dtype=D) - torch.outer(ones, ones) / m
    spread = center @ v @ center  # covariances of tokens around their mean
    twice = v * (v * spread).sum() / m**2
    own = spread.diagonal() - spread.diagonal().mean()
    once = torch.outer(v.diagonal(), v @ own) / (2 * m)
    return branch**2 / temperature**2 * torch.stack([twice, once + once.T])


def tokens_with(v, width, heads):
    """Tokens (m, width) with exactly these covariances, within the coordinates of every head."""
    block = torch.linalg.qr(torch.randn(width // heads, len(v), dtype=D))[0].T * math.sqrt(width // heads)
    return (torch.linalg.cholesky(v) @ block).repeat(1, heads)


@torch.no_grad()
def changes(x, design, count):
    """n (V' - V) for weights drawn anew; values and outputs are the identity, which is one of the rotations
    one averages over.

    Each draw is averaged over the signs of queries and of values: the mean is the same, and terms of odd
    order are gone.
    """
    n, module, shaping = design.width, design.self_attention().double(), design.shaping
    module.output.weight.copy_(torch.eye(n, dtype=D))
    before, found = x @ x.T / n, []
    for _ in range(count):
        initialize(module.projection, design.initialization, 1)
        module.projection.weight[2 * n :] = torch.eye(n, dtype=D)
        draws = []
        for _sign in range(2):
            module.projection.weight[:n] *= -1
            mixed = module(x)
            draws += [shaping.kept * x + sign * shaping.branch * mixed for sign in (1, -1)]
        found.append(n * (torch.stack([y @ y.T / n for y in draws]).mean(0) - before))
    return torch.stack(found)


@pytest.mark.parametrize("heads", [1, 4])
def test_covariances_drift_as_the_theory_says(heads):
    v = torch.tensor([[3.0, 1.0, 0.5], [1.0, 0.6, 0.2], [0.5, 0.2, 0.5]], dtype=D)
    design = shaped(Design(128, heads, bias=False), 0.9, 0.7)
    found = changes(tokens_with(v, 128, heads), design, 200)
    mean, error = found.mean(0), found.std(0) / math.sqrt(len(found))
    twice, once = drift(v, 0.7, 0.9)
    wanted = twice + once
    allowed = 4 * error + 3 * float(wanted.abs().max()) / 128  # chance, and the next order in 1/n
    assert bool(((mean - wanted).abs() < allowed).all())
    assert float(error.max()) < 0.15 * float(wanted.abs().max())
    assert bool(((mean - twice).abs() > allowed).any())  # sharp enough to miss either term
    assert bool(((mean - once).abs() > allowed).any())


def apart(x):
    """How far tokens are from their mean, as a share of their size: 0 where all are one."""
    return float((x - x.mean(-2, keepdim=True)).norm() / x.norm())


@torch.no_grad()
def test_depth_collapses_plain_attention_and_not_the_shaped_one():
    """64 layers of width 64: plain attention loses what tells tokens apart (to the last digit),
    shaped layers keep it.
    """
    x = torch.randn(8, 64, dtype=D)
    plain = x
    for _ in range(12):
        layer = MultiHeadAttention(64, 4, bias=False).double()
        initialize(layer, UnitVariance(), 1)
        plain = layer(plain)
    assert apart(x) > 0.8
    assert apart(plain) < 1e-8
    deep = Encoder(shaped(Design(64, 4, hidden=64)), 64).double().eval()
    assert apart(deep(x)) > 0.3
    sizes = deep(x).norm(dim=-1)
    assert float(sizes.min()) > 1
    assert float(sizes.max()) < 100


def test_a_shaped_network_begins_with_gradients_everywhere():
    """From the first layer to the last, gradients are within a factor of each other."""
    deep = Encoder(shaped(Design(32, 4, hidden=32)), 32).double()
    deep(torch.randn(6, 32, dtype=D)).square().sum().backward()
    sizes = [float(layer.attention.output.weight.grad.norm()) for layer in deep.layers]
    assert max(sizes) / min(sizes) < 100


def test_shaping_is_checked_and_shown():
    assert Shaping().kept == pytest.approx(math.sqrt(0.5))
    assert Shaping(2.0).scale(16, 4) == pytest.approx(1 / 16)
    assert isinstance(shaped(Design(8, 2)).self_attention(), nn.Module)
    assert not shaped(Design(8, 2)).cross_attention().shaped  # another sequence has no identity to add
