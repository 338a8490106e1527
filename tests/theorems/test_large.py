"""One wide token moves: the path that keeps one row and one column,
taken by small inputs and held against all rows and all columns.
"""

import pytest
import torch
import torch.utils._pytree as pytree

import regard as r
from regard._upper import exact
from regard.domains import one_token
from regard.maps import Heads, Residual
from regard.norms import Frobenius
from regard.proofs import deviation, falsify_deviation
from regard.proofs.near import facts, heads
from regard.proofs.near import token as token_moves
from regard.proofs.near.facts import LocalFacts, local_facts
from regard.proofs.near.heads import LocalHeads
from regard.proofs.near.token import TokenMove, _output_matrix, interval_bound
from regard.proofs.subject import subject_of
from regard.proofs.theorems.one_token import one_token as theorem
from tests.theorems.exact import D, generator, jacobian, normal

TOKENS, WIDTH, HEADS = 5, 4, 3
RADII = (1e-3, 0.2, 3.0, 30.0)


def side_by_side(g, support):
    """Heads of width two that nothing mixes."""
    w_q, w_k, w_v = (normal(g, HEADS, WIDTH, 2) for _ in range(3))
    return r.Attention(r.Dot(w_q, w_k), r.Linear(w_v), support=support)


def mixed(g, support):
    return Heads(side_by_side(g, support), normal(g, HEADS, 2, WIDTH))


def rotary(g, support):
    """One head whose slopes are those of pairs: there is no form for all of them."""
    w_q, w_k, w_v = (normal(g, WIDTH, WIDTH) / 2 for _ in range(3))
    return r.Attention(r.Rotary(r.Dot(w_q, w_k)), r.Linear(w_v), support=support)


MAPS = {
    "mixed": (mixed, False),
    "mixed, residual": (mixed, True),
    "side by side": (side_by_side, False),
    "rotary, residual": (rotary, True),
}
PLACES = [(kind, support, seed) for seed, kind in enumerate(MAPS) for support in (r.Full(), r.Causal())]


def drawn(kind, support, seed):
    """A map, whether it is added to its input, and tokens."""
    g = generator(seed)
    make, residual = MAPS[kind]
    return make(g, support), residual, normal(g, TOKENS, WIDTH)


def whole(map, residual):
    return Residual(map) if residual else map


def dense(map, residual, x):
    """(n, n, e, d) by automatic differentiation."""
    return jacobian(lambda y: flat(map, residual, y), x).transpose(1, 2)


def flat(map, residual, x):
    """(n, e); heads that are not mixed side by side."""
    found = whole(map, residual)(x)
    return found if found.ndim == 2 else found.transpose(0, 1).flatten(1)


def moved(g, x, token, radius, count=30):
    """Tokens with one that has moved as far as it may, and its step."""
    for step in normal(g, count, WIDTH):
        step = radius * (1 - 1e-12) * step / step.norm()
        yield x.index_add(0, torch.tensor([token]), step.unsqueeze(0)), step


def alone(token, radius):
    moves = torch.zeros(TOKENS, dtype=D)
    moves[token] = radius
    return moves


@pytest.fixture
def large(monkeypatch):
    """Every input is large."""
    monkeypatch.setattr(facts, "LARGE", 0)


def refuse(*given):
    raise AssertionError("all rows were asked for")


@pytest.mark.parametrize(("kind", "support", "seed"), PLACES)
def test_a_row_is_that_of_all_rows(kind, support, seed):
    """Saturation picks numbers, any of which would do, and may pick others for one row than for all."""
    map, residual, x = drawn(kind, support, seed)
    for token in (0, seed + 1):
        for radius in RADII:
            known = local_facts(subject_of(map, residual), one_token(x, token, radius))
            one, every = known.row(token, alone(token, radius)), known.rows(alone(token, radius))
            for name, digits in (
                ("linear", 1e-8),
                ("plain", 1e-8),
                ("remainder", 1e-6),
                ("saturation", 0.05),
                ("best", 0.05),
            ):
                assert getattr(one, name).value.shape == (1,)
                mine, theirs = float(getattr(one, name)), float(getattr(every, name)[token])
                assert mine == pytest.approx(theirs, rel=digits), (name, token, radius)


@pytest.mark.parametrize(("kind", "support", "seed"), PLACES)
def test_a_row_moves_no_farther(kind, support, seed):
    """As a whole, and beyond its linear part."""
    map, residual, x = drawn(kind, support, seed)
    token, g = seed + 1, generator(seed + 20)
    block, here = dense(map, residual, x)[token, token], flat(map, residual, x)[token]
    for radius in RADII:
        row = local_facts(subject_of(map, residual), one_token(x, token, radius)).row(
            token, alone(token, radius)
        )
        for y, step in moved(g, x, token, radius):
            away = flat(map, residual, y)[token] - here
            assert float(away.norm()) <= float(row.best)
            assert float((away - block @ step).norm()) <= float(row.remainder) + 1e-12
            assert float((block @ step).norm()) <= float(row.linear)


@pytest.mark.parametrize(("kind", "support", "seed"), PLACES)
def test_columns_are_those_of_the_jacobian(kind, support, seed):
    map, residual, x = drawn(kind, support, seed)
    jacobian = dense(map, residual, x)
    for tokens in ([0], [seed + 1], [3, 1]):
        heads = LocalHeads(subject_of(map, residual), one_token(x, 0, 1.0))
        some = heads.columns(torch.tensor(tokens))
        assert "jacobian" not in heads.__dict__  # a few columns do not make the whole
        torch.testing.assert_close(some, jacobian[:, tokens])
        torch.testing.assert_close(heads.jacobian[:, tokens], some)
        torch.testing.assert_close(heads.columns(torch.tensor(tokens)), some)
        assert heads.width == jacobian.shape[2]


def test_other_columns_are_not_taken_for_the_last_ones():
    map, residual, x = drawn("mixed", r.Full(), 2)
    heads, dense_jacobian = (
        LocalHeads(subject_of(map, residual), one_token(x, 0, 1.0)),
        dense(map, residual, x),
    )
    for token in (1, 3, 3, 1):
        torch.testing.assert_close(heads.columns(torch.tensor([token])), dense_jacobian[:, [token]])


@pytest.mark.parametrize(("kind", "support", "seed"), PLACES)
def test_bounds_stay_above_attacks(large, monkeypatch, kind, support, seed):
    """From one row and one column alone: what needs all of them is not touched."""
    map, residual, x = drawn(kind, support, seed)
    monkeypatch.setattr(LocalFacts, "rows", refuse)
    for radius in RADII:
        domain, subject = one_token(x, seed + 1, radius), subject_of(map, residual)
        bound = float(theorem(subject, domain, Frobenius()).value)
        attack = falsify_deviation(
            whole(map, residual), domain, Frobenius(), steps=10, restarts=1, generator=generator(seed)
        ).value
        assert 0.05 * bound < attack <= bound, radius
        assert radius > 1e-3 or attack > 0.98 * bound
        assert "jacobian" not in local_facts(subject, domain).heads.__dict__


@pytest.mark.parametrize("kind", MAPS)
def test_the_whole_ladder_stays_above_attacks(large, kind):
    """Every theorem that answers, as a user asks; the one for all rows stands back."""
    for seed, support in enumerate((r.Full(), r.Causal())):
        map, residual, x = drawn(kind, support, seed + 10)
        for radius in (0.1, 3.0):
            domain = one_token(x, 2, radius)
            found = deviation(whole(map, residual), domain, Frobenius())
            attack = falsify_deviation(
                whole(map, residual), domain, Frobenius(), steps=10, restarts=1, generator=generator(seed)
            ).value
            assert all(attack <= rung.value for rung in (found, *found.others)), (support, radius)
            assert residual or any(
                "the theorem for one moving token stands in" in why for why in found.refused
            )


def test_it_gives_away_little(monkeypatch):
    """Close to what all facts give."""
    for kind, support, seed in PLACES[:5:2]:
        map, residual, x = drawn(kind, support, seed)
        for radius in RADII[1:3]:
            values = []
            for limit in (facts.LARGE, 0):
                with monkeypatch.context() as patched:
                    patched.setattr(facts, "LARGE", limit)
                    bound = theorem(subject_of(map, residual), one_token(x, 1, radius), Frobenius())
                    values.append(float(bound.value))
            assert 0.95 * values[0] <= values[1] <= 1.5 * values[0], (kind, support, radius)


@pytest.mark.parametrize("support", [r.Full(), r.Causal()], ids=repr)
def test_heads_side_by_side_keep_their_places(support):
    """The rows of other tokens, from ranges of weights: each head writes to its own part of the output."""
    map, residual, x = drawn("side by side", support, 3)
    heads = LocalHeads(subject_of(map, residual), one_token(x, 1, 1.0))
    w_v = map.lookup.w_v
    torch.testing.assert_close(
        torch.stack([_output_matrix(heads, h) for h in range(HEADS)]).sum(0), torch.cat(list(w_v), -1)
    )
    rest, g = [i for i in range(TOKENS) if i != 1], generator(4)
    for radius in RADII:
        away = max(float((map(y) - map(x))[:, rest].norm()) for y, _ in moved(g, x, 1, radius, 50))
        bound = float(
            interval_bound(heads, [TokenMove(values, 1, radius) for values in heads.separate], exact(radius))
        )
        assert away <= bound
        assert radius > 1e-3 or away > 0.7 * bound


@pytest.mark.parametrize(("kind", "support", "seed"), PLACES)
def test_nothing_is_kept_for_pairs_of_tokens(kind, support, seed, large, monkeypatch):
    """Vectors for the row that moves alone, and for the others a few rows at a time: the same bound."""
    map, residual, x = drawn(kind, support, seed)
    domain = one_token(x, 1, 0.2)
    known = local_facts(subject_of(map, residual), domain)
    together = float(theorem(subject_of(map, residual), domain, Frobenius()).value)
    for local in known.heads.heads:
        assert "means" in vars(local)  # these are the facts that were used
        assert not {"y", "own", "own_apart"} & set(vars(local))
    for module in (heads, token_moves):
        monkeypatch.setattr(module, "AT_ONCE", 1)
    map, x = pytree.tree_map(torch.clone, map), x.clone()  # other facts
    apart = theorem(subject_of(map, residual), one_token(x, 1, 0.2), Frobenius())
    assert float(apart.value) == pytest.approx(together, rel=1e-12)
