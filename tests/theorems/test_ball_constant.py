"""The constant near a given input: exact at radius zero, above every point of the neighborhood,
whatever the sizes.
"""

import pytest
import torch

import regard as r
from regard.domains import Neighborhood, Radii
from regard.maps import Heads, Residual
from regard.norms import Frobenius, TokenMax
from regard.proofs import certify, deviation
from regard.proofs.near import ball
from regard.proofs.theorems.ball_constant import THEOREM
from regard.proofs.theorems.ball_deviation import THEOREM as MOVES
from tests.theorems.exact import (
    SUPPORTS,
    D,
    bilinear_attention,
    frobenius_norm,
    generator,
    normal,
    token_max_norm,
    worked,
)

EXACT = {Frobenius: frobenius_norm, TokenMax: token_max_norm}


def rung(map, domain, norm):
    found = certify(map, domain, norm)
    (value,) = [c.value for c in (found, *found.others) if c.theorem.startswith(THEOREM.title)]
    return value


def near(g, x, radius, norm):
    step = normal(g, *x.shape)
    length = step.norm() if isinstance(norm, Frobenius) else step.norm(dim=-1, keepdim=True)
    return x + radius * (1 - 1e-12) * step / length


def test_worked_example_is_exact_at_the_point():
    x, a, w = worked()
    found = rung(r.Attention(r.Bilinear(a), r.Linear(w)), Neighborhood(x, 0.0), Frobenius())
    assert found >= 2.8106266806294307 * (1 - 1e-14)
    assert found == pytest.approx(2.8106266806294307, rel=1e-9)


@pytest.mark.parametrize("norm", [Frobenius(), TokenMax()])
@pytest.mark.parametrize(("seed", "support"), list(enumerate(SUPPORTS)), ids=repr)
def test_every_point_of_the_neighborhood_stays_below(seed, support, norm):
    g = generator(seed)
    attention, x = bilinear_attention(g, 2, 2 + seed, support), normal(g, 4, 2)
    for radius in (0.0, 1e-3, 0.1, 1.0, 10.0):
        domain = Neighborhood(x, radius, norm)
        bound = rung(attention, domain, norm)
        for _ in range(4):
            assert EXACT[type(norm)](attention, near(g, x, radius, norm)) <= bound * (1 + 1e-12)


@pytest.mark.parametrize("e", [1, 2, 3])
@pytest.mark.parametrize("n", [2, 6])
def test_token_max_at_a_point_is_not_below_the_norm(e, n):
    """With one output a row's norm is exactly Σ_j |J_ij|:
    shares that add up to more than one would certify less than that.
    """
    for seed in range(8):
        g = generator(100 * n + 10 * e + seed)
        size = 10.0 ** -(seed % 4)
        attention = r.Attention(r.Bilinear(normal(g, 3, 3)) + r.Alibi(0.5), r.Linear(normal(g, 3, e)))
        x = normal(g, n, 3, scale=size)
        assert token_max_norm(attention, x) <= rung(attention, Neighborhood(x, 0.0), TokenMax()) * (1 + 1e-12)


@pytest.mark.parametrize(
    "attention",
    [
        r.Attention(r.Bilinear(torch.zeros(2, 2, dtype=D)), r.Linear(torch.ones(2, 3, dtype=D))),
        r.Attention(r.Alibi(0.3)),
        r.Attention(
            r.Bilinear(torch.outer(torch.tensor([1.0, 2.0], dtype=D), torch.tensor([1.0, 0.0], dtype=D)))
        ),
        r.Attention(r.Bilinear(torch.eye(2, dtype=D)), r.Linear(torch.zeros(2, 3, dtype=D))),
        r.Attention(
            r.Rotary(r.Dot(b_q=torch.ones(2, dtype=D), b_k=torch.ones(1, dtype=D))) + r.Alibi(0.1),
            support=r.Causal(),
        ),
    ],
    ids=["zero scores", "positions alone", "rank one", "zero values", "rotary"],
)
@pytest.mark.parametrize("norm", [Frobenius(), TokenMax()])
def test_degenerate_declarations(attention, norm):
    g = generator(3)
    for n, size in ((1, 1.0), (2, 1e-6), (3, 1.0), (3, 1e4)):
        x = normal(g, n, 2, scale=size)
        for points in (x, x[:1].expand(n, 2).contiguous()):
            for radius in (0.0, 0.1 * size):
                bound = rung(attention, Neighborhood(points, radius, norm), norm)
                assert (
                    EXACT[type(norm)](attention, near(g, points, radius, norm))
                    <= bound * (1 + (1e-8 if size < 1e4 else 1e-7)) + 1e-300
                )  # the oracle loses digits


@pytest.mark.parametrize("norm", [Frobenius(), TokenMax()])
@pytest.mark.parametrize("radius", [1e10, 1e100, 1e200])
@pytest.mark.parametrize("support", [r.Full(), r.Causal()], ids=repr)
def test_huge_radii_never_crash(norm, radius, support):
    x = normal(generator(4), 3, 2)[[0, 0, 1]]
    found = certify(
        r.Attention(r.Bilinear(torch.eye(2, dtype=D)), support=support), Neighborhood(x, radius, norm), norm
    )
    assert found.value >= 1


def test_rows_of_one_weight_come_back():
    """Scores ±1000: a weight underflows at the center, and a ball of radius 1.5 brings it back."""
    attention = r.Attention(r.Bilinear(torch.tensor([[1000.0]], dtype=D)))
    x = torch.tensor([[1.0], [-1.0]], dtype=D)
    points = [torch.tensor([[t], [-1.0]], dtype=D) for t in torch.linspace(-0.5, 1.0, 2001).tolist()]
    for norm in (Frobenius(), TokenMax()):
        seen = max(EXACT[type(norm)](attention, point) for point in points[:300])
        assert rung(attention, Neighborhood(x, 1.5, norm), norm) >= seen


def test_residuals_and_mixed_heads():
    g = generator(6)
    attention = r.Attention(r.Dot(normal(g, 2, 3, 2), normal(g, 2, 3, 2)), r.Linear(normal(g, 2, 3, 2)))
    mixed, x = Heads(attention, normal(g, 2, 2, 3)), normal(g, 4, 3)
    for map in (mixed, Residual(mixed)):
        assert certify(map, Neighborhood(x, 0.0), Frobenius()).value == pytest.approx(
            frobenius_norm(map, x), rel=1e-6
        )
        bound = certify(map, Neighborhood(x, 0.05), Frobenius()).value
        assert all(frobenius_norm(map, near(g, x, 0.05, Frobenius())) <= bound for _ in range(8))


def test_tightness_near_the_center():
    g = generator(7)
    attention, x = bilinear_attention(g, 3, 3, scale=0.5), normal(g, 5, 3)
    seen = frobenius_norm(attention, x)
    assert seen > 0.999 * rung(attention, Neighborhood(x, 1e-5), Frobenius())
    assert seen > 0.5 * rung(attention, Neighborhood(x, 1e-2), Frobenius())


def test_written_weights_are_seen():
    """Facts are kept between questions; writing to a tensor in any way that torch allows changes the
    answer.
    """
    x, a = normal(generator(8), 3, 2), torch.eye(2, dtype=D)
    attention, domain = r.Attention(r.Bilinear(a)), Neighborhood(x, 0.1)
    before = certify(attention, domain, Frobenius()).value
    a.mul_(3.0)
    after = certify(attention, domain, Frobenius()).value
    assert after > before
    assert (
        after == certify(r.Attention(r.Bilinear(a.clone())), Neighborhood(x.clone(), 0.1), Frobenius()).value
    )
    a.data.mul_(3.0)
    assert (
        certify(attention, domain, Frobenius()).value
        == certify(r.Attention(r.Bilinear(a.clone())), domain, Frobenius()).value
    )


def test_what_is_not_bilinear_is_refused():
    for potential, name in ((r.Gaussian(bandwidth=1.0), "Gaussian"), (r.SoftCap(r.Dot(), 2.0), "SoftCap")):
        found = certify(r.Attention(potential), Neighborhood(torch.ones(2, 2, dtype=D), 0.1), Frobenius())
        assert any(
            why.startswith(THEOREM.title) and f"scores of {name} are not bilinear" in why
            for why in found.refused
        )


def test_radii_are_held_by_a_ball():
    x, radii = normal(generator(9), 3, 2), torch.tensor([0.3, 0.0, 0.4], dtype=D)
    attention = r.Attention(r.Dot())
    assert rung(attention, Radii(x, radii), Frobenius()) == pytest.approx(
        rung(attention, Neighborhood(x, 0.5), Frobenius()), rel=1e-9
    )


@pytest.mark.parametrize("ask", [certify, deviation])
def test_a_norm_that_is_drawn_says_so(ask, monkeypatch):
    """Large Jacobians are measured from random starts: the bound holds with a probability, and says so."""
    said = "the random start of the norm at the center"
    map, domain = bilinear_attention(generator(0), 3, 2), Neighborhood(normal(generator(1), 4, 3), 0.01)
    for dense, certain in ((10**6, True), (1, False)):
        monkeypatch.setattr(ball, "DENSE", dense)
        found = ask(map, domain, Frobenius())
        (one,) = [
            c for c in (found, *found.others) if c.theorem.split(":")[0] in (THEOREM.title, MOVES.title)
        ]
        assert (one.probability == 1) == certain
        assert any(said in str(known) for known in one.hypotheses) != certain
