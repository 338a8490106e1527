"""The entmax package beside Entmax: values, gradients, and the properties that its own tests have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard as r

entmax = pytest.importorskip("entmax")

D = torch.float64


def rows(seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(5, 9, generator=torch.Generator().manual_seed(seed), dtype=D)


def mine(alpha: float | Tensor, scores: Tensor) -> Tensor:
    return r.Entmax(alpha).weights(scores, r.normalizers.Reference())


THEIRS = {
    1.5: entmax.entmax15,
    2.0: entmax.sparsemax,
    1.25: lambda x, dim: entmax.entmax_bisect(x, 1.25, dim=dim, n_iter=100),
    1.8: lambda x, dim: entmax.entmax_bisect(x, 1.8, dim=dim, n_iter=100),
    3.0: lambda x, dim: entmax.entmax_bisect(x, 3.0, dim=dim, n_iter=100),
}


@pytest.mark.parametrize("alpha", THEIRS)
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_values_and_gradients(alpha: float, scale: float) -> None:
    scores = rows(0, scale).requires_grad_()
    wanted, found = THEIRS[alpha](scores, dim=-1), mine(alpha, scores)
    torch.testing.assert_close(found, wanted, atol=1e-8, rtol=1e-6)
    cotangent = rows(1)
    one, other = (torch.autograd.grad(value, scores, cotangent)[0] for value in (wanted, found))
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("alpha", THEIRS)
def test_ties_are_shared_and_rows_are_laws(alpha: float) -> None:
    tied = torch.tensor([[1.0, 1.0, 1.0, -5.0], [0.0, 0.0, 0.0, 0.0]], dtype=D)
    for function in (mine, lambda a, x: THEIRS[a](x, dim=-1)):
        found = function(alpha, tied)
        torch.testing.assert_close(found.sum(-1), torch.ones(2, dtype=D))
        torch.testing.assert_close(found[:, 0], found[:, 2])
    assert float(mine(alpha, tied)[0, 3]) == 0


@pytest.mark.parametrize("alpha", THEIRS)
def test_a_constant_does_not_count_and_order_is_kept(alpha: float) -> None:
    scores = rows(2)
    torch.testing.assert_close(mine(alpha, scores + 100), mine(alpha, scores))
    order = scores.argsort(-1)
    assert bool((mine(alpha, scores).gather(-1, order).diff(dim=-1) >= -1e-12).all())


def test_alpha_one_is_softmax_and_the_way_there_is_smooth() -> None:
    scores = rows(3)
    torch.testing.assert_close(mine(1.0, scores), scores.softmax(-1))
    near = entmax.entmax_bisect(scores, 1.0001, dim=-1, n_iter=100)
    torch.testing.assert_close(mine(1.0001, scores), near, atol=1e-7, rtol=1e-5)


def test_alpha_is_learned_as_theirs_is() -> None:
    scores, gradients = rows(4), []
    for function in (
        lambda a: entmax.entmax_bisect(scores, a, dim=-1, n_iter=100),
        lambda a: mine(a, scores),
    ):
        alpha = torch.tensor(1.7, dtype=D, requires_grad=True)
        gradients.append(torch.autograd.grad((function(alpha) * rows(5)).sum(), alpha)[0])
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)
