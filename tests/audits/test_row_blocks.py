"""Rows of long inputs are looked at some queries at a time, with the same numbers."""

import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import regard as r
from regard.audits import row_blocks
from regard.audits.adapters import masks, rotary


class Largest(TorchDispatchMode):
    """How many entries the largest tensor has that an operation gave."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self.entries = max(self.entries, tensor.untyped_storage().size() // tensor.element_size())
        return found


def _model(causal, **more):
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = (LlamaConfig if causal else BertConfig)(**{"num_attention_heads": 4, **sizes, **more})
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


@pytest.mark.parametrize("causal", [True, False])
def test_no_table_of_all_pairs_is_made(causal):
    """Neither while a layer is declared nor while it is measured."""
    tokens = 1100
    sizes = {"vocab_size": 40, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = _model(causal, num_attention_heads=1, max_position_embeddings=tokens, **sizes)
    with Largest() as largest:
        report = r.audit(model, {"input_ids": torch.randint(4, 40, (1, tokens))}, checks=["weights", "rows"])
    assert not report.skipped
    assert not report.missing
    assert row_blocks.ROOM / 2 < largest.entries < tokens**2


@pytest.mark.parametrize("seed", range(4))
def test_a_mask_read_in_parts_is_the_same_support(seed, monkeypatch):
    """Windows, biases by offset and packed positions, some rows at a time."""
    generator = torch.Generator().manual_seed(seed)
    offset = torch.arange(11) - torch.arange(11).unsqueeze(-1)
    allowed = ((offset <= 0) & (offset > -4) if seed % 2 else torch.rand(11, 11, generator=generator) < 0.7)[
        None, None
    ] | torch.eye(11, dtype=torch.bool)
    slope = -0.5 * offset.abs().double().expand(1, 1, 11, 11)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11]])

    def read():
        pairs, places = masks.Pairs(allowed, slope), torch.arange(11)
        tables = [
            masks.support_of(allowed).allows(places, places),
            masks.support_of(allowed, positions).allows(positions[0], positions[0]),
        ]
        return [*tables, masks.bias_of(pairs, 2).table, rotary.marks_of(positions, allowed)]

    whole = read()
    monkeypatch.setattr(masks, "ROOM", 30)
    assert len(list(masks.row_parts(allowed.shape))) > 3
    for one, other in zip(whole, read(), strict=True):
        assert torch.equal(one, other)
