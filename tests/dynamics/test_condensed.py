"""Particles that attend to few atoms of themselves."""

import pytest
import torch

from regard import (
    Attention,
    Ball,
    Dot,
    Gaussian,
    Linear,
    Measure,
    Sparsemax,
    TokenMax,
    certify,
    compress,
    flow,
)
from regard.dynamics import Condensed, Euler, drift, resume
from regard.errors import ArgumentError, RefusalError

D = torch.float64
SOFT = Attention(Dot(scale=1.0))


def _crowd(count: int = 300, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 2, generator=torch.Generator().manual_seed(seed), dtype=D) - 0.5


@pytest.mark.parametrize("attention", [SOFT, Attention(Gaussian(bandwidth=0.7))], ids=["dot", "gaussian"])
def test_no_velocity_is_farther_off_than_the_tolerance(attention):
    x = _crowd()
    for tolerance in (0.05, 0.005):
        field = Condensed(attention, tolerance)
        assert compress(x, attention, tolerance=tolerance).size < len(x) // 2
        assert 0 < (field(x) - attention(x)).norm(dim=-1).max() <= tolerance


def test_weights_count():
    x = _crowd()
    weights = 4 * x[:, 0]
    found = drift(Condensed(SOFT, 0.01), Measure(x, weights), None)
    exact = SOFT(x, Measure(x, weights))
    assert (found - exact).norm(dim=-1).max() <= 0.01
    assert (found - SOFT(x)).norm(dim=-1).max() > 0.1


def test_a_flow_departs_no_farther_than_proved():
    """Also where the bound is nearly attained: one particle that a wrong velocity carries along."""
    x = _crowd(120)
    field, steps = Condensed(SOFT, 0.02), Euler(0.1)
    near, exact = (flow(map, x, steps, 1.0).at(1.0) for map in (field, SOFT))
    held = Ball(float(max(near.norm(dim=-1).max(), exact.norm(dim=-1).max())), torch.zeros(2, dtype=D), 120)
    constant = certify(SOFT, held, TokenMax())
    moved = (near - exact).norm(dim=-1).max()
    assert 0 < moved <= field.departure(constant, 1.0) == field.departure(constant.value, 1.0)
    assert field.departure(0.0, 2.0) == pytest.approx(0.04)
    assert field.departure(3.0, 0.5) == pytest.approx(0.02 * (torch.tensor(1.5, dtype=D).expm1().item()) / 3)
    assert field.departure(3.0, 0.0) == 0


def test_a_flow_goes_on_from_a_file(tmp_path):
    field = Condensed(SOFT, 0.02)
    first = flow(field, _crowd(60), Euler(0.1), 0.5)
    first.save(tmp_path / "run.safetensors", every=2)
    first.at(0.3)
    assert torch.equal(resume(tmp_path / "run.safetensors", field).at(0.5), first.at(0.5))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Condensed(Dot(), 0.1), "attention"),
        (lambda: Condensed(Attention(Dot(), Linear(torch.ones(2, 3, 3))), 0.1), "attention"),
        (lambda: Condensed(SOFT, 0.0), "tolerance"),
        (lambda: Condensed(SOFT, "small"), "tolerance"),
        (lambda: Condensed(SOFT, 0.1).departure(-1.0, 1.0), "constant"),
        (lambda: Condensed(SOFT, 0.1).departure(1.0, float("nan")), "time"),
    ],
)
def test_bad_arguments(make, name):
    with pytest.raises(ArgumentError, match=f"^{name}:"):
        make()


def test_rows_without_tangent_atoms_are_refused():
    with pytest.raises(RefusalError):
        Condensed(Attention(Dot(), normalizer=Sparsemax()), 0.1)(_crowd(20))
