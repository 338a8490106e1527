"""The ball model in arithmetic with few digits (`coarse`): where one part of a state has a size and the rest
is nothing, what is accounted for its rounding is all there is.
"""

import pytest
import torch
from torch.nn.functional import normalize as of_length_one

import regard as r
from regard import maps
from regard._enclosed import computed_lengths
from regard._upper import exact
from regard.proofs.ball_model.ellipsoids import Sum, longest, pushed, widths
from regard.proofs.ball_model.groups import Groups, no_groups
from regard.proofs.ball_model.inputs import BallPart, Inputs
from regard.proofs.ball_model.margin import least
from regard.proofs.ball_model.network import through
from regard.proofs.ball_model.neurons import arguments
from regard.proofs.ball_model.opening import closed, opened
from regard.proofs.ball_model.quadratic import Quadratic, own_square, quartic_norms, reach_of_forms, split
from regard.proofs.ball_model.sides import product_norms
from regard.proofs.ball_model.squares import Squares
from regard.proofs.ball_model.state import State
from tests.ball_model.networks import D, drawn, norm
from tests.coarse import coarse, representable

N, WIDE, MOVING, COLUMNS = 2, 3, 2, 3


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def numbers(g, *shape, size=1.0):
    return representable(size * drawn(g, *shape))


def state_of(g, center=0.0, linear=0.0, curved=None, groups=0.0, shape=0.0):
    """A state of which each part has a size; nothing is exactly zero."""
    forms = None
    if curved is not None:
        half = numbers(g, N, WIDE, MOVING, MOVING, size=curved / 2)
        forms = Quadratic(representable(half + half.mT))
    owners = torch.tensor([-5, -5, -6])
    shared = Groups(numbers(g, N, WIDE, COLUMNS, size=groups), torch.arange(COLUMNS) - 10, owners)
    root = shape * drawn(g, N, WIDE, WIDE)
    return State(
        Inputs((BallPart(MOVING),), (1.0,)),
        numbers(g, N, WIDE, size=center),
        numbers(g, N, WIDE, MOVING, size=linear),
        forms,
        shared if groups else no_groups(N, WIDE),
        representable(root @ root.mT),
    )


def point(g, state):
    """u, what groups share, and a point of each ellipsoid."""
    u, shared = of_length_one(drawn(g, MOVING), dim=0), drawn(g, COLUMNS)
    shared = torch.cat([of_length_one(shared[:2], dim=0), shared[2:].sign()])
    values, vectors = torch.linalg.eigh(state.shape)
    roots = vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)
    away = (roots @ of_length_one(drawn(g, N, WIDE, 1), dim=1)).squeeze(-1) * (1 - 1e-12)
    return u, shared[: len(state.groups.labels)], away


def model(state, u, shared):
    """c + Au + uᵀHu + Bw, with the groups that were there before."""
    found = state.center + state.linear @ u + state.groups.columns[..., : len(shared)] @ shared
    if state.curved is None:
        return found
    return found + torch.einsum("ndkl,k,l->nd", state.curved.forms, u, u)


def used(state, away, known=0):
    """Which share of the ellipsoids moves need; fresh groups are a part of them."""
    fresh = state.groups.of(torch.arange(len(state.groups.labels)) >= known)
    shape = fresh.merged_into(Sum(*away.shape).shape(state.shape)).done()
    size = shape.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert bool(((size > 1e-250) | (away == 0).all(-1)).all()), (
        "something moves in an ellipsoid that is nothing"
    )
    scaled = shape / size.clamp_min(1e-250)[:, None, None]
    solved = torch.linalg.solve(scaled, away.unsqueeze(-1)).squeeze(-1) / size.clamp_min(1e-250).unsqueeze(-1)
    return float((solved * away).sum(-1).clamp_min(0.0).sqrt().max())


def shares_used(map, state, after, g, points=6):
    """The largest share of the ellipsoids after a map that points of the state before it need."""
    found = []
    for _ in range(points):
        u, shared, away = point(g, state)
        value = map(model(state, u, shared) + away)
        found.append(used(after, value - model(after, u, shared), len(shared)))
    return max(found)


def dot(g, biased):
    size = 0.5
    biases = {"b_q": numbers(g, 1, 2), "b_k": numbers(g, 1, 2)} if biased else {}
    return r.Dot(numbers(g, 1, WIDE, 2, size=size), numbers(g, 1, WIDE, 2, size=size), **biases)


def heads(g, biased):
    bias = numbers(g, 1, 3) if biased else None
    lookup = r.Linear(numbers(g, 1, WIDE, 3), bias)
    return maps.Heads(
        r.Attention(dot(g, biased), lookup), numbers(g, 1, 3, WIDE), numbers(g, WIDE) if biased else None
    )


def layer(g, activation, biased):
    first, second = (numbers(g, WIDE) if biased else None for _ in range(2))
    return maps.feed_forward(activation, numbers(g, WIDE, WIDE), numbers(g, WIDE, WIDE), first, second)


def gate(g, biased):
    weights = (numbers(g, WIDE, WIDE) for _ in range(3))
    return maps.Gated(maps.Silu(), *weights, *(numbers(g, WIDE) if biased else None for _ in range(2)))


MAPS = {
    "affine": lambda g, biased: maps.Affine(numbers(g, WIDE, WIDE), numbers(g, WIDE) if biased else None),
    "relu": lambda g, biased: layer(g, maps.Relu(), biased),
    "gelu": lambda g, biased: layer(g, maps.Gelu(), biased),
    "tanh": lambda g, biased: layer(g, maps.Tanh(), biased),
    "gated": gate,
    "attention": heads,
    "norm": lambda g, biased: norm(g, WIDE, eps=1e-5 if biased else 0.0),
    "root mean square": lambda g, biased: norm(g, WIDE, centered=False, eps=1e-5 if biased else 0.0),
    "residual": lambda g, biased: maps.Residual(heads(g, biased)),
    "hidden": lambda g, biased: maps.Residual(layer(g, maps.Relu(), biased)),
}
PARTS = {
    "center": {"center": 1.0},
    "far": {"center": 1e3},
    "near": {"center": 1e-3},
    "linear": {"linear": 1.0},
    "curved": {"linear": 1e-6, "curved": 1.0},
    "groups": {"groups": 1.0},
    "ellipsoid": {"shape": 1.0},
    "all": {"center": 1.0, "linear": 1e-2, "curved": 1e-2, "groups": 1e-2, "shape": 1e-2},
    "little": {"center": 1.0, "linear": 1e-4, "groups": 1e-4, "shape": 1e-5},
}
TIGHT = {
    "affine": 0.1,
    "tokens": 0.1,
    "sum": 0.02,
    "relu": 0.02,
    "hidden": 0.02,
    "gelu": 0.0025,
    "norm": 0.005,
}
"""Which share of all that is accounted for is needed at least once where only the center has a size."""
MAPS |= {
    "tokens": lambda g, biased: r.nonexpansive.MixTokens(numbers(g, N, N)),
    "pool": lambda g, biased: r.nonexpansive.Pool(),
    "sum": lambda g, biased: maps.Added((MAPS["affine"](g, biased), MAPS["affine"](g, biased))),
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", MAPS)
def test_maps_hold_their_values_in_few_digits(kind, biased):
    """Where one part of a state has a size and the others are nothing, and where all have."""
    shares = {}
    for part, sizes in PARTS.items():
        g = generator(1)
        map = MAPS[kind](g, biased)
        state = state_of(g, **sizes)
        if (kind in ("norm", "root mean square") and not sizes.get("center")) or (
            kind in ("attention", "residual") and part == "far"
        ):
            continue  # a norm layer without tokens, and scores of a million
        with coarse(3):
            after = through.one(map, state)
        shares[part] = shares_used(map, state, after, g)
    assert max(shares.values()) <= 1
    assert biased or shares["center"] > TIGHT.get(kind, 0.0)


def above(bound, exactly, most):
    """Bounds of few digits over exact numbers: never below one, and below `most`."""
    ratio = bound / exactly
    assert bool((ratio >= 1).all())
    assert float(ratio.max()) < most


def rank_one(g, *shape, size=1.0):
    """Symmetric matrices of rank one, whose spectral norm is their Frobenius norm."""
    a = numbers(g, *shape, 1, size=size)
    return a @ a.mT


SEEDS = range(10)


@pytest.mark.parametrize("seed", SEEDS)
def test_norms_of_matrices_of_rank_one_in_few_digits(seed):
    """Every bound of a norm is the norm, and rounding."""
    g = generator(seed)
    forms, linear = rank_one(g, N, 4, MOVING), numbers(g, N, WIDE, MOVING)
    q, k = (numbers(g, N, 2, 1) @ numbers(g, N, 1, MOVING) for _ in range(2))
    with coarse(seed):
        own = own_square(linear)
        error, largest = own.error.bound, own.norm.bound
        quartic, reached = quartic_norms(forms).bound, reach_of_forms(forms, own).bound
        many = exact(torch.full((N,), 1e9, dtype=D))
        products = product_norms(q, k, many, many).bound
    exactly = torch.linalg.matrix_norm(forms, 2)
    above(quartic, exactly, 1 + 1e-4)
    above(reached, exactly, 1 + 1e-4)
    above(products, torch.linalg.matrix_norm(torch.einsum("ick,jcl->ijkl", q, k), 2), 3.0)
    above(largest, torch.linalg.matrix_norm(linear, 2).square(), 1 + 1e-3)
    off = torch.linalg.matrix_norm(own.square - linear.mT @ linear, 2)
    assert 1e-2 < float((off / error).max()) <= 1


def held(shape, away, least=0.0):
    """Moves (n, d) lie in ellipsoids, and one of them uses a share of them that is not less."""
    size = away.norm(dim=-1)
    directions = (away / size.clamp_min(1e-300).unsqueeze(-1)).unsqueeze(-1)
    width = widths(shape, directions).bound.squeeze(-1)
    assert bool((size <= width).all())
    assert float((size / width).max()) >= least


def beside(offset, move):
    """What is left of a move where a number of [0, 1] times the offset is taken from it."""
    t = (move * offset).sum(-1) / offset.square().sum(-1).clamp_min(1e-300)
    return move - t.clamp(0.0, 1.0).unsqueeze(-1) * offset


@pytest.mark.parametrize("seed", SEEDS)
def test_forms_that_are_multiples_of_the_square_in_few_digits(seed):
    """X = κM, where M is a multiple of the identity: κ|M|, and nothing else."""
    g = generator(seed)
    scale = float(numbers(g, 1)) * 2.0 ** (seed % 5 - 2)
    linear = scale * torch.eye(WIDE, dtype=D)[:, :MOVING].expand(N, -1, -1)
    kappa = numbers(g, N, 3)
    forms = kappa[..., None, None] * (linear.mT @ linear).unsqueeze(1)
    with coarse(seed):
        own = own_square(linear)
        reached = reach_of_forms(forms, own).bound
        offset, around = split(Quadratic(forms).grams(own), own)
    above(reached, kappa.abs() * scale**2, 1 + 1e-3)
    held(around, beside(offset, kappa * scale**2))
    assert float(longest(around).amax()) < 0.05 * float(offset.norm(dim=-1).max())


def off_by(grams, other):
    """Which shares of their errors Gram matrices need; in the arithmetic that made them."""
    gram = torch.linalg.matrix_norm(grams.gram - other.gram, 2) / grams.gram_error.bound
    inner = (grams.inner - other.inner).norm(dim=-1) / grams.inner_error.bound
    return float(gram.max()), float(inner.max())


@pytest.mark.parametrize("seed", SEEDS)
def test_gram_matrices_of_forms_are_off_by_no_more_than_they_say(seed):
    """⟨H_c, H_d⟩ and ⟨H_c, M⟩ of forms as numbers, and of squares of neurons."""
    g = generator(seed)
    sizes = [10.0 ** float(drawn(g, 1)) for _ in range(3)]
    linear, slopes = numbers(g, N, WIDE, MOVING, size=sizes[0]), numbers(g, N, 4, MOVING, size=sizes[1])
    forms, mixing = rank_one(g, N, 3, MOVING, size=sizes[1]), numbers(g, WIDE, 4, size=sizes[2])
    factors = numbers(g, N, 4)
    own = own_square(linear)
    squares, neurons = Quadratic(forms), Squares(slopes, factors, mixing, 0.0)
    exactly = squares.grams(own), neurons.grams
    with coarse(seed):
        few = Squares(slopes, factors, mixing, 0.0)
        few.__dict__["chosen"] = neurons.chosen
        found = squares.grams(own), few.grams
        shares = [off_by(one, other) for one, other in zip(found, exactly, strict=True)]
        quartic, largest = few.quartic.bound, few.norm.bound
    assert all(1e-3 < share <= 1 for pair in shares for share in pair)
    fourth = (slopes @ of_length_one(drawn(g, MOVING, 400), dim=0)).pow(4).sum(1).amax(-1)
    assert bool((quartic >= fourth).all())
    assert bool((largest >= torch.linalg.matrix_norm(slopes, 2)).all())


@pytest.mark.parametrize("seed", SEEDS)
def test_one_neuron_has_one_square_in_few_digits(seed):
    """Σ (b·u)⁴ = |b|⁴, by pairs and by lengths."""
    g = generator(seed)
    slopes = numbers(g, N, 1, MOVING)
    with coarse(seed):
        found = Squares(slopes, torch.ones(N, 1, dtype=D), torch.ones(1, 1, dtype=D), 0.0).quartic.bound
    above(found, slopes.squeeze(1).norm(dim=-1).pow(4), 1 + 1e-3)


SETS = {
    "segment": lambda found, v, square: found.segments(v),
    "gram": lambda found, v, square: found.gram(v, exact(torch.ones(N, dtype=D))),
    "shape": lambda found, v, square: found.shape(square),
    "times": lambda found, v, square: found.shape(square, exact(torch.ones(N, dtype=D))),
    "ball": lambda found, v, square: found.ball(computed_lengths(v.squeeze(-1))),
    "group": lambda found, v, square: Groups(v, torch.tensor([1]), torch.tensor([1])).merged_into(found),
    "other": lambda found, v, square: found.add(*Sum(N, WIDE).segments(v).parts),
}


@pytest.mark.parametrize("seed", SEEDS[:5])
@pytest.mark.parametrize("kind", SETS)
def test_a_sum_of_one_set_is_that_set_in_few_digits(kind, seed):
    """v itself, or vvᵀ to all digits: what is proved along it is its length, and rounding."""
    g = generator(seed)
    v = numbers(g, N, WIDE, 1, size=10.0 ** (4 * seed - 8))
    square = v @ v.mT
    with coarse(seed):
        shape = SETS[kind](Sum(N, WIDE), v, square).done()
        far, along_it = longest(shape).bound, widths(shape, v).bound.squeeze(-1)
    length = v.squeeze(-1).norm(dim=-1)
    held(shape, v.squeeze(-1))
    above(far, length, 1.01)
    above(along_it, length.square(), 1.01)


@pytest.mark.parametrize("seed", SEEDS)
def test_ellipsoids_that_are_pushed_opened_and_closed_in_few_digits(seed):
    g = generator(seed)
    v, matrix = numbers(g, N, WIDE, 1), numbers(g, N, WIDE, WIDE)
    shape, a = v @ v.mT, numbers(g, 1, WIDE, 8)
    exactly = (a.mT @ v).abs().squeeze(-1)
    with coarse(seed):
        moved, again = pushed(matrix, shape), Sum(N, WIDE).shape(shape).done()
        groups, left = opened(no_groups(N, WIDE), shape, 100)
        few, little = opened(no_groups(N, WIDE), shape, 1)
        none, rest = closed(groups, left, 1)
        pairs = ((groups, left), (few, little), (none, rest))
        reaches = [(found.reach(a) + widths(q, a)).bound for found, q in pairs]
    held(moved, (matrix @ v).squeeze(-1), 0.9)
    held(again, v.squeeze(-1), 0.9)
    assert all(bool((found >= exactly).all()) for found in reaches)
    assert float((reaches[0] / exactly).min()) < 1.1


@pytest.mark.parametrize("part", PARTS)
def test_arguments_of_neurons_in_few_digits(part):
    """Their values, and how far they move, for each part of a state."""
    g = generator(2)
    state, w = state_of(g, **PARTS[part]), numbers(g, WIDE, 4)
    b = numbers(g, 4) if part in ("groups", "all") else torch.zeros(4, dtype=D)
    shares = []
    for seed in range(4):
        with coarse(seed):
            found = arguments(state, w, b)
            error, rest, first = found.error.bound, found.rest.bound, found.first.bound
        u, shared, away = point(g, state)
        exactly = (model(state, u, shared) + away) @ w + b
        assert bool(((found.value - state.center @ w - b).abs() <= error).all())
        off = (exactly - found.value - found.along @ u).abs()
        assert bool((off <= rest).all())
        assert bool((found.along.norm(dim=-1) <= first).all())
        shares.append(float((off / rest.clamp_min(1e-300)).max()))
    assert max(shares) > 0.05


def alone(state):
    """The first token."""
    return State(
        state.inputs,
        state.center[:1],
        state.linear[:1],
        None if state.curved is None else Quadratic(state.curved.forms[:1]),
        Groups(state.groups.columns[:1], state.groups.labels, state.groups.owner),
        state.shape[:1],
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("part", ["center", "linear", "curved", "groups", "ellipsoid"])
def test_least_values_in_few_digits(part, seed):
    """Of a·x + b over one token: exactly what it is, and rounding."""
    g = generator(seed)
    state = alone(state_of(g, **PARTS[part]))
    a, b = numbers(g, WIDE, 3), numbers(g, 3, size=float(seed % 2))
    with coarse(seed):
        found = least(state, a, b)
    exactly = state.center[0] @ a + b - (state.linear[0].mT @ a).norm(dim=0)
    exactly = exactly - state.groups.lengths(a.mT @ state.groups.columns[0]).value
    exactly = exactly - ((state.shape[0] @ a) * a).sum(0).sqrt()
    if state.curved is not None:
        exactly = exactly + torch.linalg.eigvalsh(state.curved.along(a.unsqueeze(0))[0])[:, 0].clamp_max(0.0)
    assert bool((found <= exactly + (2e-6 if part == "curved" else 0.0)).all())
    assert part == "curved" or bool((found >= exactly - 1e-3 * (exactly.abs() + 1)).all())
