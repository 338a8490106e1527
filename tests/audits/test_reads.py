"""What attention reads: cross-attention by queries and context together, each of several attentions in one
module by tokens of its own. Every number is recomputed with dense Jacobians of plain torch.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard as r
from tests.audits.families import enlivened

CHECKS = ["rows", "constants", "geometry"]
CLOSE = 1e-4


def norm_of(function, *points):
    """The spectral norm of the dense Jacobian in all points together."""
    parts = torch.autograd.functional.jacobian(function, points)
    dense = torch.cat([part.reshape(-1, x.numel()) for part, x in zip(parts, points, strict=True)], 1)
    return float(torch.linalg.matrix_norm(dense, 2))


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def mixed(q, k, v, heads=3):
    """Rows times values of each head, (..., h, n, e)."""
    q, k, v = (split(part, heads) for part in (q, k, v))
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def joined(found):
    return found.transpose(-2, -3).flatten(-2)


def entropies(q, k, heads=3):
    q, k = split(q[0], heads), split(k[0], heads)
    return torch.special.entr((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)).sum(-1).mean(-1)


def tokens(n, d=12, seed=0):
    return torch.randn(1, n, d, generator=torch.Generator().manual_seed(seed + n), dtype=torch.float64)


def rows_at(report, site):
    heads = [row.values for row in report.heads if row.site == site]
    (layer,) = [row.values for row in report.layers if row.site == site]
    return heads, layer


# Cross-attention that is observed


class Widths(nn.Module):
    """Queries, keys and values of different widths: no declaration has these."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, kdim=8, vdim=10, batch_first=True)

    def forward(self, x, y, z):
        return self.attention(x, y, z)[0]

    def sides(self, x, y, z):
        own, biases = self.attention, self.attention.in_proj_bias.chunk(3)
        weights = own.q_proj_weight, own.k_proj_weight, own.v_proj_weight
        return [F.linear(*parts) for parts in zip((x, y, z), weights, biases, strict=True)]


def test_a_head_of_observed_cross_attention_moves_with_all_that_it_reads():
    model = enlivened(Widths()).double()
    x, y, z = tokens(4), tokens(5, 8), tokens(5, 10)
    report = r.audit(model, {"x": x, "y": y, "z": z}, checks=CHECKS)
    assert [entry.level for entry in report.coverage] == ["observed"]
    heads, layer = rows_at(report, "attention")
    for head, row in enumerate(heads):
        exact = norm_of(lambda *own, head=head: mixed(*model.sides(*own))[0, head], x, y, z)
        in_queries = norm_of(lambda own, head=head: mixed(*model.sides(own, y, z))[0, head], x)
        assert row["head_constant"] == pytest.approx(exact, rel=CLOSE)
        assert in_queries < 0.9 * exact  # the number that is of a part of it
    assert layer["layer_constant"] == pytest.approx(norm_of(model, x, y, z), rel=CLOSE)
    assert layer["queries_constant"] == pytest.approx(norm_of(lambda own: model(own, y, z), x), rel=CLOSE)
    both = norm_of(lambda *own: model(x, *own), y, z)
    assert layer["context_constant"] == pytest.approx(both, rel=CLOSE)


class Latents(nn.Module):
    """Latents that read the data and themselves, as in perceivers; softmax of scores of another kind."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12) for _ in range(4))

    def heads(self, latents, data):
        both = torch.cat([data, latents], 1)
        q, k, v = split(self.q(latents), 3), split(self.k(both), 3), split(self.v(both), 3)
        return torch.einsum("bhij,bhjd->bhid", (q @ k.mT / 2).softmax(-1), v)

    def forward(self, latents, data):
        return self.out(joined(self.heads(latents, data)))


class Reversed(Latents):
    def forward(self, data, latents):
        return super().forward(latents, data)


@pytest.mark.parametrize("kind", [Latents, Reversed])
def test_latents_and_data_move_together(kind):
    model, latents, data = enlivened(kind()).double(), tokens(3), tokens(6)
    report = r.audit(model, {"latents": latents, "data": data}, checks=CHECKS)
    heads, layer = rows_at(report, "")
    for head, row in enumerate(heads):
        exact = norm_of(lambda *own, head=head: model.heads(*own)[0, head], latents, data)
        assert row["head_constant"] == pytest.approx(exact, rel=CLOSE)

    def whole(*own):
        return Latents.forward(model, *own)

    assert layer["layer_constant"] == pytest.approx(norm_of(whole, latents, data), rel=CLOSE)
    found = norm_of(lambda own: whole(own, data), latents)
    assert layer["queries_constant"] == pytest.approx(found, rel=CLOSE)
    found = norm_of(lambda own: whole(latents, own), data)
    assert layer["context_constant"] == pytest.approx(found, rel=CLOSE)


class Placed(nn.Module):
    """Tables of positions are arguments too, and move nothing."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def heads(self, x, cos, sin):
        q, k, v = (split(part, 3) for part in self.qkv(x).chunk(3, -1))
        q, k = (part * cos + part.flip(-1) * sin for part in (q, k))
        return torch.einsum("bhij,bhjd->bhid", (q @ k.mT).tanh().softmax(-1), v)

    def forward(self, x, cos, sin):
        return self.out(joined(self.heads(x, cos, sin)))


def test_tables_of_positions_are_not_tokens():
    model, x = nn.Sequential(), tokens(5)
    model.add_module("attention", enlivened(Placed()).double())
    angles = torch.linspace(0, 2, 20, dtype=torch.float64).reshape(5, 4)
    model.forward = lambda x: model.attention(x, angles.cos(), angles.sin())
    heads, layer = rows_at(r.audit(model, {"x": x}, checks=CHECKS), "attention")
    for head, row in enumerate(heads):
        exact = norm_of(
            lambda own, head=head: model.attention.heads(own, angles.cos(), angles.sin())[0, head], x
        )
        assert row["head_constant"] == pytest.approx(exact, rel=CLOSE)
    assert layer["layer_constant"] == pytest.approx(norm_of(model.forward, x), rel=CLOSE)
    assert "context_constant" not in layer


# Several attentions in one module


class Two(nn.Module):
    """A block whose two attentions are written out in it; the second also reads another sequence."""

    def __init__(self, cross=False):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(12), nn.LayerNorm(12)
        self.q1, self.k1, self.v1, self.o1, self.q2, self.k2, self.v2, self.o2 = (
            nn.Linear(12, 12) for _ in range(8)
        )
        self.mlp = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))

    def first(self, x):
        return mixed(self.q1(x), self.k1(x), self.v1(x))

    def second(self, x, y):
        return mixed(self.q2(x), self.k2(y), self.v2(y))

    def between(self, x):
        return x + self.o1(joined(self.first(self.norm1(x))))

    def forward(self, x, y=None):
        x = self.between(x)
        queries = self.norm2(x)
        x = x + self.o2(joined(self.second(queries, queries if y is None else y)))
        return x + self.mlp(x)


def radius(x):
    return float((x[0] - x[0].mean(0)).norm(dim=-1).max())


@pytest.mark.parametrize("depth", [1, 2])
def test_each_of_two_attentions_in_one_block_has_numbers_of_its_own(depth):
    model, x = nn.Sequential(*(enlivened(Two()) for _ in range(depth))).double(), tokens(6)
    report = r.audit(model, {"input": x}, checks=CHECKS)
    with torch.no_grad():
        for place, block in enumerate(model):
            y = block.between(x)
            for site, run, stream, norm, out, sides in (
                (f"{place}", block.first, x, block.norm1, block.o1, (block.q1, block.k1)),
                (
                    f"{place} (part 2)",
                    lambda own, block=block: block.second(own, own),
                    y,
                    block.norm2,
                    block.o2,
                    (block.q2, block.k2),
                ),
            ):
                heads, layer = rows_at(report, site)
                own = norm(stream)
                wanted = entropies(*(side(own) for side in sides))
                for head, row in enumerate(heads):
                    one = lambda t, head=head, run=run: run(t)[0, head]  # noqa: E731
                    assert row["entropy"] == pytest.approx(float(wanted[head]), rel=1e-6)
                    assert row["head_constant"] == pytest.approx(norm_of(one, own), rel=CLOSE)
                    after = norm_of(lambda t, one=one, norm=norm: one(norm(t)), stream)
                    assert row["head_branch_constant"] == pytest.approx(after, rel=CLOSE)
                whole = lambda t, run=run, out=out: out(joined(run(t)))  # noqa: E731
                assert layer["layer_constant"] == pytest.approx(norm_of(whole, own), rel=CLOSE)
                after = norm_of(lambda t, whole=whole, norm=norm: whole(norm(t)), stream)
                assert layer["attention_branch_constant"] == pytest.approx(after, rel=CLOSE)
                assert layer["radius"] == pytest.approx(radius(stream), rel=1e-6)
            x = block(x)


class Beside(nn.Module):
    """Two attentions that read the same tokens, behind a norm outside of their module."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(12), Pair()

    def forward(self, x):
        return x + self.attention(self.norm(x))


class Pair(Two):
    def forward(self, x):
        return self.o1(joined(self.first(x))) + self.o2(joined(self.second(x, x)))


def test_a_norm_outside_of_the_module_stands_before_each_attention_in_it():
    model, x = nn.Sequential(enlivened(Beside())).double(), tokens(6)
    report, (block,) = r.audit(model, {"input": x}, checks=CHECKS), model
    own, pair = block.norm(x).detach(), block.attention
    runs = {
        "0.attention": (pair.first, pair.o1),
        "0.attention (part 2)": (lambda t: pair.second(t, t), pair.o2),
    }
    for site, (run, out) in runs.items():
        heads, layer = rows_at(report, site)
        whole = lambda t, run=run, out=out: out(joined(run(t)))  # noqa: E731
        assert layer["layer_constant"] == pytest.approx(norm_of(whole, own), rel=CLOSE)
        after = norm_of(lambda t, whole=whole: whole(block.norm(t)), x)
        assert layer["attention_branch_constant"] == pytest.approx(after, rel=CLOSE)
        assert layer["radius"] == pytest.approx(radius(x), rel=1e-6)
        for head, row in enumerate(heads):
            one = lambda t, head=head, run=run: run(t)[0, head]  # noqa: E731
            assert row["head_constant"] == pytest.approx(norm_of(one, own), rel=CLOSE)
            after = norm_of(lambda t, one=one: one(block.norm(t)), x)
            assert row["head_branch_constant"] == pytest.approx(after, rel=CLOSE)


def test_cross_attention_beside_self_attention_in_one_module():
    model, x, y = enlivened(Two()).double(), tokens(6), tokens(4)
    report = r.audit(model, {"x": x, "y": y}, checks=CHECKS)
    with torch.no_grad():
        stream = model.between(x)
    heads, layer = rows_at(report, " (part 2)")
    for head, row in enumerate(heads):
        exact = norm_of(lambda *own, head=head: model.second(*own)[0, head], model.norm2(stream), y)
        assert row["head_constant"] == pytest.approx(exact, rel=CLOSE)
    out = lambda queries, context: model.o2(joined(model.second(queries, context)))  # noqa: E731
    found = norm_of(out, model.norm2(stream), y)
    assert layer["layer_constant"] == pytest.approx(found, rel=CLOSE)
    found = norm_of(lambda queries, context: out(model.norm2(queries), context), stream, y)
    assert layer["attention_branch_constant"] == pytest.approx(found, rel=CLOSE)
    found = norm_of(lambda context: out(model.norm2(stream), context), y)
    assert layer["context_constant"] == pytest.approx(found, rel=CLOSE)


class One(nn.Module):
    """A block with one attention written out in it: the block is not its attention."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out, self.end = (
            nn.LayerNorm(12),
            nn.Linear(12, 36),
            nn.Linear(12, 12),
            nn.Linear(12, 12),
        )

    def heads(self, x):
        return mixed(*self.qkv(x).chunk(3, -1))

    def forward(self, x):
        x = x + self.out(joined(self.heads(self.norm(x))))
        return x + self.end(x.tanh())


def test_a_block_is_not_the_attention_in_it():
    model, x = enlivened(One()).double(), tokens(5)
    (layer,) = r.audit(model, {"x": x}, checks=["constants"]).layers
    with torch.no_grad():
        own = model.norm(x)
    alone = norm_of(lambda t: model.out(joined(model.heads(t))), own)
    assert layer.values["layer_constant"] == pytest.approx(alone, rel=CLOSE)
    after = norm_of(lambda t: model.out(joined(model.heads(model.norm(t)))), x)
    assert layer.values["attention_branch_constant"] == pytest.approx(after, rel=CLOSE)


class Inline(nn.Module):
    """A whole model in one forward pass, from integers on."""

    def __init__(self, layers=2):
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 12), nn.Linear(12, 20)
        self.qkv, self.mix = (nn.ModuleList(nn.Linear(12, d) for _ in range(layers)) for d in (36, 12))

    def forward(self, ids):
        x = self.embed(ids)
        for qkv, mix in zip(self.qkv, self.mix, strict=True):
            x = x + mix(joined(mixed(*qkv(x).chunk(3, -1))))
        return self.out(x)


def test_a_model_of_integers_in_one_forward_pass():
    model, ids = enlivened(Inline()).double(), torch.arange(7).unsqueeze(0)
    report = r.audit(model, {"ids": ids}, checks=CHECKS)
    with torch.no_grad():
        x = model.embed(ids)
        for qkv, mix, site in zip(model.qkv, model.mix, ["", " (part 2)"], strict=True):
            heads, layer = rows_at(report, site)
            wanted = entropies(*qkv(x).chunk(3, -1)[:2])
            for head, row in enumerate(heads):
                assert row["entropy"] == pytest.approx(float(wanted[head]), rel=1e-6)
                exact = norm_of(lambda t, head=head, qkv=qkv: mixed(*qkv(t).chunk(3, -1))[0, head], x)
                assert row["head_constant"] == pytest.approx(exact, rel=CLOSE)
            alone = norm_of(lambda t, qkv=qkv, mix=mix: mix(joined(mixed(*qkv(t).chunk(3, -1)))), x)
            assert layer["layer_constant"] == pytest.approx(alone, rel=CLOSE)
            assert layer["radius"] == pytest.approx(radius(x), rel=1e-6)
            x = x + mix(joined(mixed(*qkv(x).chunk(3, -1))))


class Bare(nn.Module):
    """The same with parameters alone: nothing says what its attention reads."""

    def __init__(self):
        super().__init__()
        self.embed, self.weights = nn.Embedding(20, 12), nn.Parameter(torch.zeros(2, 4, 12, 12))

    def forward(self, ids):
        x = self.embed(ids)
        for q, k, v, out in self.weights:
            x = x + joined(mixed(x @ q, x @ k, x @ v)) @ out
        return x


def test_where_queries_keys_and_values_are_all_that_is_known_rows_are_measured():
    model, ids = enlivened(Bare()).double(), torch.arange(7).unsqueeze(0)
    with torch.no_grad():
        model.weights.mul_(math.sqrt(12))
    report = r.audit(model, {"ids": ids}, checks=CHECKS)
    x = model.embed(ids).detach()
    for site, (q, k, v, out) in zip(["", " (part 2)"], model.weights.detach(), strict=True):
        wanted = entropies(x @ q, x @ k)
        found = [row for row in report.heads if row.site == site]
        assert [row.values["entropy"] for row in found] == pytest.approx(wanted.tolist(), rel=1e-6)
        assert all("head_constant" not in row.values for row in found)
        skipped = {entry.check: entry.reason for entry in report.skipped if entry.site == site}
        assert skipped.keys() == {"constants", "geometry"}
        assert all("it is not known what it reads" in reason for reason in skipped.values())
        x = x + joined(mixed(x @ q, x @ k, x @ v)) @ out
    assert not report.layers
