"""Each bound is the number of its statement: formulas written out once more, from norms that are computed
without any bound.

The other files ask whether a statement is true, by attacks and equality cases; here every constant and every
term of it counts.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import mpmath
import pytest
import torch

import regard as r
from regard._upper import exact
from regard.domains import Ball, Neighborhood, Radii, Whole
from regard.maps import FromQueries, Joint, ToContext
from regard.norms import EntryMax, Frobenius, TokenMax, TokenSum, Wasserstein
from regard.proofs import THEOREMS, certify, deviation
from regard.proofs.gaussian_rows import lambert_bound
from regard.proofs.scores import slopes
from regard.proofs.setting import balls_of
from regard.proofs.theorems.contraction import contraction
from regard.proofs.theorems.cosine import cosine_slopes
from regard.proofs.theorems.sinkhorn import iterations
from tests.theorems.exact import D, generator, normal

CLOSE = 1e-8
TOKENS = 5


def rungs(map, domain, norm, name, question=certify):
    """The values of one theorem on the ladder."""
    found, cited = question(map, domain, norm), THEOREMS[name].cited
    return [rung.value for rung in (found, *found.others) if f"{rung.theorem}:".startswith(f"{cited}:")]


def two(matrix):
    return float(torch.linalg.matrix_norm(matrix.double(), 2))


G = generator(11)
W_Q, W_K, B_Q, B_K = normal(G, 3, 2), normal(G, 3, 2), normal(G, 2), normal(G, 2)
W_V, B_V, CENTER = normal(G, 3, 4), normal(G, 4), normal(G, 3)
X = normal(G, TOKENS, 3)
DOT = r.Dot(W_Q, W_K, scale=0.4, b_q=B_Q, b_k=B_K)
A, BETA = 0.4 * W_Q @ W_K.mT, 0.4 * W_K @ B_Q
POTENTIALS = {
    "dot": DOT,
    "additive": r.Additive(W_Q, W_K, normal(G, 2)),
    "gaussian": r.Gaussian(w_q=W_Q, w_k=W_K, bandwidth=2.0),
    "student": r.StudentT(nu=3.0, bandwidth=2.0),
}
BALLS = {radius: Ball(radius, CENTER, tokens=TOKENS) for radius in (0.1, 0.9)}


def attention(potential, **more):
    return r.Attention(potential, r.Linear(W_V, B_V), **more)


def facts(potential, domain):
    """Balls that hold the tokens, with R, α, ν, κ and osc."""
    for ball in balls_of(domain, 3):
        found = slopes.one(potential, ball)
        yield tuple(float(part) for part in (ball.radius, found.alpha, found.nu, found.kappa, found.osc))


def crowd(osc, rows=TOKENS, keys=TOKENS):
    return rows / (1 + (keys - 1) * math.exp(-osc))


SETS = [*BALLS.values(), Radii(X, torch.tensor([0.1, 0.0, 0.2, 0.3, 0.05], dtype=D))]


@pytest.mark.parametrize("domain", SETS, ids=["small", "large", "near"])
@pytest.mark.parametrize("name", POTENTIALS)
def test_token_max(name, domain):
    """w (√(1 + 2Rν + R²α²) + Rκ)."""
    potential = POTENTIALS[name]
    stated = min(
        two(W_V) * (math.sqrt(1 + 2 * R * n + (R * a) ** 2) + R * k)
        for R, a, n, k, _ in facts(potential, domain)
    )
    assert rungs(attention(potential), domain, TokenMax(), "token_max") == [
        pytest.approx(stated, rel=CLOSE, abs=0)
    ]


@pytest.mark.parametrize("domain", SETS, ids=["small", "large", "near"])
@pytest.mark.parametrize("name", POTENTIALS)
def test_frobenius_and_token_sum(name, domain):
    """w (√(N (1 + 2Rν + R²α²)) + Rκ) and w (N (1 + 2Rα) + Rκ)."""
    potential, w = POTENTIALS[name], two(W_V)
    root = min(
        w * (math.sqrt(crowd(o) * (1 + 2 * R * n + (R * a) ** 2)) + R * k)
        for R, a, n, k, o in facts(potential, domain)
    )
    total = min(w * (crowd(o) * (1 + 2 * R * a) + R * k) for R, a, n, k, o in facts(potential, domain))
    assert rungs(attention(potential), domain, Frobenius(), "frobenius") == [
        pytest.approx(root, rel=CLOSE, abs=0)
    ]
    assert rungs(attention(potential), domain, TokenSum(), "token_sum") == [
        pytest.approx(total, rel=CLOSE, abs=0)
    ]


def test_a_causal_mask_crowds_the_first_token():
    """N = Σ_i 1/(1 + (i - 1) e^{-osc})."""
    ((R, a, n, k, osc),) = facts(DOT, BALLS[0.1])
    many = sum(1 / (1 + i * math.exp(-osc)) for i in range(TOKENS))
    stated = two(W_V) * (math.sqrt(many * (1 + 2 * R * n + (R * a) ** 2)) + R * k)
    assert rungs(attention(DOT, support=r.Causal()), BALLS[0.1], Frobenius(), "frobenius") == [
        pytest.approx(stated, rel=CLOSE, abs=0)
    ]


def test_a_sink_is_one_more_key_of_value_zero():
    """The ball must hold zero, and slopes and zero together: α/2 about the middle of both."""
    slotted = r.Attention(DOT, r.Linear(W_V), r.SinkSoftmax(sink=0.3))
    reach = float(CENTER.norm()) + 0.1
    found = slopes.one(DOT, balls_of(Ball(reach, torch.zeros(3, dtype=D)), 3)[0])
    held = slopes.one(DOT, balls_of(BALLS[0.1], 3)[0])
    alpha, kappa = float(found.alpha), min(float(held.reach), float(found.reach))
    stated = two(W_V) * (math.sqrt(1 + reach * alpha + (reach * alpha) ** 2) + reach * kappa)
    assert rungs(slotted, BALLS[0.1], TokenMax(), "token_max") == [pytest.approx(stated, rel=CLOSE, abs=0)]


@pytest.mark.parametrize("domain", BALLS.values(), ids=["small", "large"])
@pytest.mark.parametrize("name", POTENTIALS)
def test_wasserstein(name, domain):
    """w (q + Rκ), w (e^{osc/2} q + Rκ) and w (e^{osc} (1 + 2Rα) + Rκ)."""
    potential, w = POTENTIALS[name], two(W_V)
    ((R, a, n, k, osc),) = facts(potential, domain)
    q, any_order = math.sqrt(1 + 2 * R * n + (R * a) ** 2), math.exp(osc) * (1 + 2 * R * a)
    for p, crowded in (
        (math.inf, q),
        (1.0, any_order),
        (3.0, any_order),
        (2.0, min(any_order, math.exp(osc / 2) * q)),
    ):
        stated = w * (crowded + R * k)
        assert rungs(attention(potential), domain, Wasserstein(p), "wasserstein") == [
            pytest.approx(stated, rel=CLOSE, abs=0)
        ]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "domain", [*BALLS.values(), Ball(0.05, 5 * CENTER, tokens=TOKENS)], ids=["small", "large", "far"]
)
def test_cosine(domain, biased):
    """α = τ ρ̂_q λ_k, κ = τ λ_q min(ρ̂_k, λ_k R), osc = 2τ ρ̂_q min(ρ̂_k, λ_k R)."""
    biases = (B_Q, B_K) if biased else (None, None)
    potential = r.Cosine(scale=1.5, eps=0.3, w_q=W_Q, w_k=W_K, b_q=biases[0], b_k=biases[1])
    R, center, bounds = float(domain.radius), domain.center, []
    for w, b in ((W_Q, biases[0]), (W_K, biases[1])):
        middle = float((center @ w + (0 if b is None else b)).norm())
        nearest, farthest = max(0.0, middle - two(w) * R), middle + two(w) * R
        bounds.append((two(w) / math.sqrt(nearest**2 + 0.3), farthest / math.sqrt(farthest**2 + 0.3)))
    (slope_q, size_q), (slope_k, size_k) = bounds
    around = min(size_k, slope_k * R)
    tau = 1.5 * 0.5
    alpha, kappa, osc = tau * size_q * slope_k, tau * slope_q * around, 2 * tau * size_q * around
    map = attention(r.potentials.base.Scaled(potential, -0.5))
    stated = two(W_V) * (1 + R * (alpha + kappa))
    assert rungs(map, domain, TokenMax(), "cosine") == [pytest.approx(stated, rel=CLOSE, abs=0)]
    stated = two(W_V) * (math.sqrt(crowd(osc)) * (1 + R * alpha) + R * kappa)
    assert rungs(map, domain, Frobenius(), "cosine") == [pytest.approx(stated, rel=CLOSE, abs=0)]


def test_slopes_of_cosine_scores_at_a_point():
    """On a ball of radius 0, with queries turned by a right angle: |∂_y s| and |∂_x s| are attained."""
    turned = 2 * torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=D)
    potential = r.Cosine(scale=-1.5, eps=0.3, w_q=turned)
    center = torch.tensor([0.45, -0.6], dtype=D)
    (ball,) = balls_of(Ball(0.0, center), 2)
    x, y = (center.unsqueeze(0).clone().requires_grad_() for _ in range(2))
    marks = torch.zeros(1, dtype=torch.long)
    by_query, by_key = torch.autograd.grad(potential.scores(x, y, marks, marks).sum(), (x, y))
    found = cosine_slopes(potential, 0.5, ball)
    for name, seen in (("alpha", by_key), ("nu", by_key), ("reversed_nu", by_key), ("reach", by_query)):
        assert float(getattr(found, name)) == pytest.approx(0.5 * float(seen.norm()), rel=CLOSE, abs=0)
    assert float(found.kappa) <= 1e-12 >= float(found.osc)


def test_castin():
    """g = |A|R²: √3 w √(g² (4n + 1) + n), and w (1 + 3g) e^{2g} for measures."""
    plain, domain = attention(r.Bilinear(A)), Ball(0.9, tokens=TOKENS)
    g = two(A) * 0.81
    stated = math.sqrt(3) * two(W_V) * math.sqrt(g * g * (4 * TOKENS + 1) + TOKENS)
    assert rungs(plain, domain, Frobenius(), "castin_general") == [pytest.approx(stated, rel=CLOSE, abs=0)]
    stated = two(W_V) * (1 + 3 * g) * math.exp(2 * g)
    assert rungs(plain, domain, Wasserstein(1.0), "castin_mean_field") == [
        pytest.approx(stated, rel=CLOSE, abs=0)
    ]


@pytest.mark.parametrize("size", [1e-4, 1.0, 30.0])
def test_castin_with_a_bias_as_one_more_coordinate(size):
    """The least over c of √(|A|² + |β|²/c²) (R² + c²)."""
    domain = Ball(0.9, tokens=TOKENS)
    beta = size * float(BETA.norm())
    grid = [0.9 * 1.001**k for k in range(-8000, 4000)]
    g = min(math.hypot(two(A), beta / c) * (0.81 + c * c) for c in grid)
    best = two(W_V) * (1 + 3 * g) * math.exp(2 * g)
    (found,) = rungs(attention(DOT.replace(b_q=size * B_Q)), domain, Wasserstein(1.0), "castin_mean_field")
    slack = two(W_V) * (1 + 3 * g * 1.006) * math.exp(2 * g * 1.006)
    assert best * (1 - 1e-5) <= found <= slack


@pytest.mark.parametrize("tokens", [2, 5, 1000])
def test_gaussian_scores_on_the_whole_space(tokens):
    """ω = W₀((n - 1)/e): |W| + 4ω|M||U|, two forms in Frobenius norm, and the published constants."""
    u = normal(generator(3), 2, 4)
    map, domain = (
        r.Attention(r.Gaussian(w_q=W_K, w_k=W_K, bandwidth=0.7), r.Factored(W_K, u)),
        Whole(tokens=tokens),
    )
    omega = float(mpmath.lambertw((tokens - 1) / mpmath.e).real)
    w, size, many = two(W_K @ u), two(W_K) * two(u), math.sqrt(tokens)
    assert rungs(map, domain, TokenMax(), "gaussian_whole") == [
        pytest.approx(w + 4 * omega * size, rel=CLOSE, abs=0)
    ]
    forms = many * (w + 2 * omega * size) + 2 * omega * size, many * (w + 2 * math.sqrt(2) * omega * size)
    assert rungs(map, domain, Frobenius(), "gaussian_whole") == [pytest.approx(min(forms), rel=CLOSE, abs=0)]
    assert rungs(map, domain, Frobenius(), "kim_two_norm") == [
        pytest.approx(many * (4 * omega + 1) * size, rel=CLOSE, abs=0)
    ]
    stated = float(u.abs().sum(0).max() * W_K.abs().sum(0).max()) * (1 + 4 * math.sqrt(2) * omega)
    assert rungs(map, domain, EntryMax(), "kim_infinity_norm") == [pytest.approx(stated, rel=CLOSE, abs=0)]


def test_rivals_with_positions_and_masks():
    """Ω = max_i Σ_{j≠i} exp(B_ij - B_ii) takes the place of n - 1."""
    map = r.Attention(r.Gaussian(bandwidth=1.0) + r.Alibi(0.3), support=r.Causal())
    rivals = max(sum(math.exp(-0.3 * (i - j)) for j in range(i)) for i in range(TOKENS))
    omega = float(mpmath.lambertw(rivals / mpmath.e).real)
    assert rungs(map, Whole(tokens=TOKENS), TokenMax(), "gaussian_whole") == [
        pytest.approx(1 + 4 * omega, rel=CLOSE, abs=0)
    ]


@pytest.mark.parametrize("log_value", [-600.0, -30.0, -1.0, 0.0, 1.0, 12.0, 650.0, 5000.0])
def test_lambert_against_sixty_digits(log_value):
    with mpmath.workdps(60):
        found = mpmath.mpf(float(lambert_bound(log_value)))
        excess = found + mpmath.log(found) - log_value  # grows with the root
        assert 0 <= excess / (1 + abs(log_value)) <= 3e-12


def test_lambert_where_there_is_nothing_to_solve():
    assert (float(lambert_bound(-math.inf)), float(lambert_bound(math.inf))) == (0.0, math.inf)
    assert 0 < float(lambert_bound(-1000.0)) <= 1e-289


def test_lipschitz_norm():
    """(√N + 2√2) |[W_Q W_K W_V]|, N = n/(1 + (n - 1)e⁻²) or e², and the published (e√3 + 2√6)."""
    g = generator(5)
    map = r.lipschitz_norm.LipschitzNorm(normal(g, 3, 2), normal(g, 3, 2), normal(g, 3, 2))
    size = two(torch.cat([map.w_q, map.w_k, map.w_v], -1))
    for domain, many in ((Whole(), math.e**2), (Whole(tokens=7), crowd(2.0, 7, 7))):
        stated = (math.sqrt(many) + 2 * math.sqrt(2)) * size
        assert rungs(map, domain, Frobenius(), "lipschitz_norm") == [pytest.approx(stated, rel=CLOSE, abs=0)]
        stated = (math.e * math.sqrt(3) + 2 * math.sqrt(6)) * size
        assert rungs(map, domain, Frobenius(), "dasoulas") == [pytest.approx(stated, rel=CLOSE, abs=0)]


def at_a_point(bias=0.0, x=X):
    """P, the covariances C_i and the slopes v_i of a bilinear score at a sequence."""
    slope = x @ A + BETA
    laws = (slope @ x.mT + bias).softmax(-1)
    means = laws @ x
    covariances = torch.einsum("ij,ja,jb->iab", laws, x, x) - means.unsqueeze(-1) * means.unsqueeze(-2)
    return laws, covariances, slope


MARKS = torch.arange(TOKENS)
SEEN = {
    "full": (0.0, DOT, r.Full()),
    "positions, causal": (
        torch.where(MARKS[:, None] >= MARKS, -0.3 * (MARKS[:, None] - MARKS).abs().double(), -math.inf),
        DOT + r.Alibi(0.3),
        r.Causal(),
    ),
}


@pytest.mark.parametrize("seen", SEEN)
def test_point_covariance(seen):
    """√(max_j Σ_i P_ij (w² + η_i²)) + max_i σ_i ζ_i and max_i (√(w² + η_i²) + σ_i ζ_i)."""
    bias, potential, support = SEEN[seen]
    laws, covariances, slope = at_a_point(bias)
    sigma = torch.tensor([two(W_V.mT @ c @ W_V) ** 0.5 for c in covariances], dtype=D)
    zeta = torch.tensor([two(A @ c @ A.mT) ** 0.5 for c in covariances], dtype=D)
    spread = two(W_V) ** 2 + (sigma * slope.norm(dim=-1)) ** 2
    point, map = Neighborhood(X, 0.0, Frobenius()), attention(potential, support=support)
    # a row that sees one key has no variance, up to the root of a rounding
    close = CLOSE if seen == "full" else 1e-7
    stated = float((laws * spread.unsqueeze(-1)).sum(0).max().sqrt() + (sigma * zeta).max())
    assert rungs(map, point, Frobenius(), "point_covariance") == [pytest.approx(stated, rel=close, abs=0)]
    stated = float((spread.sqrt() + sigma * zeta).max())
    assert rungs(map, point, TokenMax(), "point_covariance") == [pytest.approx(stated, rel=close, abs=0)]


@pytest.mark.parametrize("factor", [1.0, 0.4])
def test_point_covariance_of_gaussian_scores(factor):
    """η_i is the smaller of σ_i max|v| and λ_max(Wᵀ E[|v|² y yᵀ] W)^½, v = (x_i - x_j)/b²;
    ζ_i = |C_i|^½/b².
    """
    bandwidth = 1.3
    unit = factor / bandwidth**2
    apart = X.unsqueeze(1) - X
    laws = (-0.5 * unit * apart.square().sum(-1)).softmax(-1)
    spread, own = [], []
    for law, offsets in zip(laws, apart, strict=True):
        y, pull = X - law @ X, offsets.norm(dim=-1) * unit
        sigma = two(law.sqrt().unsqueeze(-1) * y @ W_V)
        eta = min(sigma * float(pull.max()), two((law.sqrt() * pull).unsqueeze(-1) * y @ W_V))
        spread.append(two(W_V) ** 2 + eta**2)
        own.append(sigma * two(law.sqrt().unsqueeze(-1) * y) * unit)
    stated = max(math.sqrt(s) + o for s, o in zip(spread, own, strict=True))
    gaussian = r.potentials.base.Scaled(r.Gaussian(bandwidth=bandwidth), factor)
    map, point = attention(gaussian), Neighborhood(X, 0.0, Frobenius())
    assert rungs(map, point, TokenMax(), "point_covariance") == [pytest.approx(stated, rel=CLOSE, abs=0)]
    crowd = float((laws * torch.tensor(spread, dtype=D).unsqueeze(-1)).sum(0).max())
    stated = math.sqrt(crowd) + max(own)
    assert rungs(map, point, Frobenius(), "point_covariance") == [pytest.approx(stated, rel=CLOSE, abs=0)]


def test_gaussian_scores_that_have_no_theorem_at_a_point():
    point = Neighborhood(X, 0.0, Frobenius())
    plain, square = "Gaussian() without projections", torch.eye(3, dtype=D)
    for potential, sentence in (
        (r.Gaussian(w_q=square, bandwidth=1.0), plain),
        (r.Gaussian(w_k=square, bandwidth=1.0), plain),
        (r.potentials.base.Scaled(r.Gaussian(bandwidth=1.0), -1.0), plain),
        (r.Laplace(), plain),
        (r.Gaussian(b_q=CENTER, bandwidth=1.0), "Gaussian scores with biases"),
        (r.Gaussian(b_k=CENTER, bandwidth=1.0), "Gaussian scores with biases"),
    ):
        refused = certify(attention(potential), point, Frobenius()).refused
        assert any(sentence in why for why in refused), (potential, refused)


def test_point_half_and_undecided_rows():
    """w (|P|₂ + g (2|A||X|₂ + √n|β|) |X|₂), g = ½ or the largest p₁ (1 - p₁ + p₂)."""
    laws = at_a_point()[0]
    size = two(X)
    change = (2 * two(A) * size + math.sqrt(TOKENS) * float(BETA.norm())) * size
    top = laws.topk(2, -1).values
    undecided = float((top[:, 0] * (1 - top[:, 0] + top[:, 1])).max())
    point = Neighborhood(X, 0.0, Frobenius())
    for name, share in (("point_half", 0.5), ("point_jasmin", undecided)):
        stated = two(W_V) * (two(laws) + share * change)
        assert rungs(attention(DOT), point, Frobenius(), name) == [pytest.approx(stated, rel=CLOSE, abs=0)]


SPARSE = [(r.Sparsemax(), 2.0), (r.Entmax(1.5), 1.5)]


@pytest.mark.parametrize(("normalizer", "order"), SPARSE, ids=repr)
def test_sparse_laws_on_a_ball(normalizer, order):
    """T = n^{α-1}: w (1 + TR (a + κ)) and w (√m + Ra√(T m') + TRκ), m rows that see a key."""
    domain = BALLS[0.9]
    ((R, a, _, k, _),) = facts(DOT, domain)
    total, w = TOKENS ** (order - 1), two(W_V)
    map = attention(DOT, normalizer=normalizer)
    stated = w * (1 + total * R * (a + k))
    assert rungs(map, domain, TokenMax(), "row_normalizers") == [pytest.approx(stated, rel=CLOSE, abs=0)]
    stated = w * (math.sqrt(TOKENS) + R * a * math.sqrt(total * TOKENS) + total * R * k)
    assert rungs(map, domain, Frobenius(), "row_normalizers") == [pytest.approx(stated, rel=CLOSE, abs=0)]
    causal = attention(DOT, normalizer=normalizer, support=r.Window(1, 0))
    two_keys = 2 ** (order - 1)
    stated = w * (math.sqrt(2) + R * a * math.sqrt(two_keys * 2) + two_keys * R * k)
    assert rungs(causal, domain, Frobenius(), "row_normalizers") == [pytest.approx(stated, rel=CLOSE, abs=0)]


def sparse_laws(scores, order):
    """((α - 1) s - τ)₊^{1/(α-1)}, with the τ that makes the sum one."""
    scores = (order - 1) * scores
    high = scores.amax(-1, keepdim=True)
    low = high - 1
    for _ in range(100):
        middle = (low + high) / 2
        enough = (scores - middle).clamp(min=0).pow(1 / (order - 1)).sum(-1, keepdim=True) >= 1
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return (scores - low).clamp(min=0).pow(1 / (order - 1))


def sparse_stated(laws, order, pull, own_factor):
    """max_i (w + σ_i a_i √T_i + σ_i ζ_i),
    and w √(max_j Σ_i P_ij) + √(max_j Σ_i t_ij σ_i² a_i²) + max_i σ_i ζ_i.
    """
    slopes_of = (laws > 0).double() if order == 2 else laws ** (2 - order)
    keys, own = [], []
    for t, steepest in zip(slopes_of, pull, strict=True):
        centered = t.sqrt().unsqueeze(-1) * (X - t @ X / t.sum())
        keys.append(two(centered @ W_V) * float(steepest))
        own.append(two(centered @ W_V) * two(centered @ own_factor))
    keys, own = torch.tensor(keys, dtype=D), torch.tensor(own, dtype=D)
    largest = float((two(W_V) + keys * slopes_of.sum(-1).sqrt() + own).max())
    crowd = two(W_V) * float(laws.sum(0).max()) ** 0.5
    return largest, crowd + float((slopes_of * keys.square().unsqueeze(-1)).sum(0).max()) ** 0.5 + float(
        own.max()
    )


@pytest.mark.parametrize("name", ["dot", "sharp", "gaussian"])
@pytest.mark.parametrize(("normalizer", "order"), SPARSE, ids=repr)
def test_sparse_laws_at_a_point(normalizer, order, name):
    """With t = p^{2-α} on the support: max_i (w + σ_i a_i √T_i + σ_i ζ_i), and the form in Frobenius norm."""
    factor = {"dot": 0.3, "sharp": 6.0, "gaussian": 0.4}[name]
    if name == "gaussian":
        apart = torch.cdist(X, X) * factor
        scores, pull = -0.5 * factor * torch.cdist(X, X).square(), apart.amax(-1)
        potential, own_factor = r.Gaussian(bandwidth=1.0), factor * torch.eye(3, dtype=D)
    else:
        slope = factor * (X @ A + BETA)
        scores, pull, potential, own_factor = slope @ X.mT, slope.norm(dim=-1), DOT, factor * A.mT
    laws = sparse_laws(scores, order)
    if name == "sharp":
        assert float(laws.max()) == pytest.approx(1.0)  # a row that takes one key
    else:
        assert bool(((laws > 1e-3).sum(-1) > 1).all())
    map = attention(r.potentials.base.Scaled(potential, factor), normalizer=normalizer)
    point = Neighborhood(X, 0.0, Frobenius())
    close = 1e-10 if order == 2 and name != "sharp" else 1e-6
    for norm, stated in zip(
        (TokenMax(), Frobenius()), sparse_stated(laws, order, pull, own_factor), strict=True
    ):
        assert min(rungs(map, point, norm, "row_normalizers")) == pytest.approx(stated, rel=close, abs=0)


@pytest.mark.parametrize("bias", [None, -9.0, 2.0, "below"])
def test_sigmoid(bias):
    """C (w σ(s* + b) + ρ σ'_max (α + ζ)), s* the largest score, ρ the longest value;
    -log n where no bias is given.
    """
    domain = BALLS[0.1]
    (ball,) = balls_of(domain, 3)
    found = slopes.one(DOT, ball)
    gamma = 0.4 * W_Q @ B_K
    top = float(CENTER @ A @ CENTER + (BETA + gamma) @ CENTER) + 0.4 * float(B_Q.norm() * B_K.norm())
    top += two(A) * 0.01 + 0.1 * float((CENTER @ A + BETA).norm() + (A @ CENTER + gamma).norm())
    bias = -0.5 - top if bias == "below" else bias  # a weight between a quarter and a half
    level = top + (-math.log(TOKENS) if bias is None else bias)
    weight = 1 / (1 + math.exp(-level))
    steepest = 0.25 if level >= 0 else weight * (1 - weight)
    value = two(W_V) * (float(CENTER.norm()) + 0.1) + float(B_V.norm())
    stated = TOKENS * (two(W_V) * weight + value * steepest * (float(found.alpha) + float(found.reach)))
    map = attention(DOT, normalizer=r.Sigmoid(bias))
    assert rungs(map, domain, TokenMax(), "sigmoid") == [pytest.approx(stated, rel=CLOSE, abs=0)]


def sigmoid_stated(w, value, level, found, keys=TOKENS):
    """C (w σ(s* + b) + ρ σ'_max (α + ζ))."""
    weight = 1 / (1 + math.exp(-level))
    steepest = 0.25 if level >= 0 else weight * (1 - weight)
    return keys * (w * weight + value * steepest * (float(found.alpha) + float(found.reach)))


ONE_BIAS = torch.tensor([0.25], dtype=D)
DOTS = {
    "scaled": (r.potentials.base.Scaled(DOT, -2.0), 0.8 * float(B_Q.norm() * B_K.norm())),
    "two": (DOT + DOT, 0.8 * float(B_Q.norm() * B_K.norm())),
    "one bias": (DOT.replace(b_k=None), 0.0),
    "other bias": (DOT.replace(b_q=None), 0.0),
    "an entry for all": (DOT.replace(b_q=ONE_BIAS), 0.4 * 0.25 * math.sqrt(2) * float(B_K.norm())),
    "no projections": (r.Dot(b_q=CENTER, b_k=2 * CENTER), 2 * float(CENTER.norm()) ** 2 / math.sqrt(3)),
    "entries, no projections": (r.Dot(scale=2.0, b_q=ONE_BIAS, b_k=-ONE_BIAS), 2 * 3 * 0.25**2),
}


@pytest.mark.parametrize("name", DOTS)
def test_the_largest_score_of_a_sigmoid_counts_biases(name):
    """At the center of a ball of radius 0 the score is cᵀAc + (β + γ)·c, and |scale b_q·b_k| at most."""
    potential, constant = DOTS[name]
    domain, point = Ball(0.0, CENTER, tokens=TOKENS), CENTER.unsqueeze(0)
    nothing = torch.zeros(1, 3, dtype=D)
    marks = torch.zeros(1, dtype=torch.long)
    exact = [float(potential.scores(at, at, marks, marks)) for at in (point, nothing)]
    (ball,) = balls_of(domain, 3)
    level = exact[0] - exact[1] + constant - 3.0
    value = two(W_V) * float(CENTER.norm()) + float(B_V.norm())
    stated = sigmoid_stated(two(W_V), value, level, slopes.one(potential, ball))
    map = attention(potential, normalizer=r.Sigmoid(-3.0))
    assert rungs(map, domain, TokenMax(), "sigmoid") == [pytest.approx(stated, rel=CLOSE, abs=0)]


@pytest.mark.parametrize("bias", [-600.0, -40.0, 40.0, 1e4])
def test_sigmoid_far_from_zero(bias):
    """e^b, or weights of one; windows of two keys."""
    domain, zero = Ball(0.1, torch.zeros(3, dtype=D), tokens=TOKENS), r.Dot(scale=0.0)
    map = attention(zero, normalizer=r.Sigmoid(bias), support=r.Window(1, 0))
    weight = math.exp(bias) if bias < 0 else 1.0
    assert rungs(map, domain, TokenMax(), "sigmoid") == [
        pytest.approx(2 * two(W_V) * weight, rel=CLOSE, abs=0)
    ]


def test_sigmoid_with_hardly_any_weight():
    domain = Ball(0.1, torch.zeros(3, dtype=D), tokens=TOKENS)
    (found,) = rungs(attention(DOT, normalizer=r.Sigmoid(-2e3)), domain, TokenMax(), "sigmoid")
    assert 0 < found < 1e-280  # e^-2000 is no number: what stands for it is tiny and not zero


def test_values_of_sigmoid_heads():
    """ρ = |WU| reach + |b| of factored values, and |W_O||b| more where heads are mixed: the smaller of
    |W_O| √Σ_h b_h² and Σ_h b'_h.
    """
    domain, g = BALLS[0.1], generator(8)
    (ball,) = balls_of(domain, 3)
    found, reach = slopes.one(POTENTIALS["additive"], ball), float(ball.reach)
    u, b = normal(g, 4, 2), normal(g, 2)
    map = r.Attention(POTENTIALS["additive"], r.Factored(W_V, u, b), r.Sigmoid(0.0))
    value = two(W_V @ u) * reach + float(b.norm())
    slope = 0.25 * (float(found.alpha) + float(found.reach))
    stated = TOKENS * (two(W_V @ u) + value * slope)
    assert rungs(map, domain, TokenMax(), "sigmoid") == [pytest.approx(stated, rel=CLOSE, abs=0)]
    for w_o in (normal(g, 1, 4, 3), torch.eye(4, 3, dtype=D).unsqueeze(0)):
        mixed = r.maps.Heads(attention(POTENTIALS["additive"], normalizer=r.Sigmoid(0.0)), w_o)
        forms = []
        for w, offset, after in (
            (two(W_V @ w_o[0]), two(w_o[0]) * float(B_V.norm()), 1.0),
            (two(W_V), float(B_V.norm()), two(w_o[0])),
        ):
            forms.append(after * TOKENS * (w + (w * reach + offset) * slope))
        assert certify(mixed, domain, TokenMax()).value == pytest.approx(min(forms), rel=CLOSE, abs=0)


def test_sigmoid_of_other_scores_has_weights_of_at_most_one():
    """Where no largest score is known: C (w + ρ (α + ζ)/4)."""
    domain, potential = BALLS[0.1], POTENTIALS["additive"]
    (ball,) = balls_of(domain, 3)
    found = slopes.one(potential, ball)
    value = two(W_V) * float(ball.reach) + float(B_V.norm())
    stated = TOKENS * (two(W_V) + value * 0.25 * (float(found.alpha) + float(found.reach)))
    map = attention(potential, normalizer=r.Sigmoid(0.0))
    assert rungs(map, domain, TokenMax(), "sigmoid") == [pytest.approx(stated, rel=CLOSE, abs=0)]


def test_sigmoid_with_positions():
    """The largest position bias is one more part of the largest score: here zero, at a token itself,
    times -2.
    """
    domain, bias = Ball(0.0, torch.zeros(3, dtype=D), tokens=TOKENS), -1.0
    potential = r.Bilinear(A) + r.potentials.base.Scaled(r.Alibi(0.3), -2.0)
    weight = 1 / (1 + math.exp(-(bias + 0.6 * (TOKENS - 1))))
    map = attention(potential, normalizer=r.Sigmoid(bias))
    stated = TOKENS * two(W_V) * weight
    assert rungs(map, domain, TokenMax(), "sigmoid") == [pytest.approx(stated, rel=CLOSE, abs=0)]


@pytest.mark.parametrize("name", ["dot", "additive"])
def test_sinkhorn(name):
    """w (1 + |A| n R²); other scores: w (1 + ½ √n (α + κ) √n R)."""
    potential, domain = POTENTIALS[name], Ball(0.2, CENTER, tokens=TOKENS)
    ((R, a, _, k, _),) = facts(potential, domain)
    change = two(A) * math.sqrt(TOKENS) * R if name == "dot" else 0.5 * math.sqrt(TOKENS) * (a + k)
    stated = two(W_V) * (1 + change * math.sqrt(TOKENS) * R)
    map = attention(potential, normalizer=r.Sinkhorn(tolerance=1e-6, max_iterations=500))
    assert rungs(map, domain, Frobenius(), "sinkhorn") == [pytest.approx(stated, rel=CLOSE, abs=0)]


@pytest.mark.parametrize("name", ["dot", "additive", "dot, far", "dot, wide", "dot, positions"])
def test_iterations_that_balance(name):
    """By the oscillation of rows and the crossed differences: the smaller of 2 osc and 4|A|R², or 2 osc;
    positions add their range once, and twice.
    """
    kind = name.split(",")[0]
    center = 5 * CENTER if name == "dot, far" else CENTER
    potential, fixed = POTENTIALS[kind], 0.0
    domain = Ball(1.2 if name == "dot, wide" else 0.2, center, tokens=TOKENS)
    ((R, _, _, _, osc),) = facts(potential, domain)
    if name == "dot, positions":
        potential, fixed = potential + r.Alibi(0.1), 0.1 * (TOKENS - 1)
    crossed = min(2 * osc, 4 * two(A) * R * R) if kind == "dot" else 2 * osc
    needed = iterations(exact(osc + fixed), exact(crossed + 2 * fixed), 1e-6)
    map = attention(potential, normalizer=r.Sinkhorn(tolerance=1e-6, max_iterations=int(needed)))
    found = certify(map, domain, Frobenius())
    said = [str(known) for rung in (found, *found.others) for known in rung.hypotheses]
    assert any(f"at most {needed:.0f} iterations reach the tolerance 1e-06" in one for one in said)
    fewer = map.replace(normalizer=r.Sinkhorn(tolerance=1e-6, max_iterations=int(needed) - 1))
    assert rungs(fewer, domain, Frobenius(), "sinkhorn") == []


@pytest.mark.parametrize("norm", [Frobenius(), TokenMax()], ids=repr)
def test_sinkhorn_near_a_sequence(norm):
    """|X - c| + the move takes the place of √n R where it is smaller."""
    domain = Neighborhood(X, 0.05, norm)
    map = attention(DOT, normalizer=r.Sinkhorn(tolerance=1e-6, max_iterations=10**9))
    moved = 0.05 if isinstance(norm, Frobenius) else 0.05 * math.sqrt(TOKENS)
    stated = math.inf
    for ball in balls_of(domain, 3):
        size = min(math.sqrt(TOKENS) * float(ball.radius), two(X - ball.center) + moved)
        stated = min(stated, two(W_V) * (1 + two(A) * size * size))
    assert rungs(map, domain, Frobenius(), "sinkhorn") == [pytest.approx(stated, rel=CLOSE, abs=0)]


@pytest.mark.parametrize(
    ("row", "crossed"), [(0.5, 0.7), (3.0, 5.0), (3.0, 9.5), (3.0, 10.5), (40.0, 59.0), (40.0, 80.0)]
)
def test_iterations_of_sinkhorn(row, crossed):
    """Two more than log(row/tolerance) over -2 log tanh(crossed/4),
    the rate in Hilbert's metric (Birkhoff).
    """
    with mpmath.workdps(60):
        rate = -2 * mpmath.log(mpmath.tanh(mpmath.mpf(crossed) / 4))
        least = 2 + mpmath.log(mpmath.mpf(row) / mpmath.mpf(1e-6)) / rate
        assert least <= iterations(exact(row), exact(crossed), 1e-6) <= (least + 1) * (1 + 2e-5)


def test_iterations_of_sinkhorn_at_the_ends():
    """One where scores of a row hardly differ; infinitely many where rounding hides the tolerance."""
    assert iterations(exact(1e-7), exact(1e-7), 1e-6) == iterations(exact(1e-6), exact(1e-6), 1e-6) == 1
    assert iterations(exact(1e4), exact(1.0), 1e-9 * 0.9) == math.inf
    assert iterations(exact(1e3), exact(1.0), 1e-9) < math.inf


def test_queries_to_a_context():
    """w R κ with κ = |A| R, R the radius of the keys, about zero, their mean or the middle of their box."""
    keys = normal(generator(7), 4, 3)
    radii = [
        float((keys - c).norm(dim=-1).max()) for c in (0, keys.mean(0), 0.5 * (keys.amax(0) + keys.amin(0)))
    ]
    for norm in (Frobenius(), TokenMax(), TokenSum(), Wasserstein(2.0)):
        found = rungs(ToContext(attention(DOT), keys), Whole(), norm, "cross")
        assert found == [pytest.approx(two(W_V) * two(A) * min(radii) ** 2, rel=CLOSE, abs=0)]


def test_keys_that_move():
    """w √(N (1 + R²α²)), α = max_i |Aᵀx_i + β|, N = 1 in TokenMax and m/(1 + (n - 1) e^{-2Rα}) in
    Frobenius norm.
    """
    queries, domain, R = X[:3], BALLS[0.1], 0.1
    alpha = float((queries @ A + BETA).norm(dim=-1).max())
    root = math.sqrt(1 + (R * alpha) ** 2)
    map = FromQueries(attention(DOT), queries)
    assert rungs(map, domain, TokenMax(), "cross") == [pytest.approx(two(W_V) * root, rel=CLOSE, abs=0)]
    many = crowd(2 * R * alpha, 3, TOKENS)
    assert rungs(map, domain, Frobenius(), "cross") == [
        pytest.approx(two(W_V) * math.sqrt(many) * root, rel=CLOSE, abs=0)
    ]


STUDENT = r.StudentT(nu=3.0, bandwidth=20.0)


def student(radius):
    """The steepest slope and the range of Student's scores of tokens in a ball, before 20√3."""
    u = 2 * radius
    return 4 * u / (3 * 400 + u * u), min(u * 4 * u / (3 * 400 + u * u), 2 * math.log1p(u * u / (3 * 400)))


def holding(points):
    """Balls about zero, the mean and the middle of the box that hold points: centers and radii."""
    centers = (0 * points[0], points.mean(0), 0.5 * (points.amax(0) + points.amin(0)))
    return [(center, float((points - center).norm(dim=-1).max())) for center in centers]


def test_queries_of_other_scores():
    """κ on the ball about the keys that holds the queries too."""
    keys, domain = normal(generator(7), 4, 3) + 2 * CENTER, BALLS[0.9]
    stated = min(
        two(W_V) * size * student(max(size, float((CENTER - center).norm()) + 0.9))[0]
        for center, size in holding(keys)
    )
    found = rungs(ToContext(attention(STUDENT), keys), domain, TokenMax(), "cross")
    assert found == [pytest.approx(stated, rel=CLOSE, abs=0)]
    far = Ball(0.01, CENTER, tokens=TOKENS)  # queries inside of the balls of the keys
    stated = min(
        two(W_V) * size * student(max(size, float((CENTER - center).norm()) + 0.01))[0]
        for center, size in holding(keys + 3 * CENTER)
    )
    found = rungs(ToContext(attention(STUDENT), keys + 3 * CENTER), far, TokenMax(), "cross")
    assert found == [pytest.approx(stated, rel=CLOSE, abs=0)]


def test_a_context_of_one_key_is_all_that_queries_see():
    for norm in (Frobenius(), TokenMax()):
        assert rungs(ToContext(attention(DOT), X[:1]), Whole(), norm, "cross") == [
            pytest.approx(0.0, abs=1e-9)
        ]


def test_keys_of_other_scores():
    """α and ν on the ball about the keys that holds the queries too, and N by the range on it."""
    queries, R = X[:3] + 2.0, 0.9
    center, size = min(holding(queries), key=lambda pair: pair[1])
    slope, osc = student(float((center - CENTER).norm()) + size)
    root = math.sqrt(1 + 2 * R * slope + (R * slope) ** 2)
    map = FromQueries(attention(STUDENT), queries)
    assert rungs(map, BALLS[R], TokenMax(), "cross") == [pytest.approx(two(W_V) * root, rel=CLOSE, abs=0)]
    assert rungs(map, BALLS[R], Frobenius(), "cross") == [
        pytest.approx(two(W_V) * math.sqrt(crowd(osc, 3, TOKENS)) * root, rel=CLOSE, abs=0)
    ]


@pytest.mark.parametrize("map", ["mask", "positions", "no number"])
def test_queries_that_may_all_look_at_one_key(map):
    """N = m where masks or positions decide, or where nobody says how many keys there are."""
    queries, R = X[:3], 0.1
    alpha = float((queries @ A + BETA).norm(dim=-1).max())
    stated = two(W_V) * math.sqrt(3 * (1 + (R * alpha) ** 2))
    made = {
        "mask": attention(DOT, support=r.Causal()),
        "positions": attention(DOT + r.Alibi(0.2)),
        "no number": attention(DOT),
    }[map]
    domain = Ball(R, CENTER) if map == "no number" else BALLS[R]
    assert rungs(FromQueries(made, queries), domain, Frobenius(), "cross") == [
        pytest.approx(stated, rel=CLOSE, abs=0)
    ]


def test_queries_and_keys_near_a_sequence():
    """Each in its own balls, with its own radii; the smallest over pairs of balls."""
    radii = torch.tensor([0.1, 0.0, 0.3, 0.05, 0.2], dtype=D)
    queries, keys = ((X[:2], radii[:2]), (X[2:], radii[2:]))
    stated = {"frobenius": math.inf, "token max": math.inf}
    for center in (c for c, _ in holding(queries[0])):
        reach = float(((queries[0] - center).norm(dim=-1) + queries[1]).max())
        alpha = float((center @ A + BETA).norm()) + two(A) * reach
        for middle in (c for c, _ in holding(keys[0])):
            R = float(((keys[0] - middle).norm(dim=-1) + keys[1]).max())
            own, root = two(W_V) * two(A) * R * R, two(W_V) * math.sqrt(1 + (R * alpha) ** 2)
            many = math.sqrt(crowd(2 * R * alpha, 2, 3))
            stated["frobenius"] = min(stated["frobenius"], math.hypot(own, many * root))
            stated["token max"] = min(stated["token max"], own + root)
    map, domain = Joint(attention(DOT), 2), Radii(X, radii)
    for norm, name in ((Frobenius(), "frobenius"), (TokenMax(), "token max")):
        assert rungs(map, domain, norm, "cross") == [pytest.approx(stated[name], rel=CLOSE, abs=0)]


def test_queries_and_keys_that_move_together():
    """√(L_X² + L_Y²) in Frobenius and L_X + L_Y in TokenMax norm."""
    domain, R = Ball(0.1, CENTER, tokens=7), 0.1
    alpha = float((CENTER @ A + BETA).norm()) + two(A) * R
    root, own = math.sqrt(1 + (R * alpha) ** 2), two(W_V) * two(A) * R * R
    map = Joint(attention(DOT), 3)
    assert rungs(map, domain, TokenMax(), "cross") == [pytest.approx(two(W_V) * root + own, rel=CLOSE, abs=0)]
    moved = two(W_V) * math.sqrt(crowd(2 * R * alpha, 3, 4)) * root
    assert rungs(map, domain, Frobenius(), "cross") == [
        pytest.approx(math.hypot(own, moved), rel=CLOSE, abs=0)
    ]


def test_tilts():
    """e^osc (1 + 2Rα) with α = |Aᵀq + β| and osc = 2Rα."""
    domain, query = BALLS[0.1], X[0]
    alpha = float((query @ A + BETA).norm())
    stated = math.exp(0.2 * alpha) * (1 + 0.2 * alpha)
    tilt = r.tilt.Tilt(DOT, query)
    assert rungs(tilt, domain, Wasserstein(1.0), "gibbs") == [pytest.approx(stated, rel=CLOSE, abs=0)]


def test_tilts_of_other_scores():
    """The ball is made large enough to hold the query, for the slope; tokens stay where they are."""
    domain, query = BALLS[0.9], CENTER + torch.tensor([0.0, 3.0, 0.0], dtype=D)
    student = r.StudentT(nu=3.0, bandwidth=5.0)
    held = slopes.one(student, balls_of(Ball(3.0, CENTER), 3)[0])
    osc = min(float(held.osc), 2 * 0.9 * float(held.alpha))
    stated = math.exp(osc) * (1 + 2 * 0.9 * float(held.alpha))
    assert rungs(r.tilt.Tilt(student, query), domain, Wasserstein(1.0), "gibbs") == [
        pytest.approx(stated, rel=CLOSE, abs=0)
    ]


def test_a_tilt_by_a_query_among_the_tokens():
    """The range of the scores, where it is smaller than 2Rα."""
    slope, osc = student(0.9)
    assert osc < 2 * 0.9 * slope
    stated = math.exp(osc) * (1 + 2 * 0.9 * slope)
    assert rungs(r.tilt.Tilt(STUDENT, CENTER + 0.1), BALLS[0.9], Wasserstein(1.0), "gibbs") == [
        pytest.approx(stated, rel=CLOSE, abs=0)
    ]


@dataclass(frozen=True, eq=False, repr=False)
class Watched(r.Potential):
    """Scores by a distance; its rule writes down where it was told that tokens are."""

    seen: ClassVar[list] = []
    positional: ClassVar[bool] = False

    def features(self, x, y, x_marks, y_marks):
        return x, y

    def pair(self, queries, keys):
        return -torch.cdist(queries, keys)


@slopes.rule(Watched)
def _watched(potential, ball):
    Watched.seen.append(ball)
    return slopes.one(r.Laplace(), ball)


@pytest.mark.parametrize("kind", ["context", "queries", "tilt", "contraction", "ball", "slot"])
def test_rules_of_slopes_are_told_how_long_tokens_are(kind):
    """Every ball that a rule sees holds all tokens, and `reach` is the longest of them, or of the ball."""
    Watched.seen.clear()
    keys, domain, potential = X[:3] + 2 * CENTER, BALLS[0.9], Watched()
    map = r.Attention(potential, r.Linear(W_V))
    given = float(CENTER.norm()) + 0.9
    longest = float(keys.norm(dim=-1).max())
    if kind == "context":
        certify(ToContext(map, keys), domain, TokenMax())
    elif kind == "queries":
        certify(FromQueries(map, keys), domain, TokenMax())
    elif kind == "tilt":
        certify(r.tilt.Tilt(potential, keys[0]), domain, Wasserstein(1.0))
    elif kind == "contraction":
        contraction(map.softmatch(keys), domain)
    else:
        made = map if kind == "ball" else map.replace(normalizer=r.SinkSoftmax(0.0))
        certify(made, domain, TokenMax())
    assert Watched.seen
    for ball in Watched.seen:
        about = float(ball.center.norm()) + float(ball.radius)
        length = max(given, longest) if kind in ("context", "queries") else about
        length = given if kind in ("ball", "slot") else length
        assert float(ball.reach) == pytest.approx(length, rel=CLOSE, abs=0)
        assert float((CENTER - ball.center).norm()) + 0.9 <= float(ball.radius) * (1 + CLOSE)


@pytest.mark.parametrize(
    ("norm", "factor"), [(Frobenius(), math.sqrt(TOKENS)), (TokenSum(), TOKENS), (TokenMax(), 1)], ids=repr
)
def test_diameter(norm, factor):
    """2ρ, times √n in Frobenius and n in TokenSum norm: norm layers stay in a ball of √d."""
    layer = r.maps.Normalize(1e-5, torch.tensor([1.0, 2.0, 0.5], dtype=D))
    found = rungs(layer, Neighborhood(10 * X, 1e6, Frobenius()), norm, "diameter", deviation)
    assert found == [pytest.approx(2 * 2 * math.sqrt(3) * factor, rel=CLOSE, abs=0)]


def test_the_smallest_of_three_balls_near_a_sequence():
    """About zero, the mean and the middle of the box: the bounds of all three differ, the least is taken."""
    domain = SETS[-1]
    balls, w = balls_of(domain, 3), two(W_V)
    many = TOKENS * w

    cosine = r.Cosine(scale=1.5, eps=0.3, w_q=W_Q, w_k=W_K)
    stated, crowded = [], []
    for ball in balls:
        found = cosine_slopes(cosine, 1.0, ball)
        R, alpha, kappa = float(ball.radius), float(found.alpha), float(found.kappa)
        stated.append(w * (1 + R * (alpha + kappa)))
        crowded.append(w * (math.sqrt(crowd(float(found.osc))) * (1 + R * alpha) + R * kappa))
    assert_least(attention(cosine), domain, TokenMax(), "cosine", stated)
    assert_least(attention(cosine), domain, Frobenius(), "cosine", crowded)

    sparse = attention(DOT, normalizer=r.Sparsemax())
    held = list(facts(DOT, domain))
    assert_least(
        sparse,
        domain,
        TokenMax(),
        "row_normalizers",
        [w * (1 + TOKENS * R * (a + k)) for R, a, _, k, _ in held],
    )
    stated = [w * (math.sqrt(TOKENS) + R * a * TOKENS + TOKENS * R * k) for R, a, _, k, _ in held]
    assert_least(sparse, domain, Frobenius(), "row_normalizers", stated)

    potential = r.SoftCap(DOT, 3.0)
    found = [slopes.one(potential, ball) for ball in balls]
    value = w * float(balls[0].reach) + float(B_V.norm())
    stated = [many + TOKENS * value * 0.25 * (float(one.alpha) + float(one.reach)) for one in found]
    assert_least(attention(potential, normalizer=r.Sigmoid(0.0)), domain, TokenMax(), "sigmoid", stated)


def assert_least(map, domain, norm, name, stated):
    assert max(stated) > min(stated) * (1 + 1e-6)
    assert rungs(map, domain, norm, name) == [pytest.approx(min(stated), rel=CLOSE, abs=0)]


@pytest.mark.parametrize(("normalizer", "order"), SPARSE, ids=repr)
def test_sparse_laws_of_tokens_with_weights(normalizer, order):
    """T = (Σ_j c_j)^{α-1} and m' = max_j m_j c_j^{α-1}, c_j = n times the weight."""
    masses = torch.tensor([0.1, 0.4, 0.1, 0.15, 0.25], dtype=D)
    domain = Neighborhood(r.Measure(X, masses.log()), 0.2, TokenMax())
    counts = TOKENS * masses
    held, w = list(facts(DOT, domain)), two(W_V)
    pairs = counts[1:] + counts[:-1]
    for support, total, crowded, rows in (
        (r.Full(), TOKENS ** (order - 1), TOKENS * float(counts.max()) ** (order - 1), TOKENS),
        (r.Window(1, 0), float(pairs.max()) ** (order - 1), 2 * float(counts[:-1].max()) ** (order - 1), 2),
    ):
        map = attention(DOT, normalizer=normalizer, support=support)
        stated = min(w * (1 + total * R * (a + k)) for R, a, _, k, _ in held)
        assert rungs(map, domain, TokenMax(), "row_normalizers") == [pytest.approx(stated, rel=CLOSE, abs=0)]
        stated = min(
            w * (math.sqrt(rows) + R * a * math.sqrt(total * crowded) + total * R * k)
            for R, a, _, k, _ in held
        )
        assert rungs(map, domain, Frobenius(), "row_normalizers") == [pytest.approx(stated, rel=CLOSE, abs=0)]
