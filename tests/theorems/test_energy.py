"""Columns of attention by the energy of scores: closed forms, cases of equality, attacks, what is refused."""

import math
from fractions import Fraction

import mpmath
import pytest
import torch

import regard as r
from regard._round import largest_eigenvalue_bound
from regard._upper import Upper, exact
from regard.domains import Ball, Neighborhood, Whole
from regard.maps import Compose, Heads, Residual
from regard.norms import Frobenius, TokenMax, TokenSum, Wasserstein
from regard.proofs import certify
from regard.proofs.crowd import bilinear_energy, crowd, log_ratio
from regard.proofs.scores import Form, bilinear, slopes
from regard.proofs.setting import balls_of
from regard.proofs.theorem import Refusal
from regard.proofs.theorems.energy import THEOREM, _power
from tests.theorems.exact import D, frobenius_norm, generator, normal

EYE = torch.eye(3, dtype=D)
SKEW = torch.tensor([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=D)
CLOSE = 1e-10


def rung(attention, domain, norm):
    found = certify(attention, domain, norm)
    (value,) = [c.value for c in (found, *found.others) if c.theorem.startswith(THEOREM.title)]
    return value


def refusal(attention, domain, norm):
    (why,) = [why for why in certify(attention, domain, norm).refused if why.startswith(THEOREM.title)]
    return why


def energy(a, radius=1.0, center=None, beta=None, error=0.0, error_beta=0.0):
    zero = torch.zeros(len(a), dtype=D)
    form = Form(a, zero if beta is None else beta, zero, exact(error), exact(error_beta))
    return float(bilinear_energy(form, zero if center is None else center, exact(radius)))


def crowding_energy(potential, ball, known=math.inf):
    return float(crowd(potential, balls_of(ball, 3)[0], Upper(known)).energy)


def column(scores, weights, key_scores):
    """log F(μ, y) = log Σ_i w_i e^{s(x_i, y)}/Σ_k w_k e^{s(x_i, x_k)}; scores (…, n, n), of y (…, n)."""
    logs = weights.log_softmax(-1)
    return (logs + key_scores - (scores + logs.unsqueeze(-2)).logsumexp(-1)).logsumexp(-1)


def clouds(g, batch, n, d, radius):
    """Points in balls, many of them on the sphere, some close together, with weights of all sizes."""
    x = normal(g, batch, n, d)
    x = x / x.norm(dim=-1, keepdim=True) * torch.rand(batch, n, 1, generator=g, dtype=D) ** (1 / d)
    middle = x[:, :1]
    tight = torch.rand(batch, 1, 1, generator=g, dtype=D).round()
    x = middle + (x - middle) * (1 - 0.95 * tight)
    return radius * x * (1 - 1e-12), -6 * torch.rand(batch, n, generator=g, dtype=D)


# Closed forms


@pytest.mark.parametrize("radius", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    ("a", "share"),
    [
        (EYE, 0.25),
        (torch.diag(torch.tensor([1.0, 0.4, 0.0], dtype=D)), 0.25),
        (-EYE, 2.0),
        (SKEW, 1.0),
        (torch.tensor([[1.0]], dtype=D), 0.25),
        (torch.tensor([[-1.0]], dtype=D), 2.0),
    ],
    ids=["identity", "positive", "negative", "skew", "one dimension", "one negative dimension"],
)
def test_closed_forms(a, share, radius):
    """g/4, 2g and g, for g = |A|R²."""
    assert energy(1.7 * a, radius) == pytest.approx(share * 1.7 * radius**2, rel=CLOSE)
    assert energy(1.7 * a, radius) >= share * 1.7 * radius**2


def test_factors_of_terms_are_counted_as_eight_roundings():
    ball = balls_of(Ball(0.1, torch.zeros(3, dtype=D)), 3)[0]
    for potential in (0.3 * r.Gaussian(bandwidth=1.0), 0.3 * r.Cosine()):
        assert crowd(potential, ball, Upper(math.inf)).energy.roundings >= 8


def test_weak_scores_on_a_wide_ball_are_asked_for_their_energy():
    """|A|R²/4 is what may be above what is known, not R²/4."""
    wide = Ball(9.0, torch.zeros(3, dtype=D))
    assert crowding_energy(r.Dot(scale=0.01), wide, 1.0) == pytest.approx(0.01 * 81 / 4, rel=CLOSE)


def test_one_dimension_with_a_center_and_a_bias():
    """max (am + b)(y - m) over |m|, |y| ≤ R, b = ac + β, over the ends and the stationary points."""
    for a, center, beta, radius in (
        (1.3, 0.7, -0.2, 0.9),
        (-0.8, 0.4, 0.3, 1.1),
        (0.5, -2.0, 0.1, 0.6),
        (0.0, 1.0, 0.7, 2.0),
        (2.0, 0.0, 0.0, 1.0),
        (0.9, 0.05, 0.0, 1.4),
    ):
        b, best = a * center + beta, -math.inf
        for y in (-radius, radius):
            inner = [] if a == 0 else [(a * y - b) / (2 * a)]
            for m in (-radius, radius, *inner):
                if abs(m) <= radius:
                    best = max(best, (a * m + b) * (y - m))
        found = energy(
            torch.tensor([[a]], dtype=D),
            radius,
            torch.tensor([center], dtype=D),
            torch.tensor([beta], dtype=D),
        )
        assert best <= found == pytest.approx(best, rel=CLOSE, abs=1e-12)


def test_only_a_bias():
    """Scores b·y alone: 2R|b|."""
    b = torch.tensor([0.3, -0.4, 0.0], dtype=D)
    assert energy(0 * EYE, 1.5, beta=b) == pytest.approx(1.5, rel=CLOSE)


@pytest.mark.parametrize("seed", range(6))
def test_between_attacks_and_the_dual(seed):
    """An ascent finds what the multipliers prove, for any matrix, center and bias."""
    g = generator(seed)
    d, radius = 2 + seed % 3, 0.5 + 0.3 * seed
    a, center = normal(g, d, d), normal(g, d) * (seed % 2)
    beta = normal(g, d) * (seed % 3 > 0)
    b = center @ a + beta
    m = normal(g, 200, d)
    for _ in range(400):
        m = radius * m / m.norm(dim=-1, keepdim=True).clamp_min(radius)
        pulled = m @ a + b
        y = radius * pulled / pulled.norm(dim=-1, keepdim=True)
        m = m + 0.05 * ((y - m) @ a.mT - pulled)
    m = radius * m / m.norm(dim=-1, keepdim=True).clamp_min(radius)
    best = float((radius * (m @ a + b).norm(dim=-1) - ((m @ a + b) * m).sum(-1)).max())
    found = energy(a, radius, center, beta)
    assert best <= found == pytest.approx(best, rel=1e-4)
    size = float(torch.linalg.matrix_norm(a, 2)) * radius**2
    assert size / 4 <= found <= 2 * (size + radius * float(b.norm())) * (1 + 1e-12)


def test_rotations_and_scales_change_nothing():
    g = generator(3)
    a, b = normal(g, 3, 3), normal(g, 3)
    turn = torch.linalg.qr(normal(g, 3, 3))[0]
    assert energy(turn @ a @ turn.mT, beta=turn @ b) == pytest.approx(energy(a, beta=b), rel=CLOSE)
    assert energy(a / 4, 2.0, beta=b / 2) == pytest.approx(energy(a, beta=b), rel=CLOSE)
    for scale in (1e-120, 1e150):
        assert energy(scale * a, beta=scale * b) == pytest.approx(scale * energy(a, beta=b), rel=CLOSE)


def test_wide_matrices_of_small_rank():
    """In coordinates of their span or not."""
    g = generator(5)
    a = torch.zeros(70, 70, dtype=D)
    a[:3, :3] = core = normal(g, 3, 3)
    b = normal(g, 70) * (torch.arange(70) < 3)
    turn = torch.linalg.qr(normal(g, 70, 70))[0]
    found = energy(turn @ a @ turn.mT, beta=turn @ b)
    assert found == pytest.approx(energy(core, beta=b[:3]), rel=1e-8)
    assert energy(torch.eye(70, dtype=D)) == pytest.approx(0.25, rel=1e-6)


def test_what_rounding_changed_is_added():
    """2R (R|δA| + |c||δA| + |δb|)."""
    center = torch.tensor([3.0, 0.0, 4.0], dtype=D)
    plain = energy(EYE, 2.0, center)
    lost = 2 * 2.0 * (2.0 * 0.01 + 5 * 0.01 + 0.003)
    assert energy(EYE, 2.0, center, error=0.01, error_beta=0.003) == pytest.approx(plain + lost, rel=CLOSE)


def test_no_scores_and_no_radius():
    assert energy(0 * EYE, 2.0) < 1e-280
    assert energy(EYE, 0.0) < 1e-280
    assert energy(EYE, 1e200) == math.inf


def test_what_is_known_is_not_computed_again():
    """E ≥ |A|R²/4."""
    dot = r.Dot(scale=1.0)
    ball = Ball(2.0, torch.zeros(3, dtype=D))
    assert crowding_energy(dot, ball) == pytest.approx(1.0, rel=CLOSE)
    assert crowding_energy(dot, ball, 1.001) == pytest.approx(1.0, rel=CLOSE)
    assert crowding_energy(dot, ball, 0.999) == 0.999
    assert crowding_energy(-1.0 * dot, ball, 7.0) == pytest.approx(7.0, rel=CLOSE)
    assert crowding_energy(-1.0 * dot, ball) == pytest.approx(8.0, rel=CLOSE)


# Largest eigenvalues


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
@pytest.mark.parametrize("size", [1, 2, 7, 40])
def test_largest_eigenvalue(size, scale):
    g = generator(size)
    for shift in (-30.0, 0.0, 2.0):
        turn = torch.linalg.qr(normal(g, size, size))[0]
        values = shift + normal(g, size)
        matrix = turn @ values.diag() @ turn.mT
        matrix = scale * (matrix + matrix.mT) / 2
        top, widest = scale * float(values.max()), scale * float(values.abs().max())
        found = largest_eigenvalue_bound(matrix)
        assert top - 1e-13 * widest <= found <= top + 1e-11 * widest


def test_largest_eigenvalue_of_a_diagonal_is_never_below():
    for top in (-3.0, 0.1, 1 / 3, 5e10):
        matrix = torch.diag(torch.tensor([top, top - 1, top - 2], dtype=D))
        assert top <= largest_eigenvalue_bound(matrix) <= top + 1e-12 * max(1.0, abs(top) + 2)
    assert largest_eigenvalue_bound(torch.zeros(3, 3, dtype=D)) == 0.0
    assert largest_eigenvalue_bound(torch.full((2, 2), math.inf, dtype=D)) == math.inf


# Other scores


def test_gaussian_energy():
    """min(g/2, k/2 log 4/3) with g = t|w|²R², and e^{2·energy} 4k/3 t|w|² steepness."""
    g = generator(1)
    w = normal(g, 3, 2)
    size = float(torch.linalg.matrix_norm(w, 2))
    for radius, factor, bandwidth in ((0.2, 1.0, 1.0), (3.0, 1.0, 1.5), (0.3, 2.5, 1.2)):
        potential = factor * r.Gaussian(w_q=w, w_k=w, bandwidth=bandwidth)
        t = factor / bandwidth**2
        found = crowd(potential, balls_of(Ball(radius, normal(g, 3)), 3)[0], Upper(math.inf))
        stated = min(t * (size * radius) ** 2 / 2, math.log(4 / 3))
        assert float(found.energy) == pytest.approx(stated, rel=CLOSE)
        assert float(found.steepness) == pytest.approx(t * size**2 * (4 / 3) * (8 / 3), rel=CLOSE)
    plain = crowd(
        r.Gaussian(bandwidth=1.0), balls_of(Ball(9.0, torch.zeros(3, dtype=D)), 3)[0], Upper(math.inf)
    )
    assert float(plain.energy) == pytest.approx(1.5 * math.log(4 / 3), rel=CLOSE)
    assert float(plain.steepness) == pytest.approx((4 / 3) ** 1.5 * 4, rel=CLOSE)
    wide = r.Gaussian(w_q=normal(g, 3, 5), bandwidth=1.0)
    wide = wide.replace(w_k=wide.w_q)
    assert crowding_energy(wide, Ball(9.0, torch.zeros(3, dtype=D))) == pytest.approx(
        1.5 * math.log(4 / 3), rel=CLOSE
    )


def test_laplace_and_cosine_energy():
    ball, g = Ball(2.0, torch.zeros(3, dtype=D)), generator(2)
    one, two = normal(g, 3, 1), normal(g, 3, 2)
    assert crowding_energy(2.0 * r.Laplace(w_q=one, w_k=one), ball) == pytest.approx(
        math.log(5 / 4), rel=CLOSE
    )
    assert crowding_energy(r.Laplace(w_q=two, w_k=two), ball, 7.0) == 7.0
    assert crowding_energy(3.0 * r.Cosine(w_q=two, w_k=two, scale=0.5), ball) == pytest.approx(
        0.375, rel=CLOSE
    )
    assert crowding_energy(r.Cosine(scale=0.0), ball) < 1e-280


@pytest.mark.parametrize(
    "potential",
    [
        r.Gaussian(w_q=EYE, w_k=2 * EYE, bandwidth=1.0),
        r.Gaussian(b_q=EYE[0], b_k=EYE[1], bandwidth=1.0),
        -1.0 * r.Gaussian(bandwidth=1.0),
        r.Laplace(w_q=EYE[:, :1], w_k=EYE[:, 1:2]),
        -1.0 * r.Laplace(w_q=EYE[:, :1], w_k=EYE[:, :1]),
        r.Cosine(w_q=EYE, w_k=-EYE),
        -1.0 * r.Cosine(),
        r.Gaussian(bandwidth=1.0) + r.Cosine(),
        r.StudentT(),
        r.SoftCap(r.Dot(), 2.0),
    ],
    ids=repr,
)
def test_other_scores_have_what_is_known(potential):
    found = crowd(potential, balls_of(Ball(0.5, torch.zeros(3, dtype=D)), 3)[0], Upper(0.7))
    assert float(found.energy) == 0.7
    assert float(found.steepness) == math.inf


def test_weights_of_a_measure():
    x = normal(generator(4), 3, 2)
    assert float(log_ratio(Ball(1.0))) == 0.0
    assert float(log_ratio(Neighborhood(x, 1.0))) == 0.0
    weighted = r.Measure(x, torch.tensor([0.5, -1.0, 2.0], dtype=D))
    assert float(log_ratio(Neighborhood(weighted, 1.0))) == pytest.approx(3.0, rel=CLOSE)
    nothing = r.Measure(x, torch.tensor([0.0, 0.0, -math.inf], dtype=D))
    with pytest.raises(Refusal, match="without mass"):
        log_ratio(Neighborhood(nothing, 1.0))


# Equality


@pytest.mark.parametrize("a", [EYE, -EYE, SKEW], ids=["positive", "negative", "skew"])
@pytest.mark.parametrize("size", [1.0, 4.0])
def test_energy_is_attained_by_a_point_mass(a, size):
    """μ → δ_m with the best m, and y alone: F → e^E."""
    scaled, y = size * a, EYE[0]
    m = {1.0: 0.5 * y, -1.0: -y}.get(float(a[0, 0]), -EYE[1])  # the ends of the closed forms
    if float(a[0, 0]) == 0:
        m, y = EYE[0], EYE[1]
    points = torch.stack([m, y])
    weights = torch.tensor([0.0, -80.0], dtype=D)
    reached = math.exp(float(column(points @ scaled @ points.mT, weights, points @ scaled @ y)))
    bound = math.exp(energy(scaled))
    assert 0.999 * bound <= reached <= bound


def test_gaussian_is_attained_by_a_gaussian_law():
    """Keys everywhere on a line, with the variance that is worst: √(4/3); and orthonormal keys: e^{g/2}."""
    x = torch.linspace(-9, 9, 1201, dtype=D)
    best = 0.0
    for variance in (0.5, 1.0, 2.0, 3.0, 6.0):
        law = -x.square() / (2 * variance)
        best = max(best, math.exp(float(column(-(x[:, None] - x).square() / 2, law, -x.square() / 2))))
    bound = math.exp(
        crowding_energy(r.Gaussian(w_q=EYE[:, :1], w_k=EYE[:, :1], bandwidth=1.0), Ball(9.0, 0 * EYE[0]))
    )
    assert 0.99 * bound < best <= bound == pytest.approx(math.sqrt(4 / 3), rel=CLOSE)
    n, g = 4096, 2.0  # at distance R√2 from each other, at R from their middle
    scores = torch.full((n, n), -g, dtype=D).fill_diagonal_(0.0)
    reached = math.exp(float(column(scores, torch.zeros(n, dtype=D), torch.full((n,), -g / 2, dtype=D))))
    assert 0.99 * math.exp(g / 2) < reached <= math.exp(g / 2)


# Attacks


def test_no_column_of_a_thousand_clouds_is_heavier():
    """Weighted clouds under bilinear scores with center and query bias, and any y of the ball."""
    g = generator(0)
    for d in (1, 2, 3, 5):
        for kind in range(5):
            a, radius = normal(g, d, d), 0.4 + float(torch.rand((), generator=g)) * 1.4
            a = a @ a.mT if kind == 0 else a - a.mT if kind == 1 and d > 1 else -a @ a.mT if kind == 2 else a
            b = normal(g, d) * (kind == 4)
            x, weights = clouds(g, 50, 6, d, radius)
            slope = x @ a + b
            y = radius * slope[:, 0] / slope[:, 0].norm(dim=-1, keepdim=True).clamp_min(1e-300)
            found = column(slope @ x.mT, weights, (slope @ y.unsqueeze(-1)).squeeze(-1))
            assert float(found.max()) <= energy(a, radius, beta=b) * (1 + 1e-12) + 1e-12


def test_no_column_of_tied_scores_is_heavier():
    g = generator(1)
    for d in (1, 2, 4):
        x, weights = clouds(g, 200, 7, d, 1.3)
        y, w = x[:, -1:], torch.eye(d, dtype=D)
        ball = balls_of(Ball(1.3, torch.zeros(d, dtype=D)), d)[0]
        for potential in (r.Gaussian(bandwidth=0.6), r.Cosine(scale=4.0, eps=0.1), r.Laplace(w_q=w[:, :1])):
            potential = potential.replace(w_k=potential.w_q)
            scores, keys = potential.scores(x, x), potential.scores(x, y).squeeze(-1)
            bound = float(crowd(potential, ball, Upper(math.inf)).energy)
            assert float(column(scores, weights, keys).max()) <= bound + 1e-12


@pytest.mark.parametrize("kind", ["tied", "skew", "biased", "gaussian", "cosine"])
def test_no_derivative_is_larger(kind):
    """Exact norms of Jacobians in Frobenius norm, and columns of their blocks in TokenSum norm."""
    g = generator(len(kind))
    d, n, radius = 2, 6, 1.1
    a, center = normal(g, d, d), normal(g, d) * (kind == "biased")
    potential = {
        "tied": r.Dot(a, a, scale=0.8),
        "skew": r.Bilinear(a - a.mT),
        "biased": r.Dot(a, normal(g, d, d), b_q=normal(g, d), b_k=normal(g, d)),
        "gaussian": r.Gaussian(w_q=a, w_k=a, bandwidth=0.9),
        "cosine": r.Cosine(w_q=a, w_k=a, scale=2.0, eps=0.5),
    }[kind]
    attention = r.Attention(potential, r.Linear(normal(g, d, 3), normal(g, 3)))
    domain = Ball(radius, center)
    bounds = [rung(attention, domain, norm) for norm in (Frobenius(), TokenSum())]
    assert bounds[0] == pytest.approx(rung(attention, domain, Wasserstein(2.0)), rel=1e-12)
    assert bounds[1] == pytest.approx(rung(attention, domain, Wasserstein(1.0)), rel=1e-12)
    x, _ = clouds(g, 40, n, d, radius)
    for points in x + center:
        assert frobenius_norm(attention, points) <= bounds[0]
        blocks = torch.func.jacrev(attention)(points).permute(2, 0, 1, 3)  # by the column that moves
        sums = torch.linalg.matrix_norm(blocks, 2).sum(-1)
        assert float(sums.max()) <= bounds[1]


def test_weighted_sequences_stay_below():
    """Rows count once, keys count as they weigh."""
    g = generator(8)
    attention = r.Attention(r.Dot(scale=1.0))
    for _ in range(20):
        x, weights = normal(g, 5, 2), 1.5 * normal(g, 5)
        domain = Neighborhood(r.Measure(x, weights), 0.1)
        bound = rung(attention, domain, Frobenius())
        assert frobenius_norm(lambda y, w=weights: attention(r.Measure(y, w)).points, x) <= bound


# The constant


W = torch.diag(torch.tensor([0.7, 0.5, 0.2], dtype=D))


@pytest.mark.parametrize("p", [1.0, 1.3, 2.0, 3.0, 50.0])
def test_the_number_of_the_statement(p):
    """w (Λ^{1/p} (1 + 2h)^e q^{1-e} + Rκ)."""
    g, center = 1.44, torch.tensor([0.3, 0.0, -0.2], dtype=D)
    tied = r.Attention(r.Dot(scale=1.0), r.Linear(W))
    e = max(0.0, 2 / p - 1)
    stated = 0.7 * (math.exp(g / 4 / p) * (1 + 2 * g) ** e * (1 + g * g) ** ((1 - e) / 2) + g)
    assert rung(tied, Ball(1.2), Wasserstein(p)) == pytest.approx(stated, rel=1e-9)
    for potential in (r.Dot(W, EYE, b_q=center), r.StudentT(nu=3.0), r.SoftCap(r.Dot(), 2.0)):
        ball = balls_of(Ball(1.2, center), 3)[0]
        found = slopes.one(potential, ball)
        alpha, nu, kappa = float(found.alpha), float(found.nu), float(found.kappa)
        crowded = float(found.osc)
        if (form := bilinear.one(potential, 3)) is not None:
            crowded = float(bilinear_energy(form, center, exact(1.2)))
        q = math.sqrt(1 + 2.4 * nu + (1.2 * alpha) ** 2)
        rows = math.exp(crowded / p) * (1 + 2.4 * alpha) ** e * q ** (1 - e)
        stated = 0.7 * (rows + 1.2 * kappa)
        found = rung(r.Attention(potential, r.Linear(W)), Ball(1.2, center), Wasserstein(p))
        assert found == pytest.approx(stated, rel=1e-9)


@pytest.mark.parametrize("radius", [0.4, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("p", [1.0, 1.5, 2.0])
def test_the_number_of_gaussian_scores(radius, p):
    """Rows, or Schur's test with the column Λ + 2R min(αΛ, √(ΛJ)), whichever is smaller."""
    w = torch.diag(torch.tensor([1.2, 0.8, 0.5], dtype=D))
    potential = r.Gaussian(w_q=w, w_k=w, bandwidth=1.0)
    found = slopes.one(potential, balls_of(Ball(radius, 0 * EYE[0]), 3)[0])
    alpha, nu, kappa = float(found.alpha), float(found.nu), float(found.kappa)
    moment = (4 / 3) ** 1.5 * 4
    factor = min(math.exp(1.44 * radius**2 / 2), (4 / 3) ** 1.5)
    h, e = radius * alpha, max(0.0, 2 / p - 1)
    columns = factor + 2 * radius * min(alpha * factor, math.sqrt(factor * 1.44 * moment))
    by_columns = columns ** (1 / p) * (1 + h) ** (1 - 1 / p)
    q = math.sqrt(1 + 2 * radius * nu + h * h)
    by_rows = factor ** (1 / p) * (1 + 2 * h) ** e * q ** (1 - e)
    stated = 0.7 * (min(by_rows, by_columns) + radius * kappa)
    attention = r.Attention(potential, r.Linear(W))
    assert rung(attention, Ball(radius), Wasserstein(p)) == pytest.approx(stated, rel=1e-9)


@pytest.mark.parametrize("p", [1.0, 1.1, 1.4, 1.8, 2.0, 3.0, 7.0])
def test_powers_are_never_below(p):
    """Exponents are rounded, which counts where the base is large."""
    with mpmath.workdps(40):
        order = mpmath.mpf(p)
        pairs = [(1 / p, 1 / order), (max(0.0, 2 / p - 1), max(order * 0, 2 / order - 1))]
        pairs += [(min(1.0, 2 - 2 / p), min(order / order, 2 - 2 / order)), (1 - 1 / p, 1 - 1 / order)]
        for exponent, true in pairs:
            for base in (1.0, 1.5, 1e300):
                stated = mpmath.mpf(base) ** true
                found = mpmath.mpf(float(_power(exact(base), exponent)))
                assert stated <= found <= stated * (1 + mpmath.mpf(1e-12))


def test_orders_one_and_two_are_norms_of_sequences():
    attention = r.Attention(r.Dot(scale=1.0), r.Linear(W))
    for norm, p in ((Frobenius(), 2.0), (TokenSum(), 1.0)):
        found = rung(attention, Ball(1.2), Wasserstein(p))
        assert rung(attention, Ball(1.2), norm) == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize("norm", [Frobenius(), TokenSum()], ids=repr)
def test_never_above_the_bounds_by_the_number_of_tokens(norm):
    """Λ may be N too."""
    for scale in (0.2, 1.0, -1.0, -3.0):
        attention = r.Attention(scale * r.Dot(scale=1.0))
        for tokens in (1, 3, 50):
            domain = Ball(1.2, torch.zeros(3, dtype=D), tokens)
            found = certify(attention, domain, norm)
            others = [c.value for c in found.others if c.theorem.startswith("softmax attention in")]
            assert rung(attention, domain, norm) <= min(others, default=math.inf) * (1 + 1e-12)


def test_weights_multiply_the_factor():
    """Near weighted measures: E plus the logarithm of the largest quotient of weights."""
    x = 0.1 * torch.stack([EYE[0], -EYE[0], 0 * EYE[0]])  # all balls are the same
    weights = torch.tensor([0.0, 0.3, 0.1], dtype=D)
    attention = r.Attention(r.Dot(scale=1.0))
    plain, weighted = (
        rung(attention, Neighborhood(points, 1.0), TokenSum()) for points in (x, r.Measure(x, weights))
    )
    g = 1.1**2
    assert plain == pytest.approx(math.exp(g / 4) * (1 + 2 * g) + g, rel=1e-9)
    assert weighted == pytest.approx(math.exp(g / 4 + 0.3) * (1 + 2 * g) + g, rel=1e-9)


# Parts of other maps


def test_several_heads_and_residuals_use_it():
    g = generator(9)
    w_q, w_v, w_o = normal(g, 2, 3, 2), normal(g, 2, 3, 2), normal(g, 2, 2, 3)
    heads = Heads(r.Attention(r.Dot(w_q, w_q), r.Linear(w_v)), w_o)
    for norm in (Frobenius(), TokenSum(), Wasserstein(1.5)):
        domain = Ball(0.8, tokens=20)
        found = certify(heads, domain, norm)
        assert all(part.theorem.startswith(THEOREM.title) for part in found.parts)
        around = certify(Residual(heads), domain, norm)
        assert around.value == pytest.approx(1 + found.value, rel=1e-12)
        twice = certify(Compose((Residual(heads), heads)), domain, norm)
        assert math.isfinite(twice.value)
        assert any(name.startswith(THEOREM.title) for name in _tree(twice))


def _tree(certificate):
    return [certificate.theorem, *(name for part in certificate.parts for name in _tree(part))]


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 4.0])
def test_a_residual_of_measures_adds_one(p):
    attention, domain = r.Attention(r.Dot(scale=1.0)), Ball(1.0, torch.zeros(2, dtype=D))
    assert certify(Residual(attention), domain, Wasserstein(p)).value == pytest.approx(
        1 + rung(attention, domain, Wasserstein(p)), rel=1e-12
    )


# What is refused, and the ends


@pytest.mark.parametrize("norm", [Frobenius(), TokenSum(), Wasserstein(2.0)], ids=repr)
@pytest.mark.parametrize(
    "attention",
    [
        r.Attention(r.Dot(), support=r.Causal()),
        r.Attention(r.Dot(), support=r.Window(1, 1)),
        r.Attention(r.Dot() + r.Alibi(0.1)),
        r.Attention(r.Rotary(r.Dot())),
    ],
    ids=["causal", "window", "alibi", "rotary"],
)
def test_rows_that_see_keys_differently_are_refused(attention, norm):
    why = refusal(attention, Ball(1.0, torch.zeros(2, dtype=D), 4), norm)
    assert "masks and positions are not functions of the law of tokens; " in why
    assert ("use TokenMax() or Frobenius()" in why) == isinstance(norm, Wasserstein)


def test_a_causal_mask_breaks_it():
    """All rows see the first key, and the bound without a mask would be false."""
    attention, x = r.Attention(r.Dot(scale=0.01), support=r.Causal()), torch.ones(200, 1, dtype=D)
    free = rung(attention.replace(support=r.Full()), Ball(1.0, torch.zeros(1, dtype=D), 200), Frobenius())
    assert frobenius_norm(attention, x) > 1.2 * free


def test_unbounded_tokens_and_other_rows():
    assert "tokens are not bounded" in refusal(r.Attention(r.Dot(EYE, EYE)), Whole(3), Frobenius())
    for normalizer in (r.Sigmoid(), r.SinkSoftmax(), r.Entmax(1.5)):
        found = certify(r.Attention(r.Dot(), normalizer=normalizer), Ball(0.5, EYE[0], 3), Frobenius())
        assert not any(THEOREM.title in words for words in (found.theorem, *found.refused))
    found = certify(r.Attention(r.Dot()), Ball(0.5, EYE[0]), Wasserstein(math.inf))
    assert not any(THEOREM.title in rung.theorem for rung in (found, *found.others))


def test_weights_and_marks_of_laws_are_refused():
    domain = Neighborhood(r.Measure(EYE, torch.zeros(3, dtype=D)), 0.1)
    assert "forgets weights and marks" in refusal(r.Attention(r.Dot()), domain, Wasserstein(1.0))
    near = rung(r.Attention(r.Dot(scale=1.0)), Neighborhood(EYE, 0.1), Wasserstein(1.0))
    assert math.isfinite(near)


@pytest.mark.parametrize("norm", [Frobenius(), TokenSum(), Wasserstein(1.0), Wasserstein(2.0)], ids=repr)
def test_huge_scores_leave_the_range(norm):
    attention = r.Attention(r.Bilinear(-1e4 * EYE))
    assert "the bound leaves the range of numbers" in refusal(attention, Ball(1.0), norm)
    assert "the bound leaves the range of numbers" in refusal(attention, Ball(1e160), norm)


def test_one_token_and_no_scores():
    """Values alone: w."""
    w = normal(generator(2), 3, 2)
    size = float(torch.linalg.matrix_norm(w, 2))
    still = r.Attention(r.Bilinear(0 * EYE), r.Linear(w))
    for norm in (Frobenius(), TokenSum(), Wasserstein(1.0), Wasserstein(3.0)):
        assert rung(still, Ball(2.0), norm) == pytest.approx(size, rel=1e-12)
    alone = r.Attention(r.Dot(scale=1.0), r.Linear(w))
    assert rung(alone, Ball(1.0, tokens=1), TokenSum()) == pytest.approx(size * 4, rel=1e-9)
    assert certify(alone, Ball(1.0, tokens=1), TokenMax()).value <= rung(
        alone, Ball(1.0, tokens=1), TokenSum()
    )


def test_key_biases_and_constants_of_rows_change_nothing():
    """b_k adds a constant to each row; b_q is the b of the form."""
    g = generator(6)
    w_q, w_k, b = normal(g, 3, 2), normal(g, 3, 2), normal(g, 2)
    plain = rung(r.Attention(r.Dot(w_q, w_k)), Ball(0.7), Frobenius())
    assert rung(r.Attention(r.Dot(w_q, w_k, b_k=b)), Ball(0.7), Frobenius()) == pytest.approx(plain, rel=1e-9)
    assert rung(r.Attention(r.Dot(w_q, w_k, b_q=b)), Ball(0.7), Frobenius()) > plain


def test_a_center_counts_for_dot_products_and_not_for_gaussians():
    center = torch.tensor([2.0, 0.0, 0.0], dtype=D)
    for attention, alike in (
        (r.Attention(r.Dot(scale=1.0)), False),
        (r.Attention(r.Gaussian(bandwidth=1.0)), True),
    ):
        here, there = (rung(attention, Ball(0.5, c), Frobenius()) for c in (0 * center, center))
        assert (there == pytest.approx(here, rel=1e-9)) == alike
        assert there >= here * (1 - 1e-9)


def test_temperature_divides_the_scores():
    hot = r.Attention(r.Dot(scale=1.0), normalizer=r.Softmax(temperature=2.0))
    assert rung(hot, Ball(1.0, 0 * EYE[0]), Frobenius()) == pytest.approx(
        rung(r.Attention(r.Dot(scale=0.5)), Ball(1.0, 0 * EYE[0]), Frobenius()), rel=1e-9
    )


def test_a_center_that_cancels_the_bias():
    """b = Aᵀc + β of numbers that cancel: what their product lost is more than all that is left of b."""
    lost = []
    for k in range(20):
        a, center = 1e-12 / 3, 3e20 + 7e13 * k
        beta = -(a * center) + 1e-9 * (1 if k % 2 else -1)
        form = Form(*(torch.tensor(value, dtype=D) for value in ([[a]], [beta], [0.0])))
        truth = abs(Fraction(a) * Fraction(center) + Fraction(beta))  # at m = 0 and y = ±1
        bound = bilinear_energy(form, torch.tensor([center], dtype=D), exact(1.0))
        assert Fraction(float(bound)) >= truth
        lost.append(truth > 2 * abs(Fraction(a * center + beta)))
    assert any(lost)
