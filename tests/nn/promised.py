"""Every layer with a promise, tiny."""

from regard.maps import Affine
from regard.nn import (
    Averaging,
    CosineScores,
    DistanceScores,
    Fixed,
    GaussianScores,
    Guaranteed,
    Memory,
    NormBounded,
    Offset,
    Orthogonal,
    OrthogonalMixing,
    Promise,
    Reflective,
)
from regard.nonexpansive import Center, Flatten, GroupSort, IntoBall, Pool
from regard.norms import Frobenius

TOKENS, WIDTH = 3, 4

LAYERS = {
    "orthogonal": lambda: Orthogonal(WIDTH, WIDTH),
    "tall": lambda: Orthogonal(WIDTH, 7, bias=False),
    "wide": lambda: Orthogonal(WIDTH, 2),
    "bounded": lambda: NormBounded(WIDTH, 3, 0.7),
    "mixing": lambda: OrthogonalMixing(TOKENS),
    "offset": lambda: Offset(TOKENS, WIDTH),
    "sort": lambda: Fixed(GroupSort()),
    "ball": lambda: Fixed(IntoBall(0.5)),
    "center": lambda: Fixed(Center()),
    "memory": lambda: Memory(WIDTH, 5),
    "memory of sequences": lambda: Memory(WIDTH, 5, TOKENS),
    "reflective": lambda: Reflective(WIDTH, 2),
    "shorter": lambda: Reflective(WIDTH, 1, step=1.5),
    "dot": lambda: Averaging(WIDTH, 2),
    "gaussian": lambda: Averaging(WIDTH, 2, GaussianScores()),
    "cosine": lambda: Averaging(WIDTH, 2, CosineScores()),
    "distance": lambda: Averaging(WIDTH, 2, DistanceScores(), tokens=TOKENS),
    "stack": lambda: classifier(),
}


def classifier() -> Guaranteed:
    """Some of all layers, to two logits."""
    stack = [
        Orthogonal(WIDTH, WIDTH),
        Offset(TOKENS, WIDTH),
        Reflective(WIDTH, 2),
        Memory(WIDTH, 4),
        GroupSort(),
        OrthogonalMixing(TOKENS),
        Averaging(WIDTH, 2),
        NormBounded(WIDTH, WIDTH),
        Memory(WIDTH, 4, TOKENS),
        Pool(),
        Orthogonal(WIDTH, 2),
    ]
    return Guaranteed(stack, Promise(Frobenius(), 1.0), tokens=TOKENS)


def doubled() -> Guaranteed:
    """A stack whose constant is two, and which says so."""
    from torch import eye, float64

    twice = Fixed(Affine(2 * eye(WIDTH, dtype=float64)), Promise(Frobenius(), 2.0))
    return Guaranteed([Orthogonal(WIDTH, WIDTH), twice, Flatten()], Promise(Frobenius(), 2.0), tokens=TOKENS)
