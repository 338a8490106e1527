"""A token after others through all layers at once: the same value, and nobody is passed over."""

import pytest
import torch
from torch import nn

import regard as r
from regard.maps import Normalize, Silu
from regard.nn import AlibiPositions, Design, LanguageModel, NoPositions, RotaryPositions, Sinusoidal, walking

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])


@pytest.fixture
def taken(monkeypatch):
    """How many tokens went the short way."""
    steps, go = [], walking.Walk.go
    monkeypatch.setattr(walking.Walk, "go", lambda *step: steps.append(1) or go(*step))
    return steps


def model_of(**options):
    torch.manual_seed(0)
    return LanguageModel(Design(width=16, heads=2, **options), 10, 2).double().eval()


def token_by_token(model, ids=IDS):
    cache = model.cache()
    pieces = [model(ids[:, :5], cache=cache), *(model(ids[:, [i]], cache=cache) for i in range(5, 8))]
    return torch.cat(pieces, 1)


GAUSSIAN = r.Attention(r.Gaussian(bandwidth=4.0))
DESIGNS = {
    "plain": {},
    "rotary": {"positions": RotaryPositions()},
    "interleaved": {"positions": RotaryPositions(interleaved=True)},
    "alibi": {"positions": AlibiPositions()},
    "added": {"positions": Sinusoidal()},
    "gaussian": {"mechanism": GAUSSIAN},
    "narrow gaussian": {"mechanism": r.Attention(r.Gaussian(bandwidth=0.02))},
    "gaussian that falls": {"mechanism": GAUSSIAN, "positions": AlibiPositions()},
    "cold": {"mechanism": r.Attention(r.Dot(), normalizer=r.Softmax(0.3)), "positions": AlibiPositions()},
    "post-norm, gated, rms": {
        "norm_first": False, "gated": True, "activation": Silu(), "norm": Normalize(centered=False)
    },
    "no biases": {"bias": False},
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", DESIGNS)
def test_a_step_is_what_the_modules_compute(taken, name):
    model = model_of(**DESIGNS[name])
    torch.testing.assert_close(token_by_token(model), model(IDS), rtol=1e-10, atol=1e-10)
    assert len(taken) == 3


def test_distances_that_need_a_center_get_one():
    """Keys far from the origin: |k|² is large, and float32 would lose what differs."""
    torch.manual_seed(0)
    mechanism = r.Attention(r.Gaussian(bandwidth=1.0), support=r.Causal())
    layer = r.nn.MultiHeadAttention(16, 2, mechanism=mechanism)
    with torch.no_grad():
        layer.projection.bias += 300.0
        x = torch.randn(1, 8, 16)
        cache = r.nn.cache.LayerCache()
        found = torch.cat([layer(piece, cache=cache) for piece in x.split((5, 1, 1, 1), 1)], 1)
        wanted = layer.double()(x.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-2)
    assert (found - wanted).abs().max() < 1e-2 * wanted.abs().max()


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.decoder.layers[1].feed_forward.outer.register_forward_hook(lambda *a: 2 * a[2]),
        lambda m: m.decoder.layers[0].attention.register_forward_pre_hook(lambda _, a: (3 * a[0],)),
        lambda m: setattr(m.decoder.layers[0].attention, "output", nn.Linear(16, 16).double()),
        lambda m: setattr(m.decoder.layers[0], "forward", lambda x, *_, **__: 2 * x),
        lambda m: m.decoder.layers[0].attention.mechanism.potential_terms_1_slope.mul_(3.0),
        lambda m: nn.utils.parametrizations.weight_norm(m.decoder.layers[0].feed_forward.inner),
    ],
    ids=["hook", "hook before", "another module", "another forward", "another slope", "parametrized"],
)
def test_what_changes_between_two_tokens_counts(taken, change):
    """Two caches of one model: one that went the short way before the change, and one that never did."""
    model = model_of(positions=AlibiPositions())
    short, fresh = model.cache(), model.cache()
    model(IDS[:, :5], cache=short)
    model(IDS[:, [5]], cache=short)
    model(IDS[:, :6], cache=fresh)
    assert len(taken) == 1
    change(model)
    torch.testing.assert_close(model(IDS[:, [6]], cache=short), model(IDS[:, [6]], cache=fresh))
    assert len(taken) <= 2


@torch.no_grad()
def test_parameters_that_are_replaced_are_read_anew(taken):
    model = model_of()
    cache, other = model.cache(), model.cache()
    model(IDS[:, :5], cache=cache)
    before = model(IDS[:, [5]], cache=cache)
    model(IDS[:, :5], cache=other)
    outer = model.decoder.layers[0].feed_forward.outer
    outer.weight = nn.Parameter(2 * outer.weight)
    after = model(IDS[:, [5]], cache=other)
    assert len(taken) == 2
    assert not torch.allclose(before, after)


def test_steps_with_gradients_or_dropout_go_through_the_modules(taken):
    torch.manual_seed(0)
    model = LanguageModel(Design(width=16, heads=2, dropout=0.5), 10, 2)
    with torch.no_grad():
        cache = model.cache()
        model(IDS[:, :5], cache=cache)
        model(IDS[:, [5]], cache=cache)  # still training
    assert not taken
    model.eval()
    with torch.no_grad():
        model(IDS[:, [6]], cache=cache)
    assert len(taken) == 1
    with pytest.raises(r.errors.ArgumentError, match="gradients are recorded"):
        model(IDS[:, [7]], cache=cache)


def test_what_goes_the_long_way():
    assert walking.Walk.through(model_of(positions=NoPositions()).decoder) is not None
    window = r.Attention(r.Dot(), support=r.Window(3, 0))
    assert walking.Walk.through(model_of(mechanism=window).decoder) is None
    turned = model_of(mechanism=GAUSSIAN, positions=RotaryPositions())
    assert walking.Walk.through(turned.decoder) is None
    with torch.no_grad():
        torch.testing.assert_close(token_by_token(turned), turned(IDS), rtol=1e-10, atol=1e-10)
