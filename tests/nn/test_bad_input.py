"""Bad input: each mistake gets an error that names the argument, what it was, and what would do."""

import pytest
import torch
from torch import nn

import regard as r
from regard.nn import (
    Decoder,
    Design,
    Embedding,
    Encoder,
    FeedForward,
    LanguageModel,
    LearnedPositions,
    MultiHeadAttention,
    RelativePositions,
    RotaryPositions,
    ScaledNormal,
    Shaping,
    Sinusoidal,
    Transformer,
    shaped,
)

IDS = torch.zeros(1, 3, dtype=torch.long)


def model(**options):
    return LanguageModel(Design(8, 2, **options), 5, 1)


def sees(support, batch=2, heads=2):
    return lambda: MultiHeadAttention(8, heads)(torch.zeros(batch, 5, 8), support=support)


def normalized(normalizer, support=r.Full()):
    return r.Attention(r.Dot(), normalizer=normalizer, support=support)


WRONG = {
    "sigmoid of the past": (
        lambda: model(mechanism=normalized(r.Sigmoid())),
        r"mechanism: has the normalizer Sigmoid.*give Sigmoid\(bias=",
    ),
    "sigmoid of a window": (
        lambda: MultiHeadAttention(8, 2, mechanism=normalized(r.Sigmoid(), r.Window(2, 0))),
        "depends on the number of keys",
    ),
    "sigmoid, joined": (
        lambda: MultiHeadAttention(8, 2, mechanism=normalized(r.Sigmoid()))(
            torch.zeros(3, 8), support=r.Causal()
        ),
        "depends on the number of keys",
    ),
    "coupled queries": (
        lambda: model(mechanism=normalized(r.Sinkhorn())),
        "mechanism: has the normalizer Sinkhorn, which couples all queries",
    ),
    "coupled queries, joined": (
        lambda: MultiHeadAttention(8, 2, mechanism=normalized(r.Sinkhorn()))(
            torch.zeros(3, 8), support=r.Causal()
        ),
        "couples all queries, and tokens see their past alone",
    ),
    "lengths of sequences": (
        sees(r.Padding(torch.tensor([1, 2]))),
        r"support: is Padding.*say which: Padding\(lengths.unsqueeze\(-1\)\)",
    ),
    "lengths, other heads": (
        sees(r.Padding(torch.tensor([1, 2])), heads=4),
        "one entry for each head, or for each sequence",
    ),
    "lengths in a conjunction": (
        sees(r.Causal() & r.Padding(torch.tensor([1, 2]))),
        r"Padding\(lengths.unsqueeze\(-1\)\) for sequences",
    ),
    "documents of sequences": (
        sees(r.Document(torch.zeros(2, 5, dtype=torch.long))),
        r"Document\(ids.unsqueeze\(-2\)\) for sequences",
    ),
    "masks of sequences": (
        sees(r.Where(torch.ones(2, 5, 5).bool())),
        r"Where\(mask.unsqueeze\(-3\)\) for sequences",
    ),
    "lengths of contexts": (
        lambda: MultiHeadAttention(8, 2)(
            torch.zeros(3, 8), torch.zeros(2, 5, 8), support=r.Padding(torch.tensor([1, 2]))
        ),
        "one entry for each head, or for each sequence",
    ),
    "support": (sees("causal"), "support: is a str; give a Support"),
    "mask as support": (sees(torch.ones(5, 5).bool()), "support: is a Tensor"),
    "true heads": (lambda: Design(8, True), "heads: is True; give a positive integer"),
    "true hidden": (lambda: Design(8, 2, hidden=True), "hidden: is True"),
    "gated": (lambda: Design(8, 2, gated="no"), "gated: is 'no'; give True or False"),
    "norm first": (lambda: Design(8, 2, norm_first="no"), "norm_first: is 'no'"),
    "bias": (lambda: MultiHeadAttention(8, 2, bias="no"), "bias: is 'no'"),
    "shaping": (lambda: Design(8, 2, shaping="x"), "shaping: is 'x'; give a Shaping value, or None"),
    "negative hidden": (lambda: FeedForward(16, -3), "hidden: is -3"),
    "dropout of a layer": (lambda: FeedForward(16, 3, dropout=2.0), "dropout: is 2.0"),
    "one bucket": (lambda: RelativePositions(1), "buckets: is 1"),
    "negative buckets": (lambda: RelativePositions(-3), "buckets: is -3"),
    "buckets of two directions": (
        lambda: Encoder(Design(8, 2, positions=RelativePositions(2)), 1),
        "buckets: is 2, .*give four or more",
    ),
    "farthest": (
        lambda: model(positions=RelativePositions(32, 4)),
        "farthest: is 4, and 16 buckets are single",
    ),
    "waves": (lambda: Sinusoidal(base=0), "base: is 0; give a positive finite number"),
    "turns": (lambda: RotaryPositions(base=-3.0), "base: is -3.0"),
    "complex ids": (lambda: model()(IDS.to(torch.complex64)), "ids: is complex64.*give an integer tensor"),
    "small id too large": (lambda: model()(IDS.to(torch.uint8) + 5), "ids: holds 5 and the vocabulary has 5"),
    "double points": (
        lambda: MultiHeadAttention(8, 2)(torch.zeros(3, 8).double()),
        r"x: has dtype torch.float64 and the module torch.float32; convert one of them: "
        r"x.to\(torch.float32\)",
    ),
    "double points in a stack": (
        lambda: Encoder(Design(8, 2), 1)(torch.zeros(1, 3, 8).double()),
        "x: has dtype torch.float64",
    ),
    "double context": (
        lambda: MultiHeadAttention(8, 2)(torch.zeros(3, 8), torch.zeros(3, 8).double()),
        "context: has dtype torch.float64",
    ),
    "a list of points": (lambda: Encoder(Design(8, 2), 1)([1.0]), "x: is a list"),
    "heads": (
        lambda: MultiHeadAttention(8, 3),
        "heads: is 3, which does not divide the width 8; use 2, or another width",
    ),
    "heads of a design": (lambda: Design(10, 4), "heads: is 4, which does not divide the width 10; use 5"),
    "no heads": (lambda: MultiHeadAttention(8, 0), "heads: is 0; give a positive integer"),
    "half a head": (lambda: Design(8, 0.5), "heads: is 0.5; give a positive integer"),
    "no width": (lambda: Design(0, 1), "width: is 0"),
    "groups": (lambda: Design(8, 4, kv_heads=3), "kv_heads: is 3, which does not divide the 4 heads"),
    "no groups": (lambda: MultiHeadAttention(8, 4, kv_heads=0), "kv_heads: is 0"),
    "hidden": (lambda: Design(8, 2, hidden=0), "hidden: is 0"),
    "half hidden": (lambda: Design(8, 2, hidden=2.5), "hidden: is 2.5"),
    "dropout": (lambda: Design(8, 2, dropout=1.0), "dropout: is 1.0; give the share"),
    "negative dropout": (lambda: Design(8, 2, dropout=-0.1), "dropout: is -0.1"),
    "dropout is no number": (lambda: Design(8, 2, dropout=float("nan")), "dropout: is nan"),
    "positions": (lambda: Design(8, 2, positions="rotary"), "positions: is 'rotary'; give a Positions value"),
    "activation": (lambda: Design(8, 2, activation=torch.relu), "activation: is .*; give a Activation value"),
    "norm": (lambda: Design(8, 2, norm=nn.LayerNorm(8)), "norm: is LayerNorm.*give a Normalize value"),
    "norm weights": (
        lambda: Design(8, 2, norm=r.maps.Normalize(weight=torch.ones(8))),
        "norm: has weights of its own",
    ),
    "initialization": (lambda: Design(8, 2, initialization=0.02), "initialization: is 0.02"),
    "deviation": (lambda: ScaledNormal(0.0), "deviation: is 0.0"),
    "mechanism": (lambda: Design(8, 2, mechanism=r.Dot()), "mechanism: is Dot.*give an Attention"),
    "lookup": (
        lambda: MultiHeadAttention(8, 2, mechanism=r.Attention(r.Dot(), r.Linear(torch.eye(4)))),
        "lookup or a moment of its own",
    ),
    "moment": (
        lambda: MultiHeadAttention(8, 2, mechanism=r.Attention(r.Dot(), moment=r.Mode())),
        "lookup or a moment of its own",
    ),
    "layers": (lambda: Encoder(Design(8, 2), 0), "layers: is 0; give the number of layers, one or more"),
    "decoder layers": (lambda: Decoder(Design(8, 2), -1), "layers: is -1"),
    "half layers": (lambda: Transformer(Design(8, 2), 1, 1.5), "layers: is 1.5"),
    "model layers": (lambda: LanguageModel(Design(8, 2), 5, 0), "layers: is 0"),
    "vocabulary": (lambda: Embedding(0, Design(8, 2)), "vocabulary: is 0"),
    "odd width": (
        lambda: LanguageModel(Design(9, 3, positions=Sinusoidal()), 5, 1),
        "width: is 9; sinusoidal positions come in pairs: use an even",
    ),
    "positions that are none": (lambda: LearnedPositions(0), "longest: is 0"),
    "half a position": (lambda: LearnedPositions(2.5), "longest: is 2.5"),
    "shaping of distances": (
        lambda: Encoder(shaped(Design(8, 2, mechanism=r.Attention(r.Gaussian(bandwidth=1.0)))), 1),
        "shaping: is for dot products",
    ),
    "branch": (lambda: shaped(Design(8, 2), branch=1.0), "branch: is 1.0; give γ between 0 and 1"),
    "temperature": (lambda: Shaping(0.0), "temperature: is 0.0"),
    "id too large": (
        lambda: model()(IDS + 5),
        "ids: holds 5 and the vocabulary has 5 tokens; give ids from 0 to 4",
    ),
    "id below zero": (lambda: model()(IDS - 1), "ids: holds -1"),
    "real ids": (lambda: model()(IDS.float()), "ids: is .*float32.*give an integer tensor"),
    "boolean ids": (lambda: model()(IDS.bool()), "ids: is .*give an integer tensor"),
    "a list of ids": (lambda: model()([[1, 2]]), "ids: is .*give an integer tensor"),
    "one id": (lambda: model()(torch.tensor(1)), "ids: is .*give an integer tensor"),
    "too long": (
        lambda: model(positions=LearnedPositions(2))(IDS),
        "ids: reach position 2 and 2 positions are learned; give at most 2 tokens",
    ),
    "width of tokens": (
        lambda: MultiHeadAttention(8, 2)(torch.zeros(3, 7)),
        r"x: has shape \[3, 7\]; give tokens \(..., n, 8\)",
    ),
    "one token": (lambda: Encoder(Design(8, 2), 1)(torch.zeros(8)), r"has shape \[8\]"),
    "ids as tokens": (
        lambda: MultiHeadAttention(3, 1)(IDS),
        "x: has dtype torch.int64; give points; ids of tokens go through an Embedding",
    ),
    "no tensor": (lambda: MultiHeadAttention(8, 2)([1.0]), "x: is a list"),
    "width of a context": (
        lambda: MultiHeadAttention(8, 2)(torch.zeros(3, 8), torch.zeros(3, 7)),
        r"context: has shape \[3, 7\]",
    ),
    "source": (
        lambda: Transformer(Design(8, 2), 1, 1)(torch.zeros(2, 3, 4), torch.zeros(2, 3, 8)),
        "source: has shape",
    ),
    "no context": (lambda: Decoder(Design(8, 2), 1)(torch.zeros(1, 3, 8)), "context: is missing"),
    "a context too much": (
        lambda: Decoder(Design(8, 2), 1, cross=False)(torch.zeros(1, 3, 8), torch.zeros(1, 3, 8)),
        "without cross-attention",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_named(name):
    call, message = WRONG[name]
    with pytest.raises(r.errors.ArgumentError, match=message):
        call()


def test_what_looks_like_a_mistake_and_is_none():
    x = torch.randn(2, 5, 8)
    for support in (
        r.Padding(torch.tensor([[1], [2]])),
        r.Padding(torch.tensor([[3, 2]])),
        r.Padding(torch.tensor([3])),
    ):
        assert MultiHeadAttention(8, 2)(x, support=support).shape == x.shape
    assert MultiHeadAttention(8, 2)(x[0], support=r.Padding(torch.tensor([3, 2]))).shape == (
        5,
        8,
    )  # one sequence: two heads
    masks = r.Attention(
        r.Dot(), support=r.Where(torch.ones(2, 5, 5).bool())
    )  # a mechanism knows heads and no batch
    assert MultiHeadAttention(8, 2, mechanism=masks)(x).shape == x.shape
    for normalizer in (r.Sigmoid(), r.Sinkhorn()):
        assert Encoder(Design(8, 2, mechanism=normalized(normalizer)), 1)(x).shape == x.shape
    with torch.autocast("cpu", torch.bfloat16):
        assert MultiHeadAttention(8, 2)(x.bfloat16()).shape == x.shape


def test_rotary_positions_need_an_even_head():
    with pytest.raises(r.errors.ArgumentError):
        Encoder(Design(6, 2, positions=RotaryPositions()), 1)(torch.zeros(1, 3, 6))


def test_empty_sequences_go_through():
    assert model()(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 5)
    assert Encoder(Design(8, 2), 1)(torch.zeros(0, 3, 8)).shape == (0, 3, 8)
    assert model(positions=LearnedPositions(2))(torch.zeros(1, 0, dtype=torch.long)).shape == (1, 0, 5)


def test_rotary_positions_need_pairs():
    with pytest.raises(r.errors.ArgumentError, match="odd width 5"):
        Design(20, 4, positions=RotaryPositions())


def test_a_bandwidth_is_one_number_or_one_a_head():
    """Another shape would make another shape of the output."""
    layer = MultiHeadAttention(8, 2, mechanism=r.Attention(r.Gaussian(bandwidth=torch.ones(2, 1, 1))))
    with pytest.raises(r.errors.ArgumentError, match=r"mechanism.*one for each head: a tensor \(2,\)"):
        layer(torch.randn(3, 4, 8))
    assert MultiHeadAttention(8, 2, mechanism=r.Attention(r.Gaussian(bandwidth=torch.ones(2))))(
        torch.randn(3, 4, 8)
    ).shape == (3, 4, 8)
