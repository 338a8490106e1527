"""Facts at one sequence: each is its formula, with errors that are large and where only rounding is left."""

import math

import pytest
import torch

import regard as r
from regard._upper import ELEMENTARY, exact, relative_error
from regard.domains import Neighborhood
from regard.proofs.point import Point, _bilinear, operator_norm, point_of
from regard.proofs.scores import FACTOR, Form
from regard.proofs.subject import subject_of
from regard.proofs.theorem import Refusal
from tests.theorems.exact import D, generator, normal

CLOSE = 1e-11


def close(value, rel=CLOSE):
    return pytest.approx(value, rel=rel, abs=0)


def near(potential, x, **more):
    head = subject_of(r.Attention(potential, **more)).separate[0]
    return point_of(head, Neighborhood(x, 0.0))


def gamma(roundings):
    return float(relative_error(roundings))


def told(tokens, scores, error, pull=None, unit=1.0, factor=None, off=0.0):
    pull = torch.ones_like(scores) if pull is None else pull
    return Point(tokens, scores, exact(error), exact(pull), exact(unit), factor, exact(off))


def two(matrix):
    return float(torch.linalg.matrix_norm(matrix, 2))


def spread(tokens, masses):
    """Rows √mass (r - mean)."""
    mean = masses @ tokens / masses.sum()
    return masses.sqrt()[:, None] * (tokens - mean)


G = generator(5)
TOKENS, SCORES, W = normal(G, 4, 3), normal(G, 4, 4), normal(G, 3, 2)
ERROR = torch.tensor([0.0, 0.05, 0.1, 0.4], dtype=D)
EQUAL = torch.tensor([[3.0, 4.0]] * 4, dtype=D)  # no spread: what is left is rounding
QUARTERS = torch.full((4, 4), 0.25, dtype=D)


def test_laws_grow_by_twice_the_error_of_their_scores():
    masked = SCORES.clone()
    masked[1, 2] = -math.inf
    found = told(TOKENS, masked, ERROR).laws().bound
    stated = (masked.softmax(-1) * (2 * ERROR).exp()[:, None]).clamp_max(1.0)
    assert torch.allclose(found, stated, rtol=1e-13, atol=0)
    assert found[1, 2] == 0
    assert bool((found >= stated * (1 - 1e-15)).all())
    # Two tokens that are exactly equal: what is above one half is the count of roundings.
    half = told(EQUAL[:2], torch.zeros(2, 2, dtype=D), torch.zeros(2, dtype=D)).laws()
    assert float(half.bound.max()) - 0.5 >= (2 + 2 * ELEMENTARY + 4) * 2.0**-54


def test_a_law_that_is_too_small_for_a_number_is_not_zero():
    scores = torch.tensor([[0.0, -1000.0]] * 2, dtype=D)
    found = told(TOKENS[:2], scores, torch.zeros(2, dtype=D)).laws().bound
    assert bool((found[:, 1] > 0).all())
    assert bool((found[:, 1] < 1e-250).all())


def test_deviations():
    """|√M (X - m) W|, and the rounding of it: γ(32) |W| max|r| √ΣM, which is all where tokens are equal."""
    masses = torch.tensor([0.1, 0.5, 0.3, 0.4], dtype=D)  # bounds of laws need not sum to one
    point = told(TOKENS, SCORES, ERROR)
    assert float(point.deviation(exact(masses), (W,))) == close(two(spread(TOKENS, masses) @ W))
    assert float(point.deviation(exact(masses), ())) == close(two(spread(TOKENS, masses)))
    equal, w = told(EQUAL, SCORES, ERROR), W[:2]
    left = float(equal.deviation(exact(4 * QUARTERS[0]), (w,)))
    assert left == close(gamma(32) * two(w) * 5.0 * 2.0, 1e-9)


def test_deviations_of_rows_share_the_norm_of_their_factors():
    """Kept by the factors, not by how many there are."""
    equal, first, second = told(EQUAL, SCORES, ERROR), W[:2], 3.0 * W[:2]
    for factors in ((first,), (second,), (first, second.mT)):
        product = torch.eye(2, dtype=D)
        for factor in factors:
            product = product @ factor
        found = float(equal.deviation(exact(QUARTERS[0]), factors))
        assert found == close(gamma(32) * two(product) * 5.0, 1e-9)


def test_products_of_slopes_and_deviations():
    """|√(P v²) (X - E x) W|, the mean being known up to e^{4 error} - 1 of the longest token."""
    pull = normal(G, 4, 4).abs()
    law = SCORES.softmax(-1)[2]
    for row in (0, 2, 3):
        found = float(told(TOKENS, SCORES, ERROR, pull).weighed(row, exact(law), (W,)))
        masses = law * pull[row].square()
        about = masses.sqrt()[:, None] * (TOKENS - law @ TOKENS)
        drift = two(W) * math.expm1(4 * float(ERROR[row])) * float(TOKENS.norm(dim=-1).max())
        stated = two(about @ W) + drift * math.sqrt(float(masses.sum()))
        assert found == close(stated)
    equal = told(EQUAL, SCORES, ERROR, 2 * torch.ones(4, 4, dtype=D))
    left = float(equal.weighed(0, exact(QUARTERS[0]), (W[:2],)))
    assert left == close((gamma(20 * 4 + 400) + gamma(128)) * two(W[:2]) * 5.0 * 2.0, 1e-6)
    law = torch.tensor([0.2, 0.2, 0.2, 0.2], dtype=D)  # a mean is divided by the mass
    left = float(equal.weighed(0, exact(law), (W[:2],)))
    assert left < 1e-11


def test_deviations_of_query_slopes():
    """unit |√M (X - m) F|, and what rounding changed in F times |√M (X - m)|_F."""
    masses = torch.tensor([0.1, 0.5, 0.3, 0.4], dtype=D)
    about, factor = spread(TOKENS, masses), normal(G, 3, 3)
    for unit, off, given in ((1.0, 0.0, factor), (2.5, 0.0, None), (1.5, 0.7, factor)):
        point = told(TOKENS, SCORES, ERROR, unit=unit, factor=given, off=off)
        shape = about if given is None else about @ given
        assert float(point.own(exact(masses))) == close(unit * two(shape) + off * float(about.norm()))
    left = float(told(EQUAL, SCORES, ERROR, unit=0.0, off=3.0).own(exact(QUARTERS[0])))
    assert left == close(3.0 * gamma(32) * 5.0, 1e-6)


def test_no_mass_has_no_spread():
    point = told(TOKENS, SCORES, ERROR)
    assert float(point.deviation(exact(torch.zeros(4, dtype=D)), (W,))) < 1e-100


def test_what_is_not_known_of_a_form_is_in_its_scores():
    """off_i = ε (|r_i| + |c|) + ε_β, pull = |Aᵀx + β| + off, and errors of scores are off max|r|."""
    a, beta, x = normal(G, 3, 3), normal(G, 3), normal(G, 4, 3) + 0.7
    form = Form(a, beta, normal(G, 3), exact(0.2), exact(0.3), exact(0.4))
    bias = normal(G, 4, 4)
    bias[0, 3] = -math.inf
    found = _bilinear(form, x, bias)
    center = x.mean(0)
    far = (x - center).norm(dim=-1)
    off = 0.2 * (far + center.norm()) + 0.3
    pull = (x @ a + beta).norm(dim=-1) + off
    assert torch.allclose(found.pull.bound, pull[:, None].expand(4, 4), rtol=1e-12, atol=0)
    assert torch.allclose(found.error.bound, off * far.max(), rtol=1e-12, atol=0)
    assert torch.allclose(found.scores, (x @ a + beta) @ (x - center).mT + bias, rtol=1e-12, atol=1e-12)
    assert (float(found.unit), float(found.off)) == (1.0, 0.2)
    assert found.factor is not None
    assert torch.equal(found.factor, a.mT)


def test_roundings_of_a_form():
    """γ(4d + 20) of |A|_F (|r_i| + |c|) + |β| in a slope; of that and of the slope in a score; γ(80) of the
    largest score and bias.
    """
    a, x = torch.diag(torch.tensor([3.0, 4.0], dtype=D)), torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=D)
    units, size, center = gamma(4 * 2 + 20), 5.0, torch.tensor([2.0, 3.0], dtype=D)
    far, reach = math.sqrt(2.0), math.sqrt(13.0)
    beta = -(x[0] @ a)  # the slope of the first token is exactly zero
    found = _bilinear(Form(a, beta, torch.zeros(2, dtype=D)), x, torch.zeros(2, 2, dtype=D))
    off = units * (size * (far + reach) + float(beta.norm()))
    assert float(found.pull.bound[0, 0]) == close(off, 1e-6)
    slopes = (x @ a + beta).norm(dim=-1)
    scores = ((x @ a + beta) @ (x - center).mT).abs().amax(-1)
    stated = (off + units * slopes) * far + gamma(80) * scores
    assert torch.allclose(found.error.bound, stated, rtol=1e-6, atol=0)
    bias = torch.tensor([[7.0, 1.0], [-math.inf, -2.0]], dtype=D)
    more = _bilinear(Form(a, beta, torch.zeros(2, dtype=D)), x, bias).error.bound - found.error.bound
    # The second row's largest |score| stands at both keys, so that its bias of -2 is added whole.
    assert torch.allclose(more, gamma(80) * torch.tensor([7.0, 2.0], dtype=D), rtol=1e-6, atol=0)


def test_facts_of_gaussian_scores():
    """s = -f|r_i - r_j|²/(2b²), pull = f|r_i - r_j|/b², and γ of the farthest pair."""
    x, width, factor = normal(G, 4, 3), 0.6, 1.75
    found = near(r.Gaussian(bandwidth=width), x, normalizer=r.Softmax(temperature=1 / factor))
    apart = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    scores = -0.5 * factor / width**2 * apart.square()
    assert torch.allclose(found.scores, scores, rtol=1e-13, atol=0)
    assert torch.allclose(found.pull.bound, factor / width**2 * apart, rtol=1e-13, atol=1e-280)
    assert float(found.unit) == close(factor / width**2)
    units = gamma(2 * 3 + FACTOR + 2 + 16) + gamma(80)
    assert torch.allclose(found.error.bound, units * scores.abs().amax(-1), rtol=1e-6, atol=0)
    assert found.factor is None
    assert float(found.off) == 0
    assert torch.allclose(found.tokens, x - x.mean(0), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "potential",
    [
        r.Gaussian(b_q=torch.ones(3, dtype=D), bandwidth=1.0),
        r.Gaussian(w_q=torch.eye(3, dtype=D), bandwidth=1.0),
        r.Laplace(),
        -1.0 * r.Gaussian(bandwidth=1.0),
    ],
)
def test_other_scores_have_no_facts(potential):
    with pytest.raises(Refusal, match="at a point"):
        near(potential, normal(G, 4, 3))


def test_counts_of_gaussian_facts():
    """Roundings of 1/b² and of a distance."""
    found = near(r.Gaussian(bandwidth=1.0), normal(G, 4, 3))
    assert found.unit.roundings >= FACTOR + 2
    assert found.pull.roundings >= FACTOR + 2 + 3 + 4


def test_the_norm_of_nonnegative_matrices():
    weights = SCORES.softmax(-1)
    assert float(operator_norm(exact(weights))) == close(two(weights))
