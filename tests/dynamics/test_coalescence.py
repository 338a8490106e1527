"""Particles that meet become one: what that changes is proved, and an attack cannot break it."""

import math

import pytest
import torch

import regard as r
from regard.dynamics import (
    BlowUpError,
    Displacement,
    DormandPrince,
    Euclidean,
    Euler,
    Heun,
    Merge,
    Rescaled,
    Sphere,
    coalesce,
    drift,
    merge_within,
)
from regard.dynamics.splitting import _on_the_sphere, apart_after
from regard.measure import Measure
from regard.normalizers import Exponential
from tests.dynamics.systems import D, normal

UNIT = torch.nn.functional.normalize


def test_cells_unite_and_the_heaviest_stays():
    x = torch.tensor([[0.1, 0.1], [0.2, 0.2], [5.0, 5.0], [0.15, 0.1]], dtype=D)
    merged = merge_within(Measure(x, torch.tensor([0.2, 0.5, 0.2, 0.1], dtype=D).log()), 1.0)
    assert merged.measure.size == 2
    assert merged.labels[0] == merged.labels[1] == merged.labels[3] != merged.labels[2]
    heavy = merged.labels[0]
    assert torch.equal(merged.measure.points[heavy], x[1])
    assert float(merged.measure.masses()[heavy]) == pytest.approx(0.8, rel=1e-14)
    assert math.sqrt(0.02) <= merged.radius <= math.sqrt(0.02) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_nobody_moves_farther_than_a_cell(seed, shift):
    x = normal(300, 1 + seed % 3, seed=seed)
    merged = merge_within(Measure(x, normal(300, seed=seed + 9)), 0.3, shift)
    moved = torch.linalg.vector_norm(merged.measure.points[merged.labels] - x, dim=-1)
    assert float(moved.max()) <= merged.radius <= 0.3 * (1 + 1e-9)
    assert float(merged.measure.masses().sum()) == pytest.approx(1.0, rel=1e-12)
    assert merged.measure.size < 300


def test_what_cannot_be_merged():
    x = normal(4, 2)
    with pytest.raises(r.errors.ArgumentError, match="within"):
        merge_within(Measure(x), 0.0)
    with pytest.raises(r.errors.ArgumentError, match="batch"):
        merge_within(Measure(normal(2, 4, 2)), 1.0)
    with pytest.raises(r.errors.ArgumentError, match="marks"):
        merge_within(Measure(x, None, torch.arange(4)), 1.0)
    with pytest.raises(r.errors.ArgumentError, match="most"):
        Merge(1.0, 1.0, 0)
    with pytest.raises(r.errors.ArgumentError, match="merge"):
        coalesce(r.Attention(r.Dot()), x, Euler(0.1), 1.0, 0.1)
    with pytest.raises(r.errors.ArgumentError, match="marks"):
        coalesce(r.Attention(r.Dot()), Measure(x, None, torch.arange(4)), Euler(0.1), 1.0, Merge(0.1, 1.0))


def split(atoms, masses, apart, copies, generator):
    """Particles around atoms: at the edge of the balls, one of them alone where nobody else is."""
    ways = UNIT(torch.randn(copies, *atoms.shape, generator=generator, dtype=D), dim=-1)
    shares = torch.rand(copies, len(atoms), generator=generator, dtype=D) ** 8
    shares = shares / shares.sum(0)
    return (atoms + apart * ways).flatten(0, 1), (shares * masses).flatten()


FIELDS = {
    "dot": (r.Attention(r.Dot(scale=3.0)), Euclidean()),
    "sphere": (r.Attention(r.Dot(scale=3.0)), Sphere()),
    "moved sphere": (Displacement(r.Attention(r.Dot(scale=3.0))), Sphere()),
    "mean shift": (Displacement(r.Attention(r.Gaussian(bandwidth=0.7))), Euclidean()),
    "gaussian": (r.Attention(r.Gaussian(bandwidth=0.7), normalizer=r.Softmax(1.5)), Euclidean()),
    "values": (r.Attention(r.Dot(scale=1.0), r.Linear(normal(2, 2, seed=3))), Euclidean()),
}


@pytest.mark.parametrize("name", FIELDS)
def test_no_split_breaks_the_bound_of_a_step(name):
    """Random splits, and the worst of them pulled further along the gradient of the distance."""
    map, space = FIELDS[name]
    g = torch.Generator().manual_seed(5)
    tightest = 0.0
    for case in range(6):
        count, apart, step = 1 + case, (0.2, 0.03)[case % 2], (0.1, 0.5)[case // 3]
        atoms = torch.randn(count, 2, generator=g, dtype=D)
        atoms = UNIT(atoms, dim=-1) if isinstance(space, Sphere) else atoms
        masses = torch.rand(count, generator=g, dtype=D) + 0.01
        measure = Measure(atoms, masses.log())
        masses = measure.masses()
        bound = apart_after(map, measure, drift(map, measure, None), apart, step, space)
        after = r.flow(map, measure, Euler(step), step, space=space).at(step)
        for _ in range(4):
            points, shares = split(atoms, masses, apart, 3, g)
            ways = (points - atoms.repeat(3, 1)).requires_grad_()
            for _ in range(4):
                placed = atoms.repeat(3, 1) + apart * UNIT(ways, dim=-1)
                placed = near(placed, atoms.repeat(3, 1), apart) if isinstance(space, Sphere) else placed
                moved = r.flow(map, Measure(placed, shares.log()), Euler(step), step, space=space).at(step)
                found = torch.linalg.vector_norm(moved - after.repeat(3, 1), dim=-1).max()
                assert float(found.detach()) <= bound * (1 + 1e-12)
                tightest = max(tightest, float(found.detach()) / bound)
                (slope,) = torch.autograd.grad(found, ways)
                ways = (ways + 0.5 * apart * UNIT(slope, dim=-1)).detach().requires_grad_()
    assert tightest > 0.5  # the bound is no more than twice what was found


def near(points, atoms, apart):
    """Points of the sphere within the same distance of their atoms: turned, not moved."""
    along = points - (points * atoms).sum(-1, keepdim=True) * atoms
    angle = 2 * math.asin(apart / 2)
    return math.cos(angle) * atoms + math.sin(angle) * UNIT(along, dim=-1)


def test_a_query_that_stays_while_its_atom_leaves():
    """One particle of no weight in an atom whose mass goes the other way moves farther than any atom can that
    moves as a whole, query and key together.
    """
    map, apart = Displacement(r.Attention(r.Dot(scale=-0.5))), 0.01
    atoms = Measure(torch.tensor([[1.0], [-1.0]], dtype=D))
    bound = apart_after(map, atoms, drift(map, atoms, None), apart, 1.0, Euclidean())
    parts = torch.tensor([[1 - apart], [1 + apart], [-1 + apart]], dtype=D)
    laws = Measure(parts, torch.tensor([1e-12, 0.5, 0.5], dtype=D).log())
    found = abs(float((map.map(laws).points - map.map(atoms).points[:1])[0]))
    whole = r.deviation(map.map, r.Neighborhood(atoms, apart, r.TokenMax()), r.TokenMax()).value
    assert whole < found <= bound <= 1.02 * found


def test_the_bound_of_gaussian_rows():
    """Two atoms, by hand: for each row ε + Σ p (e^η - 1)|c - m| / Σ p e^{-η}."""
    h, t, apart, far, w = 0.8, 1.5, 0.1, 2.0, 0.3
    atoms = Measure(torch.tensor([[0.0], [far]], dtype=D), torch.tensor([w, 1 - w], dtype=D).log())
    square, rows = h * h * t, []
    for own, other in ((w, 1 - w), (1 - w, w)):
        p = other * math.exp(-(far**2) / (2 * square))
        p = p / (p + own)
        near, away = 2 * apart**2 / square, (2 * apart * far + 2 * apart**2) / square
        top = (1 - p) * math.expm1(near) * p * far + p * math.expm1(away) * (1 - p) * far
        rows.append(apart + top / ((1 - p) * math.exp(-near) + p * math.exp(-away)))
    map = Displacement(r.Attention(r.Gaussian(bandwidth=h), normalizer=r.Softmax(t)))
    found = apart_after(map, atoms, drift(map, atoms, None), apart, 1.0, Euclidean())
    assert max(rows) <= found == pytest.approx(max(rows), rel=1e-8)


@pytest.mark.parametrize("name", ["sphere", "mean shift"])
def test_a_flow_gets_fewer_atoms_within_its_error(name):
    map, space = FIELDS[name]
    x = UNIT(normal(60, 3, seed=2), dim=-1) if name == "sphere" else 2 * normal(60, 2, seed=2)
    until = 9.0
    whole = r.flow(map, x, Euler(0.25), until, space=space)
    merged = coalesce(map, x, Euler(0.25), until, Merge(0.02, 1.0, 20), space=space)
    counts = merged.atoms()
    assert counts
    assert counts[-1][1] <= 20
    assert [count for _, count in counts] == sorted((count for _, count in counts), reverse=True)
    for t in (2.0, 7.1, until):
        found = torch.linalg.vector_norm(merged.particles(t) - whole.at(t), dim=-1).max()
        bound = merged.error(t)
        assert float(found) <= bound.value + 1e-12
        assert bound.value < 1.0
    assert bound.value > 0
    assert bound.quantity == "distance to the atoms"
    assert [h.checked for h in bound.hypotheses] == [True, True, False]
    assert float(merged.measure(until).masses().sum()) == pytest.approx(1.0)
    assert "atoms" in repr(merged)


def test_nothing_is_merged_before_few_atoms_are_left():
    x = normal(30, 2, seed=1)
    none = coalesce(r.Attention(r.Dot()), x, Euler(0.1), 0.5, Merge(0.01, 0.2, 5))
    assert none.atoms() == []
    assert none.error(0.5).value == 0
    torch.testing.assert_close(none.at(0.5), r.flow(r.Attention(r.Dot()), x, Euler(0.1), 0.5).at(0.5))


def test_equal_particles_are_united_exactly():
    x = normal(3, 2, seed=4)[[0, 0, 1, 2, 2, 2]]
    map = r.Attention(r.Dot())
    merged = coalesce(map, x, Euler(0.1), 0.4, Merge(1e-9, 0.2))
    torch.testing.assert_close(merged.particles(0.4), r.flow(map, x, Euler(0.1), 0.4).at(0.4))
    assert merged.atoms() == [(0.2, 3)]
    assert merged.error(0.4).value == 0


@pytest.mark.parametrize(
    ("map", "scheme", "space", "why"),
    [
        (r.Attention(r.Dot()), Heun(0.1), Euclidean(), "stages"),
        (r.Attention(r.Dot()), DormandPrince(1e-3), Euclidean(), "stages"),
        (r.Attention(r.Dot()), Euler(0.1), Rescaled(1.0), "Rescaled"),
        (r.Attention(r.Dot(), normalizer=Exponential()), Euler(0.1), Euclidean(), "Exponential"),
        (r.maps.Residual(r.Attention(r.Dot())), Euler(0.1), Euclidean(), "Residual"),
    ],
    ids=["heun", "adaptive", "rescaled", "exponential", "residual"],
)
def test_errors_are_refused_with_a_reason(map, scheme, space, why):
    found = coalesce(map, normal(5, 2), scheme, 0.2, Merge(0.1, 0.1), space=space)
    assert found.at(0.2).shape[-1] == 2
    with pytest.raises(r.errors.RefusalError, match=why):
        found.error(0.2)


def test_times_outside_are_errors():
    found = coalesce(r.Attention(r.Dot()), normal(5, 2), Euler(0.1), 0.2, Merge(0.1, 0.1))
    for t in (-0.1, 0.3, math.nan, True):
        with pytest.raises(r.errors.ArgumentError, match="between 0 and"):
            found.at(t)


def test_steps_along_the_sphere_are_their_formula():
    """One point and its value: d² (1 - s(a + a')) + 2 s d c + b², a' = a - c - d |v|, b = s (c + d (|v| +
    c)), up to the diameter of the sphere.
    """
    x, value = torch.tensor([[1.0, 0.0]], dtype=D), torch.tensor([[1.2, 1.6]], dtype=D)
    step, apart, change = 0.25, 0.125, 0.25
    other, bent = 1.2 - change - apart * 2, step * (change + apart * (2 + change))
    truth = math.sqrt(apart**2 * (1 - step * (1.2 + other)) + 2 * step * apart * change + bent**2)
    assert truth <= _on_the_sphere(x, value, apart, change, step) <= truth * (1 + 1e-11)
    for far in (1.5, 2.5, 3.5, 100.0):
        expected = min(2.0, far)  # b alone
        assert expected <= _on_the_sphere(x, value, 0.0, far, 1.0) <= min(2.0, expected * (1 + 1e-11))


@pytest.mark.parametrize("name", ["mean shift", "gaussian"])
def test_distances_whose_squares_leave_the_range_have_no_bound(name):
    """Nothing is known of particles that may be 1e160 from their atoms, and a flow as wide blows up; neither
    is an overflow that nobody caught.
    """
    map, space = FIELDS[name]
    atoms = Measure(normal(3, 2))
    assert apart_after(map, atoms, drift(map, atoms, None), 1e160, 0.5, space) == math.inf
    with pytest.raises(BlowUpError):
        coalesce(map, 1e160 * normal(6, 2), Euler(0.5), 1.0, Merge(1e161, 0.5)).error(1.0)
