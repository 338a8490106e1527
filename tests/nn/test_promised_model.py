"""Language models that keep a promise: proved from the weights whatever they are, not broken by attack."""

import math

import pytest
import torch

from regard import TokenMax
from regard.errors import ArgumentError
from regard.nn import (
    AlibiPositions,
    Decoder,
    Design,
    Encoder,
    LanguageModel,
    MultiHeadAttention,
    NoPositions,
    Promise,
    RelativePositions,
    RotaryPositions,
    load,
    save,
)
from regard.norms import Frobenius

VOCABULARY = 11


def made(heads=1, value=2.0, positions=RelativePositions(), layers=2, seed=0):
    torch.manual_seed(seed)
    design = Design(8, heads, positions=positions, promise=Promise(TokenMax(), value))
    return LanguageModel(design, VOCABULARY, layers, tied=False)


@pytest.mark.parametrize("positions", [NoPositions(), AlibiPositions(), RelativePositions()])
@pytest.mark.parametrize("heads", [1, 2])
def test_the_certificate_is_the_promise(heads, positions):
    """Constants multiply to the promise but for the room that is left for rounding: nothing is given away."""
    model = made(heads, positions=positions)
    found = model.certificate(7)
    assert found.value <= 2.0 * (1 + 1e-6)
    assert found.value >= 2.0 * (1 - 1e-3)
    assert model.certificate().value == pytest.approx(found.value, rel=1e-9)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_no_training_breaks_it(optimizer):
    """Steps at a rate that is far too large."""
    model = made(layers=1)
    steps = optimizer(model.parameters(), lr=0.05)
    ids = torch.randint(VOCABULARY, (2, 6))
    for _ in range(200):
        steps.zero_grad()
        logits = model(ids)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        steps.step()
    assert model.certificate(6).value <= 2.0 * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_no_pair_of_texts_breaks_it(seed):
    """Gradient ascent on how far logits move over how far points move, from sharp scores and large points."""
    model = made(heads=2, seed=seed).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    x = torch.randn(5, 8, dtype=torch.float64)
    y = (x + 0.1 * torch.randn_like(x)).requires_grad_()
    read, ascent, best = model.declare_logits(), torch.optim.Adam([y], lr=0.02), 0.0
    for _ in range(60):
        ratio = (read(y) - read(x)).norm(dim=-1).amax() / (y - x).norm(dim=-1).amax()
        best = max(best, float(ratio.detach()))
        ascent.zero_grad()
        (-ratio).backward()
        ascent.step()
    assert best <= model.certificate(5).value
    assert best >= 0.02


def test_the_declaration_is_the_model():
    model = made(heads=2).double()
    ids = torch.randint(VOCABULARY, (9,))
    declared = model.declare_logits()
    assert torch.allclose(declared(model.embedding(ids)), model(ids), atol=1e-12)


@torch.no_grad()
def test_a_cache_changes_nothing():
    model, ids = made(), torch.randint(VOCABULARY, (2, 9))
    cache = model.cache()
    pieces = [model(ids[:, :4], cache=cache), model(ids[:, 4:], cache=cache)]
    assert torch.allclose(torch.cat(pieces, 1), model(ids), atol=1e-5)


def test_saved_and_loaded(tmp_path):
    model, ids = made(), torch.randint(VOCABULARY, (2, 9))
    save(model, tmp_path / "model")
    again = load(tmp_path / "model")
    assert torch.equal(model(ids), again(ids))
    assert again.certificate().value == model.certificate().value


def test_fewer_digits_keep_the_promise():
    """Parameters are what is rounded; matrices are made of them in float32."""
    model = made()
    before = model.certificate(4).value
    rounded = model.to(torch.bfloat16)
    assert rounded.certificate(4).value <= 2.0 * (1 + 1e-6)
    assert math.isclose(rounded.certificate(4).value, before, rel_tol=1e-2)


def test_what_cannot_be_promised():
    with pytest.raises(ArgumentError, match="only add a bias"):
        made(positions=RotaryPositions())
    design = Design(8, 1, promise=Promise(TokenMax(), 2.0))
    with pytest.raises(ArgumentError, match="tied=False"):
        LanguageModel(design, VOCABULARY, 1)
    with pytest.raises(ArgumentError, match="Guaranteed"):
        Encoder(design, 1)
    with pytest.raises(ArgumentError, match="cross=False"):
        Decoder(design, 1)
    with pytest.raises(ArgumentError, match="TokenMax"):
        Design(8, 1, promise=Promise(Frobenius(), 2.0))
    with pytest.raises(ArgumentError, match="bias=False"):
        MultiHeadAttention(8, 2, orthogonal=True)
    with pytest.raises(ArgumentError, match="no promise"):
        LanguageModel(Design(8, 1), VOCABULARY, 1).certificate()


def test_numbers_of_few_digits_are_not_computed_with():
    """A layer whose parameters are in bfloat16 is what it declares, up to one rounding of its value."""
    layer = made(heads=2).decoder.layers[0].to(torch.bfloat16)
    x = torch.randn(7, 8).to(torch.bfloat16)
    declared = layer.declare()(x.double())
    assert bool(((layer(x).double() - declared).abs() <= 2.0**-8 * declared.abs() + 1e-5).all())
    attention = layer.attention
    value = attention(x)
    assert value.dtype == torch.bfloat16
    expected = attention.declare()(x.double())
    assert bool(((value.double() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-5).all())


def test_autocast_does_not_reach_inside():
    layer, x = made().decoder.layers[0], torch.randn(5, 8)
    plain = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), plain)


def _hook(model):
    model.decoder.layers[0].inner.register_forward_hook(lambda module, inputs, value: 5 * value)


def _method(model):
    model.output.run = lambda x: 5 * x


@pytest.mark.parametrize(("change", "why"), [(_hook, "has hooks"), (_method, "computes something other")])
def test_a_changed_model_has_no_certificate(change, why):
    """A proof is about what a model computes: what was put in may compute anything."""
    model = made()
    change(model)
    found = model.certificate()
    assert math.isinf(found.value)
    assert why in found.refused[0]
    with pytest.raises(ArgumentError, match=f"certificate ∞ .*{why}"):
        model.keep()


def test_a_file_that_keeps_no_promise_is_refused(tmp_path):
    model = made()
    with torch.no_grad():
        model.decoder.layers[1].inner.raw[0, 0, 0] = math.nan
    save(model, tmp_path / "model")
    with pytest.raises(ArgumentError, match=r"layers\.1\.inner\.raw: holds NaN"):
        load(tmp_path / "model")
