"""Models that are made to mislead an audit: every number is that of plain autograd, or there is none."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard as r
from tests.audits.families import FAMILIES, enlivened

X = torch.randn(1, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def largest(function, x):
    dense = torch.autograd.functional.jacobian(function, x)
    return float(torch.linalg.matrix_norm(dense.reshape(-1, x.numel()), 2))


class Heads(nn.Module):
    """Three heads in plain torch."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (3, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(12), Heads()

    def forward(self, x):
        return x + self.heads(self.norm(x))


class Net(nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        enlivened(self).double()
        tie(*(block.heads for block in self.blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def tie_layers(first, second):
    """Different modules hold the same linear layers."""
    second.k, second.out = first.k, first.out


def tie_weights(first, second):
    """Different layers hold the same parameter."""
    second.q.weight = first.k.weight
    second.v.weight = first.v.weight


def tie_inside(first, second):
    """Queries and keys of a module are one layer."""
    first.k, second.v = first.q, second.q


@pytest.mark.parametrize("tie", [tie_layers, tie_weights, tie_inside])
def test_weights_that_different_modules_share(tie):
    model = Net(tie)
    report = r.audit(model, [{"x": X}], checks=["weights", "constants", "depth"])
    assert [(entry.site, entry.level) for entry in report.coverage] == [
        ("blocks.0.heads", "declared"),
        ("blocks.1.heads", "declared"),
    ]
    x = X
    for block, row in zip(model.blocks, report.layers, strict=True):
        found = row.values
        branch = largest(lambda y, block=block: block.heads(block.norm(y)), x)
        assert found["attention_branch_constant"] == pytest.approx(branch, rel=1e-4)
        assert found["layer_constant"] == pytest.approx(
            largest(block.heads, block.norm(x).detach()), rel=1e-4
        )
        assert found["block_constant"] == pytest.approx(largest(block, x), rel=1e-4)
        x = block(x).detach()
    assert report.stacks[0].values["network_constant"] == pytest.approx(largest(model, X), rel=1e-4)
    for row in report.heads:
        own = model.blocks[row.layer].heads
        w_q, w_k = (layer.weight.unflatten(0, (3, 4))[row.head].T for layer in (own.q, own.k))
        norm = float(torch.linalg.matrix_norm(w_q @ w_k.T / 2, 2).detach())
        assert row.values["qk_norm_alone"] == pytest.approx(norm, rel=1e-9)


def tilted(module, query, key, value, attention_mask, *, scaling=None, tilt=None, **options):
    """An implementation of attention with an argument of its own, which it obeys."""
    scores = query @ key.mT * scaling
    scores = scores if tilt is None else scores + tilt * torch.arange(key.shape[-2])
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def test_an_argument_that_nobody_knows():
    """Rows are those that were computed with it, seen inside; or the layer has none and says why."""
    transformers = pytest.importorskip("transformers")
    transformers.AttentionInterface.register(
        "tilted", lambda *arguments, **options: tilted(*arguments, tilt=0.7, **options)
    )
    transformers.AttentionMaskInterface.register("tilted", lambda *arguments, **options: None)
    laws = []
    keep = torch.Tensor.softmax
    try:
        model = FAMILIES["bert"].make("sdpa")
        model.set_attn_implementation("tilted")
        call = {"input_ids": torch.tensor([[5, 6, 7, 8]])}
        report = r.audit(model, [call], checks=["rows", "weights", "bounds"])
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(torch.Tensor, "softmax", lambda s, d: laws.append(keep(s, d)) or laws[-1])
            model(**call)
    finally:
        transformers.AttentionInterface._global_mapping.pop("tilted")
        transformers.AttentionMaskInterface._global_mapping.pop("tilted")
    assert not any(entry.level == "declared" for entry in report.coverage)
    assert all(entry.reason for entry in report.coverage)
    assert all("point_bound" not in row.values for row in report.rows)
    for row in report.heads:
        law = laws[row.layer][0, row.head].double()
        entropy = float(torch.special.entr(law).sum(-1).mean())
        assert row.values["entropy"] == pytest.approx(entropy, abs=1e-4)


def test_a_model_in_train_mode_has_the_numbers_of_eval_mode():
    model = FAMILIES["bert"].make("sdpa")
    model.config.hidden_dropout_prob = 0.5
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    call = {"input_ids": torch.tensor([[5, 6, 7, 8]])}
    quiet, loud = (
        r.audit(mode(), [call], checks=["rows", "constants", "depth"]) for mode in (model.eval, model.train)
    )
    assert [row.values for row in loud.rows] == [row.values for row in quiet.rows]
    assert model.training


class Hidden(Heads):
    """Later tokens are hidden by adding -100 to their scores, as windows of Swin hide each other."""

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (3, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        later = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).triu(1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=-100 * later)
        return self.out(mixed.transpose(1, 2).flatten(2))


def test_pairs_that_are_hidden_by_a_number_have_no_logit():
    """A number alone takes their weight below 10⁻³⁸; no alarm is made of the number that hides them."""
    model = enlivened(Hidden()).double()
    report = r.audit(model, [{"x": X}], checks=["rows"])
    q, k = (layer(X).unflatten(-1, (3, 4)).transpose(1, 2)[0] for layer in (model.q, model.k))
    scores = (q @ k.mT / 2).detach().tril()
    for row in report.heads:
        assert row.values["largest_logit"] == pytest.approx(float(scores[row.head].abs().max()), rel=1e-9)
    assert not [finding for finding in report.findings() if finding.column == "largest_logit"]
