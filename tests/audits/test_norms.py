"""The bound that needs no input: norm layers are read exactly, they are what attention reads,
and no search breaks the bound.
"""

import dataclasses
import math
from functools import cache

import pytest
import torch
from torch import nn

import regard as r
from regard._object import Object
from regard.audits.adapters import Matrices, adapter_of
from regard.audits.adapters.norms import normalize_of
from regard.audits.adapters.surroundings import may_turn
from regard.audits.checks.base import Weights, checks
from regard.audits.checks.spectra import MARGIN, NEAR, any_input_bounds
from regard.audits.places import Place
from regard.audits.watching import Spot
from regard.domains import Whole
from regard.lookups import Linear
from regard.maps import Normalize
from regard.norms import TokenMax
from regard.potentials import Dot, Rotary
from regard.proofs import certify
from regard.proofs.imaging import image
from regard.proofs.subject import single_heads
from tests.audits.families import BERT, FAMILIES, WIDTH, Wrapped, capture, enlivened, known, pretrained

pytest.importorskip("transformers")

UNREAD = {
    "bert_decoder": {f"encoder.layer.{i}.crossattention.self" for i in range(2)},
    "electra": {"encoder.layer.0.attention.self"},  # its embeddings are projected after their norm
    "roc_bert": {"encoder.layer.0.attention.self"},  # a setting adds to its embeddings after their norm
    "modernbert": {"layers.0.attn"},
    "gpt2_cross": {f"h.{i}.crossattention" for i in range(3)},
    "opt_post": {f"decoder.layers.{i}.self_attn" for i in range(2)},
    "t5": {f"decoder.block.{i}.layer.1.EncDecAttention" for i in range(2)},
    "mt5": {f"decoder.block.{i}.layer.1.EncDecAttention" for i in range(2)},
    "torch_encoder": {f"inner.layers.{i}.self_attn" for i in range(2)},
    "torch_decoder": {f"inner.layers.{i}.multihead_attn" for i in range(2)},
    "torch_decoder_layer": {"inner.multihead_attn"},
    "multihead": {"inner"},
    "multihead_unbiased": {"inner"},
    "multihead_time_first": {"inner"},
}
"""Attention without a known norm, by family: cross-attention, norms after the residual connection,
nothing in front.
"""


@cache
def model_of(name):
    return FAMILIES[name].make(FAMILIES[name].implementations[-1])


def entering(model, path):
    module = model.get_submodule(path)
    return adapter_of(module).entering(model, path, module)


# Norm layers


@pytest.mark.parametrize("name", sorted(FAMILIES))
@torch.no_grad()
def test_every_norm_of_every_family_is_its_value(name):
    """On tokens of several sizes: small ones see eps."""
    generator = torch.Generator().manual_seed(3)
    for module in model_of(name).modules():
        if "Norm" in type(module).__name__:
            norm = normalize_of(module)
            for size in (1e-3, 1.0, 30.0):
                x = size * (torch.randn(5, len(norm.weight), generator=generator) + 0.5)
                assert torch.allclose(norm(x.double()), module(x).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(6),
        nn.LayerNorm(6, bias=False),
        nn.LayerNorm(6, elementwise_affine=False),
        nn.RMSNorm(6),
        nn.RMSNorm(6, 0.1),
    ],
)
@torch.no_grad()
def test_norms_of_torch(module):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(
        normalize_of(enlivened(module))(x.double()), module(x).double(), rtol=1e-6, atol=1e-6
    )


class Doubled(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class LlamaRMSNorm(nn.RMSNorm):
    """A class that only has the name."""


@pytest.mark.parametrize(
    "module",
    [Doubled(6), LlamaRMSNorm(6), nn.LayerNorm((2, 3)), nn.Identity(), nn.BatchNorm1d(6), nn.Linear(6, 6)],
)
def test_what_is_no_known_norm(module):
    assert normalize_of(module) is None


# What attention reads


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_attention_reads_the_norm_and_nothing_else(name):
    """In every call the tensors of width d that enter the module are the output of the norm."""
    model = model_of(name)
    norms = {path: entering(model, path) for path in known(model)}
    assert {path for path, norm in norms.items() if norm is None} == UNREAD.get(name, set())
    read = {path: norm for path, norm in norms.items() if norm is not None}
    for call in FAMILIES[name].calls.values():
        found = capture(model, call, sorted({*read, *read.values()}))
        assert set(read) <= set(found)
        for path, norm in read.items():
            states = entered(found[path])
            assert states
            assert all(torch.equal(state, found[norm].output) for state in states)


def entered(call):
    """Every tensor of tokens that a module was called with,
    apart from encoder states that self-attention of BERT does not look at.
    """
    own = {name: value for name, value in call.options.items() if name != "encoder_hidden_states"}
    every = [value for value in (*call.arguments[:3], *own.values()) if isinstance(value, torch.Tensor)]
    return [value for value in every if value.ndim == 3 and value.shape[-1] == WIDTH]


@pytest.mark.parametrize("name", sorted(FAMILIES))
@torch.no_grad()
def test_rotary_positions_are_noticed(name):
    """From weights alone exactly those layers are taken as turned whose declaration turns."""
    model, call = model_of(name), next(iter(FAMILIES[name].calls.values()))
    for path, captured in capture(model, call).items():
        module = model.get_submodule(path)
        declared = adapter_of(module).declare(model, path, module, captured)
        assert may_turn(model, path) == rotates(declared.attention.potential)


def rotates(value):
    parts = [part for part in vars(value).values() for part in (part if isinstance(part, tuple) else (part,))]
    return isinstance(value, Rotary) or any(rotates(part) for part in parts if isinstance(part, Object))


class Moved(nn.TransformerEncoderLayer):
    """Adds something after the norm, as models with positions in every layer do."""

    def _sa_block(self, x, *arguments, **options):
        return super()._sa_block(x + 100, *arguments, **options)


def test_layers_of_others_may_do_anything():
    options = {"dim_feedforward": 24, "batch_first": True, "norm_first": True}
    plain, moved = (
        enlivened(Wrapped(kind(WIDTH, 4, **options))) for kind in (nn.TransformerEncoderLayer, Moved)
    )
    assert entering(plain, "inner.self_attn") == "inner.norm1"
    assert entering(moved, "inner.self_attn") is None


def test_stacks_of_others_may_do_anything():
    """Blocks of BERT one after the other, in a class that is not BERT's."""
    bert = pretrained("Bert", **BERT)("sdpa")
    outside = Wrapped(bert.encoder.layer)
    assert entering(bert, "encoder.layer.1.attention.self") == "encoder.layer.0.output.LayerNorm"
    assert entering(outside, "inner.1.attention.self") is None
    assert entering(bert.encoder, "layer.0.attention.self") is None


# The bound

BOUNDED = (
    "bert",
    "distilbert",
    "esm_rotary",
    "gemma2",
    "gpt2",
    "gpt2_unscaled",
    "gpt_neox",
    "llama",
    "llama_yarn",
    "modernbert",
    "opt",
    "t5",
    "torch_encoder_pre",
)


def sites(name):
    """Each layer that reads a norm: its weights, and its site on the first sequence of a call."""
    model, call = model_of(name), next(iter(FAMILIES[name].calls.values()))
    found = capture(
        model, {key: value[:1] if isinstance(value, torch.Tensor) else value for key, value in call.items()}
    )
    for layer, path in enumerate(found):
        adapter = adapter_of(model.get_submodule(path))
        weights = Weights.of(adapter, model, path, layer)
        if weights.entering is not None:
            yield weights, Place(Spot(path), layer, "", adapter).site(model, found[path])


def filled(norm):
    """Center and radius of the ball of all outputs of a norm, by its definition."""
    center = torch.zeros(WIDTH, dtype=torch.float64) if norm.bias is None else norm.bias
    return center, float(norm.weight.abs().max()) * math.sqrt(WIDTH)


@torch.no_grad()
def stretched(head, points, moves):
    """|f(x + d) - f(x)| / |d| in TokenMax norm, for a batch of sequences and moves."""
    moved = head(points + moves) - head(points)
    return moved.norm(dim=-1).amax(-1) / moves.norm(dim=-1).amax(-1)


def searched(head, start, center, radius, rounds=25, batch=24):
    """The largest stretch that evolution finds among sequences in the ball:
    the best of each round has children near and far.
    """
    generator = torch.Generator().manual_seed(7)

    def noise(size):
        return size * torch.randn(batch, *start.shape, generator=generator, dtype=torch.float64)

    best, value = (start, noise(1.0)[0]), 0.0
    for round in range(rounds):
        size = 0.7 ** (round % 10)
        points = (
            best[0]
            - center
            + noise(size * radius / math.sqrt(WIDTH)) * (torch.arange(batch) > 0).view(-1, 1, 1)
        )
        points = center + points * (radius / points.norm(dim=-1, keepdim=True)).clamp(max=1 - 1e-6)
        moves = best[1] + noise(size)
        moves = 1e-5 * moves / moves.norm(dim=-1, keepdim=True)
        found = stretched(head, points, moves)
        if float(found.max()) > value:
            best, value = (points[found.argmax()], 1e5 * moves[found.argmax()]), float(found.max())
    return value


@pytest.mark.parametrize("name", BOUNDED)
def test_no_search_breaks_the_bound(name):
    """Heads as the model runs them, with positions and masks: at the tokens of an input,
    and wherever the norm can send them.
    """
    for weights, site in sites(name):
        (center, radius), bounds = filled(weights.entering), any_input_bounds(weights)
        assert float((site.points - center).norm(dim=-1).max()) <= radius * (1 + 1e-6)
        assert len(bounds) == site.heads
        for head, bound in list(zip(site.singles, bounds, strict=True))[::2]:
            assert 0 < searched(head, site.points, center, radius) <= bound < math.inf


@pytest.mark.parametrize("centered", [True, False])
def test_without_eps_the_bound_is_the_same(centered):
    """x̂ has length √d at most, and with eps = 0 every output has it: the ball is that of any eps,
    and an audit skips nothing.
    """
    weights, _ = next(iter(sites("torch_encoder_pre")))
    norm = weights.entering.replace(centered=centered)
    with_eps, without = (
        any_input_bounds(dataclasses.replace(weights, entering=norm.replace(eps=eps))) for eps in (1e-5, 0.0)
    )
    assert without == with_eps
    assert all(0 < bound < math.inf for bound in without)
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True, layer_norm_eps=0.0)
    x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))
    spectra = [check for check in checks() if check.name == "weights"]
    report = r.audit(enlivened(Wrapped(layer)), [{"src": x}], checks=spectra)
    assert not report.skipped


def test_the_search_finds_what_there_is():
    """Without scores a head is an average: its constant is |W_V|, and the search comes near."""
    weights, site = next(iter(sites("gpt2")))
    head = site.singles[0]
    flat = head.replace(potential=Dot(0 * head.potential.w_q, head.potential.w_k))
    size = float(torch.linalg.matrix_norm(head.lookup.w_v, 2))
    assert 0.6 * size < searched(flat, site.points, *filled(weights.entering)) <= size * (1 + 1e-6)


@pytest.mark.parametrize("rotary", [False, True])
def test_the_narrow_bound_is_the_wide_one(rotary):
    """In all coordinates nothing is larger, and with the center far away these are used."""
    generator = torch.Generator().manual_seed(2)
    w_q, w_k, w_v = (torch.randn(2, 40, 4, generator=generator, dtype=torch.float64) / 6 for _ in range(3))
    w_o, b_q = (
        torch.randn(2, 4, 40, generator=generator, dtype=torch.float64),
        torch.randn(2, 4, generator=generator, dtype=torch.float64),
    )
    weight, bias = (
        torch.rand(40, generator=generator, dtype=torch.float64),
        torch.randn(40, generator=generator, dtype=torch.float64),
    )
    own = Matrices(w_q, w_k, w_v, w_o, 0.5, b_q=b_q)
    score = Dot(w_q, w_k, 0.5, b_q)
    heads = single_heads(r.Attention(Rotary(score) if rotary else score, Linear(w_v)))
    for size in (1.0, 10.0 * NEAR):
        norm = Normalize(1e-5, weight, size * bias)
        found = any_input_bounds(Weights("", 0, own, norm, rotary))
        wide = [certify(head, image(norm, Whole()), TokenMax()).value for head in heads]
        if (
            size == 1.0 and rotary
        ):  # what a head does not read of the center no longer counts for the length of a token
            assert all(narrow <= value * MARGIN for narrow, value in zip(found, wide, strict=True))
        else:
            assert found == pytest.approx(wide, rel=2e-6)


def test_no_norm_no_bound():
    model = model_of("opt_post")
    path = known(model)[0]
    weights = Weights.of(adapter_of(model.get_submodule(path)), model, path, 0)
    assert all(math.isnan(bound) for bound in any_input_bounds(weights))
    assert len(any_input_bounds(weights)) == 4


def test_turned_is_the_larger_bound():
    """Where nobody says whether positions turn, the bound is that of both."""
    weights, _ = next(iter(sites("gpt2")))
    assert not weights.turned
    unsaid = Weights(weights.path, weights.layer, weights.matrices, weights.entering)
    assert all(a >= b for a, b in zip(any_input_bounds(unsaid), any_input_bounds(weights), strict=True))
