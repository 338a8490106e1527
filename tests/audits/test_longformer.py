"""Longformer and LED: windows on both sides and padding of their own; global attention is not declared."""

import pytest
import torch

import regard as r
from regard.audits.places import sites
from regard.supports import Window
from tests.audits.architectures import tiny_model
from tests.audits.families import enlivened

pytest.importorskip("transformers")

IDS = torch.tensor([[5, 9, 12, 7, 30, 22, 41, 17, 8, 11, 51]])


@pytest.fixture(scope="module")
def model():
    return enlivened(tiny_model("longformer"), 1.0)


def test_a_layer_is_its_window(model):
    """Eleven tokens, padded to sixteen by the model: the declaration is of those eleven."""
    for site in sites(model, {"input_ids": IDS}):
        assert site.points.shape[0] == IDS.shape[1]
        assert site.disagreement() < 1e-5
        assert isinstance(site.attention.support, Window)
        assert not site.blind


def test_rows_are_those_that_the_model_says(model):
    """The model gives its rows by offset, from -4 to 4."""
    with torch.no_grad():
        rows = model(input_ids=IDS, output_attentions=True).attentions
    for layer, site in enumerate(sites(model, {"input_ids": IDS})):
        own = rows[layer][0].double()  # (heads, tokens, window)
        for query in range(IDS.shape[1]):
            keys = torch.arange(query - 4, query + 5)
            inside = (keys >= 0) & (keys < IDS.shape[1])
            assert torch.allclose(site.laws[:, query, keys[inside]], own[:, query][:, inside], atol=1e-5)


def test_certificates_hold(model):
    report = r.audit(model, [{"input_ids": IDS}], checks=["constants", "bounds"])
    assert {entry.level for entry in report.coverage} == {"declared"}
    for row in report.heads:
        assert row.values["head_constant"] <= row.values["point_bound"] * (1 + 1e-5)


def test_global_attention_is_refused_in_a_sentence(model):
    mask = torch.zeros_like(IDS)
    mask[0, 0] = 1
    report = r.audit(model, [{"input_ids": IDS, "global_attention_mask": mask}], checks=["rows"])
    assert {entry.level for entry in report.coverage} == {"observed"}
    assert all("global attention" in entry.reason for entry in report.observed)


def test_the_encoder_of_led():
    """Its windows, and its output projection, which is in the module around it."""
    model = enlivened(tiny_model("led"), 1.0).double().requires_grad_(False)
    call = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}
    report = r.audit(model, [call], checks=["weights", "rows", "constants"])
    assert {entry.level for entry in report.coverage} == {"declared"}
    layer = model.encoder.layers[0].self_attn
    own, heads = layer.longformer_self_attn, model.config.encoder_attention_heads
    q, k, v = (getattr(own, name).weight.T.unflatten(-1, (heads, -1)) for name in ("query", "key", "value"))
    o = layer.output.weight.unflatten(-1, (heads, -1))
    for row in report.heads[:heads]:
        assert row.site == "encoder.layers.0.self_attn.longformer_self_attn"
        compares = q[:, row.head] @ k[:, row.head].T / own.head_dim**0.5
        carries = v[:, row.head] @ o[:, row.head].T
        for name, matrix in (("qk_norm", compares), ("ov_norm", carries)):
            assert row.values[name] == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-9)
