"""POT beside wasserstein: values in one and more dimensions, weights, plans, gradients, the entropic form."""

from __future__ import annotations

import math

import pytest
import torch

import regard as r
from regard.transport import entropic_wasserstein, transport_plan, wasserstein

ot = pytest.importorskip("ot")

D = torch.float64


def cloud(seed: int, size: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(size, width, generator=generator, dtype=D)
    return points, torch.rand(size, generator=generator, dtype=D).add(0.1).log_softmax(-1)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("sizes", [(7, 7), (5, 8)])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_values_are_those_of_emd2(p: float, sizes: tuple[int, int], width: int, weighted: bool) -> None:
    (x, a), (y, b) = cloud(1, sizes[0], width), cloud(2, sizes[1], width)
    mu, nu = (r.Measure(x, a), r.Measure(y, b)) if weighted else (r.Measure(x), r.Measure(y))
    masses = (a.exp(), b.exp()) if weighted else (ot.unif(len(x), type_as=x), ot.unif(len(y), type_as=y))
    cost = torch.cdist(x, y) ** p
    wanted = float(ot.emd2(*masses, cost)) ** (1 / p)
    assert float(wasserstein(mu, nu, p)) == pytest.approx(wanted, rel=1e-9)
    plan = transport_plan(mu, nu, p)
    assert float((plan * cost).sum()) == pytest.approx(wanted**p, rel=1e-9)


@pytest.mark.parametrize("p", [1, 2])
def test_a_line_is_their_closed_form(p: int) -> None:
    (x, _), (y, _) = cloud(3, 9, 1), cloud(4, 6, 1)
    wanted = float(ot.wasserstein_1d(x[:, 0].numpy(), y[:, 0].numpy(), p=p)) ** (1 / p)
    assert float(wasserstein(x, y, float(p))) == pytest.approx(wanted, rel=1e-9)


def test_gradients_in_points_are_theirs() -> None:
    (x, a), (y, b) = cloud(5, 6, 3), cloud(6, 5, 3)
    x.requires_grad_()
    theirs = ot.emd2(a.exp(), b.exp(), torch.cdist(x, y) ** 2)
    mine = wasserstein(r.Measure(x, a), r.Measure(y, b), 2.0) ** 2
    one, other = (torch.autograd.grad(value, x)[0] for value in (theirs, mine))
    torch.testing.assert_close(one, other)


def test_the_entropic_estimate_is_sinkhorns() -> None:
    (x, a), (y, b) = cloud(7, 6, 2), cloud(8, 6, 2)
    cost = torch.cdist(x, y)
    wanted = float(
        ot.sinkhorn2(a.exp(), b.exp(), cost, 0.05, method="sinkhorn_log", numItermax=20000, stopThr=1e-12)
    )
    found = float(entropic_wasserstein(r.Measure(x, a), r.Measure(y, b), 1.0, 0.05))
    assert found == pytest.approx(wanted, rel=1e-5)
    assert found >= float(wasserstein(r.Measure(x, a), r.Measure(y, b), 1.0)) - 1e-9


def test_large_orders_go_to_the_bottleneck() -> None:
    (x, _), (y, _) = cloud(9, 5, 2), cloud(10, 5, 2)
    high = float(ot.emd2(ot.unif(5, type_as=x), ot.unif(5, type_as=x), torch.cdist(x, y) ** 60)) ** (1 / 60)
    assert float(wasserstein(x, y, math.inf)) == pytest.approx(high, rel=0.05)
