"""Derivatives of modules with torch's own attention, on long inputs: the same numbers without all weights."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import regard as r
from regard.derive import long_attention

N, D = 48, torch.float64


class Largest(TorchDispatchMode):
    """The most numbers that a tensor has."""

    most = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        several = found if isinstance(found, (tuple, list)) else (found,)
        self.most = max([self.most, *(t.numel() for t in several if isinstance(t, torch.Tensor))])
        return found


def _maps():
    seen = torch.ones(N, N, dtype=torch.bool).tril() & (torch.rand(N, N) < 0.7) | torch.eye(N, dtype=bool)
    w = torch.randn(3, 4, 4, 3, dtype=D)

    def module(**options):
        def run(x):
            q, k, v = (torch.einsum("nd,hde->hne", x, part) for part in w)
            out = F.scaled_dot_product_attention(
                q[None], k[None, :2], v[None, :2], enable_gqa=True, **options
            )
            return out[0].sum(0)

        return run

    return {
        "full": module(),
        "causal": module(is_causal=True),
        "a mask": module(attn_mask=seen[None, None]),
        "scaled": module(scale=0.3),
    }


@pytest.mark.parametrize("name", ["full", "causal", "a mask", "scaled"])
def test_long_inputs_have_the_derivatives_of_short_ones(name, monkeypatch):
    function, x = _maps()[name], torch.randn(N, 4, dtype=D)
    t, u = torch.randn(N, 4, dtype=D), torch.randn(N, 3, dtype=D)
    short = r.linearize(function, x)
    asked = []
    right = long_attention.attend
    monkeypatch.setattr(long_attention, "LARGE", 4 * N * N)
    monkeypatch.setattr(long_attention, "attend", lambda *a, **k: asked.append(1) or right(*a, **k))
    long = r.linearize(function, x)
    assert asked
    torch.testing.assert_close(long.value, short.value)
    torch.testing.assert_close(long.mv(t), short.mv(t))
    torch.testing.assert_close(long.rmv(u), short.rmv(u))


def test_what_is_left_to_torch(monkeypatch):
    """Few weights, additive masks, dropout, half precision, and causal calls that are not square."""
    monkeypatch.setattr(long_attention, "LARGE", 4 * N * N)
    x = torch.randn(4, N, 3)
    mine = long_attention._attend
    assert mine(x[:3], x[:3], x[:3]) is None
    assert mine(x, x, x, torch.zeros(N, N)) is None
    assert mine(x, x, x, dropout_p=0.1) is None
    assert mine(x.half(), x.half(), x.half()) is None
    twice = torch.cat([x, x], -2)
    assert mine(x, twice, twice, is_causal=True) is None
    assert mine(x, x, x, is_causal=True) is not None


def test_no_weights_are_held():
    n = 2048
    x = torch.randn(n, 4)

    def run(x):
        return F.scaled_dot_product_attention(*(x.view(1, 1, n, 4).expand(1, 2, n, 4),) * 3, is_causal=True)[
            0, 0
        ]

    with Largest() as seen:
        jacobian = r.linearize(run, x)
        jacobian.rmv(x)
        jacobian.mv(x)
    assert 2 * n * n >= long_attention.LARGE
    assert seen.most < n * n
