"""Stop rules of contractions where they are exact: linear maps, whose errors are known at every step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

import regard as r
from regard.errors import ArgumentError
from regard.maps import Affine
from regard.nn.contraction import Contraction, dual, into_domain
from regard.nn.deep import Deep
from regard.nn.fixed_points import (
    Acceleration,
    Chooser,
    Picard,
    evaluations_needed,
    rounding_error,
    solve,
)
from regard.nn.invertible import Invertible, OutsideImageError
from regard.nn.log_determinant import Truncated
from regard.nn.promises import SLACK, Promise
from regard.norms import Frobenius, TokenMax, TokenSum

D = torch.float64
EPS = torch.finfo(D).eps


def tokens(*rows):
    return torch.tensor(rows, dtype=D)


@pytest.mark.parametrize("constant", [0.25, 0.5, 0.9])
def test_the_error_of_a_multiple_of_the_identity_is_attained(constant):
    """g(z) = b + L (z - b) on two sequences: what is proved is the distance, and no step is one too many."""
    target, start = tokens([3.0, 4.0]), torch.stack([tokens([5.0, 4.0]), tokens([3.0, 5.0])])

    def step(z):
        return target + constant * (z - target)

    tolerance = 1e-3
    found = solve(step, start, constant=constant, norm=TokenMax(), tolerance=tolerance, acceleration=Picard())
    away = (found.value - target).norm(dim=-1).amax(-1)
    assert torch.allclose(found.error, away, rtol=1e-9, atol=0)
    assert found.evaluations == math.ceil(math.log(tolerance / 2) / math.log(constant))
    assert bool((found.error >= away).all())
    assert found.error.shape == (2,)


def test_evaluations_that_are_enough_and_no_fewer():
    for constant in (0.1, 0.5, 0.9, 0.99):
        for first in (1e-9, 0.3, 7.0, 1e4):
            for tolerance in (1e-12, 1e-3, 2.0):
                k = evaluations_needed(constant, first, tolerance)
                assert k >= 1
                assert constant**k / (1 - constant) * first <= tolerance * (1 + 1e-9)
                assert k == 1 or constant ** (k - 1) / (1 - constant) * first > tolerance * (1 - 1e-9)
    assert evaluations_needed(0.5, 0.0, 1e-9) == 1
    assert evaluations_needed(0.0, 5.0, 1e-9) == 1


def test_rounding_is_four_units_of_the_longest_point():
    small, large = tokens([1.0, 0.0]), tokens([3.0, 4.0])
    assert rounding_error(TokenMax(), 0.75, small, large) == pytest.approx(
        4 * EPS * 5 / 0.25, rel=1e-12, abs=0
    )
    pair = torch.stack([small, large])
    assert rounding_error(TokenMax(), 0.75, pair) == pytest.approx(4 * EPS * 5 / 0.25, rel=1e-12, abs=0)
    single = rounding_error(TokenMax(), 0.5, large.float())
    assert single == pytest.approx(4 * torch.finfo(torch.float32).eps * 5 / 0.5, rel=1e-6, abs=0)


def test_a_tolerance_has_room_for_rounding_twice():
    """At one there is one unit of rounding, 4ε/(1 - L), which the error of a solution counts."""
    unit = 4 * EPS / 0.5
    given = {"constant": 0.5, "norm": TokenMax(), "acceleration": Picard()}
    with pytest.raises(ArgumentError, match="below what rounding"):
        solve(lambda z: z, tokens([1.0]), tolerance=1.9 * unit, **given)
    found = solve(lambda z: z, tokens([1.0]), tolerance=2.1 * unit, **given)
    assert float(found.error) == pytest.approx(unit, rel=1e-9, abs=0)
    close = solve(lambda z: 0.5 * z, tokens([1.0]), tolerance=0.25 + 0.5 * unit, **given)
    assert close.evaluations == 3  # after two of them 1/4 is left, and rounding beside it
    assert float(close.error) <= 0.25
    shrinking = solve(lambda z: 0.5 * z, tokens([1.0]), tolerance=0.3, **given)
    assert shrinking.evaluations == 2
    assert float(shrinking.error) == pytest.approx(0.25 + unit, rel=1e-15, abs=0)


def test_a_map_that_does_not_contract_is_left_after_twice_the_steps():
    """z ← -z claims L = 1/2: Banach's number is doubled, with some to spare, and then it is an error."""
    calls = []

    def turn(z):
        calls.append(z)
        return -z

    with pytest.raises(ArgumentError, match="below what rounding"):
        solve(turn, tokens([1.0]), constant=0.5, norm=TokenMax(), tolerance=1e-3, acceleration=Picard())
    needed = evaluations_needed(0.5, 2.0, 1e-3)
    assert len(calls) == 2 * needed + 16


def test_values_that_are_no_numbers():
    given = {"constant": 0.5, "norm": TokenMax(), "tolerance": 1e-3, "acceleration": Picard()}
    with pytest.raises(ArgumentError, match="gives NaN or infinity"):
        solve(lambda z: z / 0, tokens([1.0]), **given)


@dataclass(frozen=True, eq=False, repr=False)
class Astray(Acceleration):
    """Every second proposal is far away."""

    def begin(self):
        return _Astray()


class _Astray(Chooser):
    turn = 0

    def next(self, z, value):
        self.turn += 1
        return value + (100.0 if self.turn % 2 else 0.0)


def test_a_proposal_that_leads_astray_is_taken_back():
    """After a worse residual the best value is taken, so that it costs one evaluation each."""
    given = {"constant": 0.5, "norm": TokenMax(), "tolerance": 1e-3}
    plain = solve(lambda z: 0.5 * z, tokens([1.0]), acceleration=Picard(), **given)
    found = solve(lambda z: 0.5 * z, tokens([1.0]), acceleration=Astray(), **given)
    assert plain.evaluations == 10
    assert plain.evaluations < found.evaluations <= 2 * plain.evaluations
    assert float(found.value.abs().max()) <= float(found.error) <= 1e-3
    kept = solve(
        lambda z: 0.5 * z, tokens([1.0]), acceleration=Astray(), inside=lambda z: z.clamp(max=1.0), **given
    )
    assert kept.evaluations <= found.evaluations


def test_norms_and_their_duals():
    assert isinstance(dual(TokenMax()), TokenSum)
    assert isinstance(dual(TokenSum()), TokenMax)
    assert isinstance(dual(Frobenius()), Frobenius)


def test_the_nearest_point_of_a_ball():
    x = tokens([3.0, 4.0], [0.3, 0.4])
    assert torch.equal(into_domain(r.Whole(), x), x)
    assert torch.allclose(into_domain(r.Ball(1.0), x), tokens([0.6, 0.8], [0.3, 0.4]))
    assert torch.equal(into_domain(r.Ball(0.0), x), torch.zeros_like(x))
    center = torch.tensor([3.0, 0.0], dtype=D)
    assert torch.allclose(into_domain(r.Ball(2.0, center), x[:1]), tokens([3.0, 2.0]))


def identity(scale, width=2):
    return Affine(scale * torch.eye(width, dtype=D))


def test_a_constant_of_one_contracts_nothing():
    for scale in (1.0, 1.5):
        with pytest.raises(ArgumentError, match="L = 1"):
            Contraction(identity(scale), TokenMax(), r.Whole(), "it must contract")
    assert Contraction(identity(0.999), TokenMax(), r.Whole(), "it must contract").constant < 1


def test_a_point_just_outside_the_image_is_reported():
    """x + x/2 on the unit ball has the ball of 3/2 as its image: the last point inside has a preimage."""
    flow = Invertible(identity(0.5), domain=r.Ball(1.0))
    edge = tokens([1.5, 0.0])
    assert torch.allclose(flow.inverse(edge, 1e-9), tokens([1.0, 0.0]), atol=1e-8)
    for beyond in (1e-5, 0.5):
        with pytest.raises(OutsideImageError) as found:
            flow.inverse(edge + tokens([beyond, 0.0]), 1e-6)
        assert float(found.value.residual) == pytest.approx(beyond, rel=0.3, abs=0)


def test_iterations_are_counted_before_they_are_run():
    """x ← y - x/2 from y = (4, 0): the first step is 2, and L^k/(1 - L) · 2 is the error after k."""
    flow = Invertible(identity(0.5))
    assert flow.iterations(tokens([4.0, 0.0]), 1e-3) == evaluations_needed(0.5, 2.0, 1e-3) == 12
    deep = Deep(identity(0.5), tolerance=1e-3)
    assert deep.iterations(tokens([4.0, 0.0])) == 12
    assert deep.iterations(tokens([4.0, 0.0]), 1e-2) == evaluations_needed(0.5, 2.0, 1e-2) == 9
    unit = 4 * EPS * 4 / 0.5
    for layer in (flow, deep):
        with pytest.raises(ArgumentError, match="below what rounding"):
            layer.iterations(tokens([4.0, 0.0]), 1.9 * unit)
        assert layer.iterations(tokens([4.0, 0.0]), 2.1 * unit) > 40


def test_inverses_are_to_a_millionth_unless_another_tolerance_is_asked():
    flow, y = Invertible(identity(0.5)), tokens([4.0, 0.0])
    assert flow.iterations(y) == flow.iterations(y, 1e-6)
    assert flow.solve(y).evaluations == flow.solve(y, 1e-6).evaluations
    assert flow.solve(y, 2e-6).evaluations < flow.solve(y).evaluations < flow.solve(y, 0.5e-6).evaluations


def test_tokens_outside_of_the_ball_are_refused_beyond_rounding():
    flow = Invertible(identity(0.5), domain=r.Ball(1.0))
    flow(tokens([1 + 10 * EPS, 0.0]))
    with pytest.raises(ArgumentError, match="outside "):
        flow(tokens([1 + 40 * EPS, 0.0]))


def test_a_ball_that_a_layer_keeps():
    """z/2 + u stays in the unit ball where |u| ≤ 1/2; about another center f(z) - center counts."""
    deep = Deep(identity(0.5), domain=r.Ball(1.0))
    assert torch.allclose(deep(tokens([0.49, 0.0])), tokens([0.98, 0.0]))
    with pytest.raises(ArgumentError, match="out of"):
        deep(tokens([0.51, 0.0]))
    center = torch.tensor([2.0, 0.0], dtype=D)
    about = Deep(identity(0.5), domain=r.Ball(1.0, center))
    assert torch.allclose(about(tokens([1.1, 0.0])), tokens([2.2, 0.0]))
    with pytest.raises(ArgumentError, match="out of"):
        about(tokens([1.6, 0.0]))


def test_the_map_of_a_deep_layer_takes_enough_steps():
    assert Deep(identity(0.5)).declare().steps == evaluations_needed(0.5, 1.0, 1e-12) == 41


def test_what_a_cut_off_series_leaves_out():
    """Σ_{k>K} L^k/k for L = 1/2 in each of four dimensions, with a geometric series above it."""
    exact = 4 * (math.log(2) - sum(0.5**k / k for k in range(1, 6)))
    found = Truncated(5).remainder(0.5, 4)
    assert found == pytest.approx(4 * 0.5**6 / 6 / 0.5, rel=1e-12, abs=0)
    assert exact < found < 1.2 * exact


def test_a_promise_is_kept_up_to_its_slack():
    kept = Promise(Frobenius(), 2.0)

    def proved(value, norm=Frobenius()):
        return r.Certificate(value, "everywhere", norm, "a theorem")

    assert SLACK == 1e-6
    assert kept.kept_by(proved(2.0))
    assert kept.kept_by(proved(2.0 * (1 + 0.9e-6)))
    assert not kept.kept_by(proved(2.0 * (1 + 1.1e-6)))
    assert not kept.kept_by(proved(1.0, TokenMax()))
