"""Short ways to the fused kernel: they are taken, and they give what the definition gives."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import regard as r
from regard.compute import kept
from regard.compute.direct import direct
from regard.compute.kernel.slopes import ROWS, slope_of
from regard.compute.tensors import attend_tokens
from regard.engines import ReferenceEngine as Reference
from regard.engines import Sdpa

POTENTIALS = {
    "dot": r.Dot(),
    "gaussian": r.Gaussian(bandwidth=2.0),
    "cosine": r.Cosine(scale=5.0),
    "rotary": r.Rotary(r.Dot()),
    "rotary gaussian": r.Rotary(r.Gaussian(bandwidth=3.0)),
    "alibi": r.Dot() + r.Alibi(1e-7),
    "steep alibi": r.Dot() + r.Alibi(torch.tensor([2.0, 0.5, 0.1, 1e-3])),
    "two products": r.Dot() + r.Cosine(),
}


def tensors(m, n, heads=4, width=16, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, heads, t, width, generator=generator, dtype=torch.float64).to(dtype) for t in (m, n, n)
    ]


@pytest.mark.parametrize("support", [r.Full(), r.Causal()], ids=["full", "causal"])
@pytest.mark.parametrize("name", POTENTIALS)
def test_the_short_way_gives_what_the_definition_gives(name, support):
    for m, n in ((7, 7), (1, 9), (5, 9), (9, 5)):
        q, k, v = tensors(m, n)
        potential = POTENTIALS[name]
        found = direct(q, k, v, potential, r.Softmax(temperature=0.7), support)
        asked = {"potential": potential, "normalizer": r.Softmax(temperature=0.7), "support": support}
        wanted = r.attend(*(t.double() for t in (q, k, v)), engine=Reference(), **asked)
        assert (found is not None) == (name != "two products")
        if found is not None:
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=3e-6)
        torch.testing.assert_close(r.attend(q, k, v, **asked).double(), wanted, rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", POTENTIALS)
def test_a_query_that_stands_after_all_keys(name):
    q, k, v = tensors(1, 9)
    found = attend_tokens(POTENTIALS[name], r.Softmax(), r.Full(), q, k, v, torch.tensor([8]))
    attention = r.Attention(POTENTIALS[name])
    law = r.Measure(q.double(), marks=torch.tensor([8]))
    scores = attention.potential.scores(q.double(), k.double(), law.positions(), torch.arange(9))
    torch.testing.assert_close(found.double(), scores.softmax(-1) @ v.double(), rtol=0, atol=3e-6)


def test_points_far_from_the_origin_take_the_long_way():
    """A Gaussian about the origin would lose its digits: the center moves, or float64 is taken."""
    q, k, v = tensors(6, 6)
    q, k = q + 100, k + 100
    potential = r.Gaussian(bandwidth=3.0)
    assert direct(q, k, v, potential, r.Softmax(), r.Full()) is not None  # centered: still one call
    wanted = r.attend(q.double(), k.double(), v.double(), potential=potential, engine=Reference())
    torch.testing.assert_close(r.attend(q, k, v, potential=potential).double(), wanted, rtol=0, atol=2e-5)
    narrow = r.Gaussian(bandwidth=0.05)
    assert direct(q, k, v, narrow, r.Softmax(), r.Full()) is None


def test_what_the_short_way_leaves_to_the_plan():
    q, k, v = tensors(5, 5)
    learned = r.Gaussian(bandwidth=torch.tensor(1.0, requires_grad=True))
    slopes = r.Dot() + r.Alibi(torch.tensor([1e-8] * 3))  # three slopes for four heads
    for potential in (learned, slopes, r.Laplace(bandwidth=1.0)):
        assert direct(q, k, v, potential, r.Softmax(), r.Causal()) is None
    wide = r.Dot() + r.Alibi(torch.tensor([1e-8] * 4, dtype=torch.float64))
    with pytest.raises(r.errors.ArgumentError, match="float64"):
        r.attend(q, k, v, potential=wide, support=r.Causal())
    assert direct(*(t.bfloat16() for t in (q, k, v)), r.Cosine(), r.Softmax(), r.Full()) is None
    assert direct(q.requires_grad_(), k, v, r.Cosine(), r.Softmax(), r.Full()) is None


def sloped(slope, q, k, v):
    return r.attend(q, k, v, potential=r.Dot() + slope, support=r.Causal())


def test_a_table_that_is_kept_follows_the_numbers_of_its_declaration():
    """Slopes and frequencies that are written in place, also behind the back of autograd, are read anew."""
    q, k, v = tensors(6, 6)
    alibi = r.Alibi(torch.tensor([1.0, 0.5, 0.25, 0.125]))
    potential = r.Dot() + alibi
    first = r.attend(q, k, v, potential=potential)
    assert torch.equal(r.attend(q, k, v, potential=potential), first)
    alibi.slope.data.mul_(3)
    wanted = r.attend(q, k, v, potential=potential, engine=Reference())
    torch.testing.assert_close(r.attend(q, k, v, potential=potential), wanted, rtol=0, atol=3e-6)
    assert not torch.allclose(first, wanted, atol=1e-3)
    turned = r.Rotary(r.Dot(), frequencies=torch.tensor([1.0, 0.5]))
    first = r.attend(q, k, v, potential=turned)
    turned.frequencies.data.mul_(0.3)
    wanted = r.attend(q, k, v, potential=turned, engine=Reference())
    torch.testing.assert_close(r.attend(q, k, v, potential=turned), wanted, rtol=0, atol=3e-6)
    assert not torch.allclose(first, wanted, atol=1e-3)


def test_tables_are_few_and_belong_to_one_declaration():
    q, k, v = tensors(5, 5)
    kept._kept.clear()
    for number in range(3 * kept.MOST):  # each is gone before the next, so that places in memory come again
        slope = r.Alibi(0.01 * number)
        wanted = r.attend(q, k, v, potential=r.Dot() + slope, support=r.Causal(), engine=Reference())
        torch.testing.assert_close(sloped(slope, q, k, v), wanted, rtol=0, atol=3e-6)
        assert len(kept._kept) <= kept.MOST
    many = kept.slopes(r.Alibi(1.0), *2 * [torch.zeros(1, 1, 400, 8)])
    assert many is None


def test_a_table_made_in_a_mode_serves_outside_of_it():
    q, k, v = tensors(5, 5)
    slope = r.Alibi(0.3)
    with torch.inference_mode():
        inside = sloped(slope, q, k, v)
    assert torch.equal(sloped(slope, q, k, v), inside)
    other = r.Alibi(0.4)
    with torch.device("meta"):
        found = sloped(other, q, k, v)
    assert found.device.type == "cpu"
    assert torch.equal(sloped(other, q, k, v), found)
    with FakeTensorMode(allow_non_fake_inputs=True):
        sloped(r.Alibi(0.5), q, k, v)
    assert all(type(t) is torch.Tensor for _, _, table in kept._kept.values() for t in table)


STEEP = torch.tensor([0.5, 0.03, 2.0])


def plan_of(potential, m, n):
    q, k, v = tensors(m, n, heads=3)
    from regard.compute.problem import pose

    return Sdpa().plan(pose(potential, r.Softmax(), r.Causal(), q, k, v))


def test_slopes_are_recognized():
    tiling = plan_of(r.Dot() + 2.0 * r.Alibi(STEEP) + r.Alibi(5.0), 6, 6).call.tiling
    torch.testing.assert_close(slope_of(tiling), 2 * STEEP + 5.0)
    assert slope_of(tiling.replace(in_order=False)) is None
    assert slope_of(tiling.replace(support=r.Causal() & r.Window(3, 0))) is None


@pytest.mark.parametrize(
    ("m", "n"), [(ROWS, ROWS), (2 * ROWS + 7, 2 * ROWS + 7), (30, 300), (500, 210), (450, 100)]
)
def test_a_causal_slope_in_blocks(m, n):
    """Far keys by a bias of their own, near ones by pairs: outputs and gradients of the definition."""
    potential, support = r.Dot() + r.Alibi(STEEP), r.Causal()
    q, k, v = (t.requires_grad_() for t in tensors(m, n, heads=3))
    out = r.attend(q, k, v, potential=potential, support=support)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(out, (q, k, v), upstream)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    distance = (torch.arange(m).unsqueeze(-1) - torch.arange(n)).double()
    scores = wide[0] @ wide[1].mT / 4 - STEEP.double()[:, None, None] * distance
    scores = scores.masked_fill(distance < 0, -math.inf)
    wanted = scores.softmax(-1) @ wide[2]
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-5)
    exact = torch.autograd.grad(wanted, wide, upstream.double())
    for found, one in zip(gradients, exact, strict=True):
        torch.testing.assert_close(found.double(), one, rtol=1e-4, atol=1e-4 * float(one.abs().max()))


def test_slopes_cost_no_digits():
    """One bias m·j on keys alone would be off by m·n·eps in every score; blocks are not."""
    q, k, v = tensors(1500, 1500, heads=3)
    scores = q.double() @ k.double().mT / 4
    distance = (torch.arange(1500).unsqueeze(-1) - torch.arange(1500)).double()
    scores = (scores - STEEP.double()[:, None, None] * distance).masked_fill(distance < 0, -math.inf)
    wanted = scores.softmax(-1) @ v.double()
    found = r.attend(q, k, v, potential=r.Dot() + r.Alibi(STEEP), support=r.Causal())
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-6)


def test_blocks_end_where_documents_end():
    ids = torch.tensor([0] * 70 + [1] * 3 + [2] * 120 + [0] * 90)
    q, k, v = tensors(len(ids), len(ids))
    for support in (r.Document(ids), r.Document(ids) & r.Causal()):
        assert support.seams() == (70, 73, 193)
        from regard.compute.problem import pose

        plan = Sdpa().plan(pose(r.Dot(), r.Softmax(), support, q, k, v))
        assert plan.call.tiling.seams == (70, 193)  # a block of three rows would not pay
        wanted = r.attend(*(t.double() for t in (q, k, v)), support=support, engine=Reference())
        torch.testing.assert_close(plan.run().double(), wanted, rtol=0, atol=3e-6)
    past = [tile.rows for tile in plan.call.tiling if plan.call.tiling.is_past(tile)]
    assert past == [slice(0, 70)]  # document 0 comes back later, and two documents share a block
    packed = r.Document(torch.arange(283) // 100) & r.Causal()
    tiling = Sdpa().plan(pose(r.Dot(), r.Softmax(), packed, q, k, v)).call.tiling
    assert all(tiling.is_past(tile) for tile in tiling)
    assert r.Document(torch.zeros(2, 1, 5, dtype=torch.long)).seams() == ()
