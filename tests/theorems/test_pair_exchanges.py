"""Exchanges of two words: bounds that prune say the same as runs of all."""

import pytest
import torch

import regard as r
from regard.errors import ArgumentError
from regard.maps import Affine, Compose
from regard.nonexpansive import Pool
from tests.ball_model.networks import drawn, network, rounded, sequence


def model(seed=0):
    generator = torch.Generator().manual_seed(seed + 50)
    return Compose((network(seed, layers=1), Pool(), Affine(drawn(generator, 8, 2))))


def lists(x, near, far, count=12):
    """At two places words that are near each other, at a third ones that are far from all."""
    generator = torch.Generator().manual_seed(5)
    return {
        0: x[0] + near * drawn(generator, count, x.shape[-1]),
        2: x[2] + near * drawn(generator, count, x.shape[-1]),
        3: far * drawn(generator, 4, x.shape[-1]),
    }


@pytest.mark.parametrize("far", [1.0, 4.0])
def test_pruning_changes_no_answer(far):
    x = sequence(0)
    choices = lists(x, 1e-3, far)
    pruned = r.proofs.exchange_pairs(model(), x, choices, worth=20)
    plain = r.proofs.exchange_pairs(model(), x, choices, worth=10**9)
    assert pruned.proved >= 144  # pairs of the near words, by one bound
    assert plain.proved == plain.bounds == 0
    assert pruned.bounds >= 1
    assert "proved by" in str(pruned)
    assert pruned.count == plain.count == 12 + 12 + 4 + 144 + 48 + 48
    assert pruned.holds == plain.holds

    def key(one):
        return sorted(one.items())

    assert sorted(pruned.changed, key=key) == sorted(plain.changed, key=key)


def test_each_change_is_one():
    x = sequence(1)
    net = model(1)
    found = r.proofs.exchange_pairs(net, x, lists(x, 1e-3, 6.0), worth=20)
    for exchange in found.changed:
        moved = x.clone()
        for place, k in exchange.items():
            moved[place] = lists(x, 1e-3, 6.0)[place][k]
        assert int(net(moved)[0].argmax()) != found.label
    assert found.holds == (not found.changed)
    assert str(found.count) in str(found)


def test_words_that_are_all_equal():
    x = sequence(2)
    same = x[1].repeat(3, 1)
    found = r.proofs.exchange_pairs(model(2), x, {0: x[0].repeat(5, 1), 1: same}, worth=1)
    assert found.holds
    assert found.count == 5 + 3 + 15
    assert found.proved == 15


def test_what_is_wrong_is_named():
    x = sequence(0)
    for choices, words in (
        ({}, "empty"),
        ({9: x}, "position 9"),
        ({0: x[:0]}, "shape"),
        ({0: x[:, :3]}, "shape"),
    ):
        with pytest.raises(ArgumentError, match=words):
            r.proofs.exchange_pairs(model(), x, choices)
    with pytest.raises(ArgumentError, match="worth"):
        r.proofs.exchange_pairs(model(), x, {0: x}, worth=0)


def test_embeddings_that_are_no_numbers_are_named():
    x = sequence(0)
    with pytest.raises(ArgumentError, match="choices: has 32 non-finite entries"):
        r.proofs.exchange_pairs(model(), x, {0: x * float("nan")})


def test_a_set_is_as_wide_as_its_farthest_word():
    """Nine equal words and one that is apart: only two of the latter change the answer."""
    words = torch.tensor([[1.0, 0.85]] * 9 + [[0.9, 1.0]], dtype=torch.float64)
    linear = Compose((Pool(), Affine(torch.eye(2, dtype=torch.float64))))
    found = r.proofs.exchange_pairs(linear, words[:2], {0: words, 1: words}, worth=2)
    assert found.changed == ({0: 9, 1: 9},)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bound_counts_where_rounding_cannot_undo_it(dtype):
    """256.8 and 255.6 are one number in bfloat16, so two words change an answer that leads by 0.8 exactly."""
    x, near = torch.tensor([[0.9, -0.9]] * 2, dtype=dtype), torch.tensor([[0.8, -0.4]] * 12, dtype=dtype)
    readout = Compose((Pool(), Affine(torch.eye(2, dtype=torch.float64), torch.tensor([0.0, 0.4]).double())))
    words = {0: near, 1: near}
    pruned, plain = (
        r.proofs.exchange_pairs(rounded(dtype), x, words, readout=readout, worth=worth)
        for worth in (20, 10**9)
    )
    assert pruned.holds == plain.holds == (dtype == torch.float32)
    assert len(pruned.changed) == len(plain.changed) == (0 if plain.holds else 144)
    assert pruned.proved == (144 if plain.holds else 0)
