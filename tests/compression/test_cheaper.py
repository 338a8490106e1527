"""cheaper: candidates against their definitions, errors on queries that nobody saw, bounds that hold."""

from __future__ import annotations

import math

import pytest
import torch

from regard import Alibi, Attention, Causal, Dot, Gaussian, Linear, Measure, Rotary, Sparsemax
from regard._heads import mix_heads
from regard.compression import Features, LowRank, Merged, Nystrom, Quantized, Recent, TopK, cheaper
from regard.compression.candidates import quantize
from regard.errors import ArgumentError, RefusalError
from regard.maps import Heads
from regard.normalizers import Elu, PositiveRandom
from regard.proofs.subject import Head
from regard.supports import Full, Window

D = torch.float64


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


HEADS = Attention(Dot(_t(2, 6, 4, seed=1) / 2, _t(2, 6, 4, seed=2) / 2), Linear(_t(2, 6, 3, seed=3)))
LAYER = Heads(HEADS, _t(2, 3, 6, seed=4))
X, KEYS = _t(60, 6, seed=5), _t(40, 6, seed=6)
ALL = (
    Recent(10),
    TopK(10),
    Merged(10),
    Nystrom(10),
    LowRank(2),
    Features(Elu()),
    Features(PositiveRandom.draw(4, 64, 0, D)),
    Quantized(8),
    Quantized(4),
)


def _run(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return (HEADS(x, keys) @ LAYER.w_o).sum(0)


@pytest.fixture(scope="module")
def table():
    return cheaper(LAYER, X, KEYS, candidates=ALL)


def test_all_candidates_have_numbers(table):
    assert [choice.candidate for choice in table.choices] == list(ALL)
    for choice in table.choices:
        assert not choice.refused
        assert 0 < choice.memory <= 1
        assert 0 < choice.error <= 10
        assert choice.quantile > 0
        assert 0 <= choice.above <= 1
    lines = str(table).splitlines()
    assert len(lines) == 10
    assert lines[3].startswith("Merged(size=10)")


def test_errors_are_of_the_third_that_nobody_saw(table):
    """Recomputed by hand for the window: sizes, quantile, and the mixing."""
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    calibration, test = (X[part] for part in order.tensor_split(3)[1:])
    errors = [(_run(x, KEYS[-10:]) - _run(x, KEYS)).norm(dim=-1) for x in (calibration, test)]
    size = _run(test, KEYS).square().sum(-1).mean().sqrt()
    window = table.choices[0]
    assert math.isclose(window.error, float(errors[1].square().mean().sqrt() / size), rel_tol=1e-9)
    assert math.isclose(
        window.quantile, float(errors[0].max() / size), rel_tol=1e-9
    )  # ⌈0.95 · 21⌉ = 20 of 20
    assert math.isclose(window.above, float((errors[1] > errors[0].max()).double().mean()))
    assert window.memory == 0.25


def test_everything_kept_is_exact():
    full = cheaper(LAYER, X, KEYS, candidates=(Recent(40), TopK(40), Merged(40), LowRank(4)))
    for choice in full.choices:
        assert choice.error < 1e-9, choice
        assert choice.divergence < 1e-12


def test_bounds_hold_at_the_test_queries(table):
    """Proved numbers are above the worst measured ones, and are there where they say something."""
    found = cheaper(LAYER, X, KEYS, candidates=(Quantized(8), Merged(36), Quantized(2)))
    exact, merged, coarse = found.choices
    for choice in (exact, merged):
        assert choice.proved is not None
        assert choice.proved >= choice.error
    assert coarse.proved is None or coarse.proved >= coarse.error
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    test = X[order.tensor_split(3)[2]]
    fitted = [Quantized(8).fit(Head(head), Measure(KEYS), X[:20]) for head in _singles()]
    moved = sum(one.outputs(test) @ w for one, w in zip(fitted, LAYER.w_o, strict=True)) - _run(test, KEYS)
    size = _run(test, KEYS).square().sum(-1).mean().sqrt()
    assert float(moved.norm(dim=-1).max() / size) <= exact.proved


def _singles():
    return [
        Attention(Dot(HEADS.potential.w_q[h], HEADS.potential.w_k[h]), Linear(HEADS.lookup.w_v[h]))
        for h in (0, 1)
    ]


def test_memory_is_relative_to_the_dtype_of_the_cache():
    """Eight bits of four keys' features and three values, with two steps a channel and a token."""
    for dtype, bits in ((torch.float32, 32), (torch.bfloat16, 16)):
        (choice,) = cheaper(HEADS, X, KEYS, candidates=(Quantized(8),), dtype=dtype).choices
        assert math.isclose(choice.memory, 8 / bits + (2 * 4 + 2 * 40) / (40 * 7))
    with pytest.raises(ArgumentError, match=r"dtype: is torch.int8; give the dtype of a cache"):
        cheaper(HEADS, X, KEYS, dtype=torch.int8)


def test_the_choice_of_least_memory_under_an_error(table):
    best = table.best(0.5)
    assert best is not None
    assert best.quantile <= 0.5
    assert best.memory == min(c.memory for c in table.choices if c.quantile <= 0.5)
    assert table.best(1e-9) is None


def test_quantized_numbers_are_within_half_a_step():
    rows = _t(5, 30)
    for bits in (2, 4, 8):
        step = (rows.amax(-1) - rows.amin(-1)) / (2**bits - 1)
        found = quantize(rows, bits)
        assert bool(((found - rows).abs() <= 0.5 * step.unsqueeze(-1) + 1e-15).all())
        assert max(len(row.unique()) for row in found) <= 2**bits


def test_low_rank_is_the_best_of_its_rank_for_the_queries_it_saw():
    """No other rank-two keys have a smaller error of the scores."""
    head, queries = Head(_singles()[0]), X[:20]
    q, k = queries @ HEADS.potential.w_q[0], KEYS @ HEADS.potential.w_k[0]
    values, singular, right = torch.linalg.svd(q @ k.mT, full_matrices=False)
    best = (values[:, :2] * singular[:2]) @ right[:2]
    found = LowRank(2).fit(head, Measure(KEYS), queries)
    torch.testing.assert_close(found.rows(queries), (0.5 * best).softmax(-1), rtol=1e-6, atol=1e-9)


def test_refusals_and_self_attention():
    for attention in (Attention(Dot() + Alibi(0.5)), Attention(Dot(), normalizer=Sparsemax())):
        with pytest.raises(RefusalError, match="cheaper"):
            cheaper(attention, X)
    alone = cheaper(Attention(Gaussian(bandwidth=1.0)), X, candidates=(Recent(5), Quantized(8)))
    assert alone.choices[1].refused.startswith("Gaussian scores")
    assert alone.choices[0].error > 0
    assert alone.keys == 60
    usual = cheaper(Attention(Dot()), X)
    assert len(usual.choices) == 9


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"x": X[:5]}, "x"),
        ({"x": X.expand(2, -1, -1)}, "x"),
        ({"candidates": ()}, "candidates"),
        ({"candidates": ("merge",)}, "candidates"),
        ({"context": KEYS.expand(2, -1, -1)}, "context"),
    ],
    ids=["few", "batch", "none", "strings", "contexts"],
)
def test_bad_input(arguments, named):
    given = {"x": X, "context": KEYS} | arguments
    with pytest.raises(ArgumentError, match=named):
        cheaper(LAYER, given.pop("x"), given.pop("context"), **given)


@pytest.mark.parametrize(
    "make", [lambda: Recent(0), lambda: Merged(True), lambda: Quantized(5), lambda: LowRank(-1)]
)
def test_bad_candidates(make):
    with pytest.raises(ArgumentError):
        make()


# Masks and positions

ORDERED = Attention(
    Rotary(Dot(_t(2, 6, 4, seed=1) / 2, _t(1, 6, 4, seed=2) / 2)),
    Linear(_t(1, 6, 3, seed=3)),
    support=Causal(),
)


def test_a_decoder_keeps_what_is_beside_the_context():
    """Sixty tokens: the later thirty ask, all of these see the first 31; a window of five, by hand."""
    table = cheaper(Heads(ORDERED, LAYER.w_o), X, candidates=(Recent(5), Recent(31), TopK(31), Merged(31)))
    window, *whole = table.choices
    assert table.keys == 31
    assert table.queries == 30
    for choice in whole:
        assert choice.error < 1e-9, choice
        assert choice.divergence < 1e-12
    test = 30 + torch.randperm(30, generator=torch.Generator().manual_seed(0)).tensor_split(3)[2]
    rows = ORDERED.weights(X, X)[:, test]
    kept = rows.clone()
    kept[..., :26] = 0
    kept = kept / kept.sum(-1, keepdim=True)
    exact, cheap = (
        mix_heads(law @ ORDERED.lookup.values(X, torch.arange(60)), LAYER.w_o) for law in (rows, kept)
    )
    error = (cheap - exact).norm() / exact.norm()
    assert math.isclose(window.error, float(error), rel_tol=1e-9)
    divergence = torch.where(kept > 0, kept * (kept / rows).log(), 0.0).sum(-1).mean()
    assert math.isclose(window.divergence, float(divergence), rel_tol=1e-9)
    assert math.isclose(window.memory, 5 / 31)
    assert window.proved is None


def test_heads_that_share_keys_share_atoms():
    """Two heads look at one set of keys: eight atoms serve both."""
    table = cheaper(Heads(ORDERED, LAYER.w_o), X, candidates=(Merged(8), Nystrom(8), Features(Elu())))
    merged, nystrom, elu = table.choices
    assert math.isclose(merged.memory, 8 * (4 + 3 + 1) / (31 * 7))
    assert "not a softmax" in nystrom.refused
    assert "replace exp" in elu.refused


def test_positions_are_those_of_marks():
    """Marks that skip a thousand are those of the declaration; a window alone leaves nothing to share."""
    away = Measure(X, marks=torch.arange(60) * 1000)
    near, far = (
        cheaper(ORDERED, points, candidates=(Quantized(4),)).choices[0].error for points in (X, away)
    )
    assert near != far
    with pytest.raises(RefusalError, match="no key is seen by all queries"):
        cheaper(ORDERED.replace(support=Window(3, 0)), X)
    with pytest.raises(ArgumentError, match="leaves 15 queries"):
        cheaper(ORDERED, X[:30])
    apart = cheaper(ORDERED.replace(support=Full()), X, KEYS, candidates=(LowRank(4), Features(Elu())))
    assert apart.choices[0].error < 1e-9
    assert apart.keys == 40
