"""Decoding in pieces gives what one pass gives, and a cache is refused where it would give something else."""

import pytest
import torch
from torch import nn

import regard as r
from regard.nn import (
    Cache,
    ContextCache,
    Decoder,
    Design,
    LanguageModel,
    LayerCache,
    MultiHeadAttention,
    RotaryPositions,
    SequenceToSequence,
    UnitVariance,
    attention,
    shaped,
)
from regard.nn.next_token import attend_next
from tests.nn.modules import alive, every_position

D = torch.float64
WIDTH, HEADS, N, WORDS = 8, 4, 21, 11
DESIGNS = {
    **{
        repr(positions): Design(WIDTH, HEADS, positions=positions, initialization=UnitVariance())
        for positions in every_position(N)
    },
    "groups": Design(WIDTH, HEADS, kv_heads=2, positions=RotaryPositions(), initialization=UnitVariance()),
    "one key": Design(WIDTH, HEADS, kv_heads=1, initialization=UnitVariance()),
    "window": Design(
        WIDTH, HEADS, mechanism=r.Attention(r.Dot(), support=r.Window(3, 0)), initialization=UnitVariance()
    ),
    "gaussian": Design(
        WIDTH, HEADS, mechanism=r.Attention(r.Gaussian(bandwidth=2.0)), initialization=UnitVariance()
    ),
    "entmax": Design(
        WIDTH, HEADS, mechanism=r.Attention(r.Dot(), normalizer=r.Entmax(1.5)), initialization=UnitVariance()
    ),
    "post norm": Design(WIDTH, HEADS, norm_first=False, initialization=UnitVariance()),
    "shaped": shaped(Design(WIDTH, HEADS)),
    "shaped groups": shaped(Design(WIDTH, HEADS, kv_heads=2, positions=RotaryPositions())),
}
PIECES = [(1,) * N, (5, 1, 1, 11, 3), (17, 4), (N,)]


def assert_pieces(step, whole, ids, pieces):
    """One pass, and the same in pieces that share a cache."""
    found = torch.cat([step(piece) for piece in ids.split(pieces, 1)], 1)
    assert found.shape == whole.shape
    assert float((found - whole).abs().max()) < 1e-10
    assert float(whole.std()) > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize("pieces", PIECES[:3], ids=str)
def test_a_language_model_in_pieces(name, pieces):
    model, ids = alive(LanguageModel(DESIGNS[name], WORDS, 2)), torch.randint(WORDS, (2, N))
    cache = model.cache()
    assert_pieces(lambda piece: model(piece, cache=cache), model(ids), ids, pieces)
    assert cache.length == N
    assert repr(cache) == f"Cache(2 layers, {N} tokens)"


@torch.no_grad()
@pytest.mark.parametrize("name", ["NoPositions()", "RotaryPositions()", "groups", "shaped"])
@pytest.mark.parametrize("pieces", PIECES, ids=str)
def test_a_decoder_with_a_context_in_pieces(name, pieces):
    model = alive(SequenceToSequence(DESIGNS[name], WORDS, WORDS, 2))
    source, target, lengths = (
        torch.randint(WORDS, (2, 6)),
        torch.randint(WORDS, (2, N)),
        r.Padding(torch.tensor([[6], [3]])),
    )
    encoded, cache = model.encode(source, source_support=lengths), Cache(2)

    def step(piece):
        points = model.embedding(piece, cache.length)
        return model.embedding.logits(model.decoder(points, encoded, context_support=lengths, cache=cache))

    assert_pieces(step, model(source, target, source_support=lengths), target, pieces)


@torch.no_grad()
def test_padding_on_the_left_of_a_batch_in_pieces():
    """Rows of one batch may begin at different places; what is hidden stays hidden in later pieces."""
    model, ids = alive(LanguageModel(DESIGNS["RotaryPositions()"], WORDS, 2)), torch.randint(WORDS, (2, N))
    real = torch.ones(2, N, dtype=torch.bool)
    real[1, :4] = False
    support, cache = r.Where(real[:, None, None]), model.cache()
    whole = model(ids, support=support)
    assert_pieces(lambda piece: model(piece, support=support, cache=cache), whole, ids, (6, 1, 14))
    changed = ids.clone()
    changed[1, :4] = (changed[1, :4] + 1) % WORDS
    again, cache = model(changed, support=support), model.cache()
    pieces = [model(piece, support=support, cache=cache) for piece in changed.split((6, 1, 14), 1)]
    assert torch.equal(again[1, 4:], whole[1, 4:])
    assert torch.equal(again[0], whole[0])
    assert float((torch.cat(pieces, 1) - whole)[:, 4:].abs().max()) < 1e-10


@torch.no_grad()
def test_rows_of_a_batch_do_not_see_each_other():
    model = alive(LanguageModel(DESIGNS["groups"], WORDS, 2))
    ids, caches = torch.randint(WORDS, (3, N)), (model.cache(), model.cache())
    other = ids.clone()
    other[1:] = torch.randint(WORDS, (2, N))
    first, second = (
        [model(piece, cache=cache) for piece in rows.split((9, 12), 1)]
        for rows, cache in zip((ids, other), caches, strict=True)
    )
    assert torch.equal(torch.cat(first, 1)[0], torch.cat(second, 1)[0])
    assert not torch.equal(torch.cat(first, 1)[1], torch.cat(second, 1)[1])


@torch.no_grad()
def test_a_token_costs_a_token():
    """With a cache a step projects the new tokens alone."""
    model, seen = alive(LanguageModel(DESIGNS["groups"], WORDS, 1)), []
    model.decoder.layers[0].attention.projection.register_forward_hook(
        lambda m, given, out: seen.append(given[0].shape[1])
    )
    cache = model.cache()
    for piece in torch.randint(WORDS, (1, 8)).split((5, 1, 2), 1):
        model(piece, cache=cache)
    assert seen == [5, 1, 2]


@torch.no_grad()
def test_a_context_is_projected_once(monkeypatch):
    module, cache = alive(MultiHeadAttention(WIDTH, HEADS)), ContextCache()
    x, context = torch.randn(2, 3, WIDTH, dtype=D), torch.randn(2, 5, WIDTH, dtype=D)
    whole = module(x, context)
    sizes, linear = [], nn.functional.linear
    monkeypatch.setattr(
        nn.functional, "linear", lambda given, *rest: sizes.append(given.shape[1]) or linear(given, *rest)
    )
    found = torch.cat([module(piece, context, cache=cache) for piece in x.split((1, 2), 1)], 1)
    assert sizes.count(5) == 1
    torch.testing.assert_close(found, whole)


# Misuse


def causal(**options):
    return MultiHeadAttention(WIDTH, HEADS, mechanism=r.Attention(r.Dot(), support=r.Causal()), **options)


def refused(message, call):
    with pytest.raises(r.errors.ArgumentError, match=message):
        call()


@torch.no_grad()
def test_a_cache_is_of_one_batch_and_one_model():
    model, cache = LanguageModel(DESIGNS["NoPositions()"], WORDS, 2), Cache(2)
    model(torch.zeros(2, 3, dtype=torch.long), cache=cache)
    refused(
        r"cache: holds \[2, 4\].*gives \[3, 4\]",
        lambda: model(torch.zeros(3, 1, dtype=torch.long), cache=cache),
    )
    refused(
        "use one cache for one model",
        lambda: LanguageModel(DESIGNS["groups"], WORDS, 2)(torch.zeros(2, 1, dtype=torch.long), cache=cache),
    )
    wide = Design(2 * WIDTH, HEADS)
    refused(
        "of width 2.*of width 4",
        lambda: LanguageModel(wide, WORDS, 2)(torch.zeros(2, 1, dtype=torch.long), cache=cache),
    )
    refused("float32.*float64", lambda: model.double()(torch.zeros(2, 1, dtype=torch.long), cache=cache))
    refused(
        "is for 2 layers and there are 3",
        lambda: LanguageModel(DESIGNS["NoPositions()"], WORDS, 3)(
            torch.zeros(2, 1, dtype=torch.long), cache=cache
        ),
    )
    assert [entry.length for entry in cache.tokens] == [3, 3]  # nothing was written


@torch.no_grad()
def test_a_cache_is_of_one_context():
    decoder, cache = Decoder(Design(WIDTH, HEADS), 2), Cache(2)
    x, context = torch.randn(1, 2, WIDTH), torch.randn(1, 4, WIDTH)
    decoder(x, context, cache=cache)
    refused(
        "context: is not the one that the cache was filled with",
        lambda: decoder(x, context.clone(), cache=cache),
    )
    assert [entry.length for entry in cache.tokens] == [2, 2]  # nothing was written
    decoder(x, context, cache=cache)


def test_a_cache_is_for_inference():
    x, context = torch.randn(1, 2, WIDTH), torch.randn(1, 4, WIDTH)
    refused("call under torch.no_grad", lambda: causal()(x, cache=LayerCache()))
    refused(
        "call under torch.no_grad", lambda: MultiHeadAttention(WIDTH, HEADS)(x, context, cache=ContextCache())
    )
    frozen, cache = causal().requires_grad_(False), LayerCache()
    frozen(x, cache=cache)
    assert cache.length == 2


@torch.no_grad()
def test_a_cache_is_of_the_right_kind():
    x, context = torch.randn(1, 2, WIDTH), torch.randn(1, 4, WIDTH)
    refused("sees later tokens", lambda: MultiHeadAttention(WIDTH, HEADS)(x, cache=LayerCache()))
    window = MultiHeadAttention(WIDTH, HEADS, mechanism=r.Attention(r.Dot(), support=r.Window(3, 1)))
    refused("sees later tokens", lambda: window(x, cache=LayerCache()))
    MultiHeadAttention(WIDTH, HEADS)(x, support=r.Causal(), cache=LayerCache())
    refused("self-attention takes an entry of Cache.tokens", lambda: causal()(x, cache=ContextCache()))
    refused(
        "cross-attention takes an entry of Cache.contexts",
        lambda: MultiHeadAttention(WIDTH, HEADS)(x, context, cache=LayerCache()),
    )


@torch.no_grad()
def test_queries_that_are_coupled_do_not_come_in_pieces():
    coupled = MultiHeadAttention(WIDTH, HEADS, mechanism=r.Attention(r.Dot(), normalizer=r.Sinkhorn()))
    x = torch.randn(1, 3, WIDTH)
    refused(
        "couples all queries, and a cache gives tokens piece by piece",
        lambda: coupled(x, x, cache=ContextCache()),
    )


@torch.no_grad()
def test_sigmoids_with_a_bias_go_in_pieces():
    mechanism = r.Attention(r.Dot(), normalizer=r.Sigmoid(bias=-2.0))
    model, ids = (
        alive(
            LanguageModel(Design(WIDTH, HEADS, mechanism=mechanism, initialization=UnitVariance()), WORDS, 2)
        ),
        torch.arange(10)[None],
    )
    cache = model.cache()
    assert_pieces(lambda piece: model(piece, cache=cache), model(ids), ids, (1, 4, 5))
    assert float((model(ids[:, :3]) - model(ids)[:, :3]).abs().max()) < 1e-10


@pytest.mark.parametrize("place", ["layers.1", "layers.1.feed_forward", "norm"])
@torch.no_grad()
def test_a_cache_of_an_interrupted_pass_is_refused(place):
    model, ids = LanguageModel(DESIGNS["NoPositions()"], WORDS, 2), torch.arange(4)[None]
    cache = model.cache()
    model(ids, cache=cache)
    handle = model.decoder.get_submodule(place).register_forward_pre_hook(lambda *call: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids, cache=cache)
    handle.remove()
    refused(
        r"cache: holds \[8, .\] tokens in its layers after whole passes over 4; make a new one",
        lambda: model(ids, cache=cache),
    )


def test_turned_keys_serve_calls_with_and_without_an_added_bias():
    """Keys are kept turned, whatever else a later call adds to the scores."""
    import regard as r
    from regard.nn import MultiHeadAttention
    from regard.nn.cache import LayerCache
    from regard.potentials import PairBias

    torch.manual_seed(0)
    mechanism = r.Attention(r.Rotary(r.Dot()), support=r.Causal())
    layer = MultiHeadAttention(16, 2, mechanism=mechanism).double()
    x, bias = torch.randn(1, 6, 16, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
    with torch.no_grad():
        wanted = layer(x, added=PairBias(bias))[:, 4:]
        cache = LayerCache()
        layer(x[:, :4], cache=cache)
        found = layer(x[:, 4:], added=PairBias(bias), cache=cache)
    torch.testing.assert_close(found, wanted)


@torch.no_grad()
def test_a_token_after_others_takes_the_short_way_where_nothing_else_is_asked(monkeypatch):
    """The value is that of the long way, which all else takes."""
    taken = []
    monkeypatch.setattr(attention, "attend_next", lambda *step: taken.append(step) or attend_next(*step))
    for mechanism, short in (
        (r.Attention(r.Rotary(r.Dot()), support=r.Causal()), True),
        (r.Attention(r.Dot(), normalizer=r.Softmax(2.0), support=r.Causal()), True),
        (r.Attention(r.Dot() + r.Alibi(0.5), support=r.Causal()), True),
        (
            r.Attention(
                r.Dot(scale=0.3) + r.Alibi.heads(HEADS), normalizer=r.Softmax(0.5), support=r.Causal()
            ),
            True,
        ),
        (r.Attention(r.Dot() + r.Alibi(0.5) + r.Alibi(0.5), support=r.Causal()), False),
        (r.Attention(r.Dot() + r.Alibi(torch.ones(HEADS, requires_grad=True)), support=r.Causal()), False),
        (r.Attention(r.Dot(scale=-2.0), support=r.Causal()), False),
        (r.Attention(r.Dot(), support=r.Window(3, 0)), False),
        (r.Attention(r.Dot(), normalizer=r.Softmax(torch.tensor(2.0)), support=r.Causal()), False),
    ):
        layer, cache, x = (
            MultiHeadAttention(WIDTH, HEADS, mechanism=mechanism),
            LayerCache(),
            torch.randn(2, 6, WIDTH),
        )
        found = torch.cat([layer(piece, cache=cache) for piece in x.split((4, 1, 1), 1)], 1)
        assert len(taken) == (2 if short else 0), mechanism
        torch.testing.assert_close(found, layer(x), rtol=1e-5, atol=1e-6)
        taken.clear()
