"""A module and its declaration are one map, for every design, and every verb works on it."""

import pytest
import torch
from torch import nn

import regard as r
from regard.nn import (
    AlibiPositions,
    Decoder,
    DecoderLayer,
    Design,
    Encoder,
    EncoderLayer,
    FeedForward,
    LanguageModel,
    MultiHeadAttention,
    RelativePositions,
    RotaryPositions,
    SequenceToSequence,
    Transformer,
    shaped,
)
from tests.nn.modules import alive, every_position
from tests.nouns import NORMALIZERS, POTENTIALS

D = torch.float64
WIDTH, HEADS, N = 8, 2, 6
POSITIONS = [*every_position(9), RotaryPositions(100.0, True)]


def points(*shape):
    return torch.randn(*shape, WIDTH, dtype=D)


def same(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


# A plain function of two projected tokens, and nouns whose own parameters are for another number of
# dimensions, have no declaration.
OPAQUE = ("function",)


@pytest.mark.parametrize("name", [name for name in POTENTIALS if name not in OPAQUE])
def test_attention_with_every_potential(name):
    module, x, y = (
        alive(MultiHeadAttention(WIDTH, HEADS, mechanism=r.Attention(POTENTIALS[name]))),
        points(N),
        points(4),
    )
    same(module.declare()(x), module(x))
    same(module.declare(y)(x), module(x, y))


# Projections that are fixed for two heads do not fit one group; position biases have no keys.
HEADED = ("dot heads", "normed heads")


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("name", [name for name in POTENTIALS if name not in OPAQUE + HEADED])
def test_groups_with_every_potential(name, kv_heads):
    heads = 4 if kv_heads == 2 and "heads" not in name and name != "relative" else 2
    mechanism = r.Attention(POTENTIALS[name])
    module = alive(MultiHeadAttention(4 * heads, heads, kv_heads=kv_heads, mechanism=mechanism))
    x, y = torch.randn(N, 4 * heads, dtype=D), torch.randn(5, 4 * heads, dtype=D)
    same(module.declare()(x), module(x))
    same(module.declare(y)(x), module(x, y))


LAWS = [name for name, normalizer in NORMALIZERS.items() if normalizer.laws]


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("support", [r.Full(), r.Window(1, 2)], ids=repr)
def test_shaped_attention_with_every_law(name, support):
    mechanism = r.Attention(r.Dot(), normalizer=NORMALIZERS[name], support=support)
    module, x = alive(MultiHeadAttention(WIDTH, HEADS, mechanism=mechanism, shaped=True)), points(N)
    torch.testing.assert_close(module.declare()(x), module(x), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", [name for name in NORMALIZERS if name not in LAWS])
def test_shaped_attention_is_of_laws(name):
    mechanism = r.Attention(r.Dot(), normalizer=NORMALIZERS[name])
    with pytest.raises(
        r.errors.ArgumentError, match=r"mechanism: has the normalizer .*, whose rows are not laws"
    ):
        MultiHeadAttention(WIDTH, HEADS, mechanism=mechanism, shaped=True)


@pytest.mark.parametrize("name", NORMALIZERS)
def test_attention_with_every_normalizer(name):
    module = alive(
        MultiHeadAttention(WIDTH, HEADS, mechanism=r.Attention(r.Dot(), normalizer=NORMALIZERS[name]))
    )
    x, y = points(N), points(4)
    torch.testing.assert_close(module.declare()(x), module(x), rtol=1e-7, atol=1e-8)
    if name != "sinkhorn":  # which compares as many queries as keys
        torch.testing.assert_close(module.declare(y)(x), module(x, y), rtol=1e-7, atol=1e-8)


def test_a_function_has_no_declaration_and_says_so():
    with pytest.raises(
        r.errors.ArgumentError, match=r"FunctionPotential, which takes no projections.*@projected.rule"
    ):
        MultiHeadAttention(WIDTH, HEADS, mechanism=r.Attention(POTENTIALS["function"])).declare()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("support", [r.Full(), r.Causal(), r.Window(1, None)])
@pytest.mark.parametrize("bias", [True, False])
def test_groups_supports_and_biases(kv_heads, support, bias):
    mechanism = r.Attention(r.Dot(), support=support)
    module = alive(MultiHeadAttention(WIDTH, 4, kv_heads=kv_heads, mechanism=mechanism, bias=bias))
    x, y = points(N), points(N)
    same(module.declare()(x), module(x))
    same(module.declare(y)(x), module(x, y))


@pytest.mark.parametrize("positions", POSITIONS, ids=repr)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_layers(positions, first, centered, gated):
    design = Design(
        WIDTH,
        HEADS,
        kv_heads=1,
        hidden=10,
        positions=positions,
        norm=r.maps.Normalize(1e-3, centered=centered),
        norm_first=first,
        gated=gated,
    )
    layer, x, y = alive(EncoderLayer(design)), points(N), points(4)
    same(layer.declare()(x), layer(x))
    decoder = alive(DecoderLayer(design))
    same(decoder.declare(y)(x), decoder(x, y))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_shaped_layers(first, kv_heads):
    design = shaped(Design(WIDTH, 4, kv_heads=kv_heads, norm_first=first), 0.8, 0.4)
    layer, x, y = alive(EncoderLayer(design)), points(N), points(4)
    same(layer.declare()(x), layer(x))
    decoder = alive(DecoderLayer(design))
    same(decoder.declare(y)(x), decoder(x, y))


@pytest.mark.parametrize("first", [True, False])
def test_stacks(first):
    design, x, y = Design(WIDTH, HEADS, norm_first=first, positions=RotaryPositions()), points(N), points(4)
    encoder, decoder = alive(Encoder(design, 2)), alive(Decoder(design, 2))
    same(encoder.declare()(x), encoder(x))
    same(decoder.declare(y)(x), decoder(x, y))
    transformer = alive(Transformer(design, 1, 2))
    same(transformer.declare(y)(x), transformer(y.unsqueeze(0), x.unsqueeze(0))[0])


def test_a_language_model_from_points_to_logits():
    model, ids = (
        alive(LanguageModel(Design(WIDTH, HEADS, positions=RelativePositions(8, 16)), 11, 2)),
        torch.randint(11, (1, N)),
    )
    found = model.declare()(model.embedding(ids)[0]) @ model.embedding.weight.T
    same(found, model(ids)[0])


def test_single_precision_is_declared_in_double():
    layer, x = EncoderLayer(Design(WIDTH, HEADS)).eval(), torch.randn(N, WIDTH)
    found = layer.declare()(x.double())
    assert found.dtype is D
    assert float((found - layer(x)).detach().abs().max()) < 1e-5


def test_a_declaration_is_cut_off():
    layer, x = alive(EncoderLayer(Design(WIDTH, HEADS))), points(N)
    declared = layer.declare()
    before = declared(x)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert torch.equal(declared(x), before)
    assert not before.requires_grad


# Verbs


CASES = {
    "dot": Design(4, 2, hidden=5),
    "gaussian": Design(4, 2, hidden=5, mechanism=r.Attention(r.Gaussian(bandwidth=2.0))),
    "causal rotary": Design(
        4, 2, hidden=5, mechanism=r.Attention(r.Dot(), support=r.Causal()), positions=RotaryPositions()
    ),
    "alibi rms gated": Design(
        4, 2, hidden=5, positions=AlibiPositions(), norm=r.maps.Normalize(0.1, centered=False), gated=True
    ),
    "post norm groups": Design(4, 2, kv_heads=1, hidden=5, norm=r.maps.Normalize(0.1), norm_first=False),
    "shaped": shaped(Design(4, 2, hidden=5)),
    "shaped groups": shaped(Design(4, 4, kv_heads=2, hidden=5)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_norm_of_the_derivative(name):
    layer = alive(EncoderLayer(CASES[name]))
    x = torch.randn(5, 4, dtype=D)
    matrix = torch.autograd.functional.jacobian(lambda z: layer(z), x).reshape(20, 20)
    found = r.linearize(layer.declare(), x).norm()
    assert float(found.value) == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-6)


BALL = r.Ball(1.0, torch.zeros(4, dtype=D), tokens=3)


def steepest(layer, count=4):
    """The largest derivative of the module itself at some sequences of the ball:
    a constant cannot be below it.
    """
    found = 0.0
    for _ in range(count):
        x = nn.functional.normalize(torch.randn(3, 4, dtype=D), dim=-1) * torch.rand(3, 1, dtype=D)
        matrix = torch.autograd.functional.jacobian(layer, x).reshape(12, 12)
        found = max(found, float(torch.linalg.matrix_norm(matrix, 2)))
    return found


@pytest.mark.parametrize("name", CASES)
def test_certificates_stay_above_derivatives_of_the_module(name):
    layer = alive(EncoderLayer(CASES[name]))
    for module in (layer.attention, layer):
        certificate = r.certify(module.declare(), BALL, r.Frobenius())
        assert 0 < steepest(module) <= certificate.value < float("inf")


@pytest.mark.parametrize("name", ["causal rotary", "shaped"])
def test_certificates_stay_above_what_a_search_finds(name):
    declared = alive(EncoderLayer(CASES[name])).attention.declare()
    witness = r.falsify(declared, BALL, r.Frobenius(), steps=3, restarts=1)
    assert 0 < witness.value <= r.certify(declared, BALL, r.Frobenius()).value


def test_a_search_in_a_whole_layer():
    declared = alive(EncoderLayer(CASES["post norm groups"])).declare()
    witness = r.falsify(declared, BALL, r.Frobenius(), steps=3, restarts=1)
    assert 0 < witness.value <= r.certify(declared, BALL, r.Frobenius()).value < float("inf")


def test_a_search_in_cross_attention():
    declared = alive(MultiHeadAttention(4, 2)).declare(torch.randn(3, 4, dtype=D))
    witness = r.falsify(declared, BALL, r.Frobenius(), steps=3, restarts=1)
    assert 0 < witness.value <= r.certify(declared, BALL, r.Frobenius()).value < float("inf")


# regard.declare


KNOWN = {
    "attention": lambda: MultiHeadAttention(WIDTH, HEADS),
    "feed forward": lambda: FeedForward(WIDTH, 5, gated=True),
    "encoder layer": lambda: EncoderLayer(Design(WIDTH, HEADS)),
    "decoder layer": lambda: DecoderLayer(Design(WIDTH, HEADS), cross=False),
    "encoder": lambda: Encoder(Design(WIDTH, HEADS), 2),
    "decoder": lambda: Decoder(Design(WIDTH, HEADS), 2, cross=False),
}


@pytest.mark.parametrize("name", KNOWN)
def test_regard_declares_modules(name):
    module, x = alive(KNOWN[name]()), points(N)
    same(r.declare.one(module)(x), module(x))


def test_regard_declares_a_language_model_on_its_points():
    model = alive(LanguageModel(Design(WIDTH, HEADS), 5, 1))
    x = points(N)
    same(r.declare.one(model)(x), model.decoder(x))


def test_modules_are_certified_as_they_are():
    module = alive(MultiHeadAttention(4, 2))
    domain, norm = r.Ball(1.0, torch.zeros(4, dtype=D)), r.TokenMax()
    assert (
        r.certify(module, domain, norm).value
        == r.certify(module.declare(), domain, norm).value
        < float("inf")
    )
    assert r.certify(nn.Sequential(nn.LayerNorm(4).double(), module), r.Whole(), norm).value < float("inf")


def test_layers_of_regard_stand_among_those_of_torch():
    network = nn.Sequential(nn.Linear(3, WIDTH), EncoderLayer(Design(WIDTH, HEADS)), nn.Linear(WIDTH, 2))
    network, x = alive(network), torch.randn(N, 3, dtype=D)
    same(r.declare.one(network)(x), network(x))


class Twice(EncoderLayer):
    """Not what it is derived from."""

    def forward(self, x, **options):
        return 2 * x


def hooked():
    module = EncoderLayer(Design(WIDTH, HEADS))
    module.attention.register_forward_hook(lambda *call: None)
    return module


REFUSED = {
    "other forward": (lambda: Twice(Design(WIDTH, HEADS)), "computes something other than EncoderLayer"),
    "hooks": (hooked, "MultiHeadAttention has hooks"),
    "context": (lambda: Decoder(Design(WIDTH, HEADS), 1), r"depends on a context; module.declare\(context\)"),
    "context of a layer": (lambda: DecoderLayer(Design(WIDTH, HEADS)), "depends on a context"),
    "two sequences": (lambda: Transformer(Design(WIDTH, HEADS), 1, 1), "reads two sequences"),
    "two sequences of tokens": (
        lambda: SequenceToSequence(Design(WIDTH, HEADS), 5, 5, 1),
        "reads two sequences",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_map_is_refused_and_has_no_finite_constant(name):
    make, message = REFUSED[name]
    module = make()
    with pytest.raises(Exception, match=message):
        r.declare.one(module)
    certificate = r.certify(module, r.Ball(1.0, torch.zeros(WIDTH, dtype=D)), r.Frobenius())
    assert certificate.value == float("inf")


def test_a_context_is_given_where_it_is_needed_and_only_there():
    with pytest.raises(r.errors.ArgumentError, match="context: is missing"):
        DecoderLayer(Design(WIDTH, HEADS)).declare()
    with pytest.raises(r.errors.ArgumentError, match="without cross-attention"):
        Decoder(Design(WIDTH, HEADS), 1, cross=False).declare(points(3))
    with pytest.raises(r.errors.ArgumentError, match=r"declare attention to one context \(m, width\)"):
        MultiHeadAttention(WIDTH, HEADS).declare(points(1, 3))
    with pytest.raises(r.errors.ArgumentError, match="shaped attention"):
        MultiHeadAttention(WIDTH, HEADS, shaped=True).declare(points(3))
    with pytest.raises(r.errors.ArgumentError, match="shaped attention"):
        MultiHeadAttention(WIDTH, HEADS, shaped=True).double()(points(4), points(3))
