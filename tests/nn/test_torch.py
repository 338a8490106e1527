"""Weights of torch's own modules give the same outputs and the same gradients here,
and come back unchanged.
"""

import re

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
    Transformer,
    from_torch,
    shaped,
    to_torch,
)
from regard.nn.interchange import DECODING, reading
from tests.nn.modules import alive

WIDTH, HEADS, HIDDEN, BATCH, N, M = 8, 2, 12, 3, 5, 4
LAYERS = [
    (first, activation, bias)
    for first in (True, False)
    for activation in ("relu", "gelu")
    for bias in (True, False)
]
CLOSED = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)


def points(*shape):
    return torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True)


def own_name(name):
    """The name in regard.nn of a parameter of torch."""
    decoder = "multihead_attn" in name or "decoder" in name
    table = {
        "self_attn.": "attention.",
        "multihead_attn.": "cross_attention.",
        "in_proj_": "projection.",
        "out_proj.": "output.",
        "linear1.": "feed_forward.inner.",
        "linear2.": "feed_forward.outer.",
        "norm1.": "attention_branch.norm.",
        "norm2.": "cross_branch.norm." if decoder else "hidden_branch.norm.",
        "norm3.": "hidden_branch.norm.",
    }
    for theirs, ours in table.items():
        name = name.replace(theirs, ours)
    return name


def close(found, wanted, what):
    assert found is not None, what
    assert float((found - wanted).detach().abs().max()) < 1e-9, what


def assert_same(theirs, ours, called, calling, inputs, decoder=False):
    """Outputs, and gradients of inputs and of every parameter."""
    wanted, found = called(theirs), calling(ours)
    close(found, wanted, "output")
    cotangent = torch.randn_like(wanted)
    named = dict(theirs.named_parameters())
    wanted = torch.autograd.grad(wanted, [*inputs, *named.values()], cotangent)
    found_names = dict(ours.named_parameters())
    assert len(found_names) == len(named)
    mine = [
        found_names[
            own_name(f"decoder.{name}" if decoder else name).removeprefix("decoder." if decoder else "")
        ]
        for name in named
    ]
    found = torch.autograd.grad(found, [*inputs, *mine], cotangent)
    for what, one, other in zip([*map(str, range(len(inputs))), *named], found, wanted, strict=True):
        close(one, other, what)
    assert any(float(gradient.abs().max()) > 1e-3 for gradient in found)


def assert_returned(theirs, ours):
    """to_torch gives back every number under its own name."""
    again = to_torch(ours).state_dict()
    assert again.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again[name], tensor), name


MASKS = {
    "none": ({}, r.Full()),
    "bool": ({"attn_mask": CLOSED.isinf()}, r.Causal()),
    "float": ({"attn_mask": CLOSED}, r.Causal()),
    "padding": (
        {"key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] + [True] * 4])},
        r.Padding(torch.tensor([[5], [3], [1]])),
    ),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_self_attention(bias, mask):
    theirs = alive(nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True))
    ours, x, (options, support) = from_torch(theirs), points(BATCH, N), MASKS[mask]
    assert_same(theirs, ours, lambda m: m(x, x, x, **options)[0], lambda m: m(x, support=support), [x])
    assert_returned(theirs, ours)


@pytest.mark.parametrize("bias", [True, False])
def test_cross_attention(bias):
    theirs = alive(nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True))
    ours, x, y = from_torch(theirs), points(BATCH, N), points(BATCH, M)
    hidden = torch.tensor([[False] * 4, [True, False, False, True], [False, True, True, True]])
    assert_same(
        theirs,
        ours,
        lambda m: m(x, y, y, key_padding_mask=hidden)[0],
        lambda m: m(x, y, support=r.Where(~hidden[:, None, None])),
        [x, y],
    )


def test_tokens_first_is_read_as_batches_first():
    theirs = alive(nn.MultiheadAttention(WIDTH, HEADS))
    x = points(N, BATCH)
    close(from_torch(theirs)(x.transpose(0, 1)), theirs(x, x, x)[0].transpose(0, 1), "output")


@pytest.mark.parametrize(("first", "activation", "bias"), LAYERS)
def test_encoder_layer(first, activation, bias):
    theirs = alive(
        nn.TransformerEncoderLayer(
            WIDTH, HEADS, HIDDEN, 0.1, activation, 1e-3, batch_first=True, norm_first=first, bias=bias
        )
    )
    ours, x = from_torch(theirs), points(BATCH, N)
    hidden = torch.arange(N) >= torch.tensor([[5], [4], [2]])
    assert isinstance(ours, EncoderLayer)
    assert_same(
        theirs,
        ours,
        lambda m: m(x, src_key_padding_mask=hidden),
        lambda m: m(x, support=r.Padding(torch.tensor([[5], [4], [2]]))),
        [x],
    )
    assert_returned(theirs, ours)


@pytest.mark.parametrize(("first", "activation", "bias"), LAYERS)
def test_decoder_layer(first, activation, bias):
    theirs = alive(
        nn.TransformerDecoderLayer(
            WIDTH, HEADS, HIDDEN, 0.1, activation, 1e-3, batch_first=True, norm_first=first, bias=bias
        )
    )
    ours, x, y = from_torch(theirs, support=r.Causal()), points(BATCH, N), points(BATCH, M)
    assert isinstance(ours, DecoderLayer)
    assert_same(theirs, ours, lambda m: m(x, y, tgt_mask=CLOSED), lambda m: m(x, y), [x, y], decoder=True)
    assert_returned(theirs, ours)


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_encoder(first, final):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.1, batch_first=True, norm_first=first)
    theirs = alive(
        nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH) if final else None, enable_nested_tensor=False)
    )
    ours, x = from_torch(theirs), points(BATCH, N)
    assert_same(theirs, ours, lambda m: m(x, mask=CLOSED), lambda m: m(x, support=r.Causal()), [x])
    assert_returned(theirs, ours)


@pytest.mark.parametrize("final", [True, False])
def test_decoder(final):
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, 0.1, batch_first=True)
    theirs = alive(nn.TransformerDecoder(layer, 2, nn.LayerNorm(WIDTH) if final else None))
    ours, x, y = from_torch(theirs, support=r.Causal()), points(BATCH, N), points(BATCH, M)
    hidden = torch.arange(M) >= torch.tensor([[4], [3], [1]])
    assert_same(
        theirs,
        ours,
        lambda m: m(x, y, tgt_mask=CLOSED, memory_key_padding_mask=hidden),
        lambda m: m(x, y, context_support=r.Padding(torch.tensor([[4], [3], [1]]))),
        [x, y],
        decoder=True,
    )
    assert_returned(theirs, ours)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # torch warns of its own defaults
@pytest.mark.parametrize("first", [True, False])
def test_transformer(first):
    theirs = alive(
        nn.Transformer(WIDTH, HEADS, 2, 1, HIDDEN, 0.1, "gelu", batch_first=True, norm_first=first)
    )
    ours, x, y = from_torch(theirs, support=r.Causal()), points(BATCH, N), points(BATCH, M)
    hidden = torch.arange(M) >= torch.tensor([[4], [2], [3]])
    lengths = r.Padding(torch.tensor([[4], [2], [3]]))
    assert_same(
        theirs,
        ours,
        lambda m: m(y, x, tgt_mask=CLOSED, src_key_padding_mask=hidden, memory_key_padding_mask=hidden),
        lambda m: m(y, x, source_support=lengths),
        [x, y],
    )
    assert_returned(theirs, ours)


def test_a_model_built_here_goes_there():
    """The other way round: the stack is regard's, and torch's computes the same,
    in training mode or not as the original is.
    """
    ours = alive(
        Transformer(
            Design(WIDTH, HEADS, hidden=HIDDEN, activation=r.maps.Relu(), norm=r.maps.Normalize(1e-4)), 1, 2
        )
    )
    theirs, x, y = to_torch(ours), points(BATCH, N), points(BATCH, M)
    close(theirs(y, x, tgt_mask=CLOSED), ours(y, x), "output")
    assert not theirs.training
    assert theirs.encoder.layers[0].self_attn.training is False
    assert to_torch(ours.train()).training
    assert theirs.state_dict()["decoder.layers.1.norm3.weight"].dtype is torch.float64


def test_single_precision_agrees_to_its_rounding():
    theirs = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True).eval()
    x = torch.randn(2, 9, 32)
    with torch.no_grad():
        assert float((from_torch(theirs)(x) - theirs(x)).abs().max()) < 3e-6


def test_copies_do_not_share_memory():
    theirs = alive(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN), 1, nn.LayerNorm(WIDTH), False)
    )
    ours = from_torch(theirs)
    mine = {parameter.data_ptr() for parameter in ours.parameters()}
    assert not mine & {parameter.data_ptr() for parameter in theirs.parameters()}
    assert not mine & {parameter.data_ptr() for parameter in to_torch(ours).parameters()}


class Other(nn.TransformerEncoderLayer):
    """A layer that is not what it is derived from."""

    def forward(self, src):
        return 2 * src


def layers(**options):
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, **options), 2, enable_nested_tensor=False
    )


def differing():
    found = layers()
    found.layers[1] = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, activation="gelu")
    return found


def touched(change):
    """A layer in a stack with one thing changed."""
    found = layers()
    change(found.layers[1])
    return found


class Same(nn.TransformerEncoderLayer):
    """A layer with another block inside the same forward."""

    def _ff_block(self, x):
        return 2 * super()._ff_block(x)


class Tripled(nn.MultiheadAttention):
    """Attention that is not what it is derived from."""

    def forward(self, *given, **named):
        found, weights = super().forward(*given, **named)
        return 3 * found, weights


def mixed():
    encoder = layers()
    encoder.norm = nn.LayerNorm(WIDTH)
    decoder = nn.TransformerDecoder(
        nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, activation="gelu"), 1, nn.LayerNorm(WIDTH)
    )
    return nn.Transformer(WIDTH, HEADS, custom_encoder=encoder, custom_decoder=decoder)


def hooked(module):
    module.register_forward_hook(lambda *call: 2 * call[-1])
    return module


TOUCHED = {
    "attention class": (
        lambda b: setattr(b, "self_attn", Tripled(WIDTH, HEADS)),
        "has a .*Tripled in self_attn",
    ),
    "attention keys": (
        lambda b: setattr(b, "self_attn", nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True)),
        "holds self_attn.bias_k",
    ),
    "attention zero": (
        lambda b: setattr(b, "self_attn", nn.MultiheadAttention(WIDTH, HEADS, add_zero_attn=True)),
        "has add_zero_attn=True in self_attn",
    ),
    "eps": (lambda b: setattr(b.norm2, "eps", 0.5), "has eps=0.5 in norm2, not 1e-05"),
    "rms": (lambda b: setattr(b, "norm1", nn.RMSNorm(WIDTH, eps=1e-5)), "holds norm2.bias"),
    "no eps": (lambda b: setattr(b, "norm1", nn.Identity()), "parts are not torch's"),
    "hook": (lambda b: hooked(b.linear1), "has hooks in layers.1.linear1"),
    "weight norm": (lambda b: nn.utils.parametrizations.weight_norm(b.linear1), "lacks linear1.weight"),
    "dropout": (lambda b: setattr(b.dropout2, "p", 0.7), "has p=0.7 in dropout2, not 0.1"),
    "stale activation": (
        lambda b: setattr(b, "activation", torch.nn.functional.gelu),
        "has activation_relu_or_gelu=1, not 2",
    ),
    "method": (lambda b: setattr(b, "_ff_block", lambda x: x), "has another _ff_block in layers.1"),
}


@pytest.mark.parametrize("name", TOUCHED)
def test_every_part_of_a_module_is_looked_at(name):
    change, message = TOUCHED[name]
    with pytest.raises(r.errors.ArgumentError, match=message):
        from_torch(touched(change))


def test_a_module_that_was_changed_does_not_go_to_torch():
    encoder = Encoder(Design(WIDTH, HEADS, activation=r.maps.Relu()), 2)
    encoder.layers[1].feed_forward.activation = r.maps.Gelu()
    with pytest.raises(
        r.errors.ArgumentError, match=r"has activation=Gelu\(\) in feed_forward, not Relu\(\); it was changed"
    ):
        to_torch(encoder)
    attention = MultiHeadAttention(WIDTH, HEADS)
    hooked(attention.output)
    with pytest.raises(r.errors.ArgumentError, match="has hooks in output"):
        to_torch(attention)


REFUSED = {
    "class": (lambda: Same(WIDTH, HEADS, HIDDEN), "with a class of its own"),
    "class inside": (
        lambda: nn.TransformerEncoder(Same(WIDTH, HEADS, HIDDEN), 2, enable_nested_tensor=False),
        "has a .*Same, not a torch",
    ),
    "hook": (lambda: hooked(nn.MultiheadAttention(WIDTH, HEADS)), "has hooks of its own"),
    "no layer": (
        lambda: nn.TransformerEncoder(nn.Identity(), 1, enable_nested_tensor=False),
        "has a layer that is a Identity",
    ),
    "two designs": (mixed, "differ in their settings; convert its encoder and decoder one by one"),
    "activation": (
        lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, activation=nn.ELU()),
        r"has the activation ELU.*use relu, gelu, ",
    ),
    "forward": (lambda: Other(WIDTH, HEADS, HIDDEN), "forward of its own"),
    "norm": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, HEADS), 1, nn.GroupNorm(2, WIDTH), False
        ),
        "ends with a GroupNorm",
    ),
    "layers": (differing, "differ in their settings"),
    "custom": (
        lambda: nn.Transformer(WIDTH, HEADS, 1, 1, custom_encoder=nn.Identity()),
        "custom part, Identity",
    ),
    "bilinear": (lambda: nn.Bilinear(2, 2, 2), "is a Bilinear"),
    "number": (lambda: 3, "is a int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_regard_cannot_say_is_refused(name):
    make, message = REFUSED[name]
    module = make()
    with pytest.raises(r.errors.ArgumentError, match=message):
        from_torch(module, support=r.Causal() if isinstance(module, DECODING) else None)


def test_anyone_may_say_what_a_module_becomes():
    class Mine(nn.TransformerEncoderLayer):
        def forward(self, src):
            return src

    reading.rule(Mine)(lambda module: EncoderLayer(Design(WIDTH, HEADS)))
    assert isinstance(from_torch(Mine(WIDTH, HEADS)), EncoderLayer)


D = Design(WIDTH, HEADS)
UNSAYABLE = {
    "query bias": (
        lambda: MultiHeadAttention(
            WIDTH, HEADS, mechanism=r.Attention(r.Dot(b_q=torch.ones(WIDTH // HEADS)))
        ),
        "softmax of scaled dot products only",
    ),
    "key bias": (
        lambda: EncoderLayer(D.replace(mechanism=r.Attention(r.Dot(b_k=torch.ones(WIDTH // HEADS))))),
        "softmax of scaled dot products only",
    ),
    "gated": (lambda: Encoder(D.replace(gated=True), 1), "gated"),
    "groups": (lambda: EncoderLayer(D.replace(kv_heads=1)), "kv_heads"),
    "alibi": (lambda: EncoderLayer(D.replace(positions=AlibiPositions())), "positions"),
    "shaped": (lambda: EncoderLayer(shaped(D)), "shaping"),
    "silu": (lambda: EncoderLayer(D.replace(activation=r.maps.Silu(1.702))), "activation"),
    "gaussian": (
        lambda: EncoderLayer(D.replace(mechanism=r.Attention(r.Gaussian(bandwidth=1.0)))),
        "softmax of scaled dot products only",
    ),
    "temperature": (
        lambda: EncoderLayer(D.replace(mechanism=r.Attention(r.Dot(), normalizer=r.Softmax(2.0)))),
        "softmax of scaled",
    ),
    "support": (
        lambda: Encoder(D.replace(mechanism=r.Attention(r.Dot(), support=r.Causal())), 1),
        "torch takes masks as arguments",
    ),
    "no cross": (lambda: Decoder(D, 1, cross=False), "has no cross-attention"),
    "layer without cross": (lambda: DecoderLayer(D, cross=False), "has no cross-attention"),
    "attention groups": (lambda: MultiHeadAttention(WIDTH, HEADS, kv_heads=1), "grouped keys"),
    "attention shaped": (lambda: MultiHeadAttention(WIDTH, HEADS, shaped=True), "shaped attention"),
    "attention scale": (
        lambda: MultiHeadAttention(WIDTH, HEADS, mechanism=r.Attention(r.Dot(scale=1.0))),
        "scaled dot products only",
    ),
    "language model": (lambda: LanguageModel(D, 5, 1), "is a LanguageModel"),
    "feed forward": (lambda: FeedForward(WIDTH, 4), "is a FeedForward"),
}


@pytest.mark.parametrize("name", UNSAYABLE)
def test_what_torch_cannot_say_is_refused(name):
    make, message = UNSAYABLE[name]
    with pytest.raises(r.errors.ArgumentError, match=re.escape(message)):
        to_torch(make())
