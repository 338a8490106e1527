"""Decisions: proved, refuted by an input that was run, or open; bad input is said so."""

import math

import pytest
import torch
from torch import nn

import regard as r
from regard.errors import ArgumentError
from regard.maps import Affine, Compose
from regard.nonexpansive import MixTokens, Pool
from regard.proofs.decision_attack import inside
from tests.ball_model.networks import D, drawn, network, rounded, sequence


def classifier(seed=1, classes=3, tokens=4, **kind):
    """The first token of a network, read out."""
    first = torch.zeros(1, tokens, dtype=D)
    first[0, 0] = 1.0
    weights = drawn(torch.Generator().manual_seed(seed), 8, classes)
    return Compose((network(seed, **kind), MixTokens(first))), Affine(weights)


def test_a_linear_classifier_changes_exactly_beyond_its_margin():
    """e_1·x against -e_1·x: the least lead over a ball is 2 (x_1 - r)."""
    model = Affine(torch.tensor([[1.0, -1.0], [0.0, 0.0]], dtype=D))
    x = torch.tensor([[0.7, 0.2]], dtype=D)
    close = r.decide(model, x, r.one_token(x, 0, 0.699))
    assert close.holds is True
    assert close.least_margin == pytest.approx(0.002, rel=1e-6)
    assert close.least_margin <= 0.002
    beyond = r.decide(model, x, r.one_token(x, 0, 0.701))
    assert beyond.holds is False
    assert beyond.attack.value < 0


def test_each_answer_of_a_network():
    model, readout = classifier()
    x = sequence(1)
    small = r.decide(model, x, r.one_token(x, 1, 1e-3), readout=readout)
    assert small.holds is True
    assert 0 < small.least_margin <= small.attack.value
    assert small.margin.value == -small.least_margin
    assert "cannot change" in str(small)
    large = r.decide(model, x, r.one_token(x, 0, 30.0), readout=readout)
    assert large.holds is not True
    assert ("changes" if large.holds is False else "may or may not") in str(large)


def test_a_planted_counterexample_is_never_called_proved():
    """A domain that reaches just beyond the shortest change that is known, in every kind."""
    model, readout = classifier(2)
    x = sequence(2)
    known = r.certified_radius(model, x, 0, readout=readout)
    over = float(known.attack) * (1 + 1e-9)
    found = r.decide(model, x, r.one_token(x, 0, over), readout=readout)
    assert found.holds is not True
    assert found.least_margin <= 0
    corner = known.moved[0].unsqueeze(0)
    hull = r.decide(model, x, r.Hull(x, 0, corner), readout=readout)
    assert hull.holds is False
    assert bool((hull.attack.other[0] == corner[0]).all())


def test_a_counterexample_is_run_by_the_model_in_its_own_dtype_and_is_inside():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True), 1, enable_nested_tensor=False
    ).eval()
    first = torch.zeros(1, 3)
    first[0, 0] = 1.0
    x = torch.randn(3, 8)
    readout = Compose((MixTokens(first), Affine(torch.randn(8, 2))))
    domain = r.one_token(x, 1, 40.0)
    found = r.decide(encoder, x, domain, readout=readout, steps=40)
    small = r.decide(encoder, x, r.one_token(x, 1, 1e-3), readout=readout)
    assert small.holds is True
    assert any("float32" in str(hypothesis) for hypothesis in small.margin.hypotheses)
    assert found.holds is False
    moved = found.attack.other.float()
    assert bool((moved.double() == found.attack.other).all())
    assert inside.one(domain, moved)
    logits = readout(encoder(moved.unsqueeze(0)).squeeze(0))[0]
    assert int(logits.argmax()) != found.label[0]


def test_the_leading_set_of_several_classes():
    model, readout = classifier(3, classes=5)
    x = sequence(3)
    order = Compose((model, readout))(x).flatten().argsort(descending=True).tolist()
    domain = r.one_token(x, 2, 1e-4)
    top = r.decide(model, x, domain, readout=readout, label=order[:2])
    assert top.holds is True
    assert top.runner_up == order[2]
    assert "leading set" in str(top)
    wrong = r.decide(model, x, domain, readout=readout, label=[order[0], order[3]])
    assert wrong.holds is False


def test_a_label_that_does_not_lead_is_refuted_by_the_input_itself():
    model, readout = classifier()
    x = sequence(1)
    last = int(Compose((model, readout))(x).argmin())
    found = r.decide(model, x, r.one_token(x, 1, 0.0), readout=readout, label=last)
    assert found.holds is False
    assert bool((found.attack.other == x).all())


def test_a_tie_is_open():
    x = torch.ones(1, 2, dtype=D)
    found = r.decide(Affine(torch.eye(2, dtype=D)), x, r.one_token(x, 0, 0.0))
    assert found.holds is None
    assert found.least_margin <= 0


def test_where_nothing_is_known_of_a_token_the_last_norm_layer_is():
    """A readout that cannot tell its values apart: proved at any radius that numbers have room for."""
    model, readout = classifier(4, sharp=3.0)
    readout = Affine(1e-6 * readout.w, torch.tensor([1.0, 0.0, 0.0], dtype=D))
    x = sequence(4)
    found = r.decide(model, x, r.one_token(x, 1, 1e3), readout=readout)
    assert found.holds is True
    assert 0.999 < found.least_margin <= found.attack.value


def test_a_radius_beyond_the_bounds_is_open_with_a_reason():
    model, readout = classifier(4, sharp=3.0)
    readout = Affine(1e-6 * readout.w, torch.tensor([1.0, 0.0, 0.0], dtype=D))
    x = sequence(4)
    found = r.decide(model, x, r.one_token(x, 1, 1e7), readout=readout)
    assert found.holds is None
    assert math.isinf(found.margin.value)
    assert "smaller radius" in str(found)
    assert "inf" not in str(found)


def test_an_attack_beyond_the_numbers_of_the_model_is_not_reported():
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    x, first = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), torch.eye(3)[:1]
    readout = Compose((MixTokens(first), Affine(torch.eye(8)[:, :2])))
    found = r.decide(encoder, x, r.one_token(x, 1, 1e30), readout=readout)
    assert found.holds is not True
    assert math.isfinite(found.attack.value)
    assert "nan" not in str(found)


def test_the_second_order_decides_where_the_first_does_not():
    """Somewhere between what is proved by both and by none."""
    from regard.proofs.ball_model.beginning import second_order
    from regard.proofs.classifier import classifier as of
    from regard.proofs.decision import _least
    from regard.proofs.theorems.ball_model import start

    model, readout = classifier(5)
    x = sequence(5)
    found = of(model, x, readout)
    label = (int(found.logits(x).argmax()),)
    state = start(r.one_token(x, 1, 0.05))
    first, second = _least(found, state, label)[0], _least(found, second_order(state), label)[0]
    seen = r.decide(model, x, r.one_token(x, 1, 0.05), readout=readout).attack.value
    assert first < second <= seen


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"label": 7}, "label"),
        ({"label": (0, 1, 2)}, "label"),
        ({"label": ()}, "label"),
        ({"label": True}, "label"),
        ({"domain": r.Ball(1.0)}, "neighborhood of x"),
        ({"domain": r.one_token(sequence(9), 0, 0.1)}, "around a different"),
        ({"x": sequence(1)[0]}, "one sequence"),
        ({"readout": Affine(torch.ones(8, 1, dtype=D))}, "logits"),
        ({"steps": 0}, "steps"),
        ({"steps": True}, "steps"),
    ],
)
def test_bad_input_is_named(change, match):
    model, readout = classifier()
    x = sequence(1)
    arguments = {"x": x, "domain": r.one_token(x, 1, 0.01), "readout": readout, "label": None, **change}
    with pytest.raises(ArgumentError, match=match):
        r.decide(model, arguments.pop("x"), arguments.pop("domain"), **arguments)


@pytest.mark.parametrize(
    ("embeddings", "token", "match"),
    [
        (torch.zeros(0, 8, dtype=D), 1, "embeddings"),
        (torch.zeros(2, 7, dtype=D), 1, "embeddings"),
        (torch.zeros(2, 8, dtype=D), 4, "token"),
        (torch.zeros(2, 8, dtype=D), True, "token"),
    ],
)
def test_a_hull_that_makes_no_sense_is_refused(embeddings, token, match):
    with pytest.raises(ArgumentError, match=match):
        r.Hull(sequence(1), token, embeddings)


def test_a_model_without_a_readout_is_told_to_have_one():
    x = sequence(1)
    with pytest.raises(ArgumentError, match="give a readout"):
        r.decide(network(1), x, r.one_token(x, 1, 0.01))


def test_what_is_inside():
    x = sequence(1)
    radii = torch.tensor([0.0, 0.1, 0.0, 0.0], dtype=D)
    moved = x.clone()
    moved[1, 0] += 0.09
    for domain in (r.Radii(x, radii), r.Box(x, radii), r.Neighborhood(x, 0.1), r.Hull(x, 1, moved[1:2])):
        assert inside.one(domain, x)
        assert inside.one(domain, moved)
        assert not inside.one(domain, moved + 0.2)


def test_a_sequence_of_one_token():
    model, readout = classifier(2, tokens=1, layers=1)
    x = sequence(2, tokens=1)
    found = r.decide(model, x, r.one_token(x, 0, 1e-3), readout=readout)
    assert found.holds is True
    assert found.least_margin <= found.attack.value


def test_what_only_pads_takes_no_part():
    """No query sees the last token: how far it moves changes nothing."""
    model, readout = classifier(3, layers=1, support=r.Padding(torch.tensor(3)))
    x = sequence(3)
    still = r.decide(model, x, r.one_token(x, 3, 1e-9), readout=readout)
    moved = r.decide(model, x, r.one_token(x, 3, 0.1), readout=readout)
    assert moved.holds is still.holds is True
    assert moved.least_margin == pytest.approx(still.least_margin, rel=1e-6)


def test_a_readout_in_float64_for_a_model_in_float32():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation="gelu", batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    x = sequence(0).float()
    first = torch.eye(4, dtype=D)[:1]
    readout = Compose((MixTokens(first), Affine(drawn(torch.Generator().manual_seed(0), 8, 2))))
    found = r.decide(model, x, r.one_token(x, 1, 1e-4), readout=readout)
    assert found.holds is not False
    assert any("float32" in str(one) and "off by" in str(one) for one in found.margin.hypotheses)
    far = r.decide(model, x, r.one_token(x, 1, 1.0), readout=readout)
    assert far.attack.value < found.attack.value - 1e-3
    wide = sequence(0)  # no input of a domain around it is one that float32 holds
    with pytest.raises(ArgumentError, match="x: has numbers that float32"):
        r.decide(model, wide, r.one_token(wide, 1, 1e-4), readout=readout)


@pytest.mark.parametrize("tokens", [4, 1])
def test_modules_that_take_tokens_before_batches(tokens):
    """torch's own default: the same answers, attacks and runs as with batches first."""
    first = torch.eye(tokens, dtype=D)[:1]
    for seed in range(3):
        torch.manual_seed(seed)
        made = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=one) for one in (True, False)]
        made[1].load_state_dict(made[0].state_dict())
        both = [nn.TransformerEncoder(one, 2, enable_nested_tensor=False).double().eval() for one in made]
        g = torch.Generator().manual_seed(seed)
        x, readout = drawn(g, tokens, 8), Compose((MixTokens(first), Affine(drawn(g, 8, 3))))
        domain = r.one_token(x, 0, 0.3)
        one, other = (r.decide(model, x, domain, readout=readout) for model in both)
        assert (one.holds, one.label) == (other.holds, other.label)
        assert one.attack.value == pytest.approx(other.attack.value, rel=1e-9)
        words = {0: drawn(g, 40, 8)} if tokens == 1 else {0: drawn(g, 12, 8), 2: drawn(g, 12, 8)}
        one, other = (r.proofs.exchange_pairs(model, x, words, readout=readout) for model in both)
        assert one.changed == other.changed


def test_attention_alone_and_readouts_in_another_dtype():
    """A module of torch that is told queries, keys and values; and modules of two dtypes."""
    torch.manual_seed(0)
    x = sequence(0).float()
    model, last = nn.MultiheadAttention(8, 2), nn.Linear(8, 8).double()
    readout = Compose((Pool(), Affine(torch.eye(8, dtype=D))))
    found = r.decide(model, x, r.one_token(x, 1, 1e-3), readout=readout)
    assert found.label == (int((model(x, x, x)[0].mean(0)).argmax()),)
    assert r.certified_radius(model, x, 1, readout=readout).value > 0
    with pytest.raises(ArgumentError, match=r"readout: gives \[4, 8\]"):
        r.decide(model, x, r.one_token(x, 1, 1e-3), readout=last)
    with pytest.raises(ArgumentError, match=r"model: does not take \[4, 6\]"):
        r.decide(model, x[:, :6], r.one_token(x[:, :6], 1, 1e-3), readout=readout)


class Doubled(nn.Linear):
    """A module that is not what it is declared as."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_module_that_is_not_its_declaration_is_an_error():
    r.declare.rule(Doubled)(lambda module: Affine(module.weight.detach().double().mT, None))
    model, x = Doubled(8, 8, bias=False), sequence(0).float()
    with pytest.raises(ArgumentError, match=r"model: differs by .* from what it is declared as"):
        r.decide(model, x, r.one_token(x, 1, 0.1), readout=Compose((Pool(), Affine(torch.eye(8, dtype=D)))))


def test_rounding_of_the_dtype_is_no_proof():
    """Two classes that differ by less than bfloat16 keeps are not decided in it."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation="gelu", batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().bfloat16()
    x, w = sequence(0).bfloat16(), drawn(torch.Generator().manual_seed(1), 8, 2)
    w[:, 1] = w[:, 0]
    readout = Compose((Pool(), Affine(w, torch.tensor([0.0, 1e-4], dtype=D))))
    found = r.decide(model, x, r.one_token(x, 1, 1e-5), readout=readout)
    assert found.holds is not True
    apart = Compose((Pool(), Affine(w, torch.tensor([0.0, 3.0], dtype=D))))
    assert r.decide(model, x, r.one_token(x, 1, 1e-5), readout=apart).holds is True


@pytest.mark.parametrize(("share", "holds"), [(1.5, None), (2.5, True)])
def test_both_logits_of_a_lead_are_rounded(share, holds):
    """A lead that is more than the rounding of one logit, and less than that of two, proves nothing."""
    from regard.proofs.classifier import classifier as of

    model, x = rounded(torch.bfloat16), torch.tensor([[0.9, -0.9]], dtype=torch.bfloat16)
    readout = Affine(torch.eye(2, dtype=D), torch.tensor([20.0, 0.0], dtype=D))
    rounding = float(of(model, x, readout).rounding(x))
    assert 1.8 <= rounding <= 2.2  # twice the largest error, which is a half of a step of two
    lead = float(x[0, 0]) - float(x[0, 1]) + 20
    domain = r.one_token(x, 0, (lead - share * rounding) / math.sqrt(2))
    found = r.decide(model, x, domain, readout=readout)
    assert found.least_margin == pytest.approx(share * rounding, rel=1e-6)
    assert found.holds is holds
    assert ("rounding in bfloat16" in str(found)) == (holds is None)
