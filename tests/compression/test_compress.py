"""compress: sizes, tolerances, refusals, and what does not change the result."""

from __future__ import annotations

import math

import pytest
import torch

import regard
from regard import Attention, Ball, Causal, Dot, Entmax, Linear, Measure, Sigmoid, Sinkhorn, compress
from regard.domains import Whole
from regard.errors import ArgumentError, RefusalError
from regard.lookups import Table
from regard.potentials import Alibi, Laplace

D = torch.float64


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


X, DOT = 0.3 * _t(60, 3, seed=1), Attention(Dot(scale=1.0))
BALL = Ball(2.0)


def _sphere(count: int = 300, width: int = 3, radius: float = 2.0) -> torch.Tensor:
    found = _t(count, width, seed=9)
    return radius * found / found.norm(dim=-1, keepdim=True)


def _error(attention, context, found) -> float:
    return float((attention(_sphere(), context) - attention(_sphere(), found.measure)).norm(dim=-1).max())


def test_a_size_and_its_proof():
    found = compress(X, DOT, size=10, domain=BALL)
    assert (found.size, found.count) == (10, 60)
    assert _error(DOT, X, found) <= float(found.bounds(_sphere()).max()) <= found.certificate.value
    masses = torch.zeros(10, dtype=D).index_add_(0, found.groups, torch.ones(60, dtype=D))
    torch.testing.assert_close(found.measure.masses(), masses / 60)  # tilts are zero at the origin
    assert "60 keys in 10 atoms" in repr(found)


def test_more_atoms_are_better_and_all_are_exact():
    values = [compress(X, DOT, size=size, domain=BALL).certificate.value for size in (1, 4, 16, 60)]
    assert values == sorted(values, reverse=True)
    assert values[-1] < 1e-12


def test_a_tolerance_is_met_or_refused_with_the_number_in_the_way():
    found = compress(X, DOT, tolerance=0.1, domain=BALL)
    assert _error(DOT, X, found) <= found.certificate.value <= 0.1
    assert found.size <= 30
    with pytest.raises(RefusalError, match=r"reaches .* in logits, and about .* is needed"):
        compress(X, DOT, tolerance=0.01, domain=BALL)


def test_a_cloud_gets_far_fewer_atoms():
    """The target of the benchmark at a size for tests."""
    x = 2 * torch.rand(20_000, 2, generator=torch.Generator().manual_seed(0), dtype=D) - 1
    found = compress(x, DOT, tolerance=0.02, domain=Ball(5.0))
    queries = _sphere(60, 2, 5.0)
    truth = float((DOT(queries, x) - DOT(queries, found.measure)).norm(dim=-1).max())
    assert found.size * 40 <= 20_000
    assert truth <= found.certificate.value <= min(0.02, 6 * truth)


def test_given_queries_are_measured_and_the_ball_stands_beside_them():
    queries = _sphere(40)
    found = compress(X, DOT, size=10, queries=queries)
    truth = float((DOT(queries, X) - DOT(queries, found.measure)).norm(dim=-1).max())
    assert truth <= found.certificate.value <= truth + 1e-12
    assert found.certificate.others[0].value >= found.certificate.value
    assert found.certificate.value < compress(X, DOT, size=10, domain=BALL).certificate.value
    both = compress(X, DOT, size=10, queries=queries, domain=BALL).certificate
    assert both.domain is BALL
    assert both.value >= min(rung.value for rung in both.others) == found.certificate.value
    enough = compress(X, DOT, tolerance=0.02, queries=queries)
    assert enough.certificate.value <= 0.02


def test_without_queries_the_keys_are_the_queries():
    found = compress(X, DOT, size=12)
    truth = float((DOT(X, X) - DOT(X, found.measure)).norm(dim=-1).max())
    assert truth <= found.certificate.value
    assert isinstance(found.certificate.domain, Ball)


def test_heads_have_atoms_of_their_own():
    heads = Attention(Dot(_t(2, 3, 3, seed=1), _t(2, 3, 3, seed=2)), Linear(_t(2, 3, 2, seed=3)))
    for goal in ({"size": 10}, {"tolerance": 0.3}):
        found = compress(X, heads, **goal, domain=Ball(1.0))
        assert found.measure.points.shape == (2, found.size, 3)
        assert found.groups.shape == (2, 60)
        queries = _sphere() / 2
        moved = (heads(queries, X) - heads(queries, found.measure)).transpose(0, 1).flatten(1).norm(dim=-1)
        assert bool((moved <= found.bounds(queries)).all())
        assert float(moved.max()) <= found.certificate.value


def test_order_and_copies_do_not_matter():
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    found, shuffled = (compress(x, DOT, size=10, domain=BALL) for x in (X, X[order]))
    assert math.isclose(found.certificate.value, shuffled.certificate.value, rel_tol=1e-9)
    torch.testing.assert_close(DOT(_sphere(), found.measure), DOT(_sphere(), shuffled.measure))
    split = compress(torch.cat([X, X]), DOT, size=10, domain=BALL)  # each atom in two
    assert math.isclose(found.certificate.value, split.certificate.value, rel_tol=1e-9)
    torch.testing.assert_close(DOT(_sphere(), found.measure), DOT(_sphere(), split.measure))


def test_a_shift_of_the_queries_is_a_reweighting():
    """Ψ_G Ψ_G' = Ψ_GG': queries about q0 see the keys as queries about 0 see the reweighted keys."""
    q0 = _t(3, seed=5)
    there = compress(X, DOT, size=10, domain=Ball(1.0, q0))
    here = compress(Measure(X).reweight(X @ q0), DOT, size=10, domain=Ball(1.0))
    assert math.isclose(there.certificate.value, here.certificate.value, rel_tol=1e-9)
    queries = _sphere() / 2
    torch.testing.assert_close(DOT(q0 + queries, there.measure), DOT(queries, here.measure))


def test_twice():
    once = compress(X, DOT, size=20, domain=BALL)
    twice = compress(once, DOT, size=6, domain=BALL)
    assert twice.size == 6
    assert _error(DOT, X, twice) <= twice.certificate.value
    assert bool((twice.groups == compress(once.measure, DOT, size=6, domain=BALL).groups[once.groups]).all())
    torch.testing.assert_close(
        DOT.free_energy(torch.zeros(1, 3, dtype=D), twice.measure) + twice.log_mass, torch.zeros(1, dtype=D)
    )
    assert compress(once, DOT, size=6, domain=Ball(9.0)).certificate.value == math.inf


def test_mixed_with_new_tokens_it_is_the_compression_of_both():
    """The mass that tangent atoms lose is kept: off the origin the atoms weigh less than their keys."""
    new, center = _t(5, 3, seed=7), torch.tensor([1.0, -2.0, 0.5], dtype=D)
    found = compress(X, DOT, size=8, domain=Ball(1.0, center))
    assert float(found.log_mass) < -1e-3
    both = found.mix(new)
    queries = center + _sphere() / 2
    truth = DOT(queries, torch.cat([X, new]))
    logs = torch.cat([found.measure.log_masses() + found.log_mass + math.log(60), torch.zeros(5, dtype=D)])
    by_hand = Measure(torch.cat([found.measure.points, new]), logs)
    torch.testing.assert_close(DOT(queries, both.measure), DOT(queries, by_hand))
    moved = (truth - DOT(queries, both.measure)).norm(dim=-1)
    assert bool((moved <= both.bounds(queries)).all())
    assert float(moved.max()) <= both.certificate.value
    careless = found.measure.mix(Measure(new), 5 / 65)  # without the mass
    assert float((truth - DOT(queries, careless)).norm(dim=-1).max()) > float(moved.max())
    energy = DOT.free_energy(queries, Measure(torch.cat([X, new])))
    assert bool((DOT.free_energy(queries, both.measure) + both.log_mass <= energy + 1e-12).all())


def test_one_key_copies_and_one_query_need_one_atom():
    for context, ball in ((X[:1], BALL), (X[:1].expand(50, 3), BALL), (X, Ball(0.0))):
        for goal in ({"tolerance": 1e-9}, {"size": 1}):
            found = compress(context, DOT, **goal, domain=ball)
            assert found.size == 1
            assert found.certificate.value < 1e-9


def test_keys_without_mass_are_left_out():
    weights = torch.zeros(60, dtype=D)
    weights[::2] = -math.inf
    found = compress(Measure(X, weights), DOT, size=5, domain=BALL)
    assert bool((found.groups[::2] == -1).all())
    assert _error(DOT, X[1::2], found) <= found.certificate.value


@pytest.mark.parametrize(
    ("attention", "why"),
    [
        (Attention(Dot(), normalizer=Entmax(1.5)), "Gibbs"),
        (Attention(Dot(), normalizer=Sigmoid()), "Gibbs"),
        (Attention(Dot(), normalizer=Sinkhorn()), "Gibbs"),
        (Attention(Dot(), support=Causal()), "positions"),
        (Attention(Dot() + Alibi(0.5)), "positions"),
        (Attention(Laplace()), "affine in the keys"),
        (Attention(Dot(), Table(X)), "Identity|values"),
    ],
    ids=["entmax", "sigmoid", "sinkhorn", "mask", "positions", "laplace", "table"],
)
def test_refusals(attention, why):
    with pytest.raises(RefusalError, match=why):
        compress(X, attention, size=4, domain=BALL)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"size": 0}, "size"),
        ({"size": 61}, "size"),
        ({"size": True}, "size"),
        ({"size": 4, "tolerance": 0.1}, "size and tolerance"),
        ({}, "size and tolerance"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"tolerance": -1.0}, "tolerance"),
        ({"size": 4, "domain": Whole()}, "domain"),
        ({"size": 4, "domain": Ball(1.0, torch.zeros(4, dtype=D))}, "domain"),
        ({"size": 4, "queries": torch.zeros(0, 3)}, "queries"),
        ({"size": 4, "queries": torch.zeros(5, 4, dtype=D)}, "queries"),
    ],
    ids=str,
)
def test_bad_input(arguments, named):
    with pytest.raises(ArgumentError, match=named):
        compress(X, DOT, **arguments)


def test_bad_measures():
    with pytest.raises(ArgumentError, match="log_weights"):
        compress(Measure(X, torch.log(-torch.ones(60, dtype=D))), DOT, size=4)  # negative masses
    with pytest.raises(ArgumentError, match="marks"):
        compress(Measure(X, marks=torch.arange(60)), DOT, size=4)
    with pytest.raises(ArgumentError, match="context"):
        compress(X.expand(2, 60, 3), DOT, size=4)
    found = compress(X, DOT, size=4)
    with pytest.raises(ArgumentError, match="other"):
        found.mix(torch.zeros(2, 4, dtype=D))
    with pytest.raises(ArgumentError, match="share"):
        found.mix(X, 1.0)
    with pytest.raises(ArgumentError, match="queries"):
        found.bounds(torch.zeros(2, 4, dtype=D))
    assert "compress" in regard.__all__


def test_errors_of_heads_add_up_as_lengths():
    """Two equal heads side by side are off by √2 times as much as one."""
    one = Attention(Dot(_t(3, 3, seed=1), _t(3, 3, seed=2)), Linear(_t(3, 2, seed=3)))
    two = Attention(
        Dot(*(w.expand(2, 3, 3) for w in (one.potential.w_q, one.potential.w_k))),
        Linear(one.lookup.w_v.expand(2, 3, 2)),
    )
    single, both = (compress(X, each, size=6, domain=Ball(1.0)) for each in (one, two))
    queries = _sphere()
    assert both.certificate.value == pytest.approx(math.sqrt(2) * single.certificate.value, rel=1e-9)
    torch.testing.assert_close(both.bounds(queries), math.sqrt(2) * single.bounds(queries))
