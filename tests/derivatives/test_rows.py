"""Values and tangents that are computed together, in blocks of whole rows."""

import math

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import jvp, vmap

import regard as r
from regard.compute.kernel import flash
from regard.compute.kernel.rows import CALM
from tests.nouns import D

TOKENS = 560  # three heads of so many tokens are too many pairs for one block


def tensors(*shape):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, dtype=D, generator=generator) for _ in range(6)]


def together(monkeypatch):
    """How often the six products ran."""
    calls = []
    products = flash.Products.run_and_push
    monkeypatch.setattr(flash.Products, "run_and_push", lambda *a: (calls.append(1), products(*a))[1])
    return calls


DECLARATIONS = {
    "full": {},
    "causal": {"support": r.Causal()},
    "bias": {"potential": r.Gaussian(bandwidth=2.0)},
    "causal, bias": {"potential": r.Gaussian(bandwidth=2.0), "support": r.Causal()},
    "padding": {"support": r.Padding(torch.tensor([500]))},
    "nothing is seen": {"support": r.Padding(torch.tensor([0]))},
}


@pytest.mark.parametrize("name", DECLARATIONS)
@pytest.mark.parametrize("moving", [(0, 1, 2), (0,), (1,), (2,), (0, 2)], ids=str)
def test_values_and_tangents(monkeypatch, name, moving):
    options, calls = DECLARATIONS[name], together(monkeypatch)
    q, k, v, *changes = tensors(1, 3, TOKENS, 16)

    def run(engine, *some):
        own = [q, k, v]
        for index, t in zip(moving, some, strict=True):
            own[index] = t
        return r.attend(*own, engine=engine, **options)

    points, tangents = tuple((q, k, v)[i] for i in moving), tuple(changes[i] for i in moving)
    found = jvp(lambda *some: run(None, *some), points, tangents)
    assert calls
    expected = jvp(lambda *some: run(r.engines.ReferenceEngine(), *some), points, tangents)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    with forward_ad.dual_level():  # the same without torch.func
        plain = forward_ad.unpack_dual(run(None, *map(forward_ad.make_dual, points, tangents)))
    assert len(calls) == 2
    torch.testing.assert_close(plain.tangent, expected[1], rtol=1e-11, atol=1e-12)


def test_a_loud_row_keeps_its_digits():
    """A change that all keys of a row have in common is large in some rows, and must not cost digits."""
    q, k, v, by_q, by_k, by_v = (t.float() for t in tensors(1, 3, TOKENS, 16))
    k[..., 0] = 100.0
    by_q[:, :, ::50, 0] = 1e3  # scores of these rows change by 25,000 together
    tangents = (by_q, 0 * by_k, by_v)
    moved = jvp(r.attend, (q, k, v), tangents)[1]
    expected = jvp(
        lambda *some: r.attend(*some, engine=r.engines.ReferenceEngine()),
        (q.double(), k.double(), v.double()),
        tuple(t.double() for t in tangents),
    )[1]
    assert (by_q[..., 0] * 100 / 4).max() > 1000 * CALM
    loud = torch.zeros(TOKENS, dtype=torch.bool)
    loud[::50] = True
    error = (moved - expected).abs().amax(-1)[0]
    assert error[:, ~loud].max() < 2e-5
    assert error[:, loud].max() < 2e-2  # the rounding of the scores' change itself: 25,000 · 2⁻²⁴ and more


@pytest.mark.parametrize("outer", ["reverse", "forward", "vmap", "grad of tangents"])
def test_inside_other_transforms(monkeypatch, outer):
    """Anything else at work: every order comes from sweeps."""
    calls = together(monkeypatch)
    q, k, v, by_q, *_ = tensors(1, 3, TOKENS, 16)
    scale = torch.tensor(0.7, dtype=D, requires_grad=outer in ("reverse", "grad of tangents"))
    moved = lambda q, t: jvp(lambda q: r.attend(q, k, v), (q,), (t,))[1].square().sum()  # noqa: E731
    if outer in ("reverse", "grad of tangents"):
        moved(*((scale * q, by_q) if outer == "reverse" else (q, scale * by_q))).backward()
        found = scale.grad
    elif outer == "forward":
        found = jvp(lambda s: moved(s * q, by_q), (scale,), (torch.ones((), dtype=D),))[1]
    else:
        found = vmap(lambda s: moved(q, s * by_q))(torch.tensor([0.7, 1.4], dtype=D))
    assert not calls
    if outer == "vmap":
        assert found[1] == pytest.approx(4 * found[0])
        return
    step = 1e-5
    shifted = [(scale.detach() + s) for s in (step, -step)]
    ends = [float(moved(*((q, s * by_q) if outer == "grad of tangents" else (s * q, by_q)))) for s in shifted]
    assert float(found) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6)
    assert calls
    assert math.isfinite(float(found))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"support": r.Causal()},
        {"potential": r.Laplace(bandwidth=2.0)},
        {"potential": r.Dot() + r.Alibi.heads(2)},
        {"normalizer": r.Entmax(1.5)},
    ],
    ids=repr,
)
def test_jacobians_by_batches_of_tangents(options):
    """torch.autograd.functional maps tangents by an older vmap, which knows no torch.func."""
    x = tensors(1, 2, 5, 4)[0]
    of = lambda **how: torch.autograd.functional.jacobian(lambda z: r.attend(z, z, z, **options), x, **how)  # noqa: E731
    torch.testing.assert_close(of(vectorize=True, strategy="forward-mode"), of())
