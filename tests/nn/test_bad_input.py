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
    LanguageModel,
    LearnedPositions,
    MultiHeadAttention,
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


WRONG = {
    "heads": (lambda: MultiHeadAttention(8, 3), "heads: is 3, which does not divide the width 8; use 2, or another width"),
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
    "norm weights": (lambda: Design(8, 2, norm=r.Normalize(weight=torch.ones(8))), "norm: has weights of its own"),
    "initialization": (lambda: Design(8, 2, initialization=0.02), "initialization: is 0.02"),
    "deviation": (lambda: ScaledNormal(0.0), "deviation: is 0.0"),
    "mechanism": (lambda: Design(8, 2, mechanism=r.Dot()), "mechanism: is Dot.*give an Attention"),
    "lookup": (lambda: MultiHeadAttention(8, 2, mechanism=r.Attention(r.Dot(), r.Linear(torch.eye(4)))), "lookup or a moment of its own"),
    "moment": (lambda: MultiHeadAttention(8, 2, mechanism=r.Attention(r.Dot(), moment=r.Mode())), "lookup or a moment of its own"),
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
    "shaping of distances": (lambda: Encoder(shaped(Design(8, 2, mechanism=r.Attention(r.Gaussian()))), 1), "shaping: is for dot products"),
    "branch": (lambda: shaped(Design(8, 2), branch=1.0), "branch: is 1.0; give γ between 0 and 1"),
    "temperature": (lambda: Shaping(0.0), "temperature: is 0.0"),
    "id too large": (lambda: model()(IDS + 5), "ids: holds 5 and the vocabulary has 5 tokens; give ids from 0 to 4"),
    "id below zero": (lambda: model()(IDS - 1), "ids: holds -1"),
    "real ids": (lambda: model()(IDS.float()), "ids: is .*float32.*give an integer tensor"),
    "boolean ids": (lambda: model()(IDS.bool()), "ids: is .*give an integer tensor"),
    "a list of ids": (lambda: model()([[1, 2]]), "ids: is .*give an integer tensor"),
    "one id": (lambda: model()(torch.tensor(1)), "ids: is .*give an integer tensor"),
    "too long": (
        lambda: model(positions=LearnedPositions(2))(IDS),
        "ids: reach position 2 and 2 positions are learned; give at most 2 tokens",
    ),
    "width of tokens": (lambda: MultiHeadAttention(8, 2)(torch.zeros(3, 7)), r"x: has shape \[3, 7\]; give tokens \(..., n, 8\)"),
    "one token": (lambda: Encoder(Design(8, 2), 1)(torch.zeros(8)), r"has shape \[8\]"),
    "ids as tokens": (
        lambda: MultiHeadAttention(3, 1)(IDS),
        "x: has dtype torch.int64; give points; ids of tokens go through an Embedding",
    ),
    "no tensor": (lambda: MultiHeadAttention(8, 2)([1.0]), "x: is a list"),
    "width of a context": (lambda: MultiHeadAttention(8, 2)(torch.zeros(3, 8), torch.zeros(3, 7)), r"context: has shape \[3, 7\]"),
    "source": (lambda: Transformer(Design(8, 2), 1, 1)(torch.zeros(2, 3, 4), torch.zeros(2, 3, 8)), "source: has shape"),
    "no context": (lambda: Decoder(Design(8, 2), 1)(torch.zeros(1, 3, 8)), "context: is missing"),
    "a context too much": (
        lambda: Decoder(Design(8, 2), 1, cross=False)(torch.zeros(1, 3, 8), torch.zeros(1, 3, 8)),
        "without cross-attention",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_named(name):
    call, message = WRONG[name]
    with pytest.raises(r.ArgumentError, match=message):
        call()


def test_rotary_positions_need_an_even_head():
    with pytest.raises(r.ArgumentError):
        Encoder(Design(6, 2, positions=RotaryPositions()), 1)(torch.zeros(1, 3, 6))


def test_empty_sequences_go_through():
    assert model()(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 5)
    assert Encoder(Design(8, 2), 1)(torch.zeros(0, 3, 8)).shape == (0, 3, 8)
    assert model(positions=LearnedPositions(2))(torch.zeros(1, 0, dtype=torch.long)).shape == (1, 0, 5)
