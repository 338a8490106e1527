"""certify and deviation as a user meets them: ladder, tree, printing, JSON, refusals with remedies,
bad arguments, declarations.
"""

import json
import math

import pytest
import torch

import regard as r
from regard.certificate import Certificate
from regard.domains import Ball, Neighborhood, Radii, Whole
from regard.maps import Heads, Residual
from regard.norms import Frobenius, TokenMax, TokenSum, Wasserstein
from regard.proofs import THEOREMS, certify, deviation
from tests.theorems.exact import (
    D,
    bilinear_attention,
    frobenius_norm,
    generator,
    in_ball,
    normal,
    token_max_norm,
    worked,
)


def worked_attention():
    x, a, w = worked()
    return r.Attention(r.Bilinear(a), r.Linear(w)), x


def test_the_smallest_rung_wins():
    attention, x = worked_attention()
    found = certify(attention, Neighborhood(x, 0.1), Frobenius())
    assert len(found.others) >= 2
    assert all(found.value <= other.value for other in found.others)
    lines = found.ladder().splitlines()
    values = [float(line.split()[0]) for line in lines if not line.strip().startswith("–")]
    assert values == sorted(values)
    assert len(lines) == 1 + len(found.others) + len(found.refused)


def test_trees_and_hypotheses():
    attention, x = worked_attention()
    found = certify(Residual(attention), Ball(1.3, tokens=4), TokenMax())
    assert found.value == pytest.approx(
        1 + certify(attention, Ball(1.3, tokens=4), TokenMax()).value, rel=1e-12
    )
    tree = found.tree()
    assert "by residual connection" in tree
    assert "checked: softmax rows" in tree
    assert tree.count("≤") == 1 + len(found.parts)
    local = certify(attention, Neighborhood(x, 0.1), Frobenius())
    assert any(
        not hypothesis.checked and "float64" in hypothesis.statement for hypothesis in local.hypotheses
    )
    assert "assumed: float64: exp and log" in str(local)


def test_what_is_printed_is_a_bound_too():
    for value in (1.000001, 2 / 3, 9.99995, 123456.7, 1.23456e-9, 1.0, 99999.99, 7e300, 5e-320):
        text = str(Certificate(value, Ball(1.0), Frobenius(), "a theorem")).split()[2]
        assert float(text) >= value
        assert float(text) <= value * 1.0002 or value < 1e-300
    assert "constant ≤ ∞" in str(Certificate(math.inf, Ball(1.0), Frobenius(), "no theorem"))


def test_json_round_trip():
    attention, x = worked_attention()
    found = [
        certify(attention, Ball(1.3, torch.ones(3, dtype=D), 4), Frobenius()),
        certify(attention, Whole(), Wasserstein(math.inf)),
        certify(attention, Neighborhood(x, 0.1, TokenMax()), TokenMax()),
        deviation(attention, Radii(x, torch.tensor([0.1, 0.0, 0.0, 0.0], dtype=D)), Frobenius()),
    ]
    for certificate in found:
        text = certificate.to_json()
        json.loads(text)
        back = Certificate.from_json(text)
        assert back.to_json() == text
        assert (back.value, str(back), back.tree(), back.ladder()) == (
            certificate.value, str(certificate), certificate.tree(), certificate.ladder(),
        )  # fmt: skip


def test_json_of_weights():
    """Weights of zero are -∞ as logarithms, which JSON has no number for; reading back changes nothing."""
    attention, x = worked_attention()
    weighted = r.Measure(x, torch.tensor([0.0, 1.0, 2.0, -math.inf], dtype=D))
    certificate = deviation(attention, Neighborhood(weighted, 0.1), Frobenius())
    text = certificate.to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    back = Certificate.from_json(text).domain.measure
    assert torch.allclose(back.log_weights, weighted.log_weights, rtol=0, atol=1e-14)


def test_infinity_comes_with_reasons_and_three_remedies():
    attention, _ = worked_attention()
    found = certify(attention, Whole(tokens=4), Frobenius())
    assert found.value == math.inf
    text = str(found)
    for remedy in ("Ball(radius, tokens=n)", "Compose((Normalize(), attention))", "Gaussian()"):
        assert remedy in text


@pytest.mark.parametrize(
    ("domain", "norm", "argument", "remedy"),
    [
        (1.0, Frobenius(), "domain", "Ball"),
        (Ball, Frobenius(), "domain", "Ball"),
        (Ball(1.0), "fro", "norm", "Frobenius"),
        (Ball(1.0), Frobenius, "norm", "Frobenius"),
        (Ball(1.0), 2, "norm", "Wasserstein"),
    ],
)
def test_bad_arguments(domain, norm, argument, remedy):
    with pytest.raises(r.errors.ArgumentError, match=remedy) as caught:
        certify(r.Attention(r.Dot()), domain, norm)
    assert str(caught.value).startswith(argument)


def test_deviations_need_a_sequence():
    with pytest.raises(r.errors.ArgumentError, match="Neighborhood"):
        deviation(r.Attention(r.Dot()), Ball(1.0), Frobenius())


def test_float32_declarations_are_certified_in_float64():
    g = generator(1)
    w_q, w_k, w_v = (normal(g, 3, 3) for _ in range(3))
    single = r.Attention(r.Dot(w_q.float(), w_k.float()), r.Linear(w_v.float()))
    double = r.Attention(r.Dot(w_q.float().double(), w_k.float().double()), r.Linear(w_v.float().double()))
    for norm in (Frobenius(), TokenMax(), TokenSum(), Wasserstein(2.0)):
        domain = Ball(1.0, tokens=3)
        assert certify(single, domain, norm).value == certify(double, domain, norm).value
    x = normal(g, 3, 3).float()
    near = [
        deviation(a, Neighborhood(p, 0.1), Frobenius()).value for a, p in ((single, x), (double, x.double()))
    ]
    assert near[0] == pytest.approx(near[1], rel=1e-12)


@pytest.mark.parametrize("rotary", [False, True])
def test_biases_of_width_one_act_on_every_coordinate(rotary):
    g = generator(2)
    w_q, w_k = normal(g, 2, 4), normal(g, 2, 4)

    def declared(b):
        dot = r.Dot(w_q, w_k, b_q=b, b_k=b)
        return r.Attention(r.Rotary(dot) if rotary else dot)

    one, full = declared(torch.tensor([0.7], dtype=D)), declared(torch.full((4,), 0.7, dtype=D))
    x = in_ball(g, 4, 2, 1.0)
    for norm in (Frobenius(), TokenMax()):
        assert certify(one, Ball(1.0, tokens=4), norm).value == pytest.approx(
            certify(full, Ball(1.0, tokens=4), norm).value, rel=1e-12
        )
        near = [certify(a, Neighborhood(x, 0.1), norm).value for a in (one, full)]
        assert near[0] == pytest.approx(near[1], rel=1e-9)
    assert frobenius_norm(one, x) <= certify(one, Ball(1.0, tokens=4), Frobenius()).value


def test_temperatures_scale_scores():
    g = generator(3)
    a, w = normal(g, 2, 2), normal(g, 2, 2)
    cold = r.Attention(r.Bilinear(a), r.Linear(w), r.Softmax(0.25))
    plain = r.Attention(r.Bilinear(4 * a), r.Linear(w))
    assert certify(cold, Ball(1.0), TokenMax()).value == pytest.approx(
        certify(plain, Ball(1.0), TokenMax()).value, rel=1e-9
    )


def test_head_counts_that_do_not_divide():
    g = generator(4)
    attention = r.Attention(r.Dot(normal(g, 4, 2, 2), normal(g, 3, 2, 2)), r.Linear(normal(g, 3, 2, 2)))
    found = certify(attention, Ball(1.0, tokens=3), TokenMax())
    assert found.value == math.inf
    assert "do not divide each other" in " ".join(found.refused)


def test_moments_and_batches_have_no_theorem():
    found = certify(
        r.Attention(r.Dot(), moment=r.SecondMoment()), Ball(1.0, torch.zeros(2, dtype=D)), TokenMax()
    )
    assert "bounds are for Mean()" in " ".join(found.refused)
    batched = r.Attention(r.Dot(normal(generator(5), 2, 3, 2, 2), normal(generator(6), 2, 3, 2, 2)))
    assert "bounds are for one sequence with heads" in " ".join(
        certify(batched, Ball(1.0), TokenMax()).refused
    )


def test_heads_without_values_of_their_own():
    g = generator(7)
    attention = r.Attention(r.Dot(scale=torch.tensor([0.5, 2.0], dtype=D)))
    mixed, x = Heads(attention, normal(g, 2, 3, 3)), in_ball(g, 4, 3, 1.0)
    assert token_max_norm(mixed, x) <= certify(mixed, Ball(1.0, torch.zeros(3, dtype=D), 4), TokenMax()).value


def test_every_bound_of_the_ladder_names_its_theorem():
    g = generator(8)
    found = certify(bilinear_attention(g, 2, 2), Neighborhood(normal(g, 3, 2), 0.1), Frobenius())
    titles = [theorem.title for theorem in THEOREMS.values()]
    assert all(any(rung.theorem.startswith(title) for title in titles) for rung in (found, *found.others))
    assert all(": " in why for why in found.refused)
