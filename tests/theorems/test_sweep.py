"""Random declarations against their certificates: the short form of `python -m benchmarks.falsify`."""

import itertools

import pytest

from benchmarks.falsify import Tally, attack, drawn, sweep


def test_no_certificate_is_broken():
    """About fifteen seconds; the numbers of the cases in the message draw them again."""
    tally = sweep(itertools.count(0), seconds=12.0, ascended=2)
    assert not tally.violations, tally.report(12.0)
    assert tally.cases > 40


@pytest.mark.parametrize("seed", [723, 783, 784, 108, 174, 187])
def test_cases_that_were_found(seed):
    """Weights that underflow, shares that add up to more than one, scores that do not look at tokens."""
    tally = Tally()
    attack(drawn(seed), tally, ascend=False)
    assert not tally.violations, tally.violations


def test_a_broken_certificate_is_reported(monkeypatch):
    """A claim of half the norm of the values is found out, with the number of the case."""
    import dataclasses

    import benchmarks.falsify as benchmark

    certify = benchmark.certify
    monkeypatch.setattr(benchmark, "certify", lambda *given: dataclasses.replace(certify(*given), value=1e-9, others=()))
    tally = sweep(iter(range(3)), seconds=60.0, ascended=0)
    assert tally.violations
    assert "--case" in tally.violations[0]
    assert "VIOLATION" in tally.report(1.0)
