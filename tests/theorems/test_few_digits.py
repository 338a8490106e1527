"""Enclosures in arithmetic with few digits (`coarse`) hold those with many, where products cancel and where
one part has a size and the rest is nothing.
"""

import itertools

import pytest
import torch

import regard as r
from regard import maps
from regard._enclosed import Numbers, Vectors
from regard._upper import Lower, Upper, exact
from regard.nonexpansive import Center, IntoBall, MemoryStep, MixTokens, Pool, Split
from regard.proofs.candidates import Rows
from regard.proofs.locating import locate
from regard.proofs.subject import subject_of
from regard.proofs.theorem import Refusal
from tests.coarse import coarse, representable

D = torch.float64


def numbers(seed, *shape, size=1.0):
    return representable(size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D))


def firm(found):
    """With its roundings paid for, in the arithmetic that made it."""
    if isinstance(found, torch.Tensor):
        return found
    if isinstance(found, Numbers | Vectors):
        return type(found)(found.center, Upper(found.error.bound))
    return type(found)(found.bound)


def share(few, many):
    """Which share of its error an enclosure in few digits needs; a bound is on its side, and needs none."""
    if isinstance(few, torch.Tensor):
        assert bool((few >= many).all())
        return 0.0
    if isinstance(few, Upper):
        assert bool((few.value >= many.value * (1 - 1e-12)).all())
        return 0.0
    if isinstance(few, Lower):
        assert bool((few.value <= many.value * (1 + 1e-12)).all())
        return 0.0
    off = (
        (few.center - many.center).abs()
        if isinstance(few, Numbers)
        else (few.center - many.center).norm(dim=-1)
    )
    off = torch.where((few.center == many.center) if isinstance(few, Numbers) else off == 0, 0.0, off)
    assert bool((off <= few.error.bound).all())
    return float((off / few.error.bound.clamp_min(1e-300)).max())


def of_rows(rows, candidates, radius):
    """All that is known of rows and candidates."""
    points = rows.seen(candidates)
    yield "slopes", rows.slopes
    yield "log sums", rows.log_sums
    yield "log odds", rows.log_odds(points)
    yield "log odds in a ball", rows.log_odds_in(candidates[0], radius).largest()
    yield "means", rows.means
    yield "mean values", rows.mean_values
    yield "values", rows.values(points)
    yield "farthest in a ball", rows.farthest_in(candidates[0], radius)


def cancelling(seed, query, bias, key, middle):
    """Queries whose slopes are nearly orthogonal to keys, term against term."""
    turn = torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=D)
    both, w_v = torch.ones(2, 2, dtype=D), numbers(seed, 2, 2)
    q = representable(query * (both + 1e-3 * numbers(seed + 1, 2, 2)))
    k = representable(key * (torch.ones(3, 2, dtype=D) + 1e-3 * numbers(seed + 2, 3, 2)))
    b = representable(bias * torch.tensor([-1.0, 1.0], dtype=D))
    potential = r.Dot(turn, torch.eye(2, dtype=D), b_q=b, scale=1.0)
    (head,) = subject_of(r.Attention(potential, r.Linear(w_v))).separate
    return head, q, k, representable(middle * numbers(seed + 3, 2))


SIZES = list(itertools.product((0.0, 1.0, 30.0), (0.0, 1.0, 30.0), (1e-2, 1.0), (0.0, 1.0)))


def rows_of(seed, sizes):
    head, q, k, middle = cancelling(seed, *sizes)
    rows = Rows(head, q, k, middle, exact(float(3 * sizes[2] + 2 * sizes[3])))
    return {name: firm(one) for name, one in of_rows(rows, representable(k[:2] * 1.5), exact(0.25))}


def test_rows_and_candidates_in_few_digits():
    shares = {}
    for seed, sizes in enumerate(SIZES):
        many = rows_of(seed, sizes)
        with coarse(seed):
            few = rows_of(seed, sizes)
        for name, one in few.items():
            shares[name] = max(shares.get(name, 0.0), share(one, many[name]))
    assert min(part for name, part in shares.items() if "in a ball" not in name) > 0.01


def matrix(seed, size, *shape):
    return numbers(seed, *(shape or (3, 3)), size=size)


def affine(seed, size, bias):
    return maps.Affine(matrix(seed, size), matrix(seed + 1, bias, 3))


def norm(seed, size, bias):
    return maps.Normalize(1e-5, matrix(seed, size, 3), matrix(seed + 1, bias, 3))


def gated(seed, size, bias):
    weights = (matrix(seed + k, size) for k in range(3))
    return maps.Gated(maps.Silu(), *weights, matrix(seed + 3, bias, 3), matrix(seed + 4, bias, 3))


def heads(seed, size, bias):
    w_q, w_k, w_v, w_o = (matrix(seed + k, size, 2, 3, 3) for k in range(4))
    b_q, b_v = (matrix(seed + k, bias, 2, 3) for k in (4, 5))
    attention = r.Attention(r.Dot(w_q, w_k, b_q=b_q), r.Linear(w_v, b_v))
    return maps.Heads(attention, w_o, matrix(seed + 6, bias, 3))


def memory(seed, size, bias):
    return MemoryStep(matrix(seed, size, 3, 4), matrix(seed + 1, bias, 4), 0.5)


LOCATED = {
    "affine": (affine, 0.02),
    "pointwise": (lambda *_: maps.Pointwise(maps.Tanh()), 0.005),
    "norm": (norm, 1e-3),
    "gated": (gated, 1e-4),
    "heads": (heads, 1e-4),
    "residual": (lambda *sizes: maps.Residual(affine(*sizes)), 0.02),
    "sum": (lambda seed, *sizes: maps.Added((affine(seed, *sizes), affine(seed + 7, *sizes))), 0.02),
    "tokens": (lambda seed, size, _: MixTokens(matrix(seed, size, 2, 2)), 0.02),
    "pool": (lambda *_: Pool(), 0.01),
    "center": (lambda *_: Center(), 0.01),
    "ball": (lambda *_: IntoBall(1.0), 0.01),
    "memory": (memory, 1e-4),
    "split": (lambda seed, size, _: Split((maps.Affine(matrix(seed, size, 1, 1)),) * 3), 0.02),
}


@pytest.mark.parametrize("kind", LOCATED)
def test_located_values_in_few_digits(kind):
    """Where tokens, weights or biases are large or nothing: the margin holds, and a share of it is needed."""
    make, least = LOCATED[kind]
    shares = []
    for seed, (token, size, bias) in enumerate(
        itertools.product((1e-3, 1.0, 30.0), (0.1, 1.0), (0.0, 1e-3, 3.0))
    ):
        map, measure = make(seed, size, bias), r.Measure(matrix(seed + 20, token, 2, 3))
        exactly = locate.one(map, measure)[0].points
        with coarse(seed):
            try:
                value, margin = locate.one(map, measure)
            except Refusal:  # rounding decides
                continue
            margin = float(margin)
        off = float((value.points - exactly).norm(dim=-1).max())
        assert off <= margin
        shares.append(off / max(margin, 1e-300))
    assert max(shares) > least
