"""What a number is about: heads with the norm before them, gains that are folded, cross-attention by what
moves, whose rounding it is, which token it was.
"""

import math

import pytest
import torch

import regard as r
from regard.audits import Audit
from regard.audits.adapters.base import Call, NotCovered
from regard.audits.capture import replay, tokens_in
from regard.audits.checks.constants import is_tokenwise
from regard.audits.findings import findings
from regard.audits.moving import Moving
from regard.audits.rounding import agreeing, in_float64
from regard.derive import linearize
from regard.derive.chain import Chain
from regard.parameters import spread_heads
from tests.audits.families import FAMILIES
from tests.audits.test_audit import call_of, dense_norm, model_of, named, row_of

pytest.importorskip("transformers")


# A chain of derivatives


def pair_of_maps():
    torch.manual_seed(0)
    w = torch.randn(5, 3, dtype=torch.float64)
    first = lambda x: torch.tanh(x @ w)  # noqa: E731
    second = r.Attention(
        r.Dot(torch.randn(3, 2).double(), torch.randn(3, 2).double()), r.Linear(torch.eye(3).double())
    )
    return first, second, torch.randn(4, 5, dtype=torch.float64)


def test_a_chain_is_the_derivative_of_the_composition():
    first, second, x = pair_of_maps()
    chain = Chain(linearize(second, first(x)), linearize(first, x))
    whole = linearize(lambda y: second(first(y)), x)
    t, u = torch.randn(4, 5).double(), torch.randn(4, 3).double()
    for mine, exact in (
        (chain.mv(t), whole.mv(t)),
        (chain.rmv(u), whole.rmv(u)),
        (chain.second(t), whole.second(t)),
        (chain.block(2, 1), whole.block(2, 1)),
        (chain.influence(), whole.influence()),
        (chain.nudge(0.0, torch.Generator()).mv(t), whole.mv(t)),
    ):
        assert torch.allclose(mine, exact, rtol=1e-9, atol=1e-12)
    with pytest.raises(r.errors.ArgumentError, match="inner"):
        Chain(linearize(first, x), linearize(second, first(x)))


def test_groups_are_written_out():
    torch.manual_seed(1)
    w_q, w_k, w_v = torch.randn(6, 5, 2), torch.randn(3, 5, 2), torch.randn(3, 5, 4)
    grouped, x = r.Attention(r.Dot(w_q, w_k), r.Linear(w_v)), torch.randn(7, 5)
    spread = spread_heads(grouped, 6)
    assert spread.lookup.w_v.shape == (6, 5, 4)
    assert torch.allclose(spread(x), grouped(x), atol=1e-6)


# Headlines are about what acts in the model


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "bert", "torch_encoder_pre"])
def test_heads_with_their_norm_are_those_of_dense_matrices(family):
    """The head after the norm of its own block, run as the modules run it; the head alone in BERT."""
    model, call = model_of(family), next(iter(FAMILIES[family].calls.values()))
    run = Audit(model, [call], checks=named("constants"))
    run.measure()
    report, scene, place = run.report(), run._scene(run.inputs[0]), run.places[1]
    site = place.site(model, scene.trace[place.path])
    before = site.block.attention[: site.block.attention.index(site.path)]
    assert bool(before) == (family != "bert")
    norm = replay(model, scene.trace, before)
    point = tokens_in(scene.trace[before[0]]) if before else site.points
    for head, attention in enumerate(site.singles):
        row = row_of(report, "head", place.path, head)
        assert row.inputs["head_constant"][0] == pytest.approx(dense_norm(attention, site.points), rel=1e-3)
        exact = dense_norm(lambda x: attention(norm(x)), point)  # noqa: B023
        assert row.inputs["head_branch_constant"][0] == pytest.approx(exact, rel=1e-3)


def test_the_headline_has_the_norm_in_it():
    """A norm with a small gain hides a large head: the sentence names the head that acts, not that one."""
    model, call = model_of("llama"), call_of("llama")
    with torch.no_grad():
        model.layers[0].self_attn.v_proj.weight *= 1000
        model.layers[0].input_layernorm.weight *= 1e-4
    report = r.audit(model, [call], checks=named("constants", "weights"))
    assert report.ranked("head_constant")[0].layer == 0
    assert report.ranked("head_branch_constant")[0].layer != 0
    assert report.ranked("layer_constant")[0].layer == 0
    first, attention = (
        report.ranked(name)[0] for name in ("head_branch_constant", "attention_branch_constant")
    )
    said = " ".join(report.summary())
    assert f"{first.label} " in said
    assert f"attention in {attention.label} (" in said
    assert "layers.0" not in said.partition("largest block")[0].partition("amplif")[2].partition(";")[0]


# The gain of a norm belongs to the matrices that read it


def dense_products(matrices, gain, centered):
    width = matrices.w_q.shape[-2]
    fold = torch.diag(gain) if gain is not None else torch.eye(width).double()
    fold = (torch.eye(width) - 1 / width).double() @ fold if centered else fold
    heads, groups = len(matrices.w_o), len(matrices.w_k)
    w_k, w_v = (w.double().repeat_interleave(heads // groups, 0) for w in (matrices.w_k, matrices.w_v))
    qk = matrices.scale * fold @ matrices.w_q.double() @ w_k.mT @ fold.mT
    return [torch.linalg.matrix_norm(m, 2).tolist() for m in (qk, fold @ w_v @ matrices.w_o.double())]


@pytest.mark.parametrize(("family", "centered"), [("llama", False), ("gpt2", True)])
def test_gains_are_folded(family, centered):
    model, call = model_of(family), call_of(family)
    norms = [m for m in model.modules() if type(m).__name__ in ("LlamaRMSNorm", "LayerNorm")]
    with torch.no_grad():
        for norm in norms:
            norm.weight.uniform_(0.1, 3.0)
    run = Audit(model, [call], checks=named("weights"))
    run.measure()
    place = run.places[0]
    module = model.get_submodule(place.path)
    norm = model.get_submodule(place.adapter.entering(model, place.path, module))
    matrices = place.adapter.matrices(model, place.path, module)
    rows = [row for row in run.report().heads if row.site == place.path]
    for names, gain in (
        (("qk_norm", "ov_norm"), norm.weight.detach()),
        (("qk_norm_alone", "ov_norm_alone"), None),
    ):
        exact = dense_products(matrices, gain, centered and gain is not None)
        for name, values in zip(names, exact, strict=True):
            assert [row.values[name] for row in rows] == pytest.approx(values, rel=1e-9)


def test_no_norm_no_gain():
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    report = r.audit(layer, [{"query": x, "key": x, "value": x}], checks=named("weights"))
    assert all(row.values["qk_norm"] == row.values["qk_norm_alone"] for row in report.heads)


# Cross-attention has three constants


@pytest.mark.parametrize("norm_first", [False, True])
def test_cross_attention_by_what_moves(norm_first):
    torch.manual_seed(3)
    layer = torch.nn.TransformerDecoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first).double()
    model = torch.nn.TransformerDecoder(layer, 1)
    layer = model.layers[0]
    x, memory = torch.randn(1, 4, 8, dtype=torch.float64), 0.2 * torch.randn(1, 3, 8, dtype=torch.float64)
    run = Audit(model, [{"tgt": x, "memory": memory}], checks=named("constants"))
    run.measure()
    report, scene = run.report(), run._scene(run.inputs[0])
    assert not report.missing
    row = row_of(report, "layer", "layers.0.multihead_attn")
    inner, point = layer.eval().multihead_attn, tokens_in(scene.trace["layers.0.multihead_attn"])
    context = memory[0]

    def attend(queries, keys):
        return inner(queries[None], keys[None], keys[None])[0][0]

    def together(function, queries):
        both = torch.cat([queries, context])
        return dense_norm(lambda pair: function(pair[: len(queries)], pair[len(queries) :]), both)

    exact = {
        "queries_constant": dense_norm(lambda y: attend(y, context), point),
        "context_constant": dense_norm(lambda y: attend(point, y), context),
        "layer_constant": together(attend, point),
    }
    before = tokens_in(scene.trace["layers.0.norm2"]) if norm_first else point
    normed = (lambda y, c: attend(layer.norm2(y), c)) if norm_first else attend
    exact["attention_branch_constant"] = together(normed, before)
    assert {name: row.values[name] for name in exact} == pytest.approx(exact, rel=1e-3)
    assert row.values["layer_constant"] > 2 * row.values["queries_constant"]  # what the headline hid
    place = next(place for place in run.places if place.path == "layers.0.multihead_attn")
    site = place.site(model, scene.trace[place.path])
    for head, single in enumerate(site.singles):
        own = row_of(report, "head", place.path, head)
        assert own.values["head_constant"] == pytest.approx(together(single, point), rel=1e-3)
    assert "queries_constant" not in row_of(report, "layer", "layers.0.self_attn").values


# Whose rounding it is


def sharp_bert():
    """Logits of many thousands, which differ by little: float32 has no digits left for the softmax."""
    model = FAMILIES["bert"].make("eager")
    own = model.encoder.layer[0].attention.self
    with torch.no_grad():
        own.key.bias.normal_(0.0, 3.0)
        own.query.bias.normal_(0.0, 3e5)
        own.key.weight *= 3e-5
    return model


def test_a_module_that_rounds_badly_is_kept_with_an_alarm():
    model, call = sharp_bert(), call_of("bert")
    report = r.audit(model, [call], checks=named("rows", "constants"))
    entry = report.coverage[0]
    assert entry.covered
    assert entry.disagreement < 1e-6 < 1e-4 < entry.rounding
    assert report.coverage[1].rounding == 0
    (alarm,) = [f for f in findings(report) if f.column == "rounding"]
    assert alarm.level == "alarming"
    assert entry.site in alarm.what
    wide = r.audit(model.double(), [call], checks=named("rows", "constants"))
    assert wide.coverage[0].rounding == 0
    assert not [f for f in findings(wide) if f.column == "rounding"]
    for mine, exact in zip(report.heads, wide.heads, strict=True):
        assert mine.values["entropy"] == pytest.approx(exact.values["entropy"], rel=0.02)


def test_a_wrong_declaration_is_no_rounding():
    model, call = sharp_bert(), call_of("bert")
    run = Audit(model, [call], checks=named("rows"))
    place, scene = run.places[0], run._scene(run.inputs[0])
    module, found = model.get_submodule(place.path), scene.trace[place.path]

    def wrong(call: Call):
        site = place.site(model, call)
        declared = site.declared.__class__(**{**vars(site.declared), "own": 1.5 * site.declared.own})
        return site.__class__(**{**vars(site), "declared": declared})

    with pytest.raises(NotCovered, match="differs from the module's own output"):
        agreeing(wrong, module, found)
    assert in_float64(module, found).output[0].dtype == torch.float64
    assert next(module.parameters()).dtype == torch.float32


# Which token it was


def test_a_tokenwise_map():
    x = torch.randn(5, 3).double()
    assert is_tokenwise(torch.tanh, x)
    assert not is_tokenwise(lambda y: y - y.mean(0), x)
    assert not is_tokenwise(lambda y: y.cumsum(0), x)


def massive_llama():
    """The MLP of layer 1 reads one direction that a single token has, and makes it huge."""
    model = model_of("llama")
    with torch.no_grad():
        model.layers[1].mlp.down_proj.weight[0] *= 4000
    return model


def test_the_constants_of_tokens_are_dense():
    model, call = massive_llama(), call_of("llama")
    run = Audit(model, [call], checks=named("constants"))
    run.measure()
    scene = run._scene(run.inputs[0])
    (table,) = [entry for entry in run.report().tables["constants"] if entry["site"].startswith("layers.1.")]
    block = run.places[1].block(model)
    function, point = replay(model, scene.trace, block.mlp), tokens_in(scene.trace[block.mlp[0]])
    whole = torch.autograd.functional.jacobian(function, point)
    exact = [float(torch.linalg.matrix_norm(whole[i, :, i], 2)) for i in range(len(point))]
    assert table["mlp"] == pytest.approx(exact, rel=1e-3)
    row = row_of(run.report(), "layer", run.places[1].path)
    assert row.values["mlp_branch_constant"] == pytest.approx(max(exact), rel=1e-3)


def test_no_norm_is_invented():
    """A block whose branch is not known has heads alone."""
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    run = Audit(layer, [{"query": x, "key": x, "value": x}], checks=named("constants"))
    run.measure()
    for row in run.report().heads:
        assert row.values["head_branch_constant"] == row.values["head_constant"]
    (layer_row,) = run.report().layers
    assert layer_row.values["attention_branch_constant"] == layer_row.values["layer_constant"]
    scene = run._scene(run.inputs[0])
    assert Moving(scene, run.places[0].site(layer, scene.trace[""])).before == ()
    assert math.isnan(layer_row.values.get("mlp_branch_constant", math.nan))


def test_tokens_are_named_as_the_page_shows_them():
    from types import SimpleNamespace

    from regard.audits.stack_findings import token_name

    report = SimpleNamespace(inputs=[SimpleNamespace(tokens=["Ġ", "Ċ", "Ġword", "▁", "##ing"])])
    found = [token_name(report, 0, token) for token in range(6)]
    assert found == ["␣", "⏎", "word", "␣", "##ing", "token 6"]
    assert token_name(report, 1, 0) == "token 1"
