"""Random declarations against their certificates: the short form of `python -m benchmarks.falsify`."""

import pytest

from benchmarks.falsify import Tally, attack, attack_all, cases_of
from benchmarks.families import FAMILIES, itself
from regard.proofs.near import ball


def test_no_certificate_is_broken():
    """The numbers of the cases in the message draw them again."""
    tally = attack_all(cases_of(["self"], iter(range(60))), ascended=2)
    assert not tally.violations, tally.report(0.0)
    assert (tally.cases, tally.ascended) == (60, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_is_broken(family):
    """Nor is it a row of refusals, which would find nothing."""
    count = 4 if family == "depth" else 12  # six blocks take their time
    tally = attack_all(cases_of([family], iter(range(count))), ascended=0)
    assert not tally.violations, tally.report(0.0)
    assert tally.cases == count
    assert tally.infinite < count
    assert max(tally.closest.values()) > 0.05


@pytest.mark.parametrize("family", ["cross", "layers"])
def test_ascents_stay_below(family):
    tally = attack_all(cases_of([family], iter(range(4))), ascended=2)
    assert tally.ascended
    assert not tally.violations, tally.report(0.0)


def test_norms_from_random_starts_hold(monkeypatch):
    monkeypatch.setattr(ball, "DENSE", 0)
    tally = attack_all(cases_of(["self"], iter(range(30))), ascended=2)
    assert not tally.violations, tally.report(0.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_is_a_case(family):
    """The same numbers draw the same case again, and others another one."""
    (first, again), (other,) = ([str(FAMILIES[family](seed)) for seed in seeds] for seeds in ((7, 7), (8,)))
    assert first == again
    assert f"--family {family} --case 7" in first
    assert first.split(":")[1] != other.split(":")[1]


@pytest.mark.parametrize("seed", [723, 783, 784, 108, 174, 187])
def test_cases_that_were_found(seed):
    """Weights that underflow, shares that add up to more than one, scores that do not look at tokens."""
    tally = Tally()
    attack(itself(seed), tally, ascend=False)
    assert not tally.violations, tally.violations


@pytest.mark.parametrize("seed", [23, 41, 47, 87, 90])
def test_attacks_that_saw_too_much(seed):
    """W₃ that was measured as W₁, a law that was put back at the border, and values that hardly move."""
    tally = attack_all(cases_of(["laws"], iter([seed])), ascended=1)
    assert not tally.violations, tally.violations


@pytest.mark.parametrize("family", ["self", "laws", "modules"])
def test_a_broken_certificate_is_reported(monkeypatch, family):
    """A claim of next to nothing is found out, with the number of the case."""
    import dataclasses

    import benchmarks.falsify as benchmark

    certify = benchmark.certify
    monkeypatch.setattr(
        benchmark, "certify", lambda *given: dataclasses.replace(certify(*given), value=1e-9, others=())
    )
    tally = attack_all(cases_of([family], iter(range(3))), ascended=0)
    assert tally.violations
    assert f"--family {family} --case" in tally.violations[0]
    assert "VIOLATION" in tally.report(1.0)
