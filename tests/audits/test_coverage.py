"""Coverage of architectures: which are declared, which observed, counted over a sample; the table of all is
written by docs/make_coverage.py.
"""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import regard as r
from regard.audits.adapters.general import General
from regard.audits.checks import checks
from regard.audits.run import Audit
from tests.audits.architectures import NOT_ALONE, coverage_of, inputs_for, tiny_model
from tests.audits.families import enlivened

pytest.importorskip("transformers")

NAMES = """
bert roberta xlm-roberta distilbert electra mpnet albert modernbert nomic_bert esm gpt2 gpt_neox opt llama
mistral mixtral qwen2 qwen3 gemma2 gemma3_text phi3 deepseek_v3 t5 bart whisper vit clip siglip dinov2
wav2vec2
"""
MOST_USED = tuple(NAMES.split())
"""Thirty types that most downloads are of, as a judgement."""
OTHERS = """
qwen3_moe phi deepseek_v2 gpt_oss llama4_text smollm3 olmo2 olmo3 granite glm4 ernie4_5 cohere starcoder2
stablelm nemotron falcon bloom mpt gptj gpt_neo gpt_bigcode codegen biogpt jamba eurobert longformer marian
umt5 beit roformer big_bird llava gemma3 siglip2 moonshine
"""
ALSO = tuple(OTHERS.split())
"""Others that people bring, declared too."""
OBSERVED = {
    "deberta": "it computes its scores itself",
    "deberta-v2": "it computes its scores itself",
    "xlnet": "it computes its scores itself",
    "mobilebert": "its keys are not",
    "dinov3_vit": "its queries are not",
    "swin": "windows",
}
"""Those of which something is not understood, and a word of what is said."""
NOTHING = ("fnet", "mamba")
DECLARED, SEEN, LEFT = 289, 186, 29
"""How many types the page has at least as declared and as observed, and at most as not run."""


def named(*names):
    return [check for check in checks() if check.name in names]


def one(kind):
    """A tiny model with live weights, and what it takes."""
    model = enlivened(tiny_model(kind), 1.0)
    return model, inputs_for(model)[0]


@pytest.mark.parametrize("kind", [*MOST_USED, *ALSO])
def test_what_people_have_is_declared(kind):
    assert coverage_of(kind) == ("declared", "")


PAGE = (Path(__file__).parents[2] / "docs" / "coverage.md").read_text()
ROWS = re.findall(r"^\| (\S+) \| (declared|observed|part) \| (.*) \|$", PAGE, re.MULTILINE)
NOT_RUN = re.findall(r"^- (\S+): (.*)$", PAGE, re.MULTILINE)


def test_the_page_counts_what_it_has():
    """Every type once, each level with its number, and a reason wherever a type is not declared."""
    levels = Counter(level for _, level, _ in ROWS)
    said = re.search(
        r"\*\*(\d+) types with attention: (\d+) declared, (\d+) observed, (\d+) part\.\*\*", PAGE
    )
    assert said is not None
    assert [int(number) for number in said.groups()] == [
        len(ROWS),
        *(levels[level] for level in ("declared", "observed", "part")),
    ]
    assert all(why.strip() for _, level, why in ROWS if level != "declared")
    assert all(why.strip() for _, why in NOT_RUN)
    names = [kind for kind, *_ in ROWS] + [kind for kind, _ in NOT_RUN]
    assert len(names) == len(set(names))


def test_no_fault_of_an_adapter_is_behind_a_reason():
    """An exception while a layer is read makes it observed, with the error as reason: the page has none."""
    assert not [
        kind for kind, _, why in ROWS if "regard failed" in why or re.search(r"Error\b|dimension", why)
    ]


def test_the_page_of_limits_has_the_numbers_of_the_table():
    limits = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    levels = Counter(level for _, level, _ in ROWS)
    said = re.search(
        r"Of (\d+) model types of transformers with attention, (\d+)\s+are declared, "
        r"(\d+) observed, and of (\d+)",
        limits,
    )
    assert said is not None
    wanted = [len(ROWS), *(levels[level] for level in ("declared", "observed", "part"))]
    assert [int(number) for number in said.groups()] == wanted


def test_the_page_has_every_type():
    """Of the transformers that it was written for: nothing is left out, and little could not be run."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    if f"transformers {transformers.__version__}," not in PAGE:
        pytest.skip("the page is about another version of transformers")
    without = PAGE.partition("## Without attention")[2].partition("##")[0].strip().split(", ")
    known = {kind for kind, *_ in ROWS} | {kind for kind, _ in NOT_RUN} | set(without) | set(NOT_ALONE)
    assert not set(MODEL_MAPPING_NAMES) - known
    levels = Counter(level for _, level, _ in ROWS)
    assert levels["declared"] >= DECLARED
    assert levels["observed"] >= SEEN
    assert len(NOT_RUN) <= LEFT


def test_the_page_says_the_same():
    """docs/coverage.md, for every type that is asked about here."""
    levels = {kind: level for kind, level, _ in ROWS}
    declared = [kind for kind in (*MOST_USED, *ALSO) if levels.get(kind) != "declared"]
    assert not declared
    assert not [kind for kind in OBSERVED if levels.get(kind) != "observed"]


@pytest.mark.parametrize("kind", OBSERVED)
def test_what_is_not_understood_is_observed_and_said(kind):
    level, reason = coverage_of(kind)
    assert level == "observed"
    assert OBSERVED[kind] in reason


@pytest.mark.parametrize("kind", NOTHING)
def test_models_without_attention_are_told_so_kindly(kind):
    model, call = one(kind)
    with pytest.warns(UserWarning, match="no attention that regard can find"):
        report = r.audit(model, [call], checks=named("rows"))
    assert not report.rows
    assert "no attention that regard can find" in report.summary()[0]


def test_what_is_read_are_the_weights():
    """Phi-3 keeps queries, keys and values in one matrix: the columns that were found are its own."""
    model, call = one("phi3")
    run = Audit(model, [call], checks=named("weights"))
    place = run.places[0]
    assert isinstance(place.adapter, General)
    found = place.adapter.matrices(model, place.path, model.get_submodule(place.path))
    fused = model.layers[0].self_attn.qkv_proj.weight.double().T
    heads, groups, width = len(found.w_q), len(found.w_k), found.w_q.shape[-1]
    parts = fused.split([heads * width, groups * width, groups * width], -1)
    for own, part, count in zip(
        (found.w_q, found.w_k, found.w_v), parts, (heads, groups, groups), strict=True
    ):
        assert torch.allclose(own, part.unflatten(-1, (count, width)).movedim(-2, 0))


def test_every_certificate_of_a_general_layer_holds():
    """Proofs about a layer that was read are above the exact constant of the module itself."""
    model, call = one("phi3")
    report = r.audit(model.double(), [call], checks=named("constants", "bounds"))
    for row in report.heads:
        assert row.values["head_constant"] <= row.values["point_bound"] * (1 + 1e-6)
        assert row.values["point_bound"] <= row.values["ball_bound"] * (1 + 1e-6)


class Twisted(nn.Module):
    """Looks like any attention, and turns its queries in a way of its own."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (2, 4)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(q.tanh(), k, v)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def test_queries_that_are_no_linear_function_are_not_declared():
    report = r.audit(enlivened(Twisted()), [{"x": torch.randn(1, 6, 8)}], checks=named("rows", "weights"))
    assert [entry.level for entry in report.coverage] == ["observed"]
    assert "its queries are not a linear function" in report.observed[0].reason
    assert all("qk_norm" not in row.values for row in report.heads)


class Joined(nn.Module):
    """Heads side by side, as BERT's relatives return them."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Mixed(nn.Module):
    """Heads, and a linear layer beside them that takes what becomes of them."""

    def __init__(self, between):
        super().__init__()
        self.other, self.heads, self.dense, self.between = nn.Linear(8, 8), Joined(), nn.Linear(8, 8), between

    def forward(self, x):
        return self.dense(self.between(self.heads(self.other(x))))


@pytest.mark.parametrize(("factor", "level"), [(1.0, "declared"), (1.5, "observed")])
def test_the_layer_that_takes_the_heads_is_found_by_what_it_was_given(factor, level):
    """Where something stands between, it is not the output projection, and nothing is proved with it."""
    model = enlivened(Mixed(lambda x: factor * x)).double()
    x = torch.randn(1, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    report = r.audit(model, [{"x": x}], checks=named("constants", "weights"))
    assert [(entry.site, entry.level) for entry in report.coverage] == [("heads", level)]
    if level == "observed":
        assert "or the next one" in report.coverage[0].reason
        assert all("ov_norm" not in row.values for row in report.heads)
        return
    points = model.other(x[0]).detach()
    dense = torch.autograd.functional.jacobian(lambda y: model.dense(model.heads(y[None]))[0], points)
    exact = float(torch.linalg.matrix_norm(dense.reshape(48, 48), 2))
    assert report.layers[0].values["layer_constant"] == pytest.approx(exact, rel=1e-4)
