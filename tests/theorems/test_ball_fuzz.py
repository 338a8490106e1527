"""Thirty networks, random and trained, against the ball model; `make falsify` has five hundred."""

import pytest

from benchmarks.networks import Verdict, case, check, random_case

RANDOM = [number for number in range(60) if number % 4 != 3]
CASES = [*[number for number in RANDOM if "12 layers" not in random_case(number).words][:28], 3, 15]


@pytest.mark.parametrize("number", CASES)
def test_no_network_moves_farther(number):
    assert not check(number).violated


def test_most_cases_speak_and_kinds_differ():
    words = [random_case(number).words for number in range(60)]
    for kind in (
        "pre True",
        "pre False",
        "Relu",
        "Silu",
        "rotary",
        "Causal",
        "box",
        "hull",
        "12 layers",
        "1 tokens",
    ):
        assert any(kind in one for one in words), kind


def test_trained_networks_have_learned():
    """Every fourth case; a loss of log 2 is that of one that has not."""
    words = case(3).words
    assert float(words.split("loss of ")[1].split(",")[0]) < 0.5


def test_a_bound_below_what_is_seen_is_a_violation():
    assert Verdict((2.0, 0.9), 1.0).violated
    assert not Verdict((2.0, 1.0), 1.0).violated
