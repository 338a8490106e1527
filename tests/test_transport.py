"""Wasserstein distances: metric laws, closed forms, and brute force over permutations."""

import itertools
import math

import pytest
import torch

import regard as r
from regard.transport import distances, entropic_wasserstein, transport_plan, wasserstein

ORDERS = [1.0, 1.5, 2.0, 3.0, math.inf]


def cloud(seed, size, width, weights=False):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(size, width, generator=generator, dtype=torch.float64)
    return r.Measure(points, torch.randn(size, generator=generator, dtype=torch.float64) if weights else None)


def brute(x, y, p):
    """The best permutation: for equal numbers of equal atoms an optimal coupling is one (Birkhoff)."""
    costs = []
    for order in itertools.permutations(range(len(x))):
        lengths = (x - y[list(order)]).norm(dim=-1)
        costs.append(float(lengths.max()) if math.isinf(p) else float((lengths**p).mean()) ** (1 / p))
    return min(costs)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("width", [1, 2, 3])
def test_brute_force(p, width):
    for seed in range(4):
        x, y = cloud(seed, 5, width).points, cloud(seed + 50, 5, width).points
        assert float(wasserstein(x, y, p)) == pytest.approx(brute(x, y, p), rel=1e-12)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("width", [1, 2])
def test_repeated_atoms_are_unequal_numbers(p, width):
    """n against m atoms is lcm(n, m) repeated ones: a brute force that knows nothing of weights."""
    x, y = cloud(1, 2, width).points, cloud(2, 3, width).points
    expected = brute(x.repeat_interleave(3, 0), y.repeat_interleave(2, 0), p)
    assert float(wasserstein(x, y, p)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize(("width", "weights"), [(1, False), (1, True), (2, False), (3, True)])
def test_metric_laws(p, width, weights):
    mu, nu, xi = cloud(1, 5, width, weights), cloud(2, 7, width, weights), cloud(3, 4, width, weights)
    there, back = float(wasserstein(mu, nu, p)), float(wasserstein(nu, mu, p))
    assert there == pytest.approx(back, rel=1e-9)
    assert there > 0
    assert float(wasserstein(mu, mu, p)) <= 1e-7
    assert there <= float(wasserstein(mu, xi, p)) + float(wasserstein(xi, nu, p)) + 1e-9


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("width", [1, 3])
def test_translation(p, width):
    mu = cloud(4, 6, width, True)
    step = torch.full((width,), 0.7, dtype=torch.float64)
    assert float(wasserstein(mu, mu.push(lambda x: x + step), p)) == pytest.approx(
        float(step.norm()), rel=1e-9
    )


@pytest.mark.parametrize("p", ORDERS)
def test_a_line_in_the_plane(p):
    """Sorting on a line and the linear program in the plane agree,
    with weights and different numbers of atoms.
    """
    for seed in range(5):
        mu, nu = cloud(seed, 6, 1, True), cloud(seed + 9, 8, 1, True)
        flat = [m.push(lambda x: torch.cat([0.6 * x, 0.8 * x], -1)) for m in (mu, nu)]
        assert float(wasserstein(*flat, p)) == pytest.approx(float(wasserstein(mu, nu, p)), rel=1e-9)


def test_orders_increase():
    mu, nu = cloud(1, 6, 2, True), cloud(2, 5, 2, True)
    found = [float(wasserstein(mu, nu, p)) for p in ORDERS]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_weights_are_repeated_atoms():
    points, other = cloud(1, 3, 2).points, cloud(2, 4, 2)
    repeated = points[[0, 0, 0, 1, 2, 2]]
    weighted = r.Measure(points, torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64).log())
    for p in ORDERS:
        assert float(wasserstein(weighted, other, p)) == pytest.approx(
            float(wasserstein(repeated, other, p)), rel=1e-9
        )


def test_atoms_without_mass_do_not_count():
    far = torch.tensor([[0.0, 0.0], [1e3, 0.0]], dtype=torch.float64)
    mu = r.Measure(far, torch.tensor([0.0, -math.inf], dtype=torch.float64))
    nu = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    assert [float(wasserstein(mu, nu, p)) for p in ORDERS] == [1.0] * 5
    assert [float(wasserstein(r.Measure(far[:, :1], mu.log_weights), nu[:, 1:], p)) for p in ORDERS] == [
        1.0
    ] * 5


def test_plan_is_an_optimal_coupling():
    for width in (1, 2):
        mu, nu = cloud(1, 5, width, True), cloud(2, 7, width, True)
        plan = transport_plan(mu, nu, 2.0)
        assert (plan.sum(1) - mu.masses()).abs().max() < 1e-12
        assert (plan.sum(0) - nu.masses()).abs().max() < 1e-12
        cost = float((plan * distances(mu.points, nu.points) ** 2).sum())
        assert math.sqrt(cost) == pytest.approx(float(wasserstein(mu, nu, 2.0)), rel=1e-12)


def test_batches():
    x = torch.stack([cloud(seed, 4, 2).points for seed in range(3)])
    y = cloud(9, 5, 2).points
    found = wasserstein(x, y, 2.0)
    assert found.shape == (3,)
    assert float(found[1]) == pytest.approx(float(wasserstein(x[1], y, 2.0)))


def test_near_points_keep_their_digits():
    x = 1e6 + cloud(1, 40, 2).points
    y = x + torch.tensor([1e-6, 0.0], dtype=torch.float64)
    assert float(wasserstein(x, y, 1.0)) == pytest.approx(1e-6, rel=1e-3)


def test_large_powers_stay_in_range():
    x, y = cloud(1, 4, 2).points, cloud(2, 4, 2).points
    assert float(wasserstein(1e-9 * x, 1e-9 * y, 60.0)) == pytest.approx(
        1e-9 * float(wasserstein(x, y, 60.0)), rel=1e-9
    )
    assert float(wasserstein(x, y, 60.0)) <= float(wasserstein(x, y, math.inf)) * (1 + 1e-12)


def test_entropic_estimates_from_above():
    mu, nu = cloud(1, 6, 2, True), cloud(2, 5, 2)
    exact = float(wasserstein(mu, nu, 2.0))
    coarse, fine = (
        float(entropic_wasserstein(mu, nu, 2.0, regularization)) for regularization in (1.0, 0.05)
    )
    assert exact - 1e-6 <= fine < coarse
    assert fine == pytest.approx(exact, rel=0.05)


def test_entropic_says_when_it_has_not_converged():
    with pytest.warns(r.errors.ConvergenceWarning, match="not a coupling after 2 iterations"):
        entropic_wasserstein(cloud(1, 6, 2), cloud(2, 5, 2), 1.0, 1e-3, iterations=2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            (torch.ones(2, 2), torch.ones(2, 3)),
            "nu: lives in dimension 3 and mu in 2; compare measures on one space",
        ),
        ((torch.ones(2, 2), torch.ones(2, 2), 0.5), "p: is 0.5; give a number of at least 1"),
        (([1.0], torch.ones(2, 2)), "mu: is a list; give a Measure, or a Tensor"),
        ((torch.ones(0, 2), torch.ones(2, 2)), "mu: has no atoms"),
        ((torch.ones(2, 2, 2), torch.ones(3, 2, 2)), "mu and nu: have batch shapes"),
    ],
)
def test_bad_input(arguments, sentence):
    with pytest.raises(r.errors.ArgumentError, match=sentence.replace("(", r"\(")):
        wasserstein(*arguments)


def test_plan_of_one_pair_only():
    with pytest.raises(r.errors.ArgumentError, match="give one pair"):
        transport_plan(torch.ones(2, 2, 2), torch.ones(2, 2))
    with pytest.raises(r.errors.ArgumentError, match="needs a finite p"):
        entropic_wasserstein(torch.ones(2, 2), torch.ones(2, 2), math.inf)


# Gradients


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize(("width", "weights"), [(1, False), (2, False), (3, True)])
def test_the_gradient_goes_through_the_plan(p, width, weights):
    """Points in general position have one plan, which does not change nearby: finite differences agree."""
    mu, nu = cloud(1, 4, width, weights), cloud(2, 5, width, weights)

    def length(x, y):
        return wasserstein(r.Measure(x, mu.log_weights), r.Measure(y, nu.log_weights), p)

    points = mu.points.clone().requires_grad_(), nu.points.clone().requires_grad_()
    assert torch.autograd.gradcheck(length, points)


def test_a_batch_in_float32_gets_its_gradient():
    x = torch.randn(3, 4, 2, requires_grad=True)
    found = torch.autograd.grad(wasserstein(x, torch.randn(3, 5, 2), 2.0).sum(), x)[0]
    assert found.dtype == torch.float32
    assert bool((found != 0).any(-1).all())


def test_measures_that_coincide_are_at_rest():
    x = cloud(1, 4, 2).points.requires_grad_()
    for p in ORDERS:
        assert float(torch.autograd.grad(wasserstein(x, x.detach(), p), x)[0].abs().max()) == 0


def test_descent_moves_one_measure_into_the_other():
    x, y = cloud(1, 6, 2).points.requires_grad_(), cloud(2, 6, 2).points
    for _ in range(40):
        (step,) = torch.autograd.grad(wasserstein(x, y, 2.0) ** 2, x)
        x = (x - 0.5 * 6 * 0.5 * step).detach().requires_grad_()
    assert float(wasserstein(x, y, 2.0).detach()) < 1e-8


def test_weights_have_no_gradient_and_say_so():
    mu = cloud(1, 4, 2, True)
    learned = r.Measure(mu.points, mu.log_weights.clone().requires_grad_())
    with pytest.raises(r.errors.ArgumentError, match="mu: has weights that require a gradient"):
        wasserstein(learned, mu)
    with torch.no_grad():
        assert float(wasserstein(learned, mu)) < 1e-7
