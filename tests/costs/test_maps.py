"""Declarations cost what torch counts when they run: by the definition, by the fused kernel,
forward and backward.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import regard as r
from regard.costs import Cost, Part, Sizes, charge, cost, register_flop_formulas
from regard.costs.account import causal_pairs

WIDTH, HEADS, GROUPS, INNER = 24, 4, 2, 16
KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def counted(run):
    register_flop_formulas()
    with FlopCounterMode(display=False) as counter:
        run()
    return counter


def attention(support=r.Full(), groups=HEADS, keys=WIDTH, potential=r.Dot, normalizer=r.Softmax()):
    scores = potential(w_q=random(HEADS, WIDTH, INNER), w_k=random(groups, keys, INNER))
    return r.Attention(scores, r.Linear(random(groups, keys, INNER)), normalizer, support)


def layer(support=r.Causal(), groups=GROUPS, hidden=40, gated=True):
    heads = r.maps.Heads(attention(support, groups), random(HEADS, INNER, WIDTH), random(WIDTH))
    wide = random(WIDTH, hidden)
    forward = (
        r.maps.Gated(r.maps.Silu(), wide, wide + 1, random(hidden, WIDTH))
        if gated
        else r.maps.feed_forward(r.maps.Relu(), wide, random(hidden, WIDTH))
    )
    return r.maps.pre_norm(
        heads,
        forward,
        r.maps.Normalize(weight=random(WIDTH)),
        r.maps.Normalize(weight=random(WIDTH), bias=random(WIDTH)),
    )


DECLARATIONS = {
    "dot": attention(),
    "causal": attention(r.Causal()),
    "grouped": attention(r.Causal(), GROUPS),
    "one group": attention(groups=1),
    "cosine": attention(potential=r.Cosine),
    "rotary": r.Attention(
        r.Rotary(r.Dot(random(HEADS, WIDTH, INNER), random(GROUPS, WIDTH, INNER))),
        r.Linear(random(GROUPS, WIDTH, INNER)),
    ),
    "bilinear": r.Attention(r.Bilinear(random(WIDTH, WIDTH)), r.Linear(random(WIDTH, INNER))),
    "additive": r.Attention(
        r.Additive(random(WIDTH, 5), random(WIDTH, 5), random(5)), r.Linear(random(WIDTH, INNER))
    ),
    "entmax": attention(normalizer=r.Entmax(1.5)),
    "sigmoid": attention(normalizer=r.Sigmoid()),
}


@pytest.mark.parametrize("name", DECLARATIONS)
@pytest.mark.parametrize("tokens", [1, 9, 33])
def test_the_definition_takes_what_is_said(name, tokens):
    x = random(tokens, WIDTH)
    run = counted(lambda: r.apply(DECLARATIONS[name], x, engine=r.engines.ReferenceEngine()))
    assert cost(DECLARATIONS[name], tokens).forward == run.get_total_flops()


@pytest.mark.parametrize("name", ["dot", "causal", "grouped", "one group", "cosine", "rotary"])
def test_the_fused_kernel_takes_what_is_said(name):
    """Kernels count pairs; the one that is compared to learn a shape is not counted."""
    x = random(33, WIDTH)
    run = counted(lambda: r.apply(DECLARATIONS[name], x, engine=r.engines.Sdpa()))
    found = cost(DECLARATIONS[name], 33)
    assert run.get_flop_counts()["Global"][KERNEL] == found.attention
    assert run.get_total_flops() == found.forward


def test_a_gaussian_costs_a_dot_product():
    declared = attention(potential=r.Gaussian)
    run = counted(lambda: r.apply(declared, random(33, WIDTH), engine=r.engines.Sdpa()))
    assert cost(declared, 33).attention == run.get_flop_counts()["Global"][KERNEL]


@pytest.mark.parametrize("support", [r.Full(), r.Causal()])
def test_feature_kernels_take_sums(support):
    declared = attention(support, normalizer=r.LinearKernel(r.normalizers.Elu()))
    run = counted(lambda: declared(random(300, WIDTH)))
    found = cost(declared, 300)
    assert found.forward == run.get_total_flops() < cost(attention(support), 300).forward
    assert found.crossover is None
    assert cost(declared, 300 + 128).attention < 2 * found.attention


def test_tiles_are_counted():
    """The tiled engine and masks that come by blocks reach the same kernels."""
    x, declared = random(600, WIDTH), attention(r.Window(20, 20))
    found = cost(declared, 600)
    for engine in (r.engines.Tiled(), r.engines.Sdpa()):
        run = counted(lambda engine=engine: r.apply(declared, x, engine=engine))
        planned = 8 * INNER * HEADS  # a pair or two
        assert found.visible < run.get_total_flops() <= found.forward + planned


def test_another_context():
    declared = attention(keys=10, groups=GROUPS)
    found = cost(declared, Sizes(7, batch=3, context=11))
    run = counted(
        lambda: r.apply(declared, random(7, WIDTH), random(11, 10), engine=r.engines.ReferenceEngine())
    )
    assert found.forward == 3 * run.get_total_flops()
    assert found.crossover is None
    held = r.maps.ToContext(declared, random(11, 10))
    assert cost(held, Sizes(7, batch=3)).parts == found.parts
    assert cost(r.maps.FromQueries(declared, random(7, WIDTH)), Sizes(11, batch=3)).forward == found.forward


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("groups", [HEADS, GROUPS])
def test_layers(gated, groups):
    tokens, batch, hidden = 9, 3, 40
    found = cost(layer(groups=groups, gated=gated), Sizes(tokens, batch))
    run = counted(lambda: layer(groups=groups, gated=gated)(random(tokens, WIDTH)))
    assert found.forward == batch * run.get_total_flops()
    inner, matrices = HEADS * INNER, 3 if gated else 2
    keys = groups * INNER
    expected = {
        "projections": 2 * tokens * WIDTH * (inner + 2 * keys),
        "scores": 2 * tokens**2 * inner,
        "mixing": 2 * tokens**2 * inner,
        "output": 2 * tokens * inner * WIDTH,
        "feed-forward": 2 * matrices * tokens * WIDTH * hidden,
    }
    assert {name: found.part(name).matmul for name in expected} == {
        name: batch * flops for name, flops in expected.items()
    }
    assert found.softmax == 5 * batch * HEADS * tokens**2
    assert found.crossover == pytest.approx(
        WIDTH * (2 * inner + 2 * keys + matrices * hidden) / (2 * inner), rel=1e-12
    )
    tensors = WIDTH * (2 * inner + 2 * keys + matrices * hidden) + WIDTH + 3 * WIDTH
    assert (found.parameters, found.weights) == (tensors, 4 * tensors)


def test_training_is_three_times_forward():
    """By the definition exactly; the fused kernel computes the scores once more."""
    declared = attention(groups=GROUPS)
    leaves = [declared.potential.w_q, declared.potential.w_k, declared.lookup.w_v]
    found = cost(declared, 33)
    for engine, more in ((r.engines.ReferenceEngine(), 0), (r.engines.Sdpa(), found.recomputed)):
        for leaf in leaves:
            leaf.requires_grad_()
        x = random(33, WIDTH).requires_grad_()
        run = counted(lambda engine=engine, x=x: r.apply(declared, x, engine=engine).sum().backward())
        assert run.get_total_flops() == found.training + more


def test_visible_pairs():
    tokens = 50
    pairs = 4 * INNER * HEADS
    for support in (
        r.Full(),
        r.Causal(),
        r.Window(3, 2),
        r.Window(1.5, None),
        r.Causal() & r.Window(7, None),
    ):
        seen = int(support.allows(torch.arange(tokens), torch.arange(tokens)).expand(tokens, tokens).sum())
        found = cost(attention(support), tokens)
        assert found.visible - (found.forward - found.attention) == pairs * seen
    mask = torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(0)) < 0.3
    found = cost(attention(r.Where(mask)), tokens)
    assert found.visible - (found.forward - found.attention) == pairs * int(mask.sum())
    assert cost(attention(r.Where(mask)), Sizes(tokens, causal=False)).visible == found.forward
    assert (
        cost(attention(), Sizes(tokens, causal=True)).visible == cost(attention(r.Causal()), tokens).visible
    )


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (3, 7), (7, 3)])
def test_causal_pairs(queries, keys):
    assert causal_pairs(queries, keys) == int(torch.ones(queries, keys).tril().sum())


def test_crossovers_are_where_pairs_meet_weights():
    plain = layer(groups=HEADS, gated=False)  # T* = (4 · 24 · 64 + 2 · 24 · 40)/128 = 63
    found = cost(plain, 63)
    assert found.crossover == 63
    assert found.attention == found.linear
    longer = cost(plain, int(found.causal_crossover))
    assert longer.visible - longer.linear == longer.linear


def test_memory():
    """What two products and an activation keep: their inputs, each once."""
    w, v = random(WIDTH, 40), random(40, WIDTH)
    found = cost(r.maps.feed_forward(r.maps.Relu(), w, v), Sizes(7, batch=2))
    assert found.activations == 4 * 2 * 7 * (WIDTH + 40 + 40)
    assert found.moved == 4 * (2 * WIDTH * 40 + 2 * 2 * 7 * (WIDTH + 40))
    assert (
        cost(r.maps.feed_forward(r.maps.Relu(), w.double(), v.double()), Sizes(7, batch=2)).activations
        == 2 * found.activations
    )


def test_nothing_is_computed():
    """A length whose scores fill no machine is counted at once."""
    found = cost(layer(), 1 << 20)
    assert found.part("scores").matmul == 2 * HEADS * INNER * (1 << 40)


def test_maps_of_users():
    class Doubled(r.maps.Map):
        def __call__(self, x):
            return 2 * x @ torch.eye(WIDTH)

    assert cost(Doubled(), Sizes(5, width=WIDTH)).part("other").matmul == 2 * 5 * WIDTH**2

    @charge.rule(Doubled)
    def _doubled(map, x, ledger):
        ledger.book(Part("feed-forward", 7))
        return x

    assert (
        cost(r.maps.Compose((Doubled(), r.maps.Affine(random(WIDTH, 3)))), 5).part("feed-forward").matmul
        == 7 + 2 * 5 * WIDTH * 3
    )


def test_shared_parameters_count_once():
    affine = r.maps.Affine(random(WIDTH, WIDTH))
    assert cost(r.maps.Compose((affine, affine)), 3).parameters == WIDTH**2


def test_table():
    found = cost(layer(), Sizes(1000, 2))
    text = repr(found)
    assert text == found.table()
    assert isinstance(found, Cost)
    rows = {line.split()[0]: line for line in text.splitlines()}
    assert set(rows) >= {
        "part",
        "projections",
        "scores",
        "mixing",
        "output",
        "feed-forward",
        "normalization",
        "total",
    }
    assert rows["scores"].split()[1:5] == ["256", "M", "768", "M"]  # 2 · 2 · 1000² · 64, and three times that
    assert f"T* = {found.crossover:,.0f} tokens" in text
    assert found.approximate_training == 3 * found.approximate_forward == 6 * found.parameters * 2000


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"tokens": 0}, "tokens"),
        ({"tokens": 2.5}, "tokens"),
        ({"tokens": True}, "tokens"),
        ({"tokens": 3, "batch": -1}, "batch"),
        ({"tokens": 3, "context": 0}, "context"),
        ({"tokens": 3, "causal": "yes"}, "causal"),
        ({"tokens": 3, "causal": 1.0}, "causal"),
    ],
)
def test_wrong_sizes(arguments, argument):
    with pytest.raises(r.errors.ArgumentError, match=f"^{argument}: is "):
        Sizes(**arguments)


def test_wrong_arguments():
    with pytest.raises(r.errors.ArgumentError, match=r"^sizes: is a str; give Sizes"):
        cost(attention(), "many")
    with pytest.raises(
        r.errors.ArgumentError,
        match=r"^sizes: give no width, and Attention takes any; give Sizes\(tokens, width=",
    ):
        cost(r.Attention(r.Dot()), 5)
    with pytest.raises(r.errors.ArgumentError, match=r"^inputs: are given for a map"):
        cost(attention(), 5, inputs=(random(5, WIDTH),))
    with pytest.raises(r.errors.ArgumentError, match=r"^subject: is <object"):
        cost(object(), 5)


@pytest.mark.parametrize("gated", [True, False])
def test_a_bias_alone_takes_no_product(gated):
    """A gated layer declares its last bias as an affine map whose matrix is the identity."""
    from regard import nn as own

    module = own.FeedForward(WIDTH, 40, gated=gated)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(random(*parameter.shape))
    declared, run = cost(module.declare(), 9), cost(module, 9)
    assert (declared.forward, declared.parameters) == (run.forward, run.parameters)
    assert declared.forward == 2 * 9 * (3 if gated else 2) * WIDTH * 40


def test_only_the_identity_is_free():
    eye = torch.eye(WIDTH)
    product = 2 * 9 * WIDTH**2
    assert cost(r.maps.Affine(eye), 9).forward == cost(r.maps.Affine(eye), 9).parameters == 0
    assert cost(r.maps.Affine(eye, random(WIDTH)), 9).parameters == WIDTH
    for w in (2 * eye, eye.flip(0), eye + 1e-6 * random(WIDTH, WIDTH)):
        assert cost(r.maps.Affine(w), 9).forward == product
    assert cost(r.maps.Affine(torch.eye(WIDTH, WIDTH + 1)), 9).forward == 2 * 9 * WIDTH * (WIDTH + 1)
