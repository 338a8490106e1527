"""Slopes of scores on a ball: each of the five numbers against a grid of pairs of tokens on a line,
from both sides.
"""

import math

import pytest
import torch

import regard as r
from regard._enclosed import length
from regard._upper import exact, relative_error
from regard.potentials.base import Scaled, Sum
from regard.proofs.scores import FACTOR, BallFacts, bilinear, is_tied, same, slopes
from tests.theorems.exact import D, generator, normal

CENTER, RADIUS = 0.75, 1.25


def one(number):
    return torch.tensor([[number]], dtype=D)


def ball(center, radius):
    return BallFacts(center, exact(radius), length(center) + exact(radius))


def gamma(roundings):
    return float(relative_error(roundings))


def on_a_line(potential, center=CENTER, radius=RADIUS, steps=500):
    """alpha, nu, kappa, reach, osc and nu of the negative, from all pairs of a grid on [c - R, c + R]."""
    tokens = center + radius * torch.linspace(-1, 1, steps + 1, dtype=D).unsqueeze(-1)
    marks, step = torch.zeros(1, dtype=torch.long), 1e-5

    def scores(x, y):
        return potential.scores(x, y, marks.expand(len(x)), marks.expand(len(y)))

    v = (scores(tokens, tokens + step) - scores(tokens, tokens - step)) / (2 * step)
    z = (scores(tokens + step, tokens) - scores(tokens - step, tokens)) / (2 * step)
    s = scores(tokens, tokens)
    spreads = [float((part.amax(-1) - part.amin(-1)).max()) for part in (v, z, s)]
    return (
        float(v.abs().max()),
        spreads[0] / 2,
        spreads[1] / 2,
        float(z.abs().max()),
        spreads[2],
        spreads[0] / 2,
    )


W_Q, W_K, B_Q, B_K = one(1.5), one(-0.5), torch.tensor([0.25], dtype=D), torch.tensor([-1.0], dtype=D)
NAMES = ("alpha", "nu", "kappa", "reach", "osc", "reversed_nu")
CASES = {
    "dot": (r.Dot(W_Q, W_K, scale=0.7, b_q=B_Q, b_k=B_K), {}),
    "dot with the usual scale": (r.Dot(), {}),
    "bilinear": (r.Bilinear(one(-2.0)), {}),
    # the covariance of x and -x is not positive, so plain Gaussian scores need no nu
    "gaussian": (r.Gaussian(bandwidth=0.8), {"nu": 0.0}),
    "gaussian, tied": (r.Gaussian(w_q=one(1.5), w_k=one(1.5), bandwidth=0.8), {}),
    "gaussian, one projection": (r.Gaussian(w_k=one(1.5), bandwidth=0.8), {"osc": 1.1}),
    "gaussian, biases": (
        r.Gaussian(w_q=one(1.5), w_k=one(0.5), bandwidth=2.0, b_q=B_Q, b_k=B_K),
        {"osc": 1.162},
    ),
    "laplace": (r.Laplace(bandwidth=0.8), {}),
    "laplace, tied": (r.Laplace(bandwidth=0.8, w_q=one(1.5), w_k=one(1.5)), {}),
    "laplace, biases": (
        r.Laplace(bandwidth=0.8, w_q=one(1.5), w_k=one(0.25), b_q=B_Q, b_k=B_K),
        {"nu": 2.0, "kappa": 2.0, "reversed_nu": 2.0},
    ),
    "student": (r.StudentT(nu=3.0, bandwidth=0.5), {}),
    "student, before its steepest": (
        r.StudentT(nu=3.0, bandwidth=4.0),
        {"nu": 1.828, "kappa": 1.828, "reversed_nu": 1.828},
    ),
    "student, projected": (
        r.StudentT(nu=2.0, bandwidth=0.5, w_q=one(1.5), w_k=one(0.5)),
        {"nu": 1.008, "kappa": 1.008, "reversed_nu": 1.008, "osc": 1.11},
    ),
    # the Jacobian of k/|k| is not negative, so v never turns around: a ball half as wide would hold it
    "cosine": (
        r.Cosine(scale=3.0, eps=1e-2, w_q=one(2.0), w_k=one(3.0)),
        {"nu": 2.0, "reversed_nu": 2.0},
    ),
    "additive": (r.Additive(one(8.0), one(-6.0), torch.tensor([1.25], dtype=D)), {}),
    "capped": (r.SoftCap(r.Dot(W_Q, one(4.0), scale=3.0), 2.0), {"kappa": 1.6}),
    "capped distance": (
        r.SoftCap(r.Gaussian(bandwidth=0.8), 1e3),
        {"nu": 2.0, "kappa": 2.0, "reversed_nu": 2.0},
    ),
    "sum": (Sum((r.Dot(scale=0.7), r.Bilinear(one(0.5)), r.Alibi(0.3))), {}),
    "scaled": (Scaled(r.Dot(W_Q, W_K, scale=0.7, b_q=B_Q, b_k=B_K), -2.5), {}),
    "scaled sum": (Scaled(Sum((r.Dot(scale=0.7), r.Gaussian(bandwidth=0.8))), 0.5), {"nu": 0.0}),
    "negative sum": (
        Scaled(Sum((r.Bilinear(one(0.7)), r.Gaussian(bandwidth=0.8))), -0.5),
        {"reversed_nu": 0.0, "alpha": 3, "osc": 3},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_slopes_are_attained_on_a_line(name):
    """alpha, nu, kappa, reach and osc are above what the grid shows,
    and no farther than the factor that is stated here.
    """
    potential, factors = CASES[name]
    found = slopes.one(potential, ball(torch.tensor([CENTER], dtype=D), RADIUS))
    ratios = {}
    for fact, seen in zip(NAMES, on_a_line(potential), strict=True):
        bound = float(getattr(found, fact))
        stated = factors.get(fact, 1.0)
        ratios[fact] = bound / seen if seen > 1e-9 else bound
        if stated == 0.0 or seen < 1e-9:
            assert bound == 0.0, fact
        else:
            assert seen * (1 - 1e-7) <= bound <= seen * stated * (1 + 2e-3), (fact, ratios[fact])


def test_slopes_of_no_multiple_are_zero():
    found = slopes.one(Scaled(r.Laplace(bandwidth=0.8), 0.0), ball(torch.tensor([CENTER], dtype=D), RADIUS))
    assert [float(getattr(found, fact)) for fact in NAMES] == [0.0] * 6


@pytest.mark.parametrize("factor", [None, -2.0])
def test_slopes_of_rotary_scores_are_attained(factor):
    """A half turn between two positions: the slope of a pair points the other way,
    and the score has the other sign.
    """
    center, radius, eye = torch.tensor([0.6, 0.8], dtype=D), 1.5, torch.eye(2, dtype=D)
    bias = torch.tensor([0.3, 0.4], dtype=D)
    dot = r.Dot(2 * eye, 3 * eye, scale=0.7, b_q=bias, b_k=-bias)
    potential = r.Rotary(
        dot if factor is None else Scaled(dot, factor), frequencies=torch.tensor([math.pi], dtype=D)
    )
    found = slopes.one(potential, ball(center, radius))
    far = (1 + radius) * center  # the longest token, along both biases
    x, y = far.unsqueeze(0).requires_grad_(), torch.stack([-far, -far]).requires_grad_()
    scores = potential.scores(x, y, torch.tensor([0]), torch.tensor([0, 1]))
    v = torch.stack([torch.autograd.grad(scores[0, j], y, retain_graph=True)[0][j] for j in range(2)])
    z = torch.stack([torch.autograd.grad(scores[0, j], x, retain_graph=True)[0][0] for j in range(2)])
    assert float(found.alpha) == pytest.approx(float(v[0].norm()), rel=1e-9, abs=0)
    assert (
        float(found.nu)
        == float(found.reversed_nu)
        == pytest.approx(float((v[0] - v[1]).norm()) / 2, rel=1e-9, abs=0)
    )
    assert float(found.reach) == pytest.approx(float(z[0].norm()), rel=1e-9, abs=0)
    assert float(found.kappa) == pytest.approx(float((z[0] - z[1]).norm()) / 2, rel=1e-9, abs=0)
    assert float(found.osc) == pytest.approx(
        abs(float((scores[0, 0] - scores[0, 1]).detach())), rel=1e-9, abs=0
    )


def test_a_projection_that_is_missing_is_the_identity():
    """Rotary scores of tokens as they are, with the scale 1/√d of their width."""
    potential = r.Rotary(r.Dot(), frequencies=torch.tensor([math.pi, math.pi], dtype=D))
    found = slopes.one(potential, ball(torch.zeros(4, dtype=D), 1.5))
    assert [float(found.alpha), float(found.reach), float(found.osc)] == pytest.approx(
        [0.75, 0.75, 2.25], rel=1e-9, abs=0
    )


@pytest.mark.parametrize("seed", range(4))
def test_forms_are_the_scores(seed):
    """xᵀAy + β·y + γ·x, up to constants, within the errors that are stated;
    and the errors are those of the proof.
    """
    g = generator(seed)
    w_q, w_k, b_q, b_k = normal(g, 4, 3), normal(g, 4, 3), normal(g, 3), normal(g, 3)
    dot = r.Dot(w_q, w_k, scale=0.7, b_q=b_q, b_k=b_k)
    form = bilinear.one(dot, 4)
    unit = gamma(3 + 4 + FACTOR) * 0.7
    sizes = [float(part.norm()) for part in (w_q, w_k, b_q, b_k)]
    assert float(form.error) == pytest.approx(unit * sizes[0] * sizes[1], rel=1e-9, abs=0)
    assert float(form.error_beta) == pytest.approx(unit * sizes[1] * sizes[2], rel=1e-9, abs=0)
    assert float(form.error_gamma) == pytest.approx(unit * sizes[0] * sizes[3], rel=1e-9, abs=0)
    matrix = 0.7 * w_q @ w_k.mT
    assert float(form.norm) == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-9, abs=0)
    other = r.Bilinear(normal(g, 4, 4))
    both = bilinear.one(Scaled(Sum((dot, other, r.Alibi(1.0))), -3.0), 4)
    x, y = normal(g, 5, 4), normal(g, 6, 4)
    marks = torch.zeros(5, dtype=torch.long), torch.zeros(6, dtype=torch.long)
    scores = -3 * (dot.scores(x, y, *marks) + other.scores(x, y, *marks))
    ours = x @ both.a @ y.mT + both.beta @ y.mT + (x @ both.gamma).unsqueeze(-1)
    assert float((scores - ours - (scores - ours)[0, 0]).abs().max()) < 1e-12
    whole = float((matrix + other.a).norm())
    added = gamma(4) * 3 * (float(matrix.norm()) + float(other.a.norm()))
    again = gamma(4) * 3 * whole  # the sum with the positions, which are zero
    scaled = gamma(4 + FACTOR) * 3 * whole
    stated = 3 * float(form.error) + added + again + scaled
    assert float(both.error) == pytest.approx(stated, rel=1e-6, abs=0)
    for error, part, own in (
        (both.error_beta, both.beta, form.error_beta),
        (both.error_gamma, both.gamma, form.error_gamma),
    ):
        size = float(part.norm())  # of three times the sum, whose other terms are zero
        stated = 3 * float(own) + (2 * gamma(4) + gamma(4 + FACTOR)) * size
        assert float(error) == pytest.approx(stated, rel=1e-6, abs=0)


def test_the_slope_at_a_center_is_that_of_the_form():
    """shift = |Aᵀc + β| and pull = |Ac + γ|, to the rounding that is counted."""
    g = generator(9)
    form = bilinear.one(r.Dot(normal(g, 4, 3), normal(g, 4, 3), b_q=normal(g, 3), b_k=normal(g, 3)), 4)
    center = normal(g, 4)
    a, long = float(form.a.norm()), float(center.norm())
    for found, true, part, error in (
        (form.shift(center), center @ form.a + form.beta, form.beta, form.error_beta),
        (form.pull(center), form.a @ center + form.gamma, form.gamma, form.error_gamma),
    ):
        counted = gamma(12) * (a * long + float(part.norm())) + float(form.error) * long + float(error)
        assert float(true.norm()) + 0.99 * counted <= float(found) <= float(true.norm()) + 1.6 * counted


def test_what_cancels_at_a_center_leaves_its_rounding():
    """Aᵀc + β = 0 in float64: the rounding of both is what is left, no less."""
    bias = torch.tensor([3.0, -1.0], dtype=D)
    form = bilinear.one(r.Dot(torch.eye(2, dtype=D), torch.eye(2, dtype=D), scale=1.0, b_q=bias, b_k=bias), 2)
    counted = gamma(8) * (math.sqrt(2) + 1) * float(bias.norm())
    errors = gamma(6 + FACTOR) * 2 * float(bias.norm()) + gamma(6 + FACTOR) * math.sqrt(2) * float(
        bias.norm()
    )
    for found in (form.shift(-bias), form.pull(-bias)):
        assert float(found) == pytest.approx(counted + errors, rel=1e-9, abs=0)


def test_forms_with_biases_add_and_their_errors_with_them():
    """A, β and γ of a sum are sums; each rounding of a sum counts once, relative to what is added."""
    g = generator(21)
    dots = [
        r.Dot(normal(g, 4, 3), normal(g, 4, 3), scale=scale, b_q=normal(g, 3), b_k=normal(g, 3))
        for scale in (0.7, -1.3)
    ]
    first, second = (bilinear.one(dot, 4) for dot in dots)
    both = bilinear.one(Sum(tuple(dots)), 4)
    for name in ("a", "beta", "gamma"):
        one, other = getattr(first, name), getattr(second, name)
        assert torch.allclose(getattr(both, name), one + other, rtol=1e-13, atol=0)
        error = {"a": "error", "beta": "error_beta", "gamma": "error_gamma"}[name]
        own = float(getattr(first, error)) + float(getattr(second, error))
        counted = own + gamma(4) * (float(one.norm()) + float(other.norm()))
        assert float(getattr(both, error)) == pytest.approx(counted, rel=1e-6, abs=0)
    x, y = normal(g, 5, 4), normal(g, 6, 4)
    marks = torch.zeros(5, dtype=torch.long), torch.zeros(6, dtype=torch.long)
    rest = sum(dot.scores(x, y, *marks) for dot in dots)
    rest = rest - x @ both.a @ y.mT - both.beta @ y.mT - (x @ both.gamma).unsqueeze(-1)
    assert float((rest - rest[0, 0]).abs().max()) < 1e-12


def test_what_is_tied():
    """Equal tensors of one shape, or none on both sides; one entry is not a matrix of equal entries."""
    w, b = torch.eye(2, dtype=D), torch.ones(2, dtype=D)
    assert same(None, None)
    assert same(w, w.clone())
    assert not same(w, None)
    assert not same(w, w + 1)
    assert not same(one(1.0), torch.ones(2, 2, dtype=D))
    assert is_tied(r.Gaussian(w_q=w, w_k=w.clone(), b_q=b, b_k=b.clone(), bandwidth=1.0))
    assert not is_tied(r.Gaussian(w_q=w, w_k=2 * w, b_q=b, b_k=b, bandwidth=1.0))
    assert not is_tied(r.Gaussian(w_q=w, w_k=w, b_q=b, b_k=2 * b, bandwidth=1.0))


W_1, W_2 = (torch.diag(torch.tensor(entries, dtype=D)) for entries in ((3.0, 1.0), (0.5, 2.0)))
V = torch.tensor([0.75, -1.0], dtype=D)  # |v| = 1.25, |v|₁ = 1.75
MIDDLE = torch.tensor([0.6, -0.8], dtype=D)


@pytest.mark.parametrize("radius", [0.01, 0.2, 3.0])
@pytest.mark.parametrize(
    ("potential", "slope_k", "slope_q", "widest"),
    [
        # |w_k| and |w_q| times the steepest slope, and how much scores can differ at all
        (r.Cosine(scale=-3.0, eps=4.0, w_q=W_1, w_k=W_2), 2.0 * 1.5, 3.0 * 1.5, 6.0),
        (r.Additive(W_1, W_2, V), 2.0 * 1.25, 3.0 * 1.25, 3.5),
    ],
    ids=["cosine", "additive"],
)
def test_scores_differ_by_their_slope_or_by_their_range(potential, slope_k, slope_q, widest, radius):
    """osc is the smaller of 2Rα and the range of the scores."""
    found = slopes.one(potential, ball(MIDDLE, radius))
    assert float(found.alpha) == pytest.approx(slope_k, rel=1e-9, abs=0)
    assert float(found.reach) == pytest.approx(slope_q, rel=1e-9, abs=0)
    assert float(found.osc) == pytest.approx(min(2 * radius * slope_k, widest), rel=1e-9, abs=0)


def test_queries_and_keys_are_no_farther_apart_than_both_are_long():
    """|q - k| ≤ |q| + |k|, which is less than the distance of their centers and two radii where tokens are
    on one side of zero: (1, 0) and (0, 1), keys on the other side.
    """
    eye, center = torch.eye(2, dtype=D), torch.tensor([0.5, 0.5], dtype=D)
    for reach, apart in ((1.0, 2.0), (9.0, 2 * math.sqrt(2.0))):
        ball = BallFacts(center, exact(math.sqrt(0.5)), exact(reach))
        found = slopes.one(r.Gaussian(w_q=eye, w_k=-eye, bandwidth=1.0), ball)
        assert float(found.alpha) == pytest.approx(apart, rel=1e-12, abs=0)


def test_factors_of_scores_are_counted_as_eight_roundings():
    """1/√c, a temperature, a product of factors: none is exact."""
    found = float(bilinear.one(r.Dot(scale=0.3), 2).error)
    assert found == pytest.approx(float(relative_error(2 + 4 + 8)) * 0.3 * 2, rel=1e-12, abs=0)


def apart_of(w_q, w_k, b_q, b_k, radius):
    """The smaller of |q| + |k| and |q(c) - k(c)| + (|w_q| + |w_k|) R, as norms of matrices."""
    norms = [float(torch.linalg.matrix_norm(w, 2)) for w in (w_q, w_k)]
    reach = 1.0 + radius  # |c| = 1
    lengths = [n * reach + float(b.norm()) for n, b in zip(norms, (b_q, b_k), strict=True)]
    offset = MIDDLE @ (w_q - w_k) + b_q - b_k
    return norms, min(sum(lengths), float(offset.norm()) + sum(norms) * radius)


@pytest.mark.parametrize("shift", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("radius", [0.01, 2.0, 40.0])
def test_slopes_of_distances_between_projected_tokens(radius, shift):
    """Gaussian |w||q - k|/b², Laplace |w|/b, Student's t |w| (ν + 1) u/(νb² + u²) at u = min(|q - k|, b√ν),
    with all their oscillations.
    """
    b_q = torch.tensor([shift, -0.5], dtype=D)
    b_k = torch.tensor([0.25, 1.0 - shift], dtype=D)
    (n_q, n_k), apart = apart_of(W_1, W_2, b_q, b_k, radius)
    projected = {"w_q": W_1, "w_k": W_2, "b_q": b_q, "b_k": b_k}
    width, nu = 1.7, 3.0
    u = min(apart, width * math.sqrt(nu))
    steepest = (nu + 1) * u / (nu * width**2 + u * u)
    tail = 0.5 * (nu + 1) * math.log1p(apart**2 / (nu * width**2))
    for potential, slope, range_, nus in (
        (r.Gaussian(bandwidth=width, **projected), apart / width**2, 0.5 * (apart / width) ** 2, None),
        (r.Laplace(bandwidth=width, **projected), 1 / width, apart / width, n_k / width),
        (r.StudentT(nu=nu, bandwidth=width, **projected), steepest, tail, n_k * steepest),
    ):
        found = slopes.one(potential, ball(MIDDLE, radius))
        gaussian = nus is None
        stated = {
            "alpha": n_k * slope,
            "reach": n_q * slope,
            "osc": min(2 * radius * n_k * slope, range_),
            "nu": n_k**2 * radius / width**2 if gaussian else nus,
            "reversed_nu": n_k**2 * radius / width**2 if gaussian else nus,
            "kappa": n_q * n_k * radius / width**2 if gaussian else n_q * slope,
        }
        for name, number in stated.items():
            assert float(getattr(found, name)) == pytest.approx(number, rel=1e-9, abs=0), (potential, name)
