"""What cannot run is not certified: widths are composed first, and a mismatch is an ArgumentError."""

import math

import pytest
import torch

import regard as r
from regard.domains import Ball, Neighborhood, Whole
from regard.errors import ArgumentError
from regard.maps import (
    Added,
    Affine,
    Compose,
    FromQueries,
    Gated,
    Gelu,
    Heads,
    Joint,
    Normalize,
    Pointwise,
    Relu,
    Residual,
    Silu,
    ToContext,
    feed_forward,
    pre_norm,
)  # fmt: skip
from regard.norms import TokenMax, Wasserstein
from regard.proofs import certify, deviation, falsify, image
from regard.proofs.falsification import falsify_deviation
from regard.proofs.shapes import Widths, widths
from tests import nouns

D = torch.float64


def t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def head(takes: int, gives: int) -> r.Attention:
    return r.Attention(r.Dot(t(takes, 2), t(takes, 2, seed=1)), r.Linear(t(takes, gives)))


# Each cannot run on tokens of width 4, or on tokens of any width.
MISFITS = {
    "residual": (Residual(Affine(t(4, 3))), "map: takes tokens of width 4 to width 3; a residual connection"),
    "residual of attention": (Residual(head(4, 3)), "map: takes tokens of width 4 to width 3"),
    "residual inside": (
        Compose((Residual(Affine(t(4, 3))), Affine(t(3, 4)))),
        "maps[0].map: takes tokens of width 4 to width 3",
    ),
    "compose": (
        Compose((Affine(t(4, 3)), Affine(t(4, 3)))),
        "maps[1].w: takes width 4 and the tokens have 3",
    ),
    "compose past keepers": (
        Compose((Affine(t(4, 3)), Pointwise(Relu()), head(4, 4))),
        "maps[2].potential: takes width 4",
    ),
    "affine": (Affine(t(3, 3)), "w: takes width 3 and the tokens have 4"),
    "added": (Added((Affine(t(4, 3)), Affine(t(4, 2)))), "maps: give values of widths 2 and 3; a sum needs"),
    "added takes": (
        Added((Affine(t(4, 3)), Affine(t(2, 3)))),
        "maps[1].w: takes width 2 and the tokens have 4",
    ),
    "added to residual": (
        Added((Residual(Pointwise(Relu())), Affine(t(4, 2)))),
        "maps: give values of widths 2 and 4",
    ),
    "norm weight": (Normalize(weight=torch.ones(3, dtype=D)), "weight: takes width 3 and the tokens have 4"),
    "norm bias": (Normalize(bias=torch.ones(3, dtype=D)), "bias: takes width 3 and the tokens have 4"),
    "gate": (Gated(Silu(), t(4, 5), t(3, 5), t(5, 4)), "w_gate: takes width 3 and the tokens have 4"),
    "projections": (r.Attention(r.Dot(t(3, 2), t(3, 2))), "potential: takes width 3 and the tokens have 4"),
    "query and key": (r.Attention(r.Dot(t(4, 2), t(3, 2))), "potential: takes width 3 and the tokens have 4"),
    "one projection": (r.Attention(r.Dot(t(4, 3))), "potential: takes width 3 and the tokens have 4"),
    "bilinear": (r.Attention(r.Bilinear(t(3, 3))), "potential: takes width 3 and the tokens have 4"),
    "additive": (r.Attention(r.Additive(None, None, t(3))), "potential: takes width 3 and the tokens have 4"),
    "a term": (
        r.Attention(r.Dot() + 2.0 * r.Gaussian(t(3, 2), t(3, 2), bandwidth=1.0)),
        "potential: takes width 3",
    ),
    "terms": (
        r.Attention(r.Bilinear(t(4, 4)) + r.Bilinear(t(3, 3))),
        "potential: takes width 3 and another term 4",
    ),
    "rotary": (r.Attention(r.Rotary(r.Dot(t(4, 3), t(4, 3)))), "potential: projects to an odd width 3"),
    "values": (r.Attention(r.Dot(), r.Linear(t(3, 3))), "w_v: takes width 3 and the keys have 4"),
    "factored": (r.Attention(r.Dot(), r.Factored(t(3, 2), t(2, 3))), "w: takes width 3 and the keys have 4"),
    "mixers": (Heads(head(4, 3), t(1, 2, 4)), "w_o: takes width 2 and the heads give 3"),
    "heads": (
        Heads(r.Attention(r.Dot(t(3, 4, 2), t(3, 4, 2)), r.Linear(t(3, 4, 2))), t(2, 2, 4)),
        "w_o: has 2 heads and the attention 3",
    ),
    "context": (ToContext(r.Attention(r.Dot()), t(5, 3)), "potential: takes width 4 and the keys have 3"),
    "context values": (
        ToContext(r.Attention(r.Dot(t(4, 2), t(3, 2)), r.Linear(t(4, 4))), t(5, 3)),
        "w_v: takes width 4 and the keys have 3",
    ),
    "queries": (
        FromQueries(r.Attention(r.Dot(t(4, 2), t(4, 2))), t(5, 3)),
        "potential: takes width 4 and the queries have 3",
    ),
    "joint": (
        Joint(r.Attention(r.Dot(t(3, 2), t(3, 2))), 1),
        "potential: takes width 3 and the tokens have 4",
    ),
}
X = t(3, 4)


def fits_by_running(map, x) -> bool:
    try:
        map(x)
    except (ArgumentError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("name", MISFITS)
def test_a_misfit_is_an_argument_error(name):
    map, message = MISFITS[name]
    assert not fits_by_running(map, X)
    ball, near = Ball(1.0, X[0], 3), Neighborhood(X, 0.1, TokenMax())
    for ask in (
        lambda: certify(map, ball, TokenMax()),
        lambda: certify(map, near, TokenMax()),
        lambda: certify(map, ball, Wasserstein(2.0)),
        lambda: deviation(map, near, TokenMax()),
        lambda: image(map, ball),
        lambda: image(map, near),
        lambda: falsify(map, ball, TokenMax(), restarts=1),
        lambda: falsify_deviation(map, near, TokenMax(), restarts=1),
    ):
        with pytest.raises(ArgumentError) as caught:
            ask()
        assert message in str(caught.value), str(caught.value)
        assert ";" in str(caught.value)


@pytest.mark.parametrize("name", ["residual", "compose", "added", "mixers"])
def test_some_need_no_width_of_the_domain(name):
    with pytest.raises(ArgumentError):
        certify(MISFITS[name][0], Whole(), TokenMax())


def test_modules_are_declared_first():
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)).double()
    with pytest.raises(ArgumentError, match=r"maps\[1\].w: takes width 4 and the tokens have 3"):
        certify(module, Whole(), TokenMax())


FITS = {
    **{name: r.Attention(potential) for name, potential in nouns.POTENTIALS.items()},
    **{name: r.Attention(r.Dot(), lookup) for name, lookup in nouns.LOOKUPS.items()},
    "block": pre_norm(
        head(4, 4), feed_forward(Gelu(), t(4, 7), t(7, 4)), Normalize(weight=t(4)), Normalize()
    ),
    "widths change": Compose((Pointwise(Relu()), Affine(t(4, 3)), head(3, 2), Residual(Affine(t(2, 2))))),
    "heads": Heads(r.Attention(r.Dot(t(2, 4, 3), t(2, 4, 3)), r.Linear(t(2, 4, 5))), t(2, 5, 6)),
    "one mixer": Heads(r.Attention(r.Dot(t(2, 4, 3), t(2, 4, 3)), r.Linear(t(2, 4, 5))), t(1, 5, 6)),
    "added": Added((Residual(Pointwise(Relu())), Affine(t(4, 4)), head(4, 4))),
    "context": ToContext(r.Attention(r.Dot(t(4, 2), t(3, 2)), r.Linear(t(3, 5))), t(5, 3)),
    "queries": FromQueries(r.Attention(r.Dot(t(3, 2), t(4, 2)), r.Linear(t(4, 5))), t(5, 3)),
    "joint": Joint(r.Attention(r.Dot()), 2),
    "gated": Gated(Silu(), t(4, 5), t(4, 5), t(5, 3)),
    "lipschitz": r.lipschitz_norm.LipschitzNorm(t(4, 2), t(4, 2), t(4, 3)),
}


@pytest.mark.parametrize("name", FITS)
def test_widths_are_those_of_a_run(name):
    """On tokens of width 4 every width that is named is the true one; without it nothing false is said."""
    map = FITS[name]
    value = map(t(6, 4))
    found = widths.one(map, 4)
    assert found.takes == 4
    assert found.gives in (None, value.shape[-1])
    guessed = widths.one(map, None)
    assert guessed.takes in (None, 4)
    assert guessed.gives in (None, value.shape[-1])


def test_maps_that_keep_a_width_pass_it_on():
    assert widths.one(Compose((Pointwise(Relu()), Normalize(), Affine(t(4, 3)))), None) == Widths(4, 3)
    assert widths.one(Compose((Pointwise(Relu()), Residual(Pointwise(Relu())))), None) == Widths(
        None, None, keeps=True
    )
    assert math.isfinite(
        falsify(
            Compose((Pointwise(Relu()), Affine(t(4, 3)))), Ball(1.0, tokens=2), TokenMax(), restarts=1
        ).value
    )


def test_rotary_scores_turn_pairs_of_coordinates():
    """Every even width, and no odd one; a rotation of its own number of pairs fits from there on."""
    for size in (2, 4, 6):
        assert math.isfinite(
            certify(r.Attention(r.Rotary(r.Dot(t(3, size), t(3, size)))), Ball(1.0), TokenMax()).value
        )
    for size in (1, 3, 5):
        with pytest.raises(ArgumentError):
            certify(r.Attention(r.Rotary(r.Dot(t(3, size), t(3, size)))), Ball(1.0), TokenMax())


def test_parts_of_a_sum_have_one_width():
    square, other = Affine(t(3, 3)), Affine(t(3, 2))
    assert math.isfinite(certify(Added((square, square)), Ball(1.0), TokenMax()).value)
    with pytest.raises(ArgumentError):
        certify(Added((square, other)), Ball(1.0), TokenMax())
    with pytest.raises(ArgumentError):
        certify(Added((square, Affine(t(4, 3)))), Ball(1.0), TokenMax())
