"""Invertible and infinitely deep layers: exact oracles, proofs that refuse, derivatives, rounding."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import regard as r
from regard.errors import ArgumentError
from regard.maps import Affine, Compose, Heads, Pointwise, Residual, Tanh
from regard.nn import Guaranteed, Memory, Promise, Reflective, load, save
from regard.nn.contraction import Contraction
from regard.nn.declared import Declared
from regard.nn.deep import Deep, ForgettingWarning
from regard.nn.diagonal_blocks import diagonal_blocks, opaque_blocks
from regard.nn.fixed_points import Anderson, Picard
from regard.nn.invertible import Invertible, OutsideImageError
from regard.nn.log_determinant import BlockTriangular, Dense, Roulette, Series, Truncated
from regard.nonexpansive import GroupSort, IntoBall

D = torch.float64


def _t(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def _orthogonal(width: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(_t(width, width, seed=seed))[0]


def _inside(*shape: int, seed: int = 1, radius: float = 1.0) -> Tensor:
    return IntoBall(radius)(_t(*shape, seed=seed))


def _attention(constant: float, g: float = 0.5, width: int = 6, support: r.supports.Support = r.Full()):
    """Attention whose constant in TokenMax norm on the unit ball is w(√(1 + g²) + g)."""
    w = constant / (math.sqrt(1 + g * g) + g)
    return r.Attention(r.Dot(scale=g), r.Linear(w * _orthogonal(width)), support=support)


def _learned(constant: float, g: float = 0.5, width: int = 3) -> Declared:
    """The same with values that are learned."""
    w = constant / (math.sqrt(1 + g * g) + g)
    return Declared(r.Attention(r.Dot(scale=g), r.Linear(nn.Parameter(w * _orthogonal(width)))))


BALL = r.Ball(1.0)


# Inverses


def test_an_affine_map_has_its_exact_inverse_and_determinant():
    w = 0.6 * _orthogonal(3) + 0.1 * torch.diag(_t(3).abs().clamp(max=1))
    b, x = _t(3, seed=3), _t(4, 5, 3, seed=2)
    flow = Invertible(Affine(w, b))
    y, log_det = flow(x)
    exact = torch.linalg.solve(torch.eye(3, dtype=D) + w.mT, (y - b).mT).mT
    torch.testing.assert_close(exact, x)
    assert float((flow.inverse(y, 1e-10) - x).norm(dim=-1).max()) < 1e-10
    determinant = 5 * torch.linalg.slogdet(torch.eye(3, dtype=D) + w)[1]
    torch.testing.assert_close(log_det, determinant.expand(4))
    blocks = Invertible(Affine(w, b), log_determinant=BlockTriangular())(x)
    torch.testing.assert_close(blocks, (y, log_det))


@pytest.mark.parametrize("constant", [0.5, 0.9, 0.99])
def test_the_stop_rule_needs_hardly_more_than_is_needed(constant):
    flow = Invertible(_attention(constant), domain=BALL)
    x = _inside(16, 6)
    y, _ = flow(x)
    found = flow.solve(y, 1e-6)
    error = float((found.value - x).norm(dim=-1).max())
    assert error <= float(found.error) <= 1e-6
    z, needed = y.clone(), 0
    while float((z - x).norm(dim=-1).max()) >= 1e-6:
        z, needed = IntoBall(1.0)(y - flow.contraction(z)), needed + 1
    assert needed <= found.evaluations <= 1.5 * needed
    assert found.evaluations <= flow.iterations(y, 1e-6)
    faster = Invertible(_attention(constant), domain=BALL, accelerate=Anderson(5))
    assert faster.solve(y, 1e-6).evaluations <= found.evaluations


def test_the_published_counterexample_is_refused():
    """Invertible attention of the literature: value weight 0.54, one channel, tokens (0, 3, -3).

    Its iteration converges to another preimage, with a residual of rounding.
    """
    attention = r.Attention(r.Dot(scale=1.0), r.Linear(torch.tensor([[-0.54]], dtype=D)))
    x = torch.tensor([[0.05], [3.0], [-3.0]], dtype=D)
    y = x + attention(x)
    z = y.clone()
    for _ in range(200):
        z = y - attention(z)
    assert float((y - z - attention(z)).abs().max()) < 1e-12
    assert float((z - x).abs().max()) > 1.0
    with pytest.raises(ArgumentError, match="no finite constant"):
        Invertible(attention)
    with pytest.raises(ArgumentError, match=r"L = 9\.\d+ in TokenMax\(\) on Ball\(radius=3\)"):
        Invertible(attention, domain=r.Ball(3.0))


def test_the_scale_that_is_named_would_do():
    attention = _attention(1.31)
    with pytest.raises(ArgumentError, match=r"L = 1\.31") as error:
        Invertible(attention, domain=BALL)
    scale = float(error.value.remedy.split("multiply f by ")[1].split()[0])
    Invertible(attention.replace(lookup=r.Linear(scale * attention.lookup.w_v)), domain=BALL)
    limit = float(error.value.remedy.split("<= ")[1].split()[0])
    gentle = attention.replace(potential=r.Dot(scale=0.999 * limit))
    assert 0.99 < Invertible(gentle, domain=BALL).contraction.constant < 1
    with pytest.raises(ArgumentError):
        Invertible(attention.replace(potential=r.Dot(scale=1.01 * limit)), domain=BALL)


def test_a_point_outside_of_the_image_is_reported():
    flow = Invertible(_attention(0.5), domain=BALL)
    inside = flow(_inside(4, 6))[0]
    outside = inside + torch.tensor([3.0, 0, 0, 0, 0, 0], dtype=D)
    with pytest.raises(OutsideImageError, match="1 of 2 sequences") as error:
        flow.inverse(torch.stack((inside, outside)))
    assert error.value.outside.tolist() == [False, True]
    assert float(error.value.residual[1]) > 0.5
    near = inside * 0 + 1.6 * torch.eye(4, 6, dtype=D)  # x + f(x) is shorter than 1.5
    with pytest.raises(OutsideImageError):
        flow.inverse(near)
    with pytest.raises(ArgumentError, match="outside Ball"):
        flow(2 * _inside(4, 6) / _inside(4, 6).norm(dim=-1, keepdim=True))


def test_small_and_degenerate_sequences():
    flow = Invertible(_attention(0.9), domain=BALL)
    for x in (_inside(1, 6), 0.3 * torch.ones(5, 6, dtype=D), torch.zeros(2, 6, dtype=D)):
        y, log_det = flow(x)
        assert bool(torch.isfinite(log_det))
        assert float((flow.inverse(y, 1e-9) - x).norm(dim=-1).max()) < 1e-9
    one = Invertible(_attention(0.9), domain=BALL)(_inside(1, 6))[1]  # a token alone sees itself
    torch.testing.assert_close(
        one, torch.linalg.slogdet(torch.eye(6, dtype=D) + _attention(0.9).lookup.w_v)[1]
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(bad):
    flow, deep = Invertible(_attention(0.5), domain=BALL), Deep(Affine(0.5 * torch.eye(6, dtype=D)))
    x = _inside(3, 6)
    x[1, 2] = bad
    for call in (flow, flow.inverse, flow.iterations, deep, deep.iterations):
        with pytest.raises(ArgumentError, match="NaN or infinity"):
            call(x)


def test_a_tolerance_below_rounding_is_an_error():
    flow = Invertible(_attention(0.9), domain=BALL)
    y = flow(_inside(8, 6))[0]
    for tolerance in (1e-16, 3e-17):
        with pytest.raises(ArgumentError, match="below what rounding"):
            flow.inverse(y, tolerance)
        with pytest.raises(ArgumentError, match="below what rounding"):
            flow.iterations(y, tolerance)
    single = Invertible(Declared(_attention(0.9)).float(), domain=BALL)
    with pytest.raises(ArgumentError, match="compute in float64"):
        single.inverse(y.float(), 1e-7)
    assert float((single.inverse(y.float(), 1e-4) - _inside(8, 6).float()).norm(dim=-1).max()) < 1e-4
    for wrong in (0.0, -1.0, math.nan, True):
        with pytest.raises(ArgumentError, match="tolerance: is"):
            flow.inverse(y, wrong)


def test_the_proof_follows_the_weights():
    layer = _learned(0.9)
    flow, deep = Invertible(layer, domain=BALL), Deep(layer, domain=BALL)
    before = flow.contraction.constant
    with torch.no_grad():
        next(layer.parameters()).mul_(0.5)
    assert flow.contraction.constant == pytest.approx(before / 2)
    next(layer.parameters()).data.mul_(3.0)  # no counter sees this
    for call in (flow, flow.inverse, deep):
        with pytest.raises(ArgumentError, match="has the constant L = 1"):
            call(0.1 * _inside(4, 3))


def test_inverses_have_gradients():
    layer = _learned(0.6)
    flow = Invertible(layer, domain=BALL)
    weight = next(layer.parameters())
    y = flow(0.5 * _inside(3, 3))[0].detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda y: flow.inverse(y, 1e-12), (y,))
    (slope,) = torch.autograd.grad((flow.inverse(y, 1e-12) * _t(3, 3)).sum(), weight)
    step = 1e-6 * _t(3, 3, seed=8)
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(sign * step)
            ends.append(float((flow.inverse(y, 1e-13) * _t(3, 3)).sum()))
            weight.sub_(sign * step)
    assert float((slope * step).sum()) == pytest.approx((ends[0] - ends[1]) / 2, rel=1e-5)


def test_a_module_that_does_something_else_is_refused():
    class Changed(Declared):
        def forward(self, x: Tensor) -> Tensor:
            return 3 * super().forward(x)

    with pytest.raises(ArgumentError, match="a forward of its own"):
        Invertible(Changed(_attention(0.5)), domain=BALL)
    hooked = Declared(_attention(0.5))
    hooked.register_forward_hook(lambda module, inputs, value: 3 * value)
    with pytest.raises(ArgumentError, match="has hooks"):
        Invertible(hooked, domain=BALL)


# Log-determinants


def test_causal_determinants_are_exact():
    """Against slogdet of the whole matrix, for one head, several heads, and compositions."""
    x = _inside(3, 8, 4)
    one = r.Attention(
        r.Dot(0.2 * _t(4, 2), 0.2 * _t(4, 2, seed=1), b_q=0.1 * _t(2), b_k=0.1 * _t(2, seed=5)),
        r.Linear(0.4 * _orthogonal(4), _t(4)),
        support=r.Causal(),
    )
    several = Heads(
        r.Attention(
            r.Dot(0.2 * _t(2, 4, 2), 0.2 * _t(2, 4, 2, seed=1)), r.Linear(_t(2, 4, 2)), support=r.Causal()
        ),
        0.05 * _t(2, 2, 4, seed=4),
        _t(4),
    )
    plain = r.Attention(r.Dot(scale=0.3), support=r.Causal())
    bent = Compose((Affine(0.5 * _orthogonal(4)), GroupSort(), IntoBall(2.0), plain, Pointwise(Tanh())))
    window = plain.replace(support=r.Window(2, 0))
    for map in (one, several, bent, Residual(several), window):
        value, blocks = diagonal_blocks.one(map, x)
        torch.testing.assert_close(value, torch.stack([map(row) for row in x]))
        torch.testing.assert_close(blocks, opaque_blocks(map, x), atol=1e-12, rtol=1e-12)
    for map in (one, several):
        dense = Invertible(map, domain=BALL)(x)
        torch.testing.assert_close(
            Invertible(map, domain=BALL, log_determinant=BlockTriangular())(x), dense, atol=1e-10, rtol=0
        )


def test_causal_determinants_are_for_causal_maps():
    for map in (_attention(0.5), Compose((IntoBall(1.0), _attention(0.5)))):
        with pytest.raises(ArgumentError, match="tokens may see later ones"):
            Invertible(map, domain=BALL, log_determinant=BlockTriangular())


def test_a_series_is_right_on_average():
    """Ten thousand draws with roulette, with and without the control variate: three standard errors."""
    x = _inside(2, 2)
    exact = float(Invertible(_attention(0.8, width=2), domain=BALL)(x)[1])
    spread = {}
    for control in (False, True):
        series = Series(10_000, Roulette(2, 0.6), control=control, seed=3)
        found = Invertible(_attention(0.8, width=2), domain=BALL, log_determinant=series).measure(x)
        error = float(found.standard_error)
        assert abs(float(found.log_det) - exact) < 3 * error
        spread[control] = error
    assert spread[False] ** 2 > 3 * spread[True] ** 2


@pytest.mark.parametrize(("tokens", "width", "g", "w"), [(16, 6, 0.5, 0.55), (32, 4, 0.25, 0.75)])
def test_the_control_variate_saves_probes(tokens, width, g, w):
    attention = r.Attention(r.Dot(scale=g), r.Linear(w * _orthogonal(width)))
    x = _inside(tokens, width, radius=0.99)
    errors = [
        float(
            Invertible(
                attention, domain=BALL, log_determinant=Series(100, Roulette(4, 0.5), control=control, seed=0)
            )
            .measure(x)
            .standard_error
        )
        for control in (False, True)
    ]
    assert errors[0] ** 2 > 3 * errors[1] ** 2


def test_the_remainder_of_a_truncated_series():
    x = _inside(5, 3)
    flow = Invertible(_attention(0.8, width=3), domain=BALL)
    exact = flow(x)[1]
    jacobian = torch.func.jacrev(flow.contraction)(x).reshape(15, 15)
    for terms in (1, 3, 8):
        powers = [torch.linalg.matrix_power(jacobian, k).trace() for k in range(1, terms + 1)]
        total = sum((-1) ** (k + 1) / k * power for k, power in enumerate(powers, 1))
        assert abs(float(total - exact)) <= Truncated(terms).remainder(flow.contraction.constant, 15)


def test_determinants_have_gradients():
    """With respect to tokens and weights; the series against its own values, and Neumann's against Dense."""
    layer, x = _learned(0.7, width=2), (0.5 * _inside(3, 2)).requires_grad_()
    weight = next(layer.parameters())
    causal = Declared(layer.value().replace(support=r.Causal()))
    for f, way in (
        (layer, Dense()),
        (causal, BlockTriangular()),
        (layer, Series(3, Truncated(4), neumann=False, seed=0)),
        (layer, Series(3, Truncated(4), neumann=False, control=True, seed=0)),
    ):
        flow = Invertible(f, domain=BALL, log_determinant=way)
        assert torch.autograd.gradcheck(lambda x, flow=flow: flow(x)[1], (x,))
        assert torch.autograd.gradgradcheck(lambda x, flow=flow: flow(x)[1], (x,))
    exact = torch.autograd.grad(Invertible(layer, domain=BALL)(x)[1], (x, weight))
    way = Series(2000, Roulette(4, 0.5), seed=1)
    series = torch.autograd.grad(Invertible(layer, domain=BALL, log_determinant=way)(x)[1], (x, weight))
    for one, other in zip(exact, series, strict=True):
        assert float((one - other).abs().max()) < 0.05 * float(one.abs().max())


def test_a_series_needs_no_gradient_where_none_is_asked():
    flow = Invertible(_attention(0.5), domain=BALL, log_determinant=Series(2))
    y, log_det = flow(_inside(4, 6))
    assert not y.requires_grad
    assert not log_det.requires_grad
    with pytest.raises(ArgumentError, match="control=False"):
        Invertible(
            Compose((_attention(0.5), Pointwise(Tanh()))), domain=BALL, log_determinant=Series(control=True)
        )


# Infinite depth


def _gentle(tokens: int, width: int, w: float, seed: int = 1) -> Tensor:
    """Tokens that f + u keeps in the ball: |u_i| ≤ 1 - w."""
    return 0.99 * (1 - w) * _inside(tokens, width, seed=seed)


def test_an_affine_fixed_point():
    w, u = 0.8 * _orthogonal(3), _t(2, 4, 3)
    deep = Deep(Affine(w), 1e-11)
    torch.testing.assert_close(deep(u), u @ torch.linalg.inv(torch.eye(3, dtype=D) - w), atol=1e-11, rtol=0)
    one = deep.solve(u)
    assert float(one.error.max()) <= 1e-11
    assert one.evaluations < Deep(Affine(w), 1e-11, Picard()).solve(u).evaluations <= deep.iterations(u) + 1


@pytest.mark.parametrize(("constant", "most"), [(0.5, 16), (0.9, 35)])
def test_gradients_are_those_of_four_hundred_layers(constant, most):
    g, tokens, width = 0.4, 24, 6
    w = constant / (math.sqrt(1 + g * g) + g)
    layer = Declared(r.Attention(r.Dot(scale=g), r.Linear(nn.Parameter(w * _orthogonal(width)))))
    deep = Deep(layer, 1e-9, Anderson(5), domain=BALL)
    weight, u, v = (
        next(layer.parameters()),
        _gentle(tokens, width, w).requires_grad_(),
        _t(tokens, width, seed=7),
    )
    z = u
    for _ in range(400):
        z = layer(z) + u
    unrolled = torch.autograd.grad((z * v).sum(), (u, weight))
    assert deep.solve(u).evaluations <= most
    exact = Deep(layer, 1e-11, domain=BALL)
    found = exact(u)
    assert float((found - z).detach().norm(dim=-1).max()) <= 1e-11
    for one, other in zip(torch.autograd.grad((found * v).sum(), (u, weight)), unrolled, strict=True):
        assert float((one - other).abs().max()) < 1e-8


def test_first_and_second_derivatives_of_fixed_points():
    layer = _learned(0.6, width=2)
    deep = Deep(layer, 1e-13, domain=BALL)
    u = _gentle(3, 2, 0.4).requires_grad_()
    assert torch.autograd.gradcheck(deep, (u,))
    assert torch.autograd.gradgradcheck(deep, (u,))
    weight = next(layer.parameters())

    def unrolled(u: Tensor) -> Tensor:
        z = u
        for _ in range(80):
            z = layer(z) + u
        return z

    def second(f) -> list[Tensor]:
        (slope,) = torch.autograd.grad((f(u) ** 2).sum(), weight, create_graph=True)
        return list(torch.autograd.grad((slope**2).sum(), (u, weight)))

    for one, other in zip(second(deep), second(unrolled), strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-8)
    (slope,) = torch.autograd.grad((deep(u) ** 2).sum(), weight, create_graph=True)
    (again,) = torch.autograd.grad((slope**2).sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        again.sum().backward()


def test_memory_does_not_grow_with_depth():
    layer = _learned(0.9)
    u = _gentle(5, 3, 0.6).requires_grad_()
    saved: list[int] = []
    evaluations = []
    for tolerance in (1e-2, 1e-6, 1e-12):
        deep = Deep(layer, tolerance, Picard(), domain=BALL)
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: (kept.append(t), t)[1], lambda t: t
        ):
            deep(u)
        saved.append(sum(t.numel() * t.element_size() for t in kept))
        evaluations.append(deep.solve(u).evaluations)
    assert saved[0] == saved[1] == saved[2] <= 8 * (5 * 3 + 3 * 3)
    assert evaluations[0] < evaluations[1] < evaluations[2]


def test_gradients_are_wanted_where_they_are():
    layer = _learned(0.5)
    deep, u = Deep(layer, domain=BALL), _gentle(3, 3, 0.4)
    assert deep(u).requires_grad
    with torch.no_grad():
        assert not deep(u).requires_grad
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    assert not deep(u).requires_grad
    assert deep(u.requires_grad_()).requires_grad


def test_what_is_no_contraction_is_refused():
    with pytest.raises(ArgumentError, match=r"L = 1\.310?1? in TokenMax\(\) on Ball\(radius=1\)") as error:
        Deep(_attention(1.31), domain=BALL)
    assert "multiply f by 0.7557" in error.value.remedy
    assert "(1 - w²)/2w" in error.value.remedy
    deep = Deep(_attention(0.9), domain=BALL)
    with pytest.raises(ArgumentError, match="u: takes f"):
        deep(_inside(4, 6) + 1.0)


def test_without_injection_the_input_is_forgotten():
    with pytest.warns(ForgettingWarning, match="forgets its input"):
        deep = Deep(_attention(0.5), 1e-10, domain=BALL, injected=False)
    assert float((deep(_inside(4, 6)) - deep(_inside(4, 6, seed=5))).abs().max()) < 1e-9


def test_how_far_an_input_moves_its_fixed_point():
    """1/(1 + L) ≤ |dz|/|du| ≤ 1/(1 - L)."""
    deep = Deep(_attention(0.9), 1e-12, domain=BALL)
    u = _gentle(5, 6, 0.56)
    norm = r.TokenMax()
    for seed in range(5):
        step = 1e-3 * _t(5, 6, seed=seed)
        ratio = float(norm.of(deep(u + step) - deep(u)) / norm.of(step))
        assert 1 / 1.9 <= ratio <= 1 / 0.1


def test_batches_are_sequences_one_by_one():
    heads = Heads(
        r.Attention(r.Dot(0.2 * _t(2, 4, 2), 0.2 * _t(2, 4, 2, seed=1)), r.Linear(0.5 * _t(2, 4, 2))),
        0.1 * _t(2, 2, 4, seed=4),
    )
    x = 0.3 * _inside(2, 3, 5, 4)
    flow, deep = Invertible(heads, domain=BALL), Deep(heads, 1e-11, domain=BALL)
    y, log_det = flow(x)
    assert (y.shape, log_det.shape) == (x.shape, (2, 3))
    back, fixed = flow.inverse(y, 1e-10), deep(x)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(flow(x[i, j]), (y[i, j], log_det[i, j]))
            torch.testing.assert_close(flow.inverse(y[i, j], 1e-10), back[i, j], atol=1e-9, rtol=0)
            torch.testing.assert_close(deep(x[i, j]), fixed[i, j], atol=1e-10, rtol=0)
    assert float((back - x).norm(dim=-1).max()) < 1e-10


def test_modules_of_torch():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    flow = Invertible(layer, r.Frobenius())
    x = _t(2, 4, 3)
    y, log_det = flow(x)
    assert float((flow.inverse(y, 1e-9) - x).detach().norm()) < 2e-9
    torch.testing.assert_close(
        Invertible(layer, r.Frobenius(), log_determinant=BlockTriangular())(x)[1], log_det
    )
    assert {name for name, _ in flow.named_parameters()} == {
        f"contraction.f.{number}.{name}" for number in (0, 2) for name in ("weight", "bias")
    }
    with pytest.raises(ArgumentError, match="norm"):
        Invertible(layer, r.EntryMax())
    with pytest.raises(ArgumentError, match="no rate"):
        Invertible(layer, r.norms.OwnToken())
    with pytest.raises(ArgumentError, match="domain"):
        Invertible(layer, domain=r.Shell(1.0))
    with pytest.raises(ArgumentError, match="f: is a int"):
        Contraction(3, r.TokenMax(), r.Whole(), "")


def test_layers_with_a_promise():
    """A promise below one is all that is needed."""
    torch.manual_seed(0)
    scale = Affine(0.8 * torch.eye(4, dtype=D))
    promised = Guaranteed([Memory(4, 6), Reflective(4, 2), scale], Promise(r.Frobenius(), 0.8)).double()
    flow, deep = Invertible(promised, r.Frobenius()), Deep(promised, 1e-10, norm=r.Frobenius())
    assert flow.contraction.constant == pytest.approx(0.8)
    x = _t(2, 3, 4)
    assert float((flow.inverse(flow(x)[0], 1e-8) - x).detach().norm(dim=(-2, -1)).max()) < 1e-8
    deep(x).square().sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in promised.parameters() if p.grad is not None)
    assert any(p.grad is not None and float(p.grad.abs().max()) > 0 for p in promised.parameters())


def test_copies_and_states():
    """A copy has a proof of its own, and weights that are loaded are proved again."""
    flow, other = (Invertible(_learned(constant), domain=BALL) for constant in (0.9, 0.5))
    x = 0.5 * _inside(4, 3)
    copied = copy.deepcopy(flow)
    torch.testing.assert_close(copied(x), flow(x))
    copied.load_state_dict(other.state_dict())
    assert copied.contraction.constant == pytest.approx(0.5)
    assert flow.contraction.constant == pytest.approx(0.9)
    assert list(flow.state_dict()) == ["contraction.f.lookup_w_v"]
    copied.load_state_dict({name: 4 * tensor for name, tensor in flow.state_dict().items()})
    with pytest.raises(ArgumentError, match="has the constant"):
        copied.inverse(x)


def test_declarations():
    flow, deep = Invertible(_attention(0.5), domain=BALL), Deep(Affine(0.5 * torch.eye(6, dtype=D)))
    x = 0.3 * _inside(4, 6)
    torch.testing.assert_close(r.declare.one(flow)(x), flow(x)[0])
    torch.testing.assert_close(r.declare.one(deep)(x), deep(x), atol=1e-8, rtol=0)
    assert r.certify(flow, BALL, r.TokenMax()).value == pytest.approx(1.5)
    assert r.certify(deep, r.Whole(), r.TokenMax()).value == pytest.approx(2.0)


def _saved() -> dict[str, nn.Module]:
    """Layers whose f is a declared map, or a layer with a promise."""
    torch.manual_seed(0)
    projected = Compose((IntoBall(1.0), _attention(0.5, width=4, support=r.Causal())))
    promised = Guaranteed([Memory(4, 6), Affine(0.8 * torch.eye(4, dtype=D))], Promise(r.Frobenius(), 0.8))
    series = Series(2, Roulette(3), control=True, seed=1)
    return {
        "blocks": Invertible(_learned(0.7, width=4), domain=BALL, log_determinant=series),
        "causal": Invertible(projected, log_determinant=BlockTriangular(), accelerate=Anderson(3)),
        "promised": Invertible(promised, r.Frobenius()),
        "deep": Deep(projected, 1e-6, Picard()),
        "deep, promised": Deep(promised, 1e-4, norm=r.Frobenius()),
    }


@pytest.mark.parametrize("name", _saved())
def test_saved_and_loaded(name, tmp_path):
    pytest.importorskip("safetensors")
    model = _saved()[name]
    again = load(save(model, tmp_path))
    x = 0.3 * _inside(3, 4)
    if "promised" in name:
        x = x.float()
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=1e-12)
    assert again.certificate().value == pytest.approx(model.certificate().value, rel=1e-12)
    assert again.contraction.norm == model.contraction.norm
    assert again.accelerate == model.accelerate
    assert [(key, p.requires_grad) for key, p in again.named_parameters()] == [
        (key, p.requires_grad) for key, p in model.named_parameters()
    ]
    found = r.cost(model, r.costs.Sizes(3, width=4))
    assert found.forward > 0
    assert found.parameters >= sum(p.numel() for p in model.parameters())


def test_what_does_not_contract_is_not_loaded(tmp_path):
    """Training may leave the contraction; the file says so when it is read."""
    pytest.importorskip("safetensors")
    layer = _learned(0.9)
    flow = Invertible(layer, domain=BALL)
    with torch.no_grad():
        next(layer.parameters()).mul_(2.0)
    save(flow, tmp_path)
    with pytest.raises(ArgumentError, match="has the constant L = 1"):
        load(tmp_path)


def test_a_file_cannot_say_what_a_module_of_torch_computes(tmp_path):
    pytest.importorskip("safetensors")
    flow = Invertible(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double(), r.Frobenius())
    with pytest.raises(ArgumentError, match="is made of a Sequential"):
        save(flow, tmp_path)


def test_the_cost_of_depth_is_that_of_its_steps():
    deep = Deep(Affine(0.5 * torch.eye(4, dtype=D)), 1e-6)
    once = r.cost(Affine(0.5 * torch.eye(4, dtype=D)), r.costs.Sizes(3, width=4)).forward
    assert r.cost(deep, r.costs.Sizes(3, width=4)).forward == 21 * once  # 2⁻²¹/(1 - 1/2) ≤ 1e-6
