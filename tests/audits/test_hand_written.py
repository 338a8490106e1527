"""Models as people write them: pairs in a loop, learned latents, a decoder that reads an encoder, layers that
are called by their forward method. Each number is recomputed in plain torch, or absent with its reason.
"""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard as r
from tests.audits.families import FAMILIES, enlivened

CHECKS = ["constants", "depth", "influence"]
WIDTH, DATA = 12, 8


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def largest(function, x):
    """The spectral norm of a dense Jacobian."""
    dense = torch.autograd.functional.jacobian(function, x.detach())
    return float(torch.linalg.matrix_norm(dense.reshape(-1, x.numel()), 2))


def about(value):
    return pytest.approx(value, rel=1e-3)


def stack_of(report, name):
    (row,) = [row for row in report.stacks if row.site == name]
    return {name: value for name, value in row.values.items() if not math.isnan(value)}


def reasons(report, check):
    return [entry.reason for entry in report.skipped if entry.check == check]


class Attention(nn.Module):
    """Heads with the norm before them, as copied vision transformers have them."""

    def __init__(self, normed=True):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if normed else nn.Identity()
        self.to_qkv, self.to_out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (3, -1)).transpose(1, 2) for part in self.to_qkv(self.norm(x)).chunk(3, -1)
        )
        return self.to_out(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    def __init__(self, normed=True):
        norm = nn.LayerNorm(WIDTH) if normed else nn.Identity()
        super().__init__(norm, nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))


class Cross(nn.Module):
    """Heads whose keys and values come from other tokens."""

    def __init__(self, context=DATA):
        super().__init__()
        self.norm, self.q = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv, self.out = nn.Linear(context, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, context):
        parts = (self.q(self.norm(x)), *self.kv(context).chunk(2, -1))
        q, k, v = (part.unflatten(-1, (3, -1)).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class PreNorm(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(WIDTH), fn

    def forward(self, x):
        return self.fn(self.norm(x))


# Pairs in a loop


class Pairs(nn.Module):
    """The loop of vit-pytorch, with the norm inside of attention or around it."""

    def __init__(self, wrapped, depth=3):
        super().__init__()
        wrap = PreNorm if wrapped else (lambda module: module)
        pairs = [
            nn.ModuleList([wrap(Attention(not wrapped)), wrap(FeedForward(not wrapped))])
            for _ in range(depth)
        ]
        self.layers, self.norm = nn.ModuleList(pairs), nn.LayerNorm(WIDTH)

    def forward(self, x):
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.norm(x)


class ViT(nn.Module):
    def __init__(self, wrapped):
        super().__init__()
        self.embed, self.transformer, self.head = nn.Linear(6, WIDTH), Pairs(wrapped), nn.Linear(WIDTH, 4)

    def forward(self, image):
        return self.head(self.transformer(self.embed(image)).mean(1))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_loop_over_pairs_has_no_blocks(wrapped):
    """The whole transformer is not the block of its first layer; what is known of each layer stays."""
    model, image = enlivened(ViT(wrapped)).double(), drawn(1, 5, 6)
    report = r.audit(model, [{"image": image}], checks=CHECKS)
    x = model.embed(image)
    assert len(report.layers) == 3
    assert [entry.block for entry in report.coverage] == [""] * 3
    for (attn, ff), row in zip(model.transformer.layers, report.layers, strict=True):
        inner, point = (attn.fn, attn.norm(x)) if wrapped else (attn, x)
        assert row.values["layer_constant"] == about(largest(inner, point))
        if not wrapped:  # it reads the stream itself
            assert row.values["attention_branch_constant"] == about(largest(attn, x))
        assert not {"block_constant", "mlp_branch_constant"} & set(row.values)
        x = x + attn(x)
        x = x + ff(x)
    if wrapped:
        assert all("attention_branch_constant" not in row.values for row in report.layers)
        assert all("head_branch_constant" not in row.values for row in report.heads)
    assert len(reasons(report, "constants")) == 3
    assert all("attention of several layers" in reason for reason in reasons(report, "constants"))
    found = stack_of(report, "transformer")
    assert found["network_constant"] == about(largest(model.transformer, model.embed(image)))
    assert "product" not in found
    assert "no product" in " ".join(reasons(report, "depth"))
    assert "product" not in " ".join(report.summary()).replace("no product", "")


class InARow(nn.Module):
    """Two layers as attributes of one module: no list says that they are two."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = Attention(), FeedForward(), Attention(), FeedForward()

    def forward(self, x):
        for part in (self.a, self.b, self.c, self.d):
            x = x + part(x)
        return x


def test_layers_in_a_row_are_no_block():
    model = enlivened(nn.Sequential(InARow())).double()
    report = r.audit(model, [{"input": drawn(1, 5, WIDTH)}], checks=CHECKS)
    assert [entry.block for entry in report.coverage] == ["", ""]
    assert all("block_constant" not in row.values for row in report.layers)
    assert all("attention of several layers" in reason for reason in reasons(report, "constants"))


class Named(nn.Module):
    """Two layers by names, with something between them that is no branch."""

    def __init__(self, names=("attn_0", "attn_1")):
        super().__init__()
        self.attns = nn.ModuleDict({name: Attention() for name in names})
        self.ffs = nn.ModuleDict({name: FeedForward() for name in names})

    def forward(self, x):
        for name, attn in self.attns.items():
            x = x + attn(x)
            x = 2 * (x + self.ffs[name](x)) + 0.3
        return x


class Shared(nn.Module):
    """The same layer three times, as a loop."""

    def __init__(self):
        super().__init__()
        self.attn, self.ff = Attention(), FeedForward()

    def forward(self, x):
        for _ in range(3):
            x = x + self.attn(x)
            x = x + self.ff(x)
        return x


@pytest.mark.parametrize("kind", [Named, Shared])
def test_a_module_with_more_attention_than_its_first_branch_is_no_block(kind):
    model, x = enlivened(nn.Sequential(kind())).double(), drawn(1, 5, WIDTH)
    report = r.audit(model, [{"input": x}], checks=CHECKS)
    assert [entry.block for entry in report.coverage] == [""] * len(report.coverage)
    part, y = model[0], x
    pairs = (
        [(part.attn, part.ff)] * 3
        if kind is Shared
        else zip(part.attns.values(), part.ffs.values(), strict=True)
    )
    for (attn, ff), row in zip(pairs, report.layers, strict=True):
        assert row.values["layer_constant"] == about(largest(attn, y))
        assert not {"block_constant", "mlp_branch_constant"} & set(row.values)
        y = y + attn(y)
        y = y + ff(y) if kind is Shared else 2 * (y + ff(y)) + 0.3
    said = ["attention of several layers", "more attention than"]
    assert any(some in reason for reason in reasons(report, "constants") for some in said)
    assert reasons(report, "depth")
    for row in report.stacks:
        assert row.values["network_constant"] == about(largest(model, x))
        assert math.isnan(row.values.get("product", math.nan))


class Rolled(nn.Linear):
    def forward(self, x):
        return super().forward(x.roll(1, 1))


class Mixed(nn.Module):
    """A second branch mixes tokens, and before the third the stream is scaled: none is known as the MLP."""

    def __init__(self):
        super().__init__()
        self.attn, self.mix, self.ff = Attention(), Rolled(WIDTH, WIDTH), FeedForward()

    def forward(self, x):
        x = x + self.attn(x)
        x = x + self.mix(x)
        return 0.7 * x + self.ff(x)


def test_a_branch_in_a_block_that_goes_on_is_not_taken_for_the_mlp():
    model, x = enlivened(nn.Sequential(Mixed(), Mixed())).double(), drawn(1, 5, WIDTH)
    report, y = r.audit(model, [{"input": x}], checks=["constants"]), x
    for block, row in zip(model, report.layers, strict=True):
        assert row.values["block_constant"] == about(largest(block, y))
        assert row.values["attention_branch_constant"] == about(largest(block.attn, y))
        assert "mlp_branch_constant" not in row.values
        y = block(y)
    assert len(reasons(report, "constants")) == 2


class Block(nn.Module):
    """The twin: the same pair as a module."""

    def __init__(self, way=nn.Module.__call__):
        super().__init__()
        self.norm, self.attn, self.ff, self.way = nn.LayerNorm(WIDTH), Attention(False), FeedForward(), way

    def forward(self, x):
        x = x + self.way(self.attn, self.norm(x))
        return x + self.ff(x)


class Blocks(nn.Module):
    """A stack, with what comes after it, and how its layers are called."""

    def __init__(self, end=None, way=nn.Module.__call__, between=1.0):
        super().__init__()
        self.blocks, self.way, self.between = nn.ModuleList([Block(way), Block(way)]), way, between
        self.closing = nn.Identity() if end is None else end

    def forward(self, x):
        for block in self.blocks:
            x = self.way(block, x) * self.between
        return self.closing(x)


def by_forward(module, x):
    """How some models call their layers."""
    return module.forward(x)


@pytest.mark.parametrize("way", [nn.Module.__call__, by_forward])
@pytest.mark.parametrize("end", [None, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)])
def test_blocks_keep_their_numbers(end, way):
    """However layers are called, and whatever the norm after the last is called; what is no norm is none."""
    model, x = enlivened(Blocks(end, way)).double(), drawn(1, 5, WIDTH)
    report = r.audit(model, [{"x": x}], checks=CHECKS)
    assert not report.skipped
    assert [entry.block for entry in report.coverage] == ["blocks.0", "blocks.1"]
    product, y = 1.0, x
    for block, row in zip(model.blocks, report.layers, strict=True):
        assert row.values["block_constant"] == about(largest(block, y))
        branch = largest(lambda z, block=block: block.attn(block.norm(z)), y)
        assert row.values["attention_branch_constant"] == about(branch)
        middle = y + block.attn(block.norm(y))
        assert row.values["mlp_branch_constant"] == about(largest(block.ff, middle))
        product, y = product * largest(block, y), block(y)
    normed = isinstance(end, nn.LayerNorm)
    product *= largest(model.closing, y) if normed else 1.0
    through = model if normed else (lambda z: model.blocks[1](model.blocks[0](z)))
    found = stack_of(report, "blocks")
    assert found["network_constant"] == about(largest(through, x))
    assert found["product"] == about(product)
    assert ("its last norm" in " ".join(report.summary())) == normed


class Angles(nn.Module):
    """A head that compares angles, which do not change with the length of tokens."""

    def __init__(self, pooled=False):
        super().__init__()
        self.pooled, self.weight = pooled, nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        if self.pooled:
            return F.normalize(x.mean(1), dim=-1)
        return 20 * F.normalize(x, dim=-1) @ F.normalize(self.weight, dim=-1).T


@pytest.mark.parametrize("pooled", [False, True])
def test_a_head_of_angles_is_no_norm(pooled):
    model, x = enlivened(Blocks(Angles(pooled))).double(), drawn(1, 5, WIDTH)
    report, (one, two) = r.audit(model, [{"x": x}], checks=["depth"]), model.blocks
    found = stack_of(report, "blocks")
    assert found["network_constant"] == about(largest(lambda y: two(one(y)), x))
    assert found["product"] == about(largest(one, x) * largest(two, one(x)))
    assert "its last norm" not in " ".join(report.summary())


def test_what_stands_between_blocks_is_in_no_product():
    model, x = enlivened(Blocks(between=2.0)).double(), drawn(1, 5, WIDTH)
    report = r.audit(model, [{"x": x}], checks=CHECKS)
    found = stack_of(report, "blocks")
    first, second = model.blocks
    assert found["network_constant"] == about(largest(lambda y: second(2 * first(y)), x))
    assert "product" not in found
    assert "blocks.1 does not read what blocks.0 returns" in " ".join(reasons(report, "depth"))


class Residual(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(WIDTH), fn

    def forward(self, x):
        return x + self.fn(self.norm(x))


@pytest.mark.parametrize("holder", [nn.ModuleList, nn.Sequential])
def test_a_list_with_other_elements_has_no_constant_end_to_end(holder):
    """Attention and MLPs by turns in one list: what is between the first and the last attention is no
    network.
    """
    parts = [Residual(part) for _ in range(2) for part in (Attention(False), FeedForward(False))]

    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = holder(parts) if holder is nn.ModuleList else holder(*parts)

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return x

    model, x = enlivened(Turns()).double(), drawn(1, 5, WIDTH)
    report = r.audit(model, [{"x": x}], checks=["constants", "depth"])
    assert report.layers[0].values["block_constant"] == about(largest(parts[0], x))
    assert not stack_of(report, "parts") if report.stacks else True
    assert "parts.3 stands next to the blocks" in " ".join(reasons(report, "depth"))


class DecoderBlock(nn.Module):
    """Self-attention, cross-attention and an MLP: one layer."""

    def __init__(self):
        super().__init__()
        self.own, self.cross, self.ff = Attention(), Cross(), FeedForward()

    def forward(self, x, context):
        x = x + self.own(x)
        x = x + self.cross(x, context)
        return x + self.ff(x)


class Decoder(nn.Module):
    def __init__(self, kind=DecoderBlock):
        super().__init__()
        self.blocks = nn.ModuleList([kind(), kind()])

    def forward(self, x, memory):
        for block in self.blocks:
            x = block(x, memory)
        return x


def test_self_and_cross_attention_are_one_layer():
    """The MLP is the MLP, and not the branch after self-attention."""
    model, x, memory = enlivened(Decoder()).double(), drawn(1, 4, WIDTH), drawn(1, 6, DATA, seed=1)
    report = r.audit(model, [{"x": x, "memory": memory}], checks=CHECKS)
    assert [entry.block for entry in report.coverage] == ["blocks.0", "blocks.0", "blocks.1", "blocks.1"]
    y, product = x, 1.0
    for place, block in enumerate(model.blocks):
        own, cross = report.layers[2 * place : 2 * place + 2]
        middle = y + block.own(y)
        after = middle + block.cross(middle, memory)
        whole = largest(lambda z, block=block: block(z, memory), y)
        for row in (own, cross):
            assert row.values["mlp_branch_constant"] == about(largest(block.ff, after))
            assert row.values["block_constant"] == about(whole)
        assert own.values["attention_branch_constant"] == about(largest(block.own, y))
        queries = largest(lambda z, block=block: block.cross(z, memory), middle)
        assert cross.values["queries_constant"] == about(queries)
        y, product = block(y, memory), product * whole
    assert stack_of(report, "blocks")["product"] == about(product)
    by_own, by_memory = (stack_of(report, f"blocks from {name}") for name in ("x", "memory"))
    assert by_own == {"network_constant": about(largest(lambda z: model(z, memory), x))}
    assert by_memory == {"network_constant": about(largest(lambda z: model(x, z), memory))}


class Post(nn.Module):
    """A decoder's layer with norms after its branches, whose queries are zero in the first."""

    def __init__(self):
        super().__init__()
        self.own, self.cross = (nn.MultiheadAttention(WIDTH, 3, batch_first=True) for _ in range(2))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.ff = FeedForward(False)

    def forward(self, x, memory, places):
        own = x + places
        x = self.norm1(x + self.own(own, own, x)[0])
        x = self.norm2(x + self.cross(x + places, memory, memory)[0])
        return self.norm3(x + self.ff(x))


class Queries(nn.Module):
    def __init__(self):
        super().__init__()
        self.places, self.blocks = nn.Parameter(torch.randn(1, 4, WIDTH)), nn.ModuleList([Post(), Post()])

    def forward(self, memory):
        x = torch.zeros_like(self.places)
        for block in self.blocks:
            x = block(x, memory, self.places)
        return x


def test_a_block_whose_tokens_are_zero_is_one():
    model, memory = enlivened(Queries()).double(), drawn(1, 6, WIDTH)
    report = r.audit(model, [{"memory": memory}], checks=["constants", "depth"])
    assert [entry.block for entry in report.coverage] == ["blocks.0", "blocks.0", "blocks.1", "blocks.1"]
    x, product = torch.zeros_like(model.places), 1.0
    for place, block in enumerate(model.blocks):
        whole = largest(lambda z, block=block: block(z, memory, model.places), x)
        own_rows = [row for row in report.layers if row.site.startswith(f"blocks.{place}.")]
        assert len(own_rows) == 2
        assert len({row.values["mlp_branch_constant"] for row in own_rows}) == 1  # of one MLP
        for row in own_rows:
            assert row.values["block_constant"] == pytest.approx(whole, rel=3e-3)  # within the residual
            own = x + model.places
            middle = block.norm1(x + block.own(own, own, x)[0])
            after = block.norm2(middle + block.cross(middle + model.places, memory, memory)[0])
            mlp = largest(block.ff, after)
            assert row.values["mlp_branch_constant"] == pytest.approx(mlp, rel=5e-3)  # tokens are alike
        x, product = block(x, memory, model.places), product * whole
    assert stack_of(report, "blocks")["product"] == pytest.approx(product, rel=6e-3)
    found = stack_of(report, "blocks from memory")["network_constant"]
    assert found == about(largest(model, memory))


class Cut(Block):
    """A layer without a residual stream."""

    def forward(self, x):
        return self.ff(self.attn(self.norm(x)))


def test_blocks_that_are_not_all_of_a_list_have_no_product():
    """Nor a constant end to end, nor the influence of a token on what the first of them return."""
    model, x = enlivened(nn.Sequential(Block(), Cut())).double(), drawn(1, 5, WIDTH)
    report = r.audit(model, [{"input": x}], checks=CHECKS)
    assert [entry.block for entry in report.coverage] == ["0", ""]
    assert report.layers[0].values["block_constant"] == about(largest(model[0], x))
    assert not report.stacks or not stack_of(report, "")
    wanted = "1 stands next to the blocks and is no block that is known"
    assert wanted in " ".join(reasons(report, "depth"))
    assert wanted in " ".join(reasons(report, "influence"))


class Fewer(nn.Module):
    """Keys and values of every second token, as of strided convolutions."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x):
        sides = self.q(x), *self.kv(x[:, ::2]).chunk(2, -1)
        q, k, v = (part.unflatten(-1, (3, -1)).transpose(1, 2) for part in sides)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_the_geometry_of_tokens_with_fewer_keys():
    model, x = enlivened(nn.Sequential(Fewer())).double(), drawn(1, 6, WIDTH)
    report = r.audit(model, [{"input": x}], checks=["geometry", "rows"])
    assert not report.skipped
    squares = torch.linalg.svdvals(x[0]).square()
    rank = float(torch.special.entr(squares / squares.sum()).sum().exp())
    for column in ("effective_rank", "effective_rank_without_sinks"):  # no token is five times as long
        assert report.layers[0].values[column] == pytest.approx(rank, rel=1e-6)


# Second inputs


class Latents(nn.Module):
    """Learned tokens that read the data, with their own MLP, and then each other."""

    def __init__(self):
        super().__init__()
        self.latents, self.blocks = nn.Parameter(torch.randn(4, WIDTH)), nn.ModuleList()
        for _ in range(2):
            parts = {"cross": Cross(), "first": FeedForward(), "own": Attention(), "second": FeedForward()}
            self.blocks.append(Reading(parts))

    def through(self, x, data):
        for block in self.blocks:
            x = block(x, data)
        return x

    def forward(self, data):
        return self.through(self.latents.expand(len(data), -1, -1), data)


class Reading(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, x, data):
        x = x + self.parts["cross"](x, data)
        x = x + self.parts["first"](x)
        x = x + self.parts["own"](x)
        return x + self.parts["second"](x)


def test_data_and_learned_latents_have_a_number_each():
    model, data = enlivened(Latents()).double(), drawn(1, 7, DATA)
    report = r.audit(model, [{"data": data}], checks=CHECKS)
    latents = model.latents.unsqueeze(0)
    given = largest(lambda z: model.through(latents, z), data)
    learned = largest(lambda z: model.through(z, data), latents)
    assert abs(given - learned) > 0.1 * given
    assert stack_of(report, "blocks from data") == {"network_constant": about(given)}
    assert stack_of(report, "blocks from learned tokens") == {"inner_constant": about(learned)}
    assert [row.site for row in report.ranked("network_constant")] == ["blocks from data"]
    assert any("End to end, the stack blocks from data" in sentence for sentence in report.summary())
    assert "learned tokens" in " ".join(reasons(report, "influence"))
    assert all("block_constant" not in row.values for row in report.layers)


class Keeping(DecoderBlock):
    """A decoder's block whose context is an attribute."""

    context = None

    def forward(self, x):
        return super().forward(x, self.context)


class Told(nn.Module):
    """Blocks that are told their context, or to which it is added between them; or all of it is learned."""

    def __init__(self, way):
        super().__init__()
        self.way, self.blocks = (
            way,
            nn.ModuleList([Block(), Block()] if way == "between" else [Keeping(), Keeping()]),
        )
        self.own, self.into = nn.Parameter(torch.randn(4, WIDTH)), nn.Linear(DATA, WIDTH)

    def run(self, x, memory):
        for block in self.blocks:
            block.context = memory
            x = block(x) + self.into(memory) if self.way == "between" else block(x)
        return x

    def forward(self, x, memory):
        return self.run(x, memory)


class ToldAlone(Told):
    def forward(self, memory):
        return self.run(self.own.expand(len(memory), -1, -1), memory)


@pytest.mark.parametrize("way", ["attribute", "between"])
def test_an_input_that_blocks_read_in_another_way_has_a_reason(way):
    """The number of the other input is that with this one held, and has its name."""
    model, x, memory = enlivened(Told(way)).double(), drawn(1, 4, WIDTH), drawn(1, 4, DATA, seed=1)
    report = r.audit(model, [{"x": x, "memory": memory}], checks=["depth", "influence"])
    found = stack_of(report, "blocks from x")
    assert found == {"network_constant": about(largest(lambda z: model(z, memory), x))}
    assert [row.site for row in report.ranked("network_constant")] == ["blocks from x"]
    assert "no constant end to end from memory" in " ".join(reasons(report, "depth"))
    assert "blocks from x amplifies" in " ".join(report.summary())


@pytest.mark.parametrize("way", ["attribute", "between"])
def test_learned_tokens_are_not_the_input_that_blocks_read_in_another_way(way):
    model, memory = enlivened(ToldAlone(way)).double(), drawn(1, 4, DATA, seed=1)
    report = r.audit(model, [{"memory": memory}], checks=["depth", "influence"])
    assert not report.ranked("network_constant")
    own = model.own.unsqueeze(0)
    (found,) = [row.values["inner_constant"] for row in report.stacks if "inner_constant" in row.values]
    assert found == about(largest(lambda z: model.run(z, memory), own))
    assert "memory in another way" in " ".join(reasons(report, "depth"))
    assert "learned tokens" in " ".join(reasons(report, "influence"))


class Twice(Told):
    """The input enters the blocks, and they are told of it too."""

    def forward(self, memory):
        return self.run(self.into(memory), memory)


def test_an_input_that_enters_blocks_and_is_read_in_another_way_has_no_number():
    """That of the tokens that enter would be of a part of it."""
    model, memory = enlivened(Twice("attribute")).double(), drawn(1, 4, DATA, seed=1)
    report = r.audit(model, [{"memory": memory}], checks=["depth", "influence"])
    assert not any({"network_constant", "inner_constant"} & set(row.values) for row in report.stacks)
    assert "memory in another way" in " ".join(reasons(report, "depth"))
    assert "reads memory also in another way" in " ".join(reasons(report, "influence"))


class ReadOnce(nn.Module):
    """Learned tokens that read the data outside of all blocks, and blocks after that."""

    def __init__(self):
        super().__init__()
        self.latents, self.cross = nn.Parameter(torch.randn(4, WIDTH)), Cross()
        self.blocks = nn.ModuleList([Block(), Block()])

    def after(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, data):
        x = self.latents.expand(len(data), -1, -1)
        return self.after(x + self.cross(x, data))


def test_what_reads_the_data_before_the_blocks_is_counted():
    model, data = enlivened(ReadOnce()).double(), drawn(1, 7, DATA)
    report = r.audit(model, [{"data": data}], checks=["depth"])
    latents = model.latents.unsqueeze(0)
    assert stack_of(report, "blocks from data") == {"network_constant": about(largest(model, data))}
    inner = latents + model.cross(latents, data)
    found = stack_of(report, "blocks from the output of cross")
    assert found == {"inner_constant": about(largest(model.after, inner))}


class ReadIds(ReadOnce):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, DATA)

    def forward(self, input_ids):
        return super().forward(self.embedding(input_ids))


def test_ids_that_are_read_before_the_blocks_have_no_constant():
    report = r.audit(enlivened(ReadIds()).double(), [{"input_ids": torch.arange(7)[None]}], checks=["depth"])
    assert not report.ranked("network_constant")
    assert "no constant end to end: blocks reads the output of cross" in reasons(report, "depth")


def test_latents_of_transformers_are_not_the_data():
    transformers = pytest.importorskip("transformers")
    config = transformers.PerceiverConfig(
        num_latents=5, d_latents=12, d_model=DATA, num_self_attends_per_block=2, num_self_attention_heads=2,
        num_cross_attention_heads=2, qk_channels=12, v_channels=12,
    )  # fmt: skip
    model, data = enlivened(transformers.PerceiverModel(config), 1.0).double(), drawn(1, 7, DATA)
    report = r.audit(model, [{"inputs": data}], checks=["depth"])
    latents = model.embeddings.latents.unsqueeze(0)
    given = largest(lambda z: model(inputs=z).last_hidden_state, data)
    learned = largest(lambda z: model.encoder(z, inputs=data).last_hidden_state, latents)
    stack = "encoder.self_attends"
    assert stack_of(report, f"{stack} from inputs") == {"network_constant": about(given)}
    assert stack_of(report, f"{stack} from learned tokens") == {"inner_constant": about(learned)}
    cross = lambda z: model.encoder.cross_attention(latents, inputs=z)[0]  # noqa: E731
    found = stack_of(report, "encoder.cross_attention from inputs")
    assert found == {"network_constant": about(largest(cross, data))}
    assert not [row for row in report.stacks if row.site.startswith("encoder from")]  # it does more


def test_encoder_and_decoder_have_a_number_for_each_input():
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, 2, 2, 2, 24, 0.0, batch_first=True).double().eval()
    source, target = drawn(1, 5, WIDTH), drawn(1, 4, WIDTH, seed=1)
    report = r.audit(model, [{"src": source, "tgt": target}], checks=["depth"])
    memory = model.encoder(source)
    assert stack_of(report, "encoder.layers")["network_constant"] == about(largest(model.encoder, source))
    wanted = {
        "src": ("network_constant", largest(lambda z: model(z, target), source)),
        "tgt": ("network_constant", largest(lambda z: model(source, z), target)),
        "the output of encoder.layers": (
            "inner_constant",
            largest(lambda z: model.decoder(target, z), memory),
        ),
    }
    for name, (column, value) in wanted.items():
        assert stack_of(report, f"decoder.layers from {name}") == {column: about(value)}
    layers, product, y = model.decoder.layers, largest(model.decoder.norm, target), target
    last = layers[1](layers[0](target, memory), memory)
    product = largest(model.decoder.norm, last)
    for layer in layers:
        product *= largest(lambda z, layer=layer: layer(z, memory), y)
        y = layer(y, memory)
    assert stack_of(report, "decoder.layers") == {"product": about(product)}


def test_ids_of_an_encoder_and_a_decoder_are_named():
    pytest.importorskip("transformers")
    model = FAMILIES["t5"].make("eager").double()
    options = {"input_ids": torch.arange(3, 12)[None], "decoder_input_ids": torch.arange(5, 12)[None]}
    report = r.audit(model, [options], checks=["depth"])
    points = {name: model.shared(ids) for name, ids in options.items()}

    def run(x, name):
        embeds = {**points, name: x}
        one, two = embeds["input_ids"], embeds["decoder_input_ids"]
        return model(inputs_embeds=one, decoder_inputs_embeds=two, use_cache=False).last_hidden_state

    for name, point in points.items():
        found = stack_of(report, f"decoder.block from {name}")
        assert found == {"network_constant": about(largest(lambda x, name=name: run(x, name), point))}
    memory = model.encoder(inputs_embeds=points["input_ids"]).last_hidden_state

    def decode(states):
        return model.decoder(
            inputs_embeds=points["decoder_input_ids"], encoder_hidden_states=states, use_cache=False
        ).last_hidden_state

    inner = stack_of(report, "decoder.block from the output of encoder.block")
    assert inner == {"inner_constant": about(largest(decode, memory))}


@pytest.mark.parametrize("name", ["llama", "t5", "bert"])
def test_positions_and_masks_are_no_inputs(name):
    """What blocks read beside tokens, and no input changes, has no number of its own."""
    pytest.importorskip("transformers")
    model = FAMILIES[name].make("eager").double()
    model = model.encoder if name == "t5" else model
    options = {"input_ids": torch.arange(3, 9)[None], "attention_mask": torch.ones(1, 6, dtype=torch.long)}
    report = r.audit(model, [options], checks=["depth"])
    (row,) = report.stacks
    assert "from" not in row.site
    assert "inner_constant" not in row.values


# torch's own layers, and forward methods


@pytest.mark.parametrize("activation", ["relu", F.gelu, nn.GELU()])
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_mlp_of_torchs_layers_is_measured(norm_first, activation):
    layer = nn.TransformerEncoderLayer(WIDTH, 3, 24, 0.1, activation, batch_first=True, norm_first=norm_first)
    model = enlivened(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)).double()
    x, layer = drawn(1, 5, WIDTH), model.layers[0]
    report = r.audit(model, [{"src": x}], checks=["constants"])
    norm = layer.norm1 if norm_first else nn.Identity()
    attended = x + layer.self_attn(*[norm(x)] * 3)[0]
    middle = attended if norm_first else layer.norm1(attended)
    after = layer.norm2 if norm_first else nn.Identity()
    mlp = largest(lambda z: layer.linear2(layer.activation(layer.linear1(after(z)))), middle)
    assert report.layers[0].values["mlp_branch_constant"] == about(mlp)
    assert not report.skipped


def test_layers_of_a_decoder_are_counted_once():
    """Self- and cross-attention of a block are one layer in the sentences about layers."""
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(WIDTH, 2, 24, 0.0, batch_first=True, norm_first=True)
    model = nn.TransformerDecoder(layer, 3).double().eval()
    x = drawn(1, 5, WIDTH)
    report = r.audit(
        model, [{"tgt": x, "memory": drawn(1, 4, WIDTH, seed=1)}], checks=["geometry", "constants"]
    )
    assert len(report.coverage) == 6
    report = dataclasses.replace(report, rows=[with_heavy_token(row) for row in report.rows])
    (found,) = [finding for finding in report.findings() if finding.column == "token_ratio"]
    assert (found.numbers["count"], found.numbers["layers"]) == (3, 3)


def with_heavy_token(row):
    values = {**row.values, "token_ratio": 500.0} if row.scope == "layer" else row.values
    return dataclasses.replace(row, values=values)


class RootMeanSquare(nn.Module):
    """A norm as people write it."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return self.gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("last", [RootMeanSquare, nn.Identity])
def test_a_norm_after_torchs_layers_is_found_by_what_it_does(last):
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(WIDTH, 3, 24, 0.0, batch_first=True, norm_first=True)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.closing, self.head = last(), nn.Linear(WIDTH, 3)

        def forward(self, x):
            return self.head(self.closing(self.encoder(x)))

    model, x = Net().double().eval(), drawn(1, 5, WIDTH)
    report = r.audit(model, [{"x": x}], checks=["depth"])
    found = stack_of(report, "encoder.layers")["network_constant"]
    assert found == about(largest(lambda z: model.closing(model.encoder(z)), x))
    assert ("its last norm" in " ".join(report.summary())) == (last is RootMeanSquare)


class Called(nn.Module):
    """torch's attention, called by its forward method or as it should be."""

    def __init__(self, direct, depth=3):
        super().__init__()
        self.direct = direct
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, 3, batch_first=True) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = x + (layer.forward(x, x, x) if self.direct else layer(x, x, x))[0]
        return x


def test_a_layer_is_counted_once():
    """Attention that is called by its forward method is the module's, and not its parent's once more."""
    x, found = drawn(1, 5, WIDTH), []
    for direct in (True, False):
        report = r.audit(enlivened(Called(direct)).double(), [{"x": x}], checks=["rows", "constants"])
        assert [entry.site for entry in report.coverage] == ["layers.0", "layers.1", "layers.2"]
        assert not report.missing
        found.append([row.values for row in report.rows])
    assert found[0] == found[1]


# What went wrong


class Stubborn(Block):
    """Code that takes no tensors with derivatives."""

    def forward(self, x):
        return x + torch.from_numpy(self.attn(self.norm(x)).numpy())


def test_errors_are_told_as_what_they_are(monkeypatch):
    class Net(nn.Sequential):
        pass

    model, x = enlivened(Net(Stubborn(), Stubborn())).double(), drawn(1, 5, WIDTH)
    report = r.audit(model, [{"input": x}], checks=["constants", "depth", "rows"])
    said = reasons(report, "constants") + reasons(report, "depth")
    assert said
    assert all(reason.startswith("the model failed when it ran again (RuntimeError: ") for reason in said)
    assert all("test_hand_written.py, line" in reason for reason in said)
    assert all("entropy" in row.values for row in report.heads)

    monkeypatch.setattr("regard.audits.checks.constants.SMALL", None)
    report = r.audit(enlivened(Net(Block())).double(), [{"input": x}], checks=["constants"])
    (reason,) = reasons(report, "constants")
    assert reason.startswith("an internal error of regard (TypeError: '<=' not supported")
    assert "checks/constants.py, line" in reason
    assert reason.endswith("please report it with this sentence")


# Logits


class Scored(nn.Module):
    """One head whose scores are given: queries are unit vectors, and keys the columns of scores."""

    def __init__(self, scores):
        super().__init__()
        self.register_buffer("scores", scores)
        self.value = nn.Linear(4, 4)

    def forward(self, x):
        q = torch.eye(len(self.scores), dtype=x.dtype)[None, None]
        k = self.scores.T[None, None]
        return F.scaled_dot_product_attention(q, k, self.value(x)[:, None], scale=1.0)[:, 0]


def logits_of(scores):
    report = r.audit(Scored(scores).double(), [{"x": drawn(1, len(scores), 4)}], checks=["rows"])
    (row,) = report.heads
    found = [finding for finding in report.findings() if finding.column == "largest_logit"]
    return row.values, found


@pytest.mark.parametrize("low", [-80.0, -95.0, -102.0, -110.0])
def test_the_largest_logit_is_of_weights_that_are_not_zero_in_float32(low):
    """The smallest numbers of float32 are 1e-45, and not 1e-38."""
    scores = torch.zeros(3, 3).double()
    scores[0, 2] = low
    weights = scores.softmax(-1).to(torch.float32)
    values, _ = logits_of(scores)
    assert values["largest_logit"] == float(scores.abs()[weights != 0].max())
    assert (low > -104) == (values["largest_logit"] > 0)


def spread_of(scores):
    """In plain torch: of each score with a weight, the part that its row's range allows for."""
    ranges = scores.amax(-1, keepdim=True) - scores.amin(-1, keepdim=True)
    weighty = scores.softmax(-1) > 1.2e-38
    return float(torch.minimum(scores.abs(), ranges.expand_as(scores))[weighty].max())


def test_a_constant_in_each_row_is_no_alarm():
    scores = 1350 + 24 * drawn(5, 5).softmax(-1)
    values, found = logits_of(scores)
    assert values["largest_logit"] == pytest.approx(float(scores.max()))
    assert values["logit_spread"] == pytest.approx(spread_of(scores))
    assert values["logit_spread"] < 25
    assert not found


def test_logits_that_vary_are_an_alarm():
    scores = 5000 * drawn(5, 5)
    values, (alarm,) = logits_of(scores)
    assert values["logit_spread"] == pytest.approx(spread_of(scores))
    assert alarm.level == "alarming"
    assert alarm.numbers["spread"] == values["logit_spread"] > 5000
    assert "W_Q and W_K" in alarm.advice


def test_a_constant_beyond_float16_is_an_overflow_of_the_bias():
    scores = 70000 + 10 * drawn(5, 5)
    _, (alarm,) = logits_of(scores)
    assert alarm.level == "alarming"
    assert "overflows in float16" in alarm.what
    assert "bias of its keys" in alarm.advice
    assert "W_Q" not in alarm.advice
    least = float(scores.abs().amin(-1).max())
    assert 65504 < alarm.numbers["constant"] <= least + 1e-6
    _, found = logits_of(scores - 10000)
    assert not found


@pytest.mark.parametrize("bias", [0.0, 3000.0])
def test_the_bias_of_keys_is_what_overflows(bias):
    """A twin: without its bias the layer has the same weights, and no alarm."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(WIDTH, 2, batch_first=True).double()
    with torch.no_grad():
        model.in_proj_bias[:WIDTH], model.in_proj_bias[WIDTH : 2 * WIDTH] = 30.0, bias
        model.in_proj_weight[: 2 * WIDTH] *= 0.1
    x = drawn(1, 5, WIDTH)
    report = r.audit(model, [{"query": x, "key": x, "value": x}], checks=["rows"])
    alarms = [finding.what for finding in report.findings() if finding.column == "largest_logit"]
    assert [("overflows in float16" in what) for what in alarms] == [True, True] * bool(bias)
    law = model(x, x, x, average_attn_weights=False)[1][0].detach()
    for row in report.heads:
        entropy = float(torch.special.entr(law[row.head]).sum(-1).mean())
        assert row.values["entropy"] == pytest.approx(entropy, rel=1e-6)
