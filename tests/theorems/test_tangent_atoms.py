"""Few atoms for many keys: the identities of the theorem, its equality cases, and attacks on its bounds."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from regard import Attention, Ball, Bilinear, Dot, Gaussian, Linear, Measure, compress
from regard._upper import exact
from regard.compression.expectation import next_anchors
from regard.proofs import cells as cells_file
from regard.proofs.cells import Cells
from regard.proofs.key_form import key_form
from regard.proofs.subject import Head
from regard.proofs.theorems import tangent_atoms

D = torch.float64


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def _cells(attention, context, labels, anchors, **more) -> Cells:
    head = Head(attention)
    return Cells(head, key_form(head, context.dimension, Ball(1.0)), context, labels, anchors, **more)


def _labels(count: int, groups: int, seed: int) -> torch.Tensor:
    drawn = torch.randint(0, groups, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.unique(drawn, return_inverse=True)[1]


ATTENTIONS = {
    "dot": Attention(Dot(scale=1.0)),
    "bilinear": Attention(Bilinear(_t(3, 3, seed=1)), Linear(_t(3, 2, seed=2), _t(2, seed=3))),
    "projected": Attention(Dot(_t(3, 4, seed=4), _t(3, 4, seed=5), b_q=_t(4, seed=6), b_k=_t(4, seed=7))),
    "gaussian": Attention(Gaussian(bandwidth=0.8), Linear(_t(3, 2, seed=8))),
    "gaussian projected": Attention(
        Gaussian(_t(3, 2, seed=1), _t(3, 2, seed=2), 1.5, _t(2, seed=3), _t(2, seed=4))
    ),
}


@pytest.fixture(params=ATTENTIONS)
def attention(request):
    return ATTENTIONS[request.param]


def test_the_gap_of_free_energies_is_a_divergence(attention):
    """Part 1, through `free_energy` and `law_gap`, for keys with weights and groups with tilts."""
    context, labels = Measure(_t(12, 3, seed=1), _t(12, seed=2)), _labels(12, 4, 3)
    cells = _cells(attention, context, labels, _t(int(labels.max()) + 1, 3, seed=4))
    queries = _t(7, 3, seed=5)
    exactly = attention.free_energy(queries, context)
    nearly = attention.free_energy(queries, cells.measure) + cells.log_mass
    assert bool((nearly <= exactly + 1e-13).all())
    lifted = attention.weights(queries, cells.measure)[:, labels] * cells.masses
    gap = attention.law_gap(lifted, queries, context)
    torch.testing.assert_close(gap, exactly - nearly, rtol=0, atol=1e-14 * (1 + float(exactly.abs().max())))
    values = attention.lookup.values(context.points, None)
    torch.testing.assert_close(lifted @ values, attention(queries, cells.measure), rtol=0, atol=1e-12)


def test_an_atom_is_exact_where_it_is_tangent(attention):
    """One group, the query at its anchor: mass, output and bound."""
    context, anchor = Measure(_t(9, 3, seed=1), _t(9, seed=2)), _t(1, 3, seed=3)
    cells = _cells(attention, context, torch.zeros(9, dtype=torch.long), anchor)
    gap = attention.free_energy(anchor, context) - attention.free_energy(anchor, cells.measure)
    torch.testing.assert_close(gap[0], cells.log_mass, rtol=0, atol=1e-12)
    moved = (attention(anchor, context) - attention(anchor, cells.measure)).norm()
    atoms = cells.atoms()
    assert float(moved) <= float(tangent_atoms.row_bounds(atoms, anchor)[0]) < 1e-10
    assert float(moved) <= float(tangent_atoms.ball_bound(atoms, anchor[0], 0.0)) < 1e-10


def test_tilts_by_the_queries_never_raise_the_mean_gap(attention):
    """Part 2: expectation and maximization."""
    context, labels, queries = Measure(_t(15, 3, seed=1)), _labels(15, 4, 2), 2 * _t(20, 3, seed=3)
    anchors, means = torch.zeros(int(labels.max()) + 1, 3, dtype=D), []
    for _ in range(6):
        cells = _cells(attention, context, labels, anchors)
        means.append(float((attention.free_energy(queries, cells.measure) + cells.log_mass).mean()))
        anchors = next_anchors(cells, queries)
    assert means[-1] > means[0]
    assert all(after >= before - 1e-13 for before, after in pairwise(means))


@pytest.mark.parametrize("seed", range(40))
def test_no_query_of_a_ball_is_farther_off_than_proved(seed):
    """Random instances over decades of scales, tilts at other places than the center, and a search."""
    gen = torch.Generator().manual_seed(seed)
    n, d = (int(torch.randint(*between, (1,), generator=gen)) for between in ((2, 14), (1, 5)))
    scale = 10 ** float(_t(1, seed=seed + 100) * 0.6)
    x = scale * _t(n, d, seed=seed + 200)
    if seed % 3 == 0:
        x = x[torch.randint(0, n, (n,), generator=gen)] + 1e-2 * _t(n, d, seed=seed + 300)
    context = Measure(x, _t(n, seed=seed + 400) * (seed % 2))
    attention = Attention(Bilinear(_t(d, d, seed=seed + 500)), Linear(_t(d, 2, seed=seed + 600)))
    if seed % 5 == 0:
        attention = Attention(Gaussian(bandwidth=1.0 + scale), Linear(_t(d, 2, seed=seed + 600)))
    labels = _labels(n, max(1, n // 2), seed)
    count = int(labels.max()) + 1
    anchors = _t(count if seed % 4 else 1, d, seed=seed + 700)
    atoms = (cells := _cells(attention, context, labels, anchors)).atoms()
    center, radius = _t(d, seed=seed + 800), 10 ** float(_t(1, seed=seed + 900) * 0.5)
    away = _t(200, d, seed=seed + 1000)
    away = (
        radius
        * away
        / away.norm(dim=-1, keepdim=True)
        * torch.rand(200, 1, generator=gen, dtype=D) ** (1 / d)
    )
    queries = torch.cat([center + away, anchors])
    moved = (attention(queries, context) - attention(queries, cells.measure)).norm(dim=-1)
    assert bool((moved <= tangent_atoms.row_bounds(atoms, queries).bound).all())
    assert float(moved[:200].max()) <= float(tangent_atoms.ball_bound(atoms, center, radius))


def test_the_ball_is_attained_to_first_order():
    """Two keys of weight one half, ±h: D = log cosh, and mass that moves to a far key is 2 tanh(D/4) R at
    most; the error of one group is E to first order in h.
    """
    h = 1e-3
    context, attention = Measure(torch.tensor([[h], [-h]], dtype=D)), Attention(Dot(scale=1.0))
    found = compress(context, attention, size=1, domain=Ball(1.0))
    moved = abs(
        float(
            attention(torch.ones(1, 1, dtype=D), context)
            - attention(torch.ones(1, 1, dtype=D), found.measure)
        )
    )
    assert moved <= found.certificate.value <= moved * (1 + 2 * h)


def test_mass_that_a_group_gains_is_attained():
    """A group of two keys with one value and a far key: the whole error is that of the mass, D = b²/2 to
    second order, and the best odds reach 2 tanh(D/4) R.
    """
    b = 0.02
    keys = torch.tensor([[b, 0.0], [-b, 0.0], [0.0, 1.0]], dtype=D)
    attention = Attention(Dot(scale=1.0), Linear(torch.tensor([[0.0], [1.0]], dtype=D)))
    gap = math.log(math.cosh(b))
    odds = math.exp(-gap / 2)  # of the group against the far key, where the bound is attained
    context = Measure(keys, torch.tensor([odds / 2, odds / 2, 1.0], dtype=D).log())
    cells = _cells(attention, context, torch.tensor([0, 0, 1]), torch.zeros(1, 2, dtype=D))
    query = torch.tensor([[1.0, 0.0]], dtype=D)
    moved = float((attention(query, context) - attention(query, cells.measure)).abs())
    bound = float(tangent_atoms.ball_bound(cells.atoms(), torch.zeros(2, dtype=D), 1.0))
    assert moved <= bound <= moved * (1 + b)


@pytest.mark.parametrize("b", [0.02, 1.0, 3.0])
def test_what_one_query_sees_of_the_mass_that_a_group_gains(b):
    """The same keys: t/(1 + t) of the way from the far key, t = P̂(e^D - 1); attained where D is."""
    keys = torch.tensor([[b, 0.0], [-b, 0.0], [0.0, 1.0]], dtype=D)
    attention = Attention(Dot(scale=1.0), Linear(torch.tensor([[0.0], [1.0]], dtype=D)))
    cells = _cells(attention, Measure(keys), torch.tensor([0, 0, 1]), torch.zeros(1, 2, dtype=D))
    query, atoms = torch.tensor([[1.0, 0.0]], dtype=D), cells.atoms()
    moved = float((attention(query, Measure(keys)) - attention(query, cells.measure)).abs())
    gap = float(tangent_atoms.gaps(atoms, exact(torch.ones(1, 2, dtype=D)))[0].bound[0, 0])
    far = float(attention(query, cells.measure))
    gained = (1 - far) * math.expm1(gap)
    bound = float(tangent_atoms.row_bounds(atoms, query))
    assert bound == pytest.approx(gained / (1 + gained) * far, rel=1e-9)
    assert moved <= bound
    assert b > 0.1 or bound <= moved * (1 + b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_copies_leave_rounding_and_nothing_else(dtype):
    """Ten distinct keys, eight times each: zero error, and a certificate that is not below what computed
    outputs differ by.
    """
    x = _t(10, 3, seed=1).to(dtype).repeat(8, 1)
    attention, queries = Attention(Dot(scale=1.0)), _t(50, 3, seed=2)
    found = compress(x, attention, size=10, domain=Ball(float(queries.norm(dim=-1).max())))
    moved = (attention(queries, x.double()) - attention(queries, _double(found.measure))).norm(dim=-1)
    assert found.size == 10
    assert bool((moved <= found.bounds(queries)).all())
    assert float(moved.max()) <= found.certificate.value < (1e-4 if dtype == torch.float32 else 1e-11)


def _double(measure: Measure) -> Measure:
    return Measure(measure.points.double(), measure.log_masses().double())


def test_series_and_closed_forms_meet():
    """(e^b - 1 - b)/b² and (e^b - 1)/b from above, from 1e-8 to 30, against high precision."""
    from fractions import Fraction

    for value in (1e-8, 1e-3, 0.3, 0.49999, 0.5, 0.50001, 1.0, 7.0, 30.0):
        b, term, first, second = Fraction(value), Fraction(1), Fraction(0), Fraction(0)
        for k in range(1, 160):
            term = term * b / k if k > 1 else b
            first += term
            second += term if k > 1 else 0
        exact = (second / b**2, first / b)
        upper = torch.tensor(value, dtype=D)
        for function, truth in zip((tangent_atoms._bennett, tangent_atoms._slope), exact, strict=True):
            found = float(function(tangent_atoms.Upper(upper)))
            assert truth <= Fraction(found) <= truth * Fraction(1 + 1e-12)


def test_weights_that_are_stored_in_few_digits_are_paid_for():
    """Copies have no error but that of log-weights in float32."""
    x = _t(6, 3, seed=1).float().repeat_interleave(torch.tensor([1, 2, 5, 9, 3, 30]), 0)
    attention, center = Attention(Dot(scale=1.0)), torch.tensor([1.0, -0.7, 0.8], dtype=D)
    found = compress(x, attention, size=6, domain=Ball(0.1, center))
    moved = (attention(center[None], x.double()) - attention(center[None], _double(found.measure))).norm()
    assert 1e-9 < float(moved) <= float(found.bounds(center[None])[0])
    assert float(moved) <= found.certificate.value < 1e-3


def test_a_weight_of_one_is_stored_with_a_rounding_too():
    """Its logarithm is zero, where a rounding relative to it would be none."""
    alone, one = Measure(torch.zeros(1, 3, dtype=D)), torch.zeros(1, dtype=torch.long)
    anchor = torch.zeros(1, 3, dtype=D)
    found = _cells(Attention(Dot(scale=1.0)), alone, one, anchor, dtype=torch.float32)
    unit = 2 * torch.finfo(torch.float32).eps
    assert unit <= float(found.weight_error) < 1.01 * unit


@pytest.mark.parametrize("way", ["covariances", "columns", "traces"])
def test_deviations_of_groups_are_roots_of_eigenvalues_or_traces(way, monkeypatch):
    """Of narrow columns, of wide ones, and of wide ones in many groups, where the trace has to do."""
    monkeypatch.setattr(cells_file, "FEW", 8 if way == "covariances" else 0)
    monkeypatch.setattr(cells_file, "MANY", 0 if way == "traces" else 100)
    cells = _cells(ATTENTIONS["dot"], Measure(_t(9, 3)), _labels(9, 2, 1), _t(2, 3, seed=2))
    columns = _t(4, 9, seed=3)
    found = cells._deviation(columns).bound
    for group in range(cells.count):
        own = cells.labels == group
        gram = (cells.masses[own] * columns[:, own]) @ columns[:, own].mT
        truth = float(gram.trace() if way == "traces" else torch.linalg.eigvalsh(gram)[-1]) ** 0.5
        assert truth <= float(found[group]) <= truth * (1 + 1e-7)
