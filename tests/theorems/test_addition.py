"""Sums of maps."""

import math
from fractions import Fraction

import pytest
import torch

from regard._upper import relative_error
from regard.attention import Attention
from regard.derive import linearize
from regard.domains import Ball, Neighborhood, Radii, Whole, one_token
from regard.errors import ArgumentError
from regard.lookups import Linear
from regard.maps import (
    Added,
    Affine,
    Compose,
    FromQueries,
    Gated,
    Heads,
    Joint,
    Normalize,
    Residual,
    Silu,
    Tanh,
    ToContext,
    feed_forward,
)
from regard.measure import Measure
from regard.norms import EntryMax, Frobenius, TokenMax, TokenSum, Wasserstein
from regard.potentials import Dot
from regard.proofs import certify, deviation, falsify, image
from regard.proofs.falsification import falsify_deviation
from regard.proofs.locating import locate
from regard.proofs.theorem import Refusal
from regard.proofs.theorems.addition import _after_norms, stack
from regard.supports import Causal

D = torch.float64
NORMS = [TokenMax(), Frobenius(), TokenSum()]


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def _attention(seed: int = 0, values: int = 3) -> Attention:
    potential = Dot(_t(3, 2, seed=seed), _t(3, 2, seed=seed + 1), b_q=_t(2, seed=seed + 2))
    return Attention(potential, Linear(_t(3, values, seed=seed + 3), _t(values, seed=seed + 4)))


def _decoder(seed: int = 0) -> Added:
    """Attention to a context as layers have it: a sum over heads."""
    context = _t(5, 3, seed=seed + 30)
    parts = (
        Compose((ToContext(_attention(seed + 10 * h, 2), context), Affine(_t(2, 3, seed=seed + 40 + h))))
        for h in range(3)
    )
    return Added(tuple(parts))


def _shaped(seed: int = 0) -> Added:
    """Attention and an affine map, less uniform attention."""
    uniform = Attention(
        Dot(torch.zeros(3, 2, dtype=D), torch.zeros(3, 2, dtype=D)), Linear(-_t(3, 3, seed=seed + 3))
    )
    return Added((_attention(seed), Affine(0.5 * torch.eye(3, dtype=D)), uniform))


SUMS = {
    "heads": Added((_attention(), _attention(10))),
    "context": _decoder(),
    "shaped": _shaped(),
    "residual": Residual(_shaped()),
    "residual context": Residual(_decoder()),
    "behind a norm layer": Compose(
        (Normalize(0.1, _t(3, seed=7)), Added((_attention(), _attention(10), Affine(_t(3, 3, seed=8)))))
    ),
    "block": Compose(
        (
            Residual(Compose((Normalize(0.1), _decoder()))),
            Residual(feed_forward(Tanh(), _t(3, 4), _t(4, 3, seed=1))),
        )
    ),
}


def test_worked_example():
    """W_1 + W_2 has the norm of the sum, 1, where the norms add to 3;
    with the residual connection it is 0.
    """
    eye = torch.eye(3, dtype=D)
    map = Added((Affine(eye), Affine(-2 * eye, _t(3))))
    for norm in (*NORMS, EntryMax(), Wasserstein(1.0), Wasserstein(3.0)):
        assert certify(map, Whole(), norm).value == pytest.approx(1.0, rel=1e-11)
        assert certify(Residual(map), Whole(), norm).value < 1e-11
    assert falsify(map, Whole(2), TokenMax(), width=3, steps=3).value == pytest.approx(1.0)
    x = _t(2, 3)
    assert deviation(map, one_token(x, 1, 0.5), Frobenius()).value == pytest.approx(0.5, rel=1e-9)
    assert falsify_deviation(map, one_token(x, 1, 0.5), Frobenius()).value == pytest.approx(0.5)


def test_value_is_the_sum():
    x = _t(4, 3, seed=9)
    map = _shaped()
    assert torch.allclose(map(x), map.maps[0](x) + 0.5 * x - (x @ _t(3, 3, seed=3)).mean(0), atol=1e-14)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", SUMS)
def test_never_exceeded(name, norm):
    map, domain = SUMS[name], Ball(0.5, 0.5 * _t(3, seed=59), tokens=4)
    bound = certify(map, domain, norm).value
    found = falsify(map, domain, norm, steps=4, restarts=1).value
    assert 1e-4 * bound <= found <= bound


@pytest.mark.parametrize("name", [name for name in SUMS if name != "block"])
def test_never_exceeded_nearby(name):
    map, x = SUMS[name], _t(4, 3, seed=9)
    for radius, share in ((1e-3, 0.2), (0.02, 0.02)):
        for domain, norm in (
            (Neighborhood(x, radius, TokenMax()), TokenMax()),
            (one_token(x, 0, radius), Frobenius()),
        ):
            bound = deviation(map, domain, norm).value
            assert share * bound <= falsify_deviation(map, domain, norm, steps=5, restarts=1).value <= bound
            if radius == 0.02:
                found = falsify(map, domain, norm, steps=2, restarts=1).value
                assert found <= certify(map, domain, norm).value


@pytest.mark.parametrize("name", SUMS)
def test_image_holds_the_values(name):
    map, x = SUMS[name], _t(4, 3, seed=9)
    ball = image(map, Ball(0.5, x[0], tokens=4))
    near = image(map, Radii(x, torch.tensor([0.1, 0.0, 0.02, 0.0], dtype=D)))
    assert isinstance(near, Radii)
    for seed in range(20):
        step = torch.nn.functional.normalize(_t(4, 3, seed=seed), dim=-1)
        assert float((map(x[:1] + 0.5 * step) - ball.center).norm(dim=-1).max()) <= ball.radius
        moved = map(x + near.radii.new_tensor([0.1, 0.0, 0.02, 0.0]).unsqueeze(-1) * step)
        assert bool(((moved - near.points).norm(dim=-1) <= near.radii).all())


def test_queries_that_stay_give_what_they_gave():
    """Attention to a context acts on each query alone, and so does a sum of such."""
    near = image(_decoder(), one_token(_t(4, 3, seed=9), 2, 0.1))
    assert float(near.radii[2]) > 1e-3
    assert float(near.radii[[0, 1, 3]].max()) < 1e-9


def test_located_within_its_margin():
    """Large parts that cancel: the margin is that of the parts."""
    x = _t(4, 3, seed=9)
    map = Added((Affine(1e8 * _t(3, 3)), Affine(-1e8 * _t(3, 3)), _attention()))
    value, margin = locate.one(map, Measure(x))
    assert float((value.points - _attention()(x)).norm(dim=-1).max()) <= float(margin) <= 1e-5


def test_no_worse_than_its_parts():
    x, norm = _t(4, 3, seed=9), TokenMax()
    layer = Normalize(0.1, 0.1 + _t(3, seed=7).abs())
    parts = (_attention(), _attention(10), Affine(_t(3, 3, seed=8)))
    for domain in (Ball(0.5, tokens=4), Neighborhood(x, 0.05, norm)):
        total = sum(certify(part, domain, norm).value for part in parts)
        assert certify(Added(parts), domain, norm).value <= total * (1 + 1e-9)
        behind = sum(certify(Compose((layer, part)), domain, norm).value for part in parts)
        assert certify(Compose((layer, Added(parts))), domain, norm).value <= behind * (1 + 1e-9)
    total = sum(deviation(part, domain, norm).value for part in parts)
    assert deviation(Added(parts), domain, norm).value <= total * (1 + 1e-9)


def test_heads_are_stacked():
    """Four heads that write into different directions: √4 times one, not four times."""
    eye = torch.eye(4, dtype=D)
    head = Attention(Dot(_t(4, 2), _t(4, 2, seed=1)), Linear(_t(4, 1, seed=2)))
    map = Added(tuple(Compose((head, Affine(eye[k : k + 1]))) for k in range(4)))
    one = certify(head, Ball(1.0, tokens=5), Frobenius()).value
    assert certify(map, Ball(1.0, tokens=5), Frobenius()).value == pytest.approx(2 * one, rel=1e-6)
    assert "heads as one attention" in certify(map, Ball(1.0, tokens=5), Frobenius()).theorem
    masked = Added((head, head.replace(support=Causal())))  # another support does not stack
    assert certify(masked, Ball(1.0, tokens=5), TokenMax()).value == pytest.approx(
        sum(certify(part, Ball(1.0, tokens=5), TokenMax()).value for part in masked.maps)
    )


def test_derivatives_add_with_their_directions():
    """f - f has the derivative zero, and what is left near an input is of second order."""
    x, attention = _t(4, 3, seed=9), _attention()
    map = Added((attention, attention.replace(lookup=Linear(-_t(3, 3, seed=3)))))
    alone = deviation(attention, one_token(x, 0, 1e-4), Frobenius()).value
    assert deviation(map, one_token(x, 0, 1e-4), Frobenius()).value < 0.01 * alone


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_measures_need_a_coupling(p):
    norm, map, domain = Wasserstein(p), _shaped(), Ball(0.5, tokens=4)
    bound = certify(map, domain, norm)
    assert falsify(map, domain, norm, steps=8, restarts=1, width=3).value <= bound.value < math.inf
    assert "coupling by coupling" in str(bound)
    assert "matched tokens" in deviation(map, one_token(_t(4, 3), 0, 0.1), norm).theorem


@pytest.mark.parametrize(
    "part",
    [
        FromQueries(_attention(), _t(2, 3)),
        Joint(_attention(), 2),
        Compose((Affine(_t(3, 3)), Joint(_attention(), 2))),
    ],
)
def test_other_numbers_of_tokens_are_refused(part):
    map, x = Added((_attention(), part)), _t(4, 3)
    for found in (
        certify(map, Ball(0.5, tokens=4), Frobenius()),
        deviation(map, one_token(x, 0, 0.1), Frobenius()),
    ):
        assert math.isinf(found.value)
        assert "a different number of tokens" in str(found)
    with pytest.raises(ArgumentError, match="values of one shape"):
        map(x)


def test_heads_that_are_not_mixed_are_refused():
    two = Attention(Dot(_t(2, 3, 2), _t(2, 3, 2, seed=1)), Linear(_t(2, 3, 3)))
    found = certify(Residual(Added((two, two))), Ball(0.5, tokens=4), Frobenius())
    assert math.isinf(found.value)
    assert "mix them with Heads" in str(found)


def test_reason_of_a_part_is_kept():
    refused = certify(_shaped(), Whole(), TokenMax())
    assert math.isinf(refused.value)
    assert "a part has no finite bound" in str(refused)


@pytest.mark.parametrize(
    ("maps", "remedy"),
    [((), "one or more"), ([Affine(_t(3, 3))], "give a tuple"), ((torch.nn.ReLU(),), "give maps")],
)
def test_bad_parts(maps, remedy):
    with pytest.raises(ArgumentError, match=remedy):
        Added(maps)


def test_widths_must_agree():
    map = Added((Affine(_t(3, 3)), Affine(_t(3, 1))))
    with pytest.raises(ArgumentError, match=r"take \[4, 3\] to \[4, 3\] and to \[4, 1\]"):
        map(_t(4, 3))
    with pytest.raises(
        ArgumentError, match="give values of widths 1 and 3; a sum needs maps that give values of one width"
    ):
        certify(map, Whole(), TokenMax())


def test_linearize_is_the_sum_of_jacobians():
    x, map = _t(4, 3, seed=9), SUMS["shaped"]
    found, tangent = linearize(map, x), _t(4, 3, seed=1)
    assert torch.allclose(found.mv(tangent), torch.func.jvp(map, (x,), (tangent,))[1], atol=1e-12)
    assert torch.allclose(
        found.mv(tangent), sum(linearize(part, x).mv(tangent) for part in map.maps), atol=1e-12
    )
    exact = torch.func.jacrev(map)(x)
    assert torch.allclose(found.block(1, 2), exact[1, :, 2], atol=1e-12)


def test_silu_is_that_of_torch():
    x = _t(100, seed=3) * 10
    assert torch.equal(Silu()(x), torch.nn.functional.silu(x))
    assert torch.allclose(Silu(2.0)(x), torch.nn.functional.silu(2 * x) / 2)


def test_maps_after_a_sum_see_its_bias():
    """Heads as one attention are the sum up to a constant,
    and what comes after is steep where that constant leads.
    """
    eye = torch.eye(2, dtype=D)
    head, bias = Attention(Dot(eye, eye), Linear(eye)), torch.tensor([50.0, 0.0], dtype=D)
    behind = (
        Compose((head, Affine(eye, bias))),
        Heads(head.replace(lookup=Linear(eye[None])), eye[None], bias),
    )
    x = torch.tensor([[0.1, 0.0], [0.1, 0.0]], dtype=D)
    for part in behind:
        map = Compose((Normalize(1.0, centered=False), Added((part, head)), Gated(Silu(), eye, eye, eye)))
        seen = float(linearize(map, x).norm())
        assert seen > 190
        for rung in (
            found := certify(map, Ball(1.0, torch.zeros(2, dtype=D), tokens=2), Frobenius()),
            *found.others,
        ):
            assert rung.value >= seen


def test_heads_hidden_in_a_composition_are_refused():
    """Two heads after which an affine map stands are two sequences, not their sum."""
    value = _t(3, 3)
    heads = Attention(Dot(_t(2, 3, 2), _t(2, 3, 2, seed=1)), Linear(torch.stack([value, -value])))
    map = Added((Compose((heads, Affine(torch.eye(3, dtype=D)))),) * 2)
    for domain in (
        Ball(1.0, tokens=3),
        Neighborhood(_t(3, 3), 1e-3, TokenMax()),
        one_token(_t(3, 3), 0, 1e-3),
    ):
        assert math.isinf(certify(map, domain, Frobenius()).value)


def test_what_cancels_leaves_its_rounding():
    """x - QPx with Q the rounded inverse of P: what is left is rounding, and no less is claimed."""
    p = _t(3, 3)
    map = Residual(Compose((Affine(p), Affine(-torch.linalg.inv(p)))))
    found = deviation(map, Neighborhood(torch.zeros(1, 3, dtype=D), 1.0, TokenMax()), TokenMax())
    rows = (
        [[Fraction(value) for value in row] for row in p.tolist()],
        [[Fraction(value) for value in row] for row in torch.linalg.inv(p).tolist()],
    )
    exact = torch.tensor(
        [
            [float((i == j) - sum(rows[0][i][k] * rows[1][k][j] for k in range(3))) for j in range(3)]
            for i in range(3)
        ],
        dtype=D,
    )
    assert all(rung.value >= float(torch.linalg.matrix_norm(exact, 2)) for rung in (found, *found.others))
    assert found.value < 1e-9


@pytest.mark.parametrize("far", [0.0, 1e4, 1e6, 1e8])
def test_a_context_far_away(far):
    """Only differences of keys count: the derivative is that of the context moved to the origin,
    where float64 has its digits.
    """
    x, near = _t(2, 3, seed=1), torch.round(_t(5, 3, seed=2) * 1024) / 1024  # moved without rounding
    shift = torch.round(far * _t(3, seed=3))
    head = Attention(Dot(_t(3, 2), _t(3, 2, seed=4)), Linear(_t(3, 3, seed=5)))
    exact = [
        torch.linalg.matrix_norm(torch.func.jacrev(lambda q: head(q, near))(x)[i, :, i], 2) for i in range(2)
    ]
    for map in (
        Compose((ToContext(head, near + shift), Affine(torch.eye(3, dtype=D)))),
        Added((ToContext(head, near + shift),)),
    ):
        for norm in (TokenMax(), Frobenius()):
            found = certify(map, Neighborhood(x, 1e-9, norm), norm)
            assert float(max(exact)) <= found.value * (1 + 1e-12)
            assert found.value < 1.01 * float(max(exact)) or far > 1e7


def test_affine_parts_that_cancel_leave_the_rounding_of_their_sum():
    """γ(2) Σ|W_k|, entry by entry, times the radius; and the norm of the sum where it does not cancel."""
    w, x = _t(3, 3), _t(4, 3, seed=1)
    counted = float(relative_error(2)) * 2 * float(w.abs().sum())
    for other, norm in ((-w, 0.0), (w, 2 * float(torch.linalg.matrix_norm(w, 2)))):
        map, domain = Added((Affine(w), Affine(other))), Neighborhood(x, 0.5, TokenMax())
        for moved, radius in ((TokenMax(), 0.5), (Frobenius(), 1.0), (TokenSum(), 2.0)):
            found = deviation(map, domain, moved)
            seen = [rung.value for rung in (found, *found.others) if rung.theorem == "sum of maps"]
            assert seen == [pytest.approx((norm + counted) * radius, rel=1e-6, abs=0)]
        found = certify(map, domain, TokenMax())
        seen = [rung.value for rung in (found, *found.others) if rung.theorem == "sum of maps"]
        assert seen == [pytest.approx(norm + counted, rel=1e-6, abs=0)]


def test_heads_after_a_norm_layer_are_one_attention_where_nothing_follows():
    """Stacked heads are the sum up to a constant, which a map after them would see."""
    both, layer = Added((_attention(0), _attention(20))), Normalize(0.1)
    noted = []
    for maps in ((layer, both), (layer, both, Affine(_t(3, 3)))):
        found = certify(Compose(maps), Ball(0.3, _t(3), tokens=3), TokenMax())
        noted.append([rung for rung in (found, *found.others) if "heads as one attention" in rung.theorem])
    assert noted[0]
    assert not noted[1]


def test_what_stands_alone_is_not_composed():
    """Σ_k f_k∘N in place of (Σ_k f_k)∘N is a sum; with a map before or after it, a composition."""
    both, layer, step = Added((_attention(0), Affine(_t(3, 3)))), Normalize(0.1), Affine(_t(3, 3, seed=1))
    kinds = [
        type(_after_norms(maps)[0][1]) for maps in ((layer, both), (step, layer, both), (layer, both, step))
    ]
    assert kinds == [Added, Compose, Compose]


def test_one_attention_is_its_own_stack():
    with pytest.raises(Refusal, match="its own stack"):
        stack((_attention(),))
    both = stack((_attention(), _attention(20)))
    assert len(both.w_o) == 2
