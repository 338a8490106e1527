"""Certified radii: the formula on linear classifiers, where it is the truth; attacks stay above;
what cannot be decided is said.
"""

import math

import pytest
import torch

import regard as r
from regard.certificate import round_down, round_up
from regard.maps import Affine, Compose
from regard.nonexpansive import Flatten, GroupSort, IntoBall, MixTokens, Pool
from tests.ball_model.networks import network, rounded, sequence

D = torch.float64


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def orthogonal(inputs, outputs, seed=0):
    return torch.linalg.qr(drawn(max(inputs, outputs), min(inputs, outputs), seed=seed))[0]


def test_two_logits_of_a_linear_map_meet_exactly_there():
    """e_1·x against -e_1·x has the constant √2, margin 2x_1 and the radius x_1."""
    w = torch.tensor([[1.0, -1.0], [0.0, 0.0]], dtype=D)
    found = r.certified_radius(Affine(w), torch.tensor([[0.7, 0.2]], dtype=D))
    assert float(found.value) == pytest.approx(0.7, rel=1e-7)
    assert float(found.value) <= 0.7
    assert float(found.attack) == pytest.approx(0.7, rel=1e-3)
    assert float(found.attack) >= 0.7
    assert int(found.label) == 0
    assert float(found.margin) == pytest.approx(1.4)


@pytest.mark.parametrize("size", [3e-5, 0.123456789, 0.7, 12.3456789, 98765.4321])
def test_what_is_printed_is_proved_too(size):
    """A radius is rounded down, whatever its size, and a constant up."""
    found = r.certified_radius(Affine(torch.eye(2, dtype=D)), torch.tensor([[size, -size]], dtype=D))
    shown = float(str(found).split("within ")[1].split()[0])
    assert 0.9999 * float(found.value) <= shown <= float(found.value)
    for value in (size, float(found.value)):
        assert float(round_down(value)) <= value <= float(round_up(value))
        assert float(round_down(value)) == pytest.approx(value, rel=1e-4)


def test_rounding_of_logits_is_taken_from_the_margin():
    """1e-9 of one and of the larger logit, for both of them."""
    w, b = torch.eye(2, dtype=D), torch.tensor([4.0, 4.0], dtype=D)
    for x in ([1.0, 0.5], [-9.0, -8.5]):
        found = r.certified_radius(Affine(w, b), torch.tensor([x], dtype=D))
        paid = 0.5 - float(found.value) * math.sqrt(2) * found.certificate.value
        assert paid == pytest.approx(2e-9 * (1 + 5.0), rel=1e-2)


@pytest.mark.parametrize("norm", [r.Frobenius(), r.TokenMax(), r.TokenSum()], ids=repr)
def test_the_radius_is_margin_over_root_two_constants(norm):
    x, w = drawn(1, 4), orthogonal(4, 4)
    model = Compose((Affine(2.5 * w), GroupSort()))
    found = r.certified_radius(model, x, norm=norm)
    top = model(x).flatten().topk(2).values
    assert found.certificate.value == pytest.approx(2.5)
    assert found.certificate.norm == norm
    assert float(found.value) == pytest.approx(float(top[0] - top[1]) / (math.sqrt(2) * 2.5), rel=1e-6)
    assert float(found.value) <= float(top[0] - top[1]) / (math.sqrt(2) * 2.5)


def test_in_the_largest_entry_two_logits_meet_at_half():
    """The identity: both coordinates move toward each other."""
    found = r.certified_radius(
        Affine(torch.eye(2, dtype=D)), torch.tensor([[1.0, 0.4]], dtype=D), norm=r.EntryMax()
    )
    assert float(found.value) == pytest.approx(0.3, rel=1e-6)
    assert 0.3 <= float(found.attack) <= 0.301


@pytest.mark.parametrize("token", [None, 0, -1])
@pytest.mark.parametrize("norm", [r.Frobenius(), r.TokenMax(), r.TokenSum()], ids=repr)
def test_attacks_change_the_decision_and_stay_above(norm, token):
    model = Compose((Affine(orthogonal(6, 4).mT), GroupSort(), Flatten()))
    model = Compose((*model.maps, Affine(orthogonal(18, 3, seed=2))))
    x = drawn(5, 3, 4, seed=3)
    found = r.certified_radius(model, x, token, norm)
    assert bool((found.value <= found.attack).all())
    assert bool(found.attack.isfinite().all())
    changed = model(found.moved).squeeze(-2).argmax(-1)
    assert bool((changed != found.label).all())
    assert torch.equal(norm.of(found.moved - x), found.attack)
    if token is not None:
        still = [k for k in range(3) if k != token % 3]
        assert torch.equal(found.moved[:, still], x[:, still])


def test_where_one_token_moves_three_norms_are_the_same():
    """A sum of n tokens over √n has the constants 1, √n and 1/√n: the last one is for one token."""
    w = torch.eye(2, dtype=D)
    x = drawn(4, 2)
    whole, one = (r.certified_radius(Compose((Pool(), Affine(w))), x, token) for token in (None, 1))
    assert float(one.value) == pytest.approx(2 * float(whole.value), rel=1e-6)
    assert float(one.attack) >= float(one.value)


def test_a_batch_is_its_sequences():
    model = Compose((Affine(orthogonal(3, 3)), GroupSort(3), Flatten(), Affine(orthogonal(6, 4, seed=5))))
    x = drawn(2, 3, 2, 3, seed=6)
    found = r.certified_radius(model, x)
    assert found.value.shape == found.attack.shape == (2, 3)
    alone = r.certified_radius(model, x[1, 2])
    assert float(alone.value) == pytest.approx(float(found.value[1, 2]))
    assert "6 radii" in str(found)
    assert f"decision {int(alone.label)} holds within" in str(alone)


def test_without_a_constant_only_the_ball_model_speaks():
    """Dot products have no constant: batches have no radius, one sequence has that of the ball model."""
    model, readout = r.Attention(r.Dot()), Compose((Pool(), Affine(torch.eye(2, dtype=D))))
    many = r.certified_radius(model, drawn(1, 3, 2), readout=readout)
    assert math.isinf(many.certificate.value)
    assert float(many.value) == 0
    one = r.certified_radius(model, drawn(3, 2), readout=readout)
    assert one.certificate.theorem == "the ball model of a network"
    assert 0.5 * float(one.attack) < float(one.value) < float(one.attack)
    near = r.Neighborhood(drawn(3, 2), float(one.value))
    assert r.decide(model, drawn(3, 2), near, readout=readout).holds


def test_the_radius_of_one_token_was_itself_proved():
    """In balls and in boxes; the attack is above, and the decision at the radius holds."""
    net = Compose((network(3), MixTokens(torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=D))))
    x, readout = sequence(3), Affine(drawn(8, 3, seed=4))
    for norm, kind in ((r.Frobenius(), r.Radii), (r.EntryMax(), r.Box)):
        found = r.certified_radius(net, x, 1, norm, readout=readout)
        radii = torch.zeros(4, dtype=D)
        radii[1] = float(found.value)
        assert 0 < float(found.value) < float(found.attack)
        assert found.certificate.value < 0
        assert r.decide(net, x, kind(x, radii), readout=readout).holds


@pytest.mark.parametrize("known", [0.0, 1e-20, 1e-3])
@pytest.mark.parametrize("attack", [math.inf, 0.9, 30.0])
@pytest.mark.parametrize("true", [0.002, 0.3, 0.8])
def test_the_search_comes_close_whatever_is_known_before(monkeypatch, known, attack, true):
    """Radii below `true` are proved; an attack may find nothing, and a constant may say next to nothing."""
    from regard.proofs.radius import _Near

    near = _Near(None, 4 * torch.eye(2, dtype=D), 0, r.Frobenius(), 0, 0.0)
    monkeypatch.setattr(near, "proved", lambda radius: "proof" if radius <= true else None)
    radius, certificate = near.search(known, attack, 1.1)
    assert true / 1.1 <= radius <= true
    assert certificate == "proof"


def test_a_readout_is_one_more_map():
    inner, readout, x = Affine(orthogonal(3, 3)), Compose((Pool(), Affine(orthogonal(3, 2)))), drawn(4, 3)
    found = r.certified_radius(inner, x, readout=readout)
    assert float(found.value) == float(r.certified_radius(Compose((inner, readout)), x).value)


def test_a_constant_classifier_is_never_changed():
    model = Affine(torch.zeros(2, 2, dtype=D), torch.tensor([1.0, 0.0], dtype=D))
    found = r.certified_radius(model, drawn(1, 2))
    assert math.isinf(float(found.attack))
    assert float(found.value) > 0


def test_a_tie_has_radius_zero():
    found = r.certified_radius(Affine(torch.eye(2, dtype=D)), torch.ones(1, 2, dtype=D))
    assert float(found.value) == 0


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"x": drawn(2)}, "x: has shape"),
        ({"x": torch.full((1, 2), math.nan)}, "x: "),
        ({"x": torch.ones(1, 2, dtype=torch.int64)}, "x: "),
        ({"token": 3}, "token: is 3; there are 1 tokens"),
        ({"norm": r.Wasserstein(2.0)}, "norm: is Wasserstein"),
        ({"steps": 0}, "steps: is 0"),
        ({"x": drawn(2, 2)}, "model: gives"),
        ({"token": "first"}, "token: is 'first'; give the position"),
        ({"token": True}, "token: is True; give the position"),
    ],
)
def test_what_cannot_be_decided_is_said(arguments, match):
    full = {"x": drawn(1, 2), "token": None, "norm": r.Frobenius(), "steps": 3, **arguments}
    with pytest.raises(r.errors.ArgumentError, match=match):
        r.certified_radius(
            Affine(torch.eye(2, dtype=D)), full["x"], full["token"], full["norm"], steps=full["steps"]
        )


def test_tokens_that_are_cut_off_at_a_ball():
    """Moves outside of the ball that change nothing inside do not confuse the attack."""
    model = Compose((IntoBall(1.0), Affine(orthogonal(3, 2))))
    found = r.certified_radius(model, 5 * drawn(4, 1, 3, seed=9))
    assert bool((found.value <= found.attack).all())


@pytest.mark.parametrize(
    ("lead", "answer", "within"), [(0.4, 1, "no radius"), (0.9, 0, "within 0 "), (11.0, 0, "within")]
)
def test_the_decision_is_that_of_the_model(lead, answer, within):
    """In bfloat16 256.9 and 255.1 are 256 and 255: a lead of 1.8 before the readout is one of 1."""
    x = torch.tensor([[0.9, -0.9]], dtype=torch.bfloat16)
    exact = float(x[0, 0]) - float(x[0, 1])
    for dtype in (torch.bfloat16, torch.float32):
        readout = Affine(torch.eye(2, dtype=D), torch.tensor([0.0, exact - lead], dtype=D))
        found = r.certified_radius(rounded(dtype), x.to(dtype), readout=readout)
        many = r.certified_radius(rounded(dtype), x.to(dtype).repeat(2, 1, 1), readout=readout)
        assert many.label.tolist() == [int(found.label)] * 2
        assert many.value == pytest.approx(float(found.value))
        if dtype == torch.float32:
            assert int(found.label) == 0
            assert float(found.value) == pytest.approx(lead / math.sqrt(2), rel=1e-3)
            continue
        assert int(found.label) == answer
        assert float(found.margin) == pytest.approx(lead if answer == 0 else -lead)
        assert within in str(found)
        assert (float(found.value) > 0) == (lead > 4)  # of the bfloat16 grid, four halves of a step of two
        assert float(found.value) <= (lead - 2) / math.sqrt(2) or lead < 4


def test_rounding_leaves_a_radius_in_float32_as_it_is():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    x, readout = drawn(3, 8).float(), Compose((Pool(), Affine(drawn(8, 3, seed=1))))
    short = r.certified_radius(model, x, 1, readout=readout, steps=3)
    exact = r.certified_radius(model.double(), x.double(), 1, readout=readout, steps=3)
    assert int(short.label) == int(exact.label)
    assert float(short.value) == pytest.approx(float(exact.value), rel=1e-5)
    assert any("float32" in str(one) and "off by" in str(one) for one in short.hypotheses)
    assert not any("off by" in str(one) for one in exact.hypotheses)


def test_a_batch_of_two_is_not_taken_for_two_heads():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).double().eval()
    x, readout = drawn(2, 3, 8), Compose((Pool(), Affine(drawn(8, 3, seed=1))))
    found = r.certified_radius(layer, x, readout=readout, steps=3)
    for one, margin, label in zip(x, found.margin, found.label, strict=True):
        alone = r.certified_radius(layer, one, readout=readout, steps=3)
        assert int(alone.label) == int(label)
        assert float(alone.margin) == pytest.approx(float(margin), rel=1e-9)
