"""Rows of long inputs are looked at some queries at a time, with the same numbers."""

import pytest
import torch

import regard as r
from regard.audits import row_blocks


def _model(causal):
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = (LlamaConfig if causal else BertConfig)(num_attention_heads=4, **sizes)
    return (LlamaModel if causal else BertModel)(config).eval()


@pytest.mark.parametrize("causal", [True, False])
def test_blocks_have_the_numbers_of_the_whole(causal, monkeypatch):
    given = [{"input_ids": torch.randint(4, 40, (1, 23))}]
    model = _model(causal)

    def columns():
        report = r.audit(model, given, checks=["rows", "geometry"])
        assert not report.skipped
        names = ("entropy", "effective_support", "largest_logit", "sink_mass", "row_stiffness")
        heads = [row.values[name] for row in report.ranked("entropy") for name in names]
        layers = [row.values["mean_cosine_without_sinks"] for row in report.ranked("mean_cosine")]
        return torch.tensor([*heads, *layers], dtype=torch.float64)

    whole = columns()
    seen = []
    right = row_blocks._block
    monkeypatch.setattr(row_blocks, "_block", lambda site, rows: seen.append(rows) or right(site, rows))
    monkeypatch.setattr(row_blocks, "ROOM", 500)
    torch.testing.assert_close(columns(), whole, rtol=1e-12, atol=1e-12)
    assert len(seen) == 2 * 5  # rows and geometry, five queries at a time
