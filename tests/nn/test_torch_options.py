"""Settings of torch's modules that are no plain attention: dropout, other widths, keys that are no tokens,
other activations and norms, decoders without a mask.
"""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import regard as r
from regard.nn import Decoder, Design, KeyValueAttention, MultiHeadAttention, from_torch, load, save, to_torch
from regard.nn.key_value_attention import Besides
from tests.nn.modules import alive
from tests.nn.test_torch import BATCH, CLOSED, HEADS, HIDDEN, WIDTH, M, N, close, points

KEYS, VALUES = 6, 3


def of_width(width, n=M):
    return torch.randn(BATCH, n, width, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_other_widths_and_keys_that_are_no_tokens(learned, zero, bias):
    options = {"add_bias_kv": learned, "add_zero_attn": zero, "bias": bias, "batch_first": True}
    theirs = alive(nn.MultiheadAttention(WIDTH, HEADS, kdim=KEYS, vdim=VALUES, **options))
    ours, x, y, z = from_torch(theirs), points(BATCH, N), of_width(KEYS), of_width(VALUES)
    wanted, found = theirs(x, y, z)[0], ours(x, y, z)
    close(found, wanted, "output")
    cotangent = torch.randn_like(wanted)
    pairs = zip(*(torch.autograd.grad(value, [x, y, z], cotangent) for value in (wanted, found)), strict=True)
    for one, other in pairs:
        close(one, other, "gradient")
    hidden = torch.arange(M) >= torch.tensor([[4], [2], [1]])
    masked = theirs(x, y, z, key_padding_mask=hidden)[0]
    close(ours(x, y, z, support=r.Where(~hidden[:, None, None])), masked, "padded")
    back = to_torch(ours).state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in theirs.state_dict().items())


@pytest.mark.parametrize("learned", [True, False])
def test_added_keys_in_self_attention_with_a_mask(learned):
    theirs = alive(
        nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=learned, add_zero_attn=True, batch_first=True)
    )
    ours, x = from_torch(theirs), points(BATCH, N)
    assert isinstance(ours, KeyValueAttention if learned else MultiHeadAttention)
    close(ours(x, support=r.Causal()), theirs(x, x, x, attn_mask=CLOSED)[0], "output")
    again = to_torch(ours)
    assert again.add_zero_attn
    close(again(x, x, x)[0], theirs(x, x, x)[0], "returned")


def test_keys_and_values_of_two_sequences():
    theirs = alive(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
    ours, x, y, z = from_torch(theirs), points(BATCH, N), points(BATCH, M), points(BATCH, M)
    close(ours(x, y, z), theirs(x, y, z)[0], "output")
    close(ours(x, y, y), ours(x, y), "one sequence")
    assert float((ours(x, y, z) - ours(x, y)).detach().abs().max()) > 1e-2
    with pytest.raises(r.errors.ArgumentError, match="values: are given without the context"):
        ours(x, values=y)
    with pytest.raises(r.errors.ArgumentError, match="values: has 5 tokens and the context 4"):
        ours(x, y, x)
    with pytest.raises(r.errors.ArgumentError, match="value: is torch's name; call module"):
        ours(x, value=y)


@pytest.mark.parametrize("heads", [False, True])
def test_a_mask_that_is_added_when_a_module_is_called(heads):
    theirs = alive(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
    ours, x = from_torch(theirs), points(BATCH, N)
    mask = torch.randn(*((HEADS,) if heads else ()), N, N, dtype=torch.float64)
    wanted = theirs(x, x, x, attn_mask=mask.repeat(BATCH, 1, 1) if heads else mask)[0]
    close(ours(x, added=r.PairBias(mask)), wanted, "output")
    both = ours(x, added=r.PairBias(mask), support=r.Causal())
    close(both, ours(x, added=r.PairBias(mask + CLOSED)), "both")
    with pytest.raises(r.errors.ArgumentError, match=r"added: is .*; give PairBias\(mask\)"):
        ours(x, added=mask)


def test_a_learned_key_is_seen_by_all():
    marks = torch.arange(4)
    seen = Besides(r.Causal(), 3).allows(marks[:3], marks)
    assert torch.equal(seen[:, :3], r.Causal().allows(marks[:3], marks[:3]))
    assert bool(seen[:, 3].all())


def test_attention_to_other_widths_is_no_map():
    module = KeyValueAttention(WIDTH, HEADS, learned=True).eval()
    found = r.certify(module, r.Ball(1.0, tokens=3), r.TokenMax())
    assert found.value == math.inf
    assert "keys and values are not its tokens" in str(found.ladder())


ACTIVATIONS = {
    "silu": (nn.SiLU(), r.maps.Silu()),
    "silu function": (functional.silu, r.maps.Silu()),
    "tanh": (nn.GELU("tanh"), r.maps.Gelu(tanh=True)),
    "tanh function": (partial(functional.gelu, approximate="tanh"), r.maps.Gelu(tanh=True)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_other_activations(name):
    theirs, wanted = ACTIVATIONS[name]
    layer = alive(nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, activation=theirs, batch_first=True))
    ours, x = from_torch(layer), points(BATCH, N)
    assert repr(ours.design.activation) == repr(wanted)
    close(ours(x), layer(x), "output")
    close(to_torch(ours)(x), layer(x), "returned")


@pytest.mark.parametrize("eps", [1e-3, None])
def test_norms_without_centers(eps, monkeypatch):
    """torch's own fast path does not know such layers, and fails."""
    monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True, norm_first=True)
    layer.norm1, layer.norm2 = nn.RMSNorm(WIDTH, eps), nn.RMSNorm(WIDTH, eps)
    stack = alive(nn.TransformerEncoder(layer, 2, nn.RMSNorm(WIDTH, eps), enable_nested_tensor=False))
    ours, x = from_torch(stack), points(BATCH, N)
    assert not ours.design.norm.centered
    close(ours(x), stack(x), "output")
    close(to_torch(ours)(x), stack(x), "returned")


DECODERS = {
    "layer": lambda: nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True),
    "stack": lambda: nn.TransformerDecoder(DECODERS["layer"](), 2),
    "transformer": lambda: nn.Transformer(WIDTH, HEADS, 1, 1, HIDDEN, batch_first=True),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_says_what_it_sees(name):
    """Nobody can read off a decoder of torch whether it will be called with a mask."""
    theirs, x, y = alive(DECODERS[name]()), points(BATCH, N), points(BATCH, M)
    call = (y, x) if name == "transformer" else (x, y)
    with pytest.raises(r.errors.ArgumentError, match=r"support: is missing: .* sees later tokens"):
        from_torch(theirs)
    close(from_torch(theirs, support=r.Full())(*call), theirs(*call), "without a mask")
    close(from_torch(theirs, support=r.Causal())(*call), theirs(*call, tgt_mask=CLOSED), "with one")
    with pytest.raises(r.errors.ArgumentError, match="tgt_mask: is torch's name; write support"):
        from_torch(theirs, support=r.Full())(*call, tgt_mask=CLOSED)


def test_what_a_decoder_sees_is_saved(tmp_path):
    decoder = Decoder(Design(WIDTH, HEADS), 1, cross=False, support=r.Window(1, 1)).eval()
    x = torch.randn(N, WIDTH)
    save(decoder, tmp_path)
    again = load(tmp_path)
    assert repr(again.support) == "Window(left=1, right=1)"
    assert torch.equal(again(x), decoder(x))


# Dropout


MODULES = {
    "attention": (lambda: nn.MultiheadAttention(WIDTH, HEADS, 0.3, batch_first=True), None),
    "layer": (lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.2, batch_first=True), None),
    "decoder": (lambda: nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, 0.2, batch_first=True), r.Full()),
}


@pytest.mark.parametrize("name", MODULES)
def test_training_draws_what_torch_draws(name):
    """The same seed, the same dropped weights, the same outputs and gradients. Layers of torch keep batches
    in another order, so that only for one sequence their branches draw the same.
    """
    make, support = MODULES[name]
    theirs = alive(make()).train()
    batch = BATCH if name == "attention" else 1
    ours, x, y = from_torch(theirs, support=support), points(batch, N), points(batch, M)
    call = {"attention": (x, x, x), "layer": (x,), "decoder": (x, y)}[name]
    assert ours.training
    torch.manual_seed(7)
    wanted = theirs(*call)
    wanted = wanted[0] if name == "attention" else wanted
    torch.manual_seed(7)
    found = ours(*(call[:1] if name == "attention" else call))
    close(found, wanted, "output")
    one, other = (torch.autograd.grad(value.sum(), x)[0] for value in (found, wanted))
    close(one, other, "gradient")
    calm = ours.eval()(*(call[:1] if name == "attention" else call))
    assert float((calm - found).detach().abs().max()) > 1e-3


def test_dropout_goes_back_and_is_saved(tmp_path):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.2)
    layer.self_attn.dropout = 0.4
    ours = from_torch(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
    assert (ours.design.dropout, ours.design.attention_dropout) == (0.2, 0.4)
    assert to_torch(ours).layers[0].self_attn.dropout == 0.4
    save(ours, tmp_path)
    assert load(tmp_path).layers[0].attention.dropout == 0.4


def test_dropout_is_refused_only_where_a_law_is_needed():
    layer = MultiHeadAttention(WIDTH, HEADS, dropout=0.5)
    with pytest.raises(r.errors.ArgumentError, match=r"rows that are not laws; call module.eval\(\)"):
        r.certify(layer, r.Ball(1.0, tokens=3), r.TokenMax())
    with pytest.raises(r.errors.ArgumentError, match=r"dropout in training mode .*call module.eval\(\)"):
        r.linearize(layer, torch.randn(3, WIDTH))
    assert r.certify(layer.eval(), r.Ball(1.0, tokens=3), r.TokenMax()).value > 0
    assert float(r.linearize(layer, torch.randn(3, WIDTH)).norm()) > 0
    with pytest.raises(r.errors.ArgumentError, match=r"dropout: is 0\.5 in shaped attention"):
        MultiHeadAttention(WIDTH, HEADS, shaped=True, dropout=0.5)
    with pytest.raises(r.errors.ArgumentError, match="attention_dropout: is above zero"):
        Design(WIDTH, HEADS, promise=r.nn.Promise(r.TokenMax(), 2.0), attention_dropout=0.1)
    with pytest.raises(r.errors.ArgumentError, match=r"dropout: is 1\.5"):
        MultiHeadAttention(WIDTH, HEADS, dropout=1.5)


FORWARD = {
    "attn_mask": r"write support=regard.Where\(~mask\).*PairBias",
    "is_causal": r"write support=regard.Causal\(\)",
    "src_key_padding_mask": r"True for padding.*Padding\(lengths",
    "dropout_p": "it is a setting",
    "nonsense": "is not an argument of .*; it takes x",
}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("kind", ["attention", "layer"])
def test_modules_say_how_torchs_arguments_are_written(kind, name):
    design = Design(WIDTH, HEADS)
    module = design.self_attention() if kind == "attention" else r.nn.EncoderLayer(design)
    with pytest.raises(r.errors.ArgumentError, match=FORWARD[name]):
        module(torch.randn(3, WIDTH), **{name: None})


def decoder_layer():
    return nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True)


@pytest.mark.parametrize(
    "make",
    [
        decoder_layer,
        lambda: nn.TransformerDecoder(decoder_layer(), 2, nn.LayerNorm(WIDTH)),
        lambda: nn.Transformer(WIDTH, HEADS, 2, 2, HIDDEN, dropout=0.0, batch_first=True),
    ],
)
@pytest.mark.parametrize("support", [r.Full(), r.Causal(), r.Window(2, 0)])
def test_decoders_come_back_whatever_they_see(make, support):
    theirs, x, y = alive(make()), points(BATCH, N), points(BATCH, M)
    ours = from_torch(theirs, support=support)
    inputs = (y, x) if isinstance(theirs, nn.Transformer) else (x, y)
    back = to_torch(ours)
    close(back(*inputs), theirs(*inputs), "returned")
    visible = support.allows(torch.arange(N), torch.arange(N))
    close(ours(*inputs), theirs(*inputs, tgt_mask=~visible), "with the mask of the support")
