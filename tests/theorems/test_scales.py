"""Powers of two change no digit: every bound of every theorem scales with the map and with its domain.

The unit of rounding is made large, and nothing is rounded: what is accounted for it is then a part of every
number, and a size that is left out of it, or is there once too often, is seen.
"""

import pytest
import torch

import regard as r
from regard import maps
from regard.domains import Ball, Neighborhood
from regard.nonexpansive import Center, IntoBall, MemoryStep, MixTokens, Pool, Reflected, Split
from regard.proofs.locating import locate
from regard.proofs.theorem import Refusal
from tests.coarse import large_unit

D = torch.float64
WIDE, UP = 3, 8.0


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def heads(size, out=1.0, by=1.0, turn=lambda dot: dot, **kinds):
    """Scores keep their size where tokens and queries grow and weights and keys shrink."""

    def made(seed, scale, *shape):
        return 0.5 * scale * drawn(seed, 2, *shape)

    queries, keys = made(1, by / size, WIDE, 2), made(2, 1 / (by * size), WIDE, 2)
    dot = r.Dot(queries, keys, b_q=made(3, by, 2), b_k=made(4, 1 / by, 2))
    lookup = r.Linear(made(5, 1 / size, WIDE, 3), made(6, 1.0, 3))
    return maps.Heads(r.Attention(turn(dot), lookup, **kinds), made(7, out, 3, WIDE), out * drawn(8, WIDE))


def alone(size, out, potential, **kinds):
    """One head, whose values have the size of the output."""
    return r.Attention(potential, r.Linear(out / size * drawn(5, WIDE, WIDE), out * drawn(6, WIDE)), **kinds)


def affine(size, out):
    return maps.Affine(out / size * drawn(1, WIDE, WIDE), out * drawn(2, WIDE))


def norm(size, out, centered=True):
    return maps.Normalize(0.1 * size**2, out * drawn(3, WIDE), out * drawn(4, WIDE), centered=centered)


def neurons(size, out, activation=maps.Gelu()):
    first, second = drawn(5, WIDE, 4) / size, out * drawn(6, 4, WIDE)
    return maps.feed_forward(activation, first, second, drawn(7, 4), out * drawn(8, WIDE))


def gated(size, out):
    weights = drawn(5, WIDE, 4) / size, drawn(6, WIDE, 4) / size, out * drawn(7, 4, WIDE)
    return maps.Gated(maps.Silu(), *weights, drawn(8, 4), drawn(9, 4))


MAPS = {
    "affine": affine,
    "norm": norm,
    "root mean square": lambda size, out: norm(size, out, centered=False),
    "neurons": neurons,
    "relu": lambda size, out: neurons(size, out, maps.Relu()),
    "gated": gated,
    "heads": heads,
    "other heads": lambda size, out: heads(size, out, by=size * out),
    "rotary": lambda size, out: heads(size, out, turn=r.Rotary),
    "alibi": lambda size, out: heads(size, out, turn=lambda dot: dot + r.Alibi(0.3)),
    "sigmoid": lambda size, out: heads(size, out, normalizer=r.Sigmoid()),
    "sparse": lambda size, out: heads(size, out, normalizer=r.Entmax(1.5)),
    "sinkhorn": lambda size, out: heads(size, out, normalizer=r.Sinkhorn(0.0, 2)),
    "sink": lambda size, out: heads(size, out, support=r.Causal()),
    "gaussian": lambda size, out: alone(size, out, r.Gaussian(bandwidth=size)),
    "laplace": lambda size, out: alone(size, out, r.Laplace(bandwidth=size)),
    "bilinear": lambda size, out: alone(size, out, r.Bilinear(drawn(1, WIDE, WIDE) / size**2)),
    "block": lambda size, out: maps.Compose((norm(size, 1.0), heads(1.0), affine(1.0, out))),
    "residual": lambda size, out: maps.Compose((maps.Residual(heads(size, size)), affine(size, out))),
    "sum": lambda size, out: maps.Added((affine(size, out), heads(size, out))),
    "into a ball": lambda size, out: maps.Compose((IntoBall(size), affine(size, out))),
    "memory": lambda size, out: maps.Compose(
        (MemoryStep(drawn(1, WIDE, 4) * size, drawn(2, 4) * size**2, 0.5 / size**2), affine(size, out))
    ),
    "tokens": lambda size, out: maps.Compose((MixTokens(drawn(1, 4, 4)), Center(), affine(size, out))),
    "pool": lambda size, out: maps.Compose((affine(size, out), Pool())),
    "split": lambda size, out: Split(tuple(maps.Affine(out / size * drawn(k, 1, 1)) for k in range(3))),
    "reflected": lambda size, out: maps.Compose(
        (Reflected(r.Attention(r.Gaussian(bandwidth=size))), affine(size, out))
    ),
}
SLOW = ("block", "memory", "residual", "sum", "other heads", "reflected")
POINTS = drawn(20, 4, WIDE)
DOMAINS = {
    "ball": lambda size: Ball(1.5 * size),
    "near": lambda size: Neighborhood(size * POINTS, 0.05 * size),
    "tokens": lambda size: Neighborhood(size * POINTS, 0.05 * size, r.TokenMax()),
    "one": lambda size: r.one_token(size * POINTS, 1, 0.05 * size),
}
QUESTIONS = [
    ("ball", r.TokenMax(), r.certify),
    ("ball", r.Wasserstein(2), r.certify),
    ("near", r.Frobenius(), r.certify),
    ("near", r.Frobenius(), r.deviation),
    ("tokens", r.TokenMax(), r.certify),
    ("one", r.TokenSum(), r.deviation),
]


def rungs(question, map, size):
    """Every bound by the name of its theorem."""
    domain, norm_of, verb = question
    found = verb(map, DOMAINS[domain](size), norm_of)
    return {one.theorem.split(":")[0]: float(one.value) for one in (found, *found.others)}


@pytest.mark.parametrize("kind", MAPS)
def test_bounds_scale_with_maps_and_domains(kind):
    make = MAPS[kind]
    for question in QUESTIONS[:3] if kind in SLOW else QUESTIONS:
        with large_unit():
            plain = rungs(question, make(1.0, 1.0), 1.0)
            for size, out in ((UP, 1.0), (1.0, UP)):
                grown = out if question[2] is r.deviation else out / size
                found = rungs(question, make(size, out), size)
                assert found == {
                    name: pytest.approx(value * grown, rel=1e-9) for name, value in plain.items()
                }


@pytest.mark.parametrize("kind", MAPS)
def test_margins_of_located_values_scale(kind):
    make = MAPS[kind]

    def margin(size, out):
        return float(locate.one(make(size, out), r.Measure(size * POINTS))[1])

    with large_unit():
        try:
            plain = margin(1.0, 1.0)
        except Refusal:
            return
        assert margin(UP, 1.0) == pytest.approx(plain, rel=1e-9)
        assert margin(1.0, UP) == pytest.approx(UP * plain, rel=1e-9)


def projected(size, out):
    weights = drawn(1, WIDE, 2) / size, drawn(2, WIDE, 2) / size
    return alone(size, out, r.Dot(*weights, b_q=drawn(3, 2), b_k=drawn(4, 2)))


@pytest.mark.parametrize("make", [projected, MAPS["gaussian"], MAPS["bilinear"]])
def test_what_atoms_get_wrong_scales(make):
    """On a ball, and query by query."""

    def found(size, out):
        compressed = r.compress(size * drawn(30, 12, WIDE), make(size, out), size=4, domain=Ball(1.5 * size))
        return compressed.certificate.value, compressed.bounds(size * drawn(31, 5, WIDE))

    with large_unit():
        whole, rows = found(1.0, 1.0)
        for size, out in ((UP, 1.0), (1.0, UP)):
            other, each = found(size, out)
            assert other == pytest.approx(out * whole, rel=1e-9)
            assert each == pytest.approx(out * rows, rel=1e-9)
