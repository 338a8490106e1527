"""Exchanges of words: all of them, exactly."""

import itertools

import pytest
import torch

import regard as r
from regard.errors import ArgumentError

D = torch.float64
TABLE = torch.randn(9, 2, generator=torch.Generator().manual_seed(3), dtype=D)
TOKENS = torch.tensor([1, 4, 2, 7])


def logits(tokens):
    """A bag of words with a product of neighbors, so that pairs matter."""
    found = TABLE[tokens]
    return found.sum(1) + (found[:, :-1] * found[:, 1:]).sum(1)


@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("batch", [1, 5, 64])
def test_every_exchange_is_run(words, batch):
    choices = {0: [3, 5], 2: [0, 6, 8], 3: [1]}
    found = r.substitutions(logits, TOKENS, choices, words=words, batch=batch)
    label = int(logits(TOKENS.unsqueeze(0)).argmax())
    leads = {}
    for size in range(1, words + 1):
        for positions in itertools.combinations(choices, size):
            for tokens in itertools.product(*(choices[position] for position in positions)):
                moved = TOKENS.clone()
                moved[list(positions)] = torch.tensor(tokens)
                own = logits(moved.unsqueeze(0))[0]
                leads[tuple(zip(positions, tokens, strict=True))] = float(own[label] - own[1 - label])
    assert found.count == len(leads)
    assert found.lead == pytest.approx(min(leads.values()))
    assert {tuple(sorted(one.items())) for one in found.changed} == {
        one for one, lead in leads.items() if lead < 0
    }
    assert found.holds == (min(leads.values()) >= 0)
    assert str(found.count) in str(found)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"choices": {}}, "choices"),
        ({"choices": {0: []}}, "choices"),
        ({"choices": {9: [1]}}, "positions"),
        ({"choices": {0: [2.5]}}, r"choices: has 2\.5"),
        ({"choices": {0: ["cat"]}}, "choices: has 'cat'"),
        ({"choices": {0: [TOKENS[0].item()]}}, "nothing but the tokens that are there"),
        ({"choices": {0: [10**6]}}, "choices: the model fails on tokens"),
        ({"tokens": "a b"}, "tokens: is 'a b'"),
        ({"tokens": torch.zeros(3)}, "tokens"),
        ({"tokens": TOKENS.unsqueeze(0)}, "tokens"),
        ({"words": 0}, "words"),
        ({"batch": 1.5}, "batch"),
    ],
)
def test_bad_lists_are_named(change, match):
    arguments = {"tokens": TOKENS, "choices": {0: [3]}, **change}
    with pytest.raises(ArgumentError, match=match):
        r.substitutions(logits, arguments.pop("tokens"), arguments.pop("choices"), **arguments)


def test_lists_and_tensors_are_one_and_what_stands_there_is_no_exchange():
    one = r.substitutions(logits, TOKENS, {0: [3, 4]}, words=3)
    other = r.substitutions(
        logits, TOKENS.tolist(), {0: torch.tensor([4, 3, 3, int(TOKENS[0])]), 1: [int(TOKENS[1])]}
    )
    assert (
        (one.count, one.lead, one.worst) == (other.count, other.lead, other.worst) == (2, one.lead, one.worst)
    )
    assert one.words == 1


def test_a_sentence_without_an_answer_is_an_error():
    nothing = torch.full((1, 2), float("nan"))
    with pytest.raises(ArgumentError, match="logits: gives NaN"):
        r.substitutions(lambda tokens: nothing.expand(len(tokens), -1), TOKENS, {0: [3]})
    drawn = torch.Generator().manual_seed(0)
    with pytest.raises(ArgumentError, match=r"call model\.eval"):
        r.substitutions(lambda tokens: torch.randn(len(tokens), 2, generator=drawn), TOKENS, {0: [3]})


@pytest.mark.parametrize("shape", [(1,), (), (0,), (2, 2)])
def test_logits_of_another_shape_are_named(shape):
    with pytest.raises(ArgumentError, match="two classes or more"):
        r.substitutions(lambda tokens: torch.zeros(len(tokens), *shape), TOKENS, {0: [3]})


def test_a_tie_that_another_class_wins_is_a_change():
    table = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.5, 1.0]], dtype=D)  # token 1 ties
    found = r.substitutions(lambda tokens: table[tokens[:, 0]], torch.tensor([0]), {0: [1, 2]})
    assert (found.label, found.lead, found.changed) == (1, 0.0, ({0: 1},))


def test_logits_that_are_no_numbers_are_no_answer():
    table = torch.tensor([[1.0, 0.0], [float("nan"), 0.0], [1.0, float("nan")]], dtype=D)
    found = r.substitutions(lambda tokens: table[tokens[:, 0]], torch.tensor([0]), {0: [1, 2]}, batch=1)
    assert not found.holds
    assert len(found.changed) == 2
    assert found.lead == -float("inf")
