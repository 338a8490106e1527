"""Tokens that come and go, against sequences that were really edited."""

import math

import pytest
import torch

import regard
from regard.attention import Attention
from regard.domains import Ball, Vocabulary, deleted, inserted, replaced
from regard.errors import ArgumentError
from regard.lookups import Linear
from regard.maps import Heads, Residual
from regard.normalizers import Sparsemax
from regard.norms import EntryMax, Frobenius, TokenMax, TokenSum, Wasserstein
from regard.potentials import Dot, Gaussian
from regard.proofs import certify, deviation, falsify_deviation
from regard.proofs.subject import subject_of
from regard.proofs.theorems.edits import Edit, row_deviations
from regard.supports import Causal
from regard.transport import wasserstein

D = torch.float64
TOKENS, WIDTH = 6, 5


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def _attention(*heads: int, seed: int = 0, **more) -> Attention:
    w_q, w_k, w_v = (_t(*heads, WIDTH, 3, seed=seed + k) for k in range(3))
    return Attention(Dot(w_q, w_k), Linear(w_v, _t(*heads, 3, seed=seed + 3)), **more)


X, WORDS = _t(TOKENS, WIDTH, seed=10), _t(30, WIDTH, seed=11)
MIXED = Heads(_attention(2), _t(2, 3, WIDTH, seed=5), _t(WIDTH, seed=6))
MAPS = {
    "one head": _attention(),
    "side by side": _attention(2),
    "mixed": MIXED,
    "residual": Residual(MIXED),
}


@pytest.fixture(params=MAPS, ids=str)
def map(request):
    return MAPS[request.param]


def _run(map, x: torch.Tensor) -> torch.Tensor:
    value = map(x)
    return value if value.ndim == 2 else value.transpose(0, 1).flatten(1)


def _moved(map, before: torch.Tensor, after: torch.Tensor, stays: list[int]) -> torch.Tensor:
    """How far the outputs of the tokens that stay are moved; new tokens come last."""
    return (_run(map, after)[: len(stays)] - _run(map, before)[stays]).norm(dim=-1)


def _equal(bound: torch.Tensor, truth: torch.Tensor) -> None:
    assert bool((bound >= truth * (1 - 1e-13)).all())
    torch.testing.assert_close(bound, truth, rtol=1e-4, atol=1e-11)


def test_one_word_that_comes_is_exact(map):
    truth = torch.stack([_moved(map, X, torch.cat([X, word[None]]), list(range(TOKENS))) for word in WORDS])
    _equal(row_deviations(map, inserted(X, Vocabulary(WORDS))), truth.amax(0))


def test_each_word_of_a_vocabulary_is_exact():
    for word in WORDS:
        truth = _moved(MIXED, X, torch.cat([X, word[None]]), list(range(TOKENS)))
        _equal(row_deviations(MIXED, inserted(X, Vocabulary(word[None]))), truth)


@pytest.mark.parametrize("gone", [(0,), (3,), (5, 1)])
def test_words_that_go_are_exact(map, gone):
    stays = [index for index in range(TOKENS) if index not in gone]
    _equal(row_deviations(map, deleted(X, *gone)), _moved(map, X, X[stays], stays))


def test_another_word_is_exact(map):
    stays = [0, 1, 3, 4, 5]
    truth = torch.stack([_moved(map, X, torch.cat([X[stays], word[None]]), stays) for word in WORDS])
    _equal(row_deviations(map, replaced(X, 2, Vocabulary(WORDS))), truth.amax(0))


def test_embeddings_that_know_of_the_shift(map):
    stays, shifted = [0, 1, 3, 4, 5], X[[0, 1, 3, 4, 5]] + 0.1 * _t(5, WIDTH, seed=7)
    after = torch.stack([_moved(map, X, torch.cat([shifted, word[None]]), stays) for word in WORDS])
    _equal(row_deviations(map, replaced(X, 2, Vocabulary(WORDS), after=shifted)), after.amax(0))
    _equal(row_deviations(map, deleted(X, 2, after=shifted)), _moved(map, X, shifted, stays))


@pytest.mark.parametrize("gone", [(), (2,)])
def test_two_words_against_all_pairs(map, gone):
    few = WORDS[:10]
    stays = [index for index in range(TOKENS) if index not in gone]
    truth = torch.stack(
        [_moved(map, X, torch.cat([X[stays], few[[a, b]]]), stays) for a in range(10) for b in range(10)]
    )
    domain = replaced(X, 2, Vocabulary(few), count=2) if gone else inserted(X, Vocabulary(few), count=2)
    bound = row_deviations(map, domain)
    assert bool((bound >= truth.amax(0)).all())
    assert bool((bound <= 2 * truth.amax(0)).all())


def test_copies_of_one_word_are_worst_for_one_head():
    """Part 3 is attained: k copies of the word that is worst."""
    word = WORDS[4:5]
    for count in (2, 5):
        truth = _moved(MAPS["one head"], X, torch.cat([X, word.expand(count, -1)]), list(range(TOKENS)))
        _equal(row_deviations(MAPS["one head"], inserted(X, Vocabulary(word), count=count)), truth)


def test_a_ball_against_search(map):
    center = _t(WIDTH, seed=3)
    bound = row_deviations(map, inserted(X, Ball(0.5, center), count=2))
    best = torch.zeros(TOKENS, dtype=D)
    for seed in range(60):
        away = _t(2, WIDTH, seed=seed)
        words = center + 0.5 * away / away.norm(dim=-1, keepdim=True)
        best = torch.maximum(best, _moved(map, X, torch.cat([X, words]), list(range(TOKENS))))
    assert bool((bound >= best).all())
    assert bool((bound <= 12 * best).all())


def test_a_ball_of_one_point_is_that_point():
    """At radius zero, one head: both theorems say the same."""
    one = MAPS["one head"]
    at_point = row_deviations(one, inserted(X, Ball(0.0, WORDS[0])))
    of_word = row_deviations(one, inserted(X, Vocabulary(WORDS[:1])))
    torch.testing.assert_close(at_point, of_word, rtol=1e-9, atol=0)


def test_how_far_tokens_may_be_from_the_middle():
    """The farthest point of a ball, the farthest word, the farthest token."""
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=D)
    subject = subject_of(Attention(Dot()))
    ball = Edit(subject, inserted(x, Ball(2.0, torch.tensor([3.0, 0.0], dtype=D))))
    words = Edit(subject, inserted(x, Vocabulary(torch.tensor([[0.0, 4.0], [1.0, 0.0]], dtype=D))))
    alone = Edit(subject, inserted(x, Ball(0.25)))
    for edit, far in ((ball, 5.0), (words, 4.0), (alone, 1.0)):
        assert far <= float(edit._reach) < far * (1 + 1e-12)


def test_a_ball_whose_worst_point_is_known():
    """One token at zero, one head without projections: y = R θ/|θ| is worst, with odds e^{R|θ|}."""
    x = torch.tensor([[1.0, 0.0]], dtype=D)
    attention = Attention(Dot(scale=2.0))
    (bound,) = row_deviations(attention, inserted(x, Ball(1.0, torch.tensor([2.0, 0.0], dtype=D)))).tolist()
    odds = math.exp(2.0 * (3.0 - 1.0))
    assert bound == pytest.approx(odds / (1 + odds) * 2.0, rel=1e-9)


@pytest.mark.parametrize("norm", [TokenMax(), Frobenius(), TokenSum()])
def test_norms_of_rows(norm):
    domain = inserted(X, Vocabulary(WORDS))
    rows = row_deviations(MIXED, domain)
    found = deviation(MIXED, domain, norm)
    expected = {TokenMax: rows.amax(), Frobenius: rows.norm(), TokenSum: rows.sum()}[type(norm)]
    assert found.value == pytest.approx(float(expected), rel=1e-12)
    assert all(hypothesis.checked for hypothesis in found.hypotheses)


def test_laws_of_outputs(map):
    words = Vocabulary(WORDS[:8])
    bound = deviation(map, inserted(X, words), Wasserstein(1.0)).value
    truth = [
        float(wasserstein(_run(map, X), _run(map, torch.cat([X, word[None]])), 1.0)) for word in WORDS[:8]
    ]
    assert max(truth) <= bound <= 12 * max(truth)
    gone = deviation(map, deleted(X, 1), Wasserstein(1.0)).value
    stays = [0, 2, 3, 4, 5]
    assert float(wasserstein(_run(map, X), _run(map, X[stays]), 1.0)) <= gone


def test_sharp_rows_keep_their_digits():
    """One key takes all: odds of e^{±300} neither overflow nor vanish."""
    attention = Attention(Dot(scale=300.0))
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=D)
    for word in (torch.tensor([[2.0, 0.0]], dtype=D), torch.tensor([[-2.0, 0.0]], dtype=D)):
        truth = _moved(attention, x, torch.cat([x, word]), [0, 1])
        _equal(row_deviations(attention, inserted(x, Vocabulary(word))), truth)


def test_tokens_far_from_the_origin():
    """Only differences of keys count; their rounding is relative to the middle, that of slopes is not."""
    far = X + 1e4
    words = WORDS + 1e4
    one = Attention(Dot(scale=1e-3))
    truth = torch.stack(
        [_moved(one, far, torch.cat([far, word[None]]), list(range(TOKENS))) for word in words]
    )
    bound = row_deviations(one, inserted(far, Vocabulary(words)))
    assert bool((bound >= truth.amax(0) * (1 - 1e-6)).all())
    assert bool((bound <= truth.amax(0) * (1 + 1e-3)).all())


def test_refusals_say_what_would_help():
    words = Vocabulary(WORDS)
    for attention, what in (
        (_attention(support=Causal()), "positions"),
        (Attention(Gaussian(bandwidth=1.0)), "bilinear"),
        (_attention(normalizer=Sparsemax()), "softmax"),
    ):
        refused = deviation(attention, inserted(X, words), TokenMax())
        assert math.isinf(refused.value)
        assert any(what in why for why in refused.refused), attention
    refused = deviation(MIXED, inserted(X, words), EntryMax())
    assert math.isinf(refused.value)
    assert any("TokenMax" in why for why in refused.refused)


def test_bad_arguments():
    words = Vocabulary(WORDS)
    with pytest.raises(ArgumentError, match="removed"):
        deleted(X, *range(TOKENS))
    with pytest.raises(ArgumentError, match="index"):
        deleted(X, 6)
    with pytest.raises(ArgumentError, match="index"):
        deleted(X)
    with pytest.raises(ArgumentError, match="added and within"):
        inserted(X, words, count=0)
    with pytest.raises(ArgumentError, match="width 4"):
        inserted(X, Vocabulary(_t(3, 4)))
    with pytest.raises(ArgumentError, match="after"):
        deleted(X, 0, after=X)
    with pytest.raises(ArgumentError, match="points"):
        Vocabulary(torch.zeros(0, 3, dtype=D))
    with pytest.raises(ArgumentError, match="deviation"):
        certify(MIXED, inserted(X, words), TokenMax())
    with pytest.raises(ArgumentError, match="another input"):
        falsify_deviation(MIXED, inserted(X, words), TokenMax())
    assert "1 of Vocabulary" in repr(inserted(X, words))
    assert "tokens [1] go" in repr(deleted(X, -5))


def test_what_was_certified_can_be_written_and_read():
    found = regard.deviation(MIXED, replaced(X, 1, Vocabulary(WORDS[:3])), TokenMax())
    again = type(found).from_json(found.to_json())
    assert again.value == found.value
    assert repr(again.domain) == repr(found.domain)
