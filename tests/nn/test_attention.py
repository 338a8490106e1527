"""Attention and layers: every mechanism runs, learns what is an nn.Parameter,
and has the gradients of its own formula.
"""

import copy
import io

import pytest
import torch
from torch import nn

import regard as r
from regard.nn import (
    Design,
    Encoder,
    EncoderLayer,
    FeedForward,
    MultiHeadAttention,
    RotaryPositions,
    ScaledNormal,
    UnitVariance,
    Xavier,
    initialize,
)
from tests.nouns import NORMALIZERS, POTENTIALS

D = torch.float64
WIDTH, HEADS, N = 8, 2, 6


def attention(mechanism=r.Attention(r.Dot()), **options):
    made = MultiHeadAttention(WIDTH, HEADS, mechanism=mechanism, **options).double()
    nn.init.normal_(made.projection.bias)
    return made


def by_hand(module, x, context=None, support=None):
    """The formula: projections, the declaration's own laws for each pair of heads, values, output."""
    y = x if context is None else context
    mechanism = module.mechanism.value()
    c, sizes = module.head_width, (module.heads, module.kv_heads, module.kv_heads)
    weights, biases = (
        module.projection.weight.split([k * c for k in sizes]),
        module.projection.bias.split([k * c for k in sizes]),
    )
    q, k, v = (
        (points @ w.T + b).unflatten(-1, (-1, c)).transpose(-3, -2)
        for points, w, b in zip((x, y, y), weights, biases, strict=True)
    )
    k, v = (part.repeat_interleave(module.heads // module.kv_heads, -3) for part in (k, v))
    marks = torch.arange(x.shape[-2]), torch.arange(y.shape[-2])
    allowed = (mechanism.support if support is None else support).allows(*marks)
    scores = mechanism.potential.scores(q, k, *marks)
    laws = mechanism.normalizer.weights(
        scores,
        r.normalizers.Reference(allowed=allowed.expand(*allowed.shape[:-2], len(marks[0]), len(marks[1]))),
    )
    return module.output((laws @ v).transpose(-3, -2).flatten(-2))


SQUARE = ("sinkhorn",)


@pytest.mark.parametrize("name", POTENTIALS)
def test_every_potential(name):
    module, x, y = (
        attention(r.Attention(POTENTIALS[name])),
        torch.randn(2, N, WIDTH, dtype=D),
        torch.randn(2, 4, WIDTH, dtype=D),
    )
    torch.testing.assert_close(module(x), by_hand(module, x), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(module(x, y), by_hand(module, x, y), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", NORMALIZERS)
def test_every_normalizer(name):
    module, x = (
        attention(r.Attention(r.Dot(), normalizer=NORMALIZERS[name])),
        torch.randn(2, N, WIDTH, dtype=D),
    )
    if name.startswith(
        "linear"
    ):  # features of queries and keys themselves: compared with the declaration elsewhere
        assert module(x).isfinite().all()
        return
    torch.testing.assert_close(module(x), by_hand(module, x), rtol=1e-6, atol=1e-7)
    if name not in SQUARE:
        y = torch.randn(2, 4, WIDTH, dtype=D)
        torch.testing.assert_close(module(x, y), by_hand(module, x, y), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("support", [r.Full(), r.Causal(), r.Window(1, 1)])
def test_groups_and_supports(kv_heads, support):
    module = MultiHeadAttention(
        WIDTH, 4, kv_heads=kv_heads, mechanism=r.Attention(r.Dot(), support=support)
    ).double()
    x, y = torch.randn(2, 3, N, WIDTH, dtype=D), torch.randn(2, 3, N, WIDTH, dtype=D)
    torch.testing.assert_close(module(x), by_hand(module, x))
    torch.testing.assert_close(module(x, y), by_hand(module, x, y))
    lengths = r.Padding(torch.tensor([[[4], [6], [1]], [[2], [3], [5]]]))
    torch.testing.assert_close(module(x, support=lengths), by_hand(module, x, support=support & lengths))


LEARNED = {
    "bandwidth": lambda: r.Attention(r.Gaussian(bandwidth=nn.Parameter(torch.tensor([1.0, 2.0], dtype=D)))),
    "table": lambda: r.Attention(
        r.Dot() + r.RelativeBias(nn.Parameter(torch.randn(2, 7, dtype=D)), r.potentials.Clipped(3))
    ),
    "temperature": lambda: r.Attention(
        r.Dot(), normalizer=r.Softmax(nn.Parameter(torch.tensor(1.5, dtype=D)))
    ),
    "sink": lambda: r.Attention(r.Dot(), normalizer=r.SinkSoftmax(nn.Parameter(torch.tensor(0.5, dtype=D)))),
    "bilinear": lambda: r.Attention(r.Bilinear(nn.Parameter(torch.randn(4, 4, dtype=D)))),
    "additive": lambda: r.Attention(r.Additive(None, None, nn.Parameter(torch.randn(4, dtype=D)))),
    "factor": lambda: r.Attention(
        nn.Parameter(torch.tensor(0.7, dtype=D)) * r.Laplace(bandwidth=2.0)
        + r.Alibi(nn.Parameter(torch.tensor(0.1, dtype=D)))
    ),
}


@pytest.mark.parametrize("name", LEARNED)
def test_parameters_of_a_mechanism_are_learned(name):
    given = LEARNED[name]()
    module = attention(given)
    own = {key: value for key, value in module.named_parameters() if key.startswith("mechanism.")}
    assert own
    assert own.keys() <= module.state_dict().keys()
    module(torch.randn(2, N, WIDTH, dtype=D)).square().sum().backward()
    for key, value in own.items():
        assert value.grad is not None, key
        assert float(value.grad.abs().max()) > 1e-8, key
    before = module(torch.ones(1, N, WIDTH, dtype=D).cumsum(-2)).detach()
    torch.optim.SGD(own.values(), 0.1).step()
    assert not torch.allclose(
        before, module(torch.ones(1, N, WIDTH, dtype=D).cumsum(-2))
    )  # the declaration sees the new numbers


def test_plain_tensors_are_buffers():
    slope = torch.tensor([0.5, 0.25], dtype=D)
    module = attention(r.Attention(r.Dot() + r.Alibi(slope)))
    assert [name for name, _ in module.named_buffers()] == ["mechanism.potential_terms_1_slope"]
    assert not [name for name, _ in module.named_parameters() if name.startswith("mechanism")]
    slope.zero_()  # what is given is copied
    assert module.state_dict()["mechanism.potential_terms_1_slope"].tolist() == [0.5, 0.25]
    assert module.float().mechanism.value().potential.terms[1].slope.dtype is torch.float32


def test_a_frozen_parameter_stays_frozen():
    bandwidth = nn.Parameter(torch.tensor(2.0), requires_grad=False)
    module = MultiHeadAttention(WIDTH, HEADS, mechanism=r.Attention(r.Gaussian(bandwidth=bandwidth)))
    (own,) = [value for name, value in module.named_parameters() if name.startswith("mechanism")]
    assert not own.requires_grad
    assert own is not bandwidth


def test_one_parameter_in_two_places_stays_one():
    shared = nn.Parameter(torch.tensor(1.5, dtype=D))
    module = attention(r.Attention(r.Gaussian(bandwidth=shared) + r.Laplace(bandwidth=shared)))
    (name,) = [name for name, _ in module.named_parameters() if name.startswith("mechanism")]
    terms = module.mechanism.value().potential.terms
    assert terms[0].bandwidth is terms[1].bandwidth is module.get_parameter(name)


def test_layers_do_not_share_a_mechanism():
    design = Design(
        WIDTH, HEADS, mechanism=r.Attention(r.Gaussian(bandwidth=nn.Parameter(torch.tensor(2.0))))
    )
    first, second = Encoder(design, 2).layers
    assert first.attention.mechanism.potential_bandwidth is not second.attention.mechanism.potential_bandwidth


GRADCHECKED = {
    "dot": r.Attention(r.Dot(), support=r.Causal()),
    "gaussian": r.Attention(r.Gaussian(bandwidth=nn.Parameter(torch.tensor(1.5, dtype=D)))),
    "entmax": r.Attention(r.Dot(), normalizer=r.Entmax(1.5)),
}


@pytest.mark.parametrize("name", GRADCHECKED)
def test_gradients_of_a_layer_are_those_of_differences(name):
    design = Design(4, 2, hidden=5, mechanism=GRADCHECKED[name], initialization=UnitVariance())
    layer = EncoderLayer(design).double()
    initialize(layer, design.initialization, 1)
    named = dict(layer.named_parameters())
    x = torch.randn(1, 3, 4, dtype=D, requires_grad=True)

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(named, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(
        run, (x, *(value.detach().requires_grad_() for value in named.values())), fast_mode=True
    )


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", [r.maps.Relu(), r.maps.Gelu(), r.maps.Silu(), r.maps.Tanh()])
def test_feed_forward_is_its_formula(activation, gated):
    layer, x = FeedForward(4, 6, activation=activation, gated=gated).double(), torch.randn(3, 4, dtype=D)
    inner = x @ layer.inner.weight.T + layer.inner.bias
    hidden = activation(inner[:, :6]) * inner[:, 6:] if gated else activation(inner)
    torch.testing.assert_close(layer(x), hidden @ layer.outer.weight.T + layer.outer.bias)
    torch.testing.assert_close(layer.declare()(x), layer(x))


def test_initializations_have_their_variances():
    layer = EncoderLayer(Design(256, 4, hidden=512))
    deviation = {
        name: lambda w=w: float(w.detach().std())
        for name, w in layer.named_parameters()
        if name.endswith("weight") and w.ndim == 2
    }
    initialize(layer, ScaledNormal(0.02), 8)
    wanted = {
        "attention.projection.weight": 0.02,
        "attention.output.weight": 0.005,
        "feed_forward.inner.weight": 0.02,
    }
    for name, value in {**wanted, "feed_forward.outer.weight": 0.005}.items():
        assert deviation[name]() == pytest.approx(value, rel=0.02), name
    initialize(layer, UnitVariance(), 8)
    assert deviation["feed_forward.outer.weight"]() == pytest.approx(512**-0.5, rel=0.02)
    initialize(layer, Xavier(), 8)
    assert deviation["feed_forward.inner.weight"]() == pytest.approx((2 / (256 + 512)) ** 0.5, rel=0.02)
    assert not layer.attention.projection.bias.any()


def test_dropout_acts_in_training_alone():
    layer, x = EncoderLayer(Design(WIDTH, HEADS, dropout=0.5)), torch.randn(1, N, WIDTH)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_copies_and_pickles_through_the_state():
    design = Design(
        WIDTH, HEADS, mechanism=LEARNED["table"](), norm=r.maps.Normalize(centered=False), gated=True
    )
    layer, x = EncoderLayer(design).double().eval(), torch.randn(2, N, WIDTH, dtype=D)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    with torch.no_grad():
        twin.attention.mechanism.potential_terms_1_table.add_(torch.randn(2, 7, dtype=D))
    assert not torch.allclose(twin(x), layer(x))  # a copy owns its numbers
    file = io.BytesIO()
    torch.save(twin.state_dict(), file)
    file.seek(0)
    other = EncoderLayer(design).double().eval()
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), twin(x))


def test_autocast_computes_in_short_numbers():
    layer, x = EncoderLayer(Design(32, 4)).eval(), torch.randn(2, N, 32)
    with torch.autocast("cpu", torch.bfloat16):
        inner = layer.attention(x)
        found = layer(x)
    assert inner.dtype is torch.bfloat16
    assert 1e-6 < float((found.float() - layer(x)).detach().abs().max()) < 0.05


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own internals
def test_a_compiled_layer_equals_the_layer():
    layer, x = EncoderLayer(Design(16, 2, positions=RotaryPositions())).eval(), torch.randn(2, N, 16)
    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-6)
    gradient = [
        torch.autograd.grad(f(x).square().sum(), layer.attention.projection.weight)[0]
        for f in (compiled, layer)
    ]
    torch.testing.assert_close(*gradient, rtol=1e-4, atol=1e-5)


def test_a_module_says_what_it_is():
    shown = repr(
        MultiHeadAttention(
            WIDTH, 4, kv_heads=2, mechanism=r.Attention(r.Gaussian(bandwidth=2.0)), shaped=True
        )
    )
    assert "8, heads=4, kv_heads=2, shaped=True" in shown
    assert "Gaussian(bandwidth=2)" in shown


def test_biases_begin_at_zero():
    layer = MultiHeadAttention(WIDTH, HEADS)
    assert not layer.projection.bias.any()
    assert not layer.output.bias.any()
