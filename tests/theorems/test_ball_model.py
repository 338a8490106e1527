"""The ball model of whole networks: above attacks, equal to the derivative for small moves, monotone, blind
to the order of tokens; what it has no lemma for is refused by name.
"""

from dataclasses import replace

import pytest
import torch

import regard as r
from regard import maps
from regard.nonexpansive import GroupSort, MixTokens
from regard.proofs.ball_model.beginning import at_rest
from regard.proofs.ball_model.groups import Groups
from regard.proofs.question import answering
from regard.proofs.theorem import Refusal
from regard.proofs.theorems.ball_model import _deviation, ball_model
from tests.ball_model.networks import D, attention, farthest, hidden, network, norm, sequence


def bound(map, domain, norm=r.Frobenius()):
    return min(float(found.value) for found in ball_model(map, domain, norm))


KINDS = {
    "post": {},
    "pre": {"pre": True},
    "relu": {"activation": maps.Relu()},
    "tanh gelu, causal": {"activation": maps.Gelu(True), "support": r.Causal()},
    "gated, rms, rotary, grouped": {
        "gated": True,
        "norms": (False, 1e-2),
        "turned": "rotary",
        "keys": 1,
        "pre": True,
        "activation": maps.Silu(),
    },
    "alibi": {"turned": "alibi", "activation": maps.Tanh()},
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_attack_goes_beyond(kind):
    """Balls, boxes, several tokens, all tokens and hulls: some of them for each kind."""
    net, x = network(1, **KINDS[kind]), sequence(1, tokens=3)
    one = torch.tensor([0.0, 0.05, 0.0], dtype=D)
    several = torch.tensor([0.01, 0.02, 0.0], dtype=D)
    near = x[1] + 0.05 * sequence(7, tokens=3)
    domains = [
        r.Radii(x, one),
        r.Radii(x, several),
        r.Box(x, 0.3 * one),
        r.Neighborhood(x, 0.01),
        r.Hull(x, 1, near),
    ]
    for domain in domains[list(KINDS).index(kind) % 3 :: 2]:
        found, seen = bound(net, domain), farthest(net, domain)
        assert seen <= found
        assert found <= 3 * seen


@pytest.mark.parametrize("pre", [False, True])
def test_small_moves_are_the_derivative(pre):
    """Bound over attack goes to one, to both orders, and its excess is of the order of the radius."""
    net, x = network(2, pre=pre), sequence(2)
    for radius, most in ((1e-3, 1.05), (1e-5, 1.0005)):
        domain = r.one_token(x, 1, radius)
        seen = farthest(net, domain, steps=40)
        values = [float(found.value) for found in ball_model(net, domain, r.Frobenius())]
        assert len(values) == 2
        assert all(1 <= value / seen <= most for value in values)


def test_larger_radii_have_larger_bounds():
    net, x = network(4), sequence(4)
    values = [bound(net, r.one_token(x, 2, radius)) for radius in (0.0, 1e-4, 1e-2, 6e-2)]
    assert values == sorted(values)
    assert values[0] < 1e-8


def test_a_permutation_of_tokens_changes_nothing():
    net, x = network(5), sequence(5)
    order = torch.tensor([2, 0, 3, 1])
    moved = bound(net, r.one_token(x, 1, 0.02))
    assert bound(net, r.one_token(x[order], 3, 0.02)) == pytest.approx(moved, rel=1e-9)


def test_norms_of_the_output():
    """TokenMax is at most Frobenius, and that at most TokenSum; each is above its attack."""
    net, x = network(6), sequence(6)
    domain = r.one_token(x, 0, 0.02)
    values = [bound(net, domain, norm) for norm in (r.TokenMax(), r.Frobenius(), r.TokenSum())]
    assert values == sorted(values)
    assert bound(net, domain, r.EntryMax()) == values[0]
    assert values[1] >= farthest(net, domain)


def test_it_is_on_the_ladder_and_below_the_taylor_model():
    net, x = network(7, width=12), sequence(7, width=12)
    found = r.deviation(net, r.one_token(x, 1, 0.02), r.Frobenius())
    others = {other.theorem: other.value for other in found.others}
    assert found.theorem == "the ball model of a network"
    assert found.value < 0.7 * min(value for name, value in others.items() if name.startswith("the Taylor"))


def test_few_columns_are_sound_too(monkeypatch):
    """Where groups may hold few numbers, most remainders go on token by token, and bounds grow a little."""
    from regard.proofs.ball_model import network as stack
    from regard.proofs.ball_model import score_moves, squares, state

    net, x = network(8, layers=3), sequence(8)
    domain = r.one_token(x, 1, 0.02)
    plain = bound(net, domain)
    monkeypatch.setattr(stack, "OPEN", 32 * 12)
    monkeypatch.setattr(stack, "KEPT", 32 * 4)
    monkeypatch.setattr(score_moves, "EXPLICIT", 0)
    monkeypatch.setattr(squares, "FINE", 100)
    monkeypatch.setattr(state, "TOGETHER", 1)
    found = float(ball_model(net, domain, r.Frobenius())[0].value)
    assert plain < found < 2 * plain
    assert farthest(net, domain) < found


def test_one_token_and_tokens_that_are_mixed():
    net, x = network(9), sequence(9, tokens=1)
    assert bound(net, r.one_token(x, 0, 0.02)) >= farthest(net, r.one_token(x, 0, 0.02))
    pooled = maps.Compose((network(9), MixTokens(torch.full((1, 4), 0.25, dtype=D))))
    domain = r.one_token(sequence(9), 2, 0.02)
    assert farthest(pooled, domain) <= bound(pooled, domain) <= 1.5 * farthest(pooled, domain)


def test_what_has_no_lemma_is_refused_by_name():
    generator = torch.Generator().manual_seed(0)
    capped = r.Attention(r.SoftCap(r.Dot(), 3.0))
    x = sequence(0)
    for map, name in (
        (maps.Compose((capped, norm(generator, 8))), "SoftCap"),
        (maps.Compose((r.Attention(r.Gaussian(bandwidth=1.0)), norm(generator, 8))), "Gaussian"),
        (maps.Compose((r.Attention(r.Dot(), normalizer=r.Sigmoid()), norm(generator, 8))), "Sigmoid"),
        (maps.Compose((GroupSort(), norm(generator, 8))), "GroupSort"),
    ):
        with pytest.raises(Refusal, match=name):
            ball_model(map, r.one_token(x, 0, 0.01), r.Frobenius())
    marked = r.Radii(r.Measure(x, marks=torch.tensor([0, 2, 3, 9])), torch.full((4,), 0.1, dtype=D))
    with pytest.raises(Refusal, match="marks"):
        ball_model(network(0), marked, r.Frobenius())


def test_a_radius_that_is_too_large_is_refused_with_a_reason():
    with pytest.raises(Refusal, match="smaller radius"):
        ball_model(network(1, sharp=3.0), r.one_token(sequence(1), 1, 1e6), r.Frobenius())


@pytest.mark.parametrize("radius", [2.0, 50.0])
def test_steep_scores_have_a_bound_at_large_radii(radius):
    """Rows that may be any law, and norm layers whose tokens may be anywhere."""
    domain = r.one_token(sequence(1), 1, radius)
    (first, *_) = ball_model(network(1, sharp=3.0), domain, r.Frobenius())
    assert farthest(network(1, sharp=3.0), domain) <= float(first.value) < 1e3


def test_a_residual_around_a_feed_forward_layer_is_exact_to_first_order():
    """x + f(x) is carried as one map: the bound is |I + J| r, not |r| + |J r|."""
    generator = torch.Generator().manual_seed(3)
    layer = maps.Residual(hidden(generator, 8, maps.Gelu()))
    x = sequence(3, tokens=1)
    steep = torch.autograd.functional.jacobian(layer, x)[0, :, 0]
    exactly = float(torch.linalg.matrix_norm(steep, 2)) * 1e-6
    assert bound(layer, r.one_token(x, 0, 1e-6)) == pytest.approx(exactly, rel=1e-4)


def test_attention_alone_in_a_residual():
    generator = torch.Generator().manual_seed(4)
    layer, x = maps.Residual(attention(generator, 8, sharp=2.0)), sequence(4)
    domain = r.one_token(x, 2, 0.05)
    assert farthest(layer, domain) <= bound(layer, domain) <= 1.3 * farthest(layer, domain)


def test_the_whole_network_has_one_and_its_parts_none():
    """A part is answered for the sake of the whole: there its ball model would be thrown away."""
    net, x = network(1, pre=True), sequence(1, tokens=3)
    domain = r.Radii(x, torch.tensor([0.0, 0.01, 0.0], dtype=D))
    assert r.deviation(net, domain, r.Frobenius()).theorem == "the ball model of a network"
    with answering(net), answering(net), pytest.raises(Refusal, match="made of the whole network"):
        ball_model(net, domain, r.Frobenius())
    with answering(maps.Residual(net)), answering(net):  # no composition: there the part is all there is
        assert ball_model(net, domain, r.Frobenius())


def test_what_rounding_hides_of_the_value_is_counted_in_groups_too():
    """The value at the given sequence is as uncertain as groups and ellipsoids say together."""
    x = sequence(11)
    still = at_rest(x)
    columns = torch.zeros(*x.shape, 1, dtype=D)
    columns[1, 2, 0] = 0.5
    unsure = replace(still, groups=Groups(columns, torch.zeros(1).long(), torch.zeros(1).long()))
    assert float(_deviation(still, unsure, r.Frobenius())) >= 0.5
