"""The audit reads regard's own modules: every head is covered, and its declaration is the module."""

import math

import pytest
import torch
from torch import nn

import regard as r
from regard.audits.adapters import Call, NotCovered, adapter_of
from regard.audits.checks import checks
from regard.audits.places import sites
from regard.nn import (
    AlibiPositions,
    Cache,
    Decoder,
    DecoderLayer,
    Design,
    Encoder,
    EncoderLayer,
    LanguageModel,
    MultiHeadAttention,
    RelativePositions,
    RotaryPositions,
    Transformer,
    UnitVariance,
    shaped,
)
from tests.nn.modules import alive

D = torch.float64
WIDTH, N = 8, 5
PLAIN = Design(WIDTH, 2, hidden=6, initialization=UnitVariance())
CHEAP = [check for check in checks() if check.name in ("weights", "rows", "geometry")]


def points(n=N):
    return torch.randn(1, n, WIDTH, dtype=D)


DESIGNS = {
    "dot": PLAIN,
    "groups": PLAIN.replace(heads=4, kv_heads=2),
    "rotary": PLAIN.replace(positions=RotaryPositions()),
    "alibi": PLAIN.replace(positions=AlibiPositions()),
    "relative": PLAIN.replace(positions=RelativePositions(8, 16)),
    "post norm": PLAIN.replace(norm_first=False, bias=False),
    "gaussian": PLAIN.replace(
        mechanism=r.Attention(r.Gaussian(bandwidth=nn.Parameter(torch.tensor([1.0, 2.0]))))
    ),
    "entmax": PLAIN.replace(mechanism=r.Attention(r.Dot(), normalizer=r.Entmax(1.5))),
    "softcap": PLAIN.replace(mechanism=r.Attention(r.SoftCap(r.Dot(), 1.5), normalizer=r.Softmax(0.5))),
}


@pytest.mark.parametrize("name", DESIGNS)
def test_declarations_equal_their_modules(name):
    design = DESIGNS[name]
    for model, options in (
        (alive(Encoder(design, 2)), {"x": points()}),
        (alive(Encoder(design, 1)), {"x": points(), "support": r.Padding(torch.tensor([[3]]))}),
        (
            alive(Decoder(design, 1)),
            {
                "x": points(),
                "context": points(4),
                "context_support": r.Where(torch.tensor([True, False, True, True])[None, None, None]),
            },
        ),
        (alive(LanguageModel(design, 7, 1)), {"ids": torch.randint(7, (1, N))}),
        (alive(Transformer(design, 1, 1)), {"source": points(4), "target": points()}),
    ):
        found = sites(model, options)
        assert len(found) == sum(isinstance(module, MultiHeadAttention) for module in model.modules())
        for site in found:
            assert site.disagreement() < 1e-12, site.path
            assert site.heads == design.heads
            assert site.block is not None


def test_supports_take_their_simplest_form():
    model = alive(LanguageModel(PLAIN, 7, 1))
    (site,) = sites(model, {"ids": torch.randint(7, (1, N)), "support": r.Padding(torch.tensor([[4]]))})
    assert repr(site.attention.support.parts[0]) == "Causal()"
    assert torch.equal(site.allowed, torch.ones(N, N).tril().bool() & (torch.arange(N) < 4))


def test_attention_alone_and_one_sequence_without_a_batch():
    module, x, y = alive(MultiHeadAttention(WIDTH, 2)), points()[0], points(3)[0]
    (own,) = sites(module, {"x": x})
    (cross,) = sites(module, {"x": x, "context": y})
    assert own.disagreement() < 1e-12
    assert own.block is None
    assert cross.disagreement() < 1e-12
    assert torch.equal(cross.context, y)


@pytest.mark.parametrize("name", ["dot", "groups", "alibi", "softcap", "gaussian"])
def test_matrices_are_the_scores(name):
    """Differences of scores over four tokens leave the bilinear part alone: (x - x')ᵀ M (y - y')."""
    module = alive(DESIGNS[name].self_attention())
    own = adapter_of(module).matrices(module, "", module)
    heads = len(own.w_o)
    mechanism = module.declare().attention
    potential = mechanism.potential.potential if name == "softcap" else mechanism.potential
    x, y = torch.randn(2, WIDTH, dtype=D), torch.randn(2, WIDTH, dtype=D)
    temperature = 0.5 if name == "softcap" else 1.0
    marks = torch.zeros(2, dtype=torch.long)
    scores = potential.scores(x, y, marks, marks) / temperature
    wanted = scores[:, 0, 0] - scores[:, 0, 1] - scores[:, 1, 0] + scores[:, 1, 1]
    form = own.scale * own.w_q @ own.w_k.repeat_interleave(heads // len(own.w_k), 0).mT
    torch.testing.assert_close((x[0] - x[1]) @ form @ (y[0] - y[1]), wanted, rtol=1e-9, atol=1e-10)


def test_parameters_are_named_as_in_the_state():
    model = Encoder(DESIGNS["gaussian"], 1)
    module = model.layers[0].attention
    names = adapter_of(module).parameters(model, "layers.0.attention", module)
    assert set(names) == {name for name in model.state_dict() if name.startswith("layers.0.attention.")}


def test_blocks_are_the_branches():
    model, x = alive(Transformer(PLAIN, 1, 1)), points()
    path = "decoder.layers.0.cross_attention"
    block = adapter_of(model.get_submodule(path)).block(model, path, model.get_submodule(path))
    assert block.path == "decoder.layers.0"
    assert block.attention == ("decoder.layers.0.cross_branch.norm", path)
    assert block.mlp == ("decoder.layers.0.hidden_branch.norm", "decoder.layers.0.feed_forward")
    assert block.final == "decoder.norm"
    layer = model.encoder.layers[0]
    inner = adapter_of(layer.attention).block(model, "encoder.layers.0.attention", layer.attention)
    first, second = (list(map(model.get_submodule, branch)) for branch in (inner.attention, inner.mlp))
    middle = x + first[1](first[0](x))
    torch.testing.assert_close(layer(x), middle + second[1](second[0](middle)))


ENTERING = {
    "dot": "attention_branch.norm",
    "alibi": "attention_branch.norm",
    "groups": "attention_branch.norm",
    "rotary": None,  # turned queries are not what matrices say
    "gaussian": None,
    "entmax": None,
    "softcap": None,
    "post norm": None,
}


@pytest.mark.parametrize("name", ENTERING)
def test_bounds_for_any_input_are_for_scores_that_matrices_say(name):
    model = alive(Encoder(DESIGNS[name], 1))
    module = model.layers[0].attention
    found = adapter_of(module).entering(model, "layers.0.attention", module)
    assert found == (None if ENTERING[name] is None else f"layers.0.{ENTERING[name]}")


def test_cross_attention_reads_more_than_a_norm():
    model = Decoder(PLAIN, 1)
    path = "layers.0.cross_attention"
    assert adapter_of(model.get_submodule(path)).entering(model, path, model.get_submodule(path)) is None


def test_the_bound_for_any_input_holds():
    """It is a certificate: no pair of inputs of the layer stretches a head more."""
    model = alive(Encoder(PLAIN.replace(bias=True), 1))
    (layer,), x = model.layers, points()
    report = r.audit(model, [{"x": x}], checks=CHEAP)
    bounds = [row.values["any_input_bound"] for row in report.heads]
    assert len(bounds) == 2
    attention = layer.attention.declare().attention
    for _ in range(20):
        read = layer.attention_branch.norm(10 * torch.randn(4, WIDTH, dtype=D)).detach()
        moved = layer.attention_branch.norm(10 * torch.randn(4, WIDTH, dtype=D)).detach()
        moved = read + 1e-3 * (moved - read)
        stretch = (attention(moved) - attention(read)).norm(dim=-1).amax(-1) / (moved - read).norm(
            dim=-1
        ).max()
        assert all(value <= bound < math.inf for value, bound in zip(stretch.tolist(), bounds, strict=True))


MODELS = {
    "encoder": (lambda: Encoder(PLAIN, 2), {"x": points()}, 4),
    "language model": (
        lambda: LanguageModel(DESIGNS["groups"], 7, 2),
        {"ids": torch.tensor([[1, 5, 0, 2]])},
        8,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_audit_covers_every_head(name):
    make, options, heads = MODELS[name]
    report = r.audit(alive(make()), [options], checks=CHEAP)
    assert not report.missing
    assert sum(entry.heads for entry in report.coverage) == len(report.heads) == heads
    assert max(entry.disagreement for entry in report.coverage) < 1e-12
    assert not report.skipped


def test_a_whole_audit_leaves_nothing_out():
    """Every check, in single precision, as people train."""
    model = alive(LanguageModel(Design(4, 1, hidden=4, initialization=UnitVariance()), 5, 1), torch.float32)
    report = r.audit(model, [{"ids": torch.tensor([[1, 4, 0]])}])
    assert not report.missing
    assert [entry for entry in report.skipped if "Error" in entry.reason] == []
    assert report.stacks
    assert len(report.heads) == 1


REFUSED = {
    "shaped": (lambda: (Encoder(shaped(PLAIN), 1), {"x": points()}), "its rows are not probability laws"),
    "more dimensions": (
        lambda: (Encoder(PLAIN, 1), {"x": points().unsqueeze(0)}),
        r"tokens are of shape \[1, 1, 5, 8\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_covered_says_why(name):
    make, message = REFUSED[name]
    model, options = make()
    with pytest.raises(NotCovered, match=message):
        sites(alive(model), options)


def test_a_cache_brings_tokens_of_other_calls():
    decoder, cache = alive(Decoder(PLAIN, 1, cross=False)), Cache(1)
    with pytest.raises(NotCovered, match="called with cache"):
        sites(decoder, {"x": points(), "cache": cache})


def test_training_is_refused_and_distances_have_no_matrices():
    module = MultiHeadAttention(WIDTH, 2, mechanism=r.Attention(r.Laplace(bandwidth=2.0))).double()
    with pytest.raises(NotCovered, match="training mode"):
        adapter_of(module).declare(module, "", module, Call((points(),), {}, module(points())))
    with pytest.raises(NotCovered, match="scores of Laplace are not a multiple"):
        adapter_of(module).matrices(module, "", module)


def test_a_class_of_the_same_name_from_elsewhere_is_not_taken_for_it():
    assert adapter_of(type("MultiHeadAttention", (nn.Module,), {})()) is None
    assert adapter_of(EncoderLayer(PLAIN)) is adapter_of(DecoderLayer(PLAIN)) is None
