"""How theorems are found: by types, by what a rule is about, and every refusal with a sentence."""

import math

import pytest
import torch

import regard as r
from regard._upper import Upper
from regard.domains import Ball, Domain, Whole
from regard.maps import Affine, Map
from regard.norms import Norm, TokenMax
from regard.proofs.setting import balls_of
from regard.proofs.theorem import THEOREMS, Bound, Refusal, Theorem, constants, deviations, finite, rungs


@pytest.fixture
def theorem():
    """A theorem that is forgotten afterwards, with its rules."""
    made = Theorem("example", "an example", "", (), "")
    yield made
    del THEOREMS["example"]
    for quantity in (constants, deviations):
        quantity._rules[:] = [rule for rule in quantity._rules if rule[1].theorem is not made]


class Still(Map):
    def __call__(self, x):
        return x


@pytest.mark.parametrize("sentence", ["", "  ", None])
def test_a_refusal_has_a_sentence(sentence):
    with pytest.raises(ValueError, match="needs a sentence that says why"):
        Refusal(sentence)


def test_what_a_rule_is_not_about_is_silent(theorem):
    @theorem.constant(Still, Domain, Norm, about=lambda map, domain, norm: isinstance(domain, Ball))
    def rule(map, domain, norm):
        raise Refusal("never; ever")

    assert rungs(constants, Still(), Whole(), TokenMax()) == ([], [])
    assert rungs(constants, Still(), Ball(1.0), TokenMax()) == ([], ["an example: never; ever"])
    assert rungs(constants, Affine(torch.eye(2)), Ball(1.0), TokenMax())[1] == []
    assert theorem.rules == (("constant", (Still, Domain, Norm), rule),)


def test_all_rules_run_and_the_smallest_bound_wins(theorem):
    theorem.constant(Still, Domain, Norm)(lambda map, domain, norm: Bound(Upper(3.0)))
    theorem.constant(Still, Domain, Norm)(
        lambda map, domain, norm: [Bound(Upper(2.0)), Bound(Upper(4.0), note="more")]
    )
    found = r.certify(Still(), Whole(), TokenMax())
    assert found.value == 2.0
    assert sorted(other.value for other in found.others) == [3.0, 4.0]


def _overflow(map, domain, norm):
    return Bound(Upper(math.exp(1e4)))


@pytest.mark.parametrize(
    "rule",
    [
        _overflow,
        lambda *_: Bound(Upper(math.inf)),
        lambda *_: Bound(Upper(math.nan)),
        lambda *_: [Bound(Upper(-math.inf))],
    ],
)
def test_what_leaves_the_range_of_numbers_proves_no_infinity(theorem, rule):
    theorem.constant(Still, Domain, Norm)(rule)
    found = r.certify(Still(), Whole(), TokenMax())
    assert found.value == math.inf
    assert found.theorem == "no theorem"
    assert (
        "an example: the bound leaves the range of numbers; use a smaller domain or smaller weights"
        in found.refused
    )


def test_a_theorem_may_prove_infinity(theorem):
    theorem.constant(Still, Domain, Norm)(lambda *_: Bound(Upper(math.inf), unbounded=True))
    found = r.certify(Still(), Whole(), TokenMax())
    assert (found.value, found.theorem) == (math.inf, "an example")
    with pytest.raises(Refusal, match=r"a part has no finite bound on Whole\(\): an example"):
        finite(found, "a part")


def test_rules_take_three_types(theorem):
    with pytest.raises(TypeError, match="the types of a subject, a domain and a norm"):
        theorem.constant(Still, Domain)


def test_heads_together_prove_no_infinity():
    """Two heads that are unbounded may cancel; their sum is refused with the reason of the first."""
    w = torch.ones(2, 3, 2, dtype=torch.float64)
    map = r.maps.Heads(
        r.Attention(r.Dot(w, w), r.Linear(w)), torch.stack([torch.eye(2, 3), -torch.eye(2, 3)]).double()
    )
    found = r.certify(map, Whole(4), TokenMax())
    assert found.theorem == "no theorem"
    assert any("head 0 has no finite bound" in why and "kim2021" in why for why in found.refused)


def test_a_bound_that_does_not_pay_for_its_rounding_is_an_error():
    """A plain float has no side: neither a bound nor a fact is made of it."""
    with pytest.raises(TypeError, match="a Bound of a float: give an Upper"):
        Bound(2.0)
    (ball,) = balls_of(Ball(1.0), 2)
    with pytest.raises(TypeError, match="Upper with float"):
        ball.radius * 2.0
    with pytest.raises(TypeError, match="Upper minus Upper"):
        ball.radius - ball.reach
