"""The residual stream, found by what modules do: custom blocks have branches, depth and influence."""

import pytest
import torch
from torch import nn

import regard as r
from regard.audits.checks import checks
from regard.audits.run import Audit
from tests.audits.families import enlivened


def named(*names):
    return [check for check in checks() if check.name in names]


class Before(nn.Module):
    """Norms before both branches, around torch's own attention."""

    def __init__(self, width=12, heads=3):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        h = self.ln1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.ff(self.ln2(x))


class After(nn.Module):
    """Norms after both, a function between two linear layers, dropout, and a factor on a branch."""

    def __init__(self, width=12, heads=3):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.a, self.b, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.1)

    def forward(self, x):
        x = self.ln1(x + 0.5 * self.drop(self.attn(x, x, x)[0]))
        return self.ln2(x + self.drop(self.b(torch.relu(self.a(x)))))


class Beside(Before):
    """Both branches read the same tokens."""

    def forward(self, x):
        h = self.ln1(x)
        return x + self.attn(h, h, h)[0] + self.ff(self.ln2(x))


class Part(nn.Module):
    """Attention and its residual connection with a norm, as a part of a block: BERT's relatives."""

    def __init__(self, width=12, heads=3):
        super().__init__()
        self.attn, self.norm = nn.MultiheadAttention(width, heads, batch_first=True), nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x + self.attn(x, x, x)[0])


class Parted(nn.Module):
    """A block of such a part, and of a second branch."""

    def __init__(self, width=12):
        super().__init__()
        self.part, self.norm = Part(width), nn.LayerNorm(width)
        self.ff = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = self.part(x)
        return self.norm(x + self.ff(x))


class Gated(Before):
    """A second branch that reads the stream beside its first module: no function of that module's input."""

    def forward(self, x):
        h = self.ln1(x)
        x = x + self.attn(h, h, h)[0]
        return x + self.ff[2](self.ff[0](x) * torch.cat([x, x], -1).sigmoid())


class Nothing(Before):
    """No residual connection at all."""

    def forward(self, x):
        h = self.ln1(x)
        return self.ff(self.attn(h, h, h)[0])


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks, self.norm = nn.ModuleList([kind(), kind()]), nn.LayerNorm(12)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def largest(function, x):
    dense = torch.autograd.functional.jacobian(function, x)
    return float(torch.linalg.matrix_norm(dense.reshape(x.numel(), x.numel()), 2))


X = torch.randn(1, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
FOUND = {
    Before: (("ln1", "attn"), ("ln2", "ff")),
    After: (("attn",), ("a", "b")),
    Beside: (("ln1", "attn"), ("ln2", "ff")),
    Parted: (("part.attn",), ("ff",)),
}


@pytest.mark.parametrize("kind", FOUND)
def test_blocks_around_attention_are_found(kind):
    model = enlivened(Net(kind)).double()
    run = Audit(model, [{"x": X}], checks=named("constants", "depth", "influence"))
    found = run.places[1].block(model)
    assert found is not None
    assert found.path == "blocks.1"
    assert found.final == "norm"
    wanted = tuple(tuple(f"blocks.1.{name}" for name in branch) for branch in FOUND[kind])
    assert (found.attention, found.mlp) == wanted
    run.measure()
    report = run.report()
    first = model.blocks[0]
    layer, stack = report.layers[0].values, report.stacks[0].values
    assert layer["block_constant"] == pytest.approx(largest(first, X), rel=1e-3)
    assert stack["network_constant"] == pytest.approx(largest(model, X), rel=1e-3)
    assert 0 < stack["influence_share"] <= 1
    if kind in (Before, Beside):
        stream = X if kind is Beside else (X + first.attn(*[first.ln1(X)] * 3)[0]).detach()
        mlp = largest(lambda x: first.ff(first.ln2(x)), stream)
        assert layer["mlp_branch_constant"] == pytest.approx(mlp, rel=1e-3)
        branch = largest(lambda x: first.attn(*[first.ln1(x)] * 3)[0], X)
        assert layer["attention_branch_constant"] == pytest.approx(branch, rel=1e-3)
    if kind is Parted:
        assert layer["mlp_branch_constant"] == pytest.approx(
            largest(first.ff, first.part(X).detach()), rel=1e-3
        )
        own = largest(lambda x: first.part.attn(x, x, x)[0], X)
        assert layer["attention_branch_constant"] == pytest.approx(own, rel=1e-3)
    assert not report.skipped


def test_blocks_of_attention_alone_do_not_take_the_next_one_for_a_second_branch():
    model = enlivened(Net(Part)).double()
    found = Audit(model, [{"x": X}], checks=named("constants")).places[0].block(model)
    assert (found.path, found.attention, found.mlp) == ("blocks.0", ("blocks.0.attn",), ())


def test_a_branch_that_reads_the_stream_twice_is_left_out():
    """Its derivative through one module would be silently wrong."""
    model = enlivened(Net(Gated)).double()
    run = Audit(model, [{"x": X}], checks=named("constants"))
    found = run.places[0].block(model)
    assert found is not None
    assert found.attention
    assert not found.mlp
    run.measure()
    values = run.report().layers[0].values
    assert "mlp_branch_constant" not in values
    assert values["block_constant"] == pytest.approx(largest(model.blocks[0], X), rel=1e-3)


def test_where_there_is_no_residual_stream_it_is_said():
    report = r.audit(
        enlivened(Net(Nothing)).double(), [{"x": X}], checks=named("constants", "depth", "influence")
    )
    assert report.covered
    assert "block_constant" not in report.layers[0].values
    reasons = {entry.check: entry.reason for entry in report.skipped}
    assert "no residual stream" in reasons["depth"]
    assert "no residual stream" in reasons["influence"]
