"""Generating: greedy is argmax, sampling has exactly the law it says, and runs can be repeated."""

import math

import pytest
import torch

import regard as r
from regard.nn import (
    AlibiPositions,
    Design,
    LanguageModel,
    LearnedPositions,
    NoPositions,
    RotaryPositions,
    Sampling,
    SequenceToSequence,
    Sinusoidal,
    UnitVariance,
    XPosPositions,
)

WORDS = 13
GREEDY = Sampling(temperature=0.0)


def model(positions=AlibiPositions(), layers=2):
    torch.manual_seed(3)
    return (
        LanguageModel(Design(16, 4, positions=positions, initialization=UnitVariance()), WORDS, layers)
        .double()
        .eval()
    )


def translator(positions=NoPositions()):
    torch.manual_seed(4)
    return (
        SequenceToSequence(Design(16, 4, positions=positions, initialization=UnitVariance()), 7, WORDS, 1)
        .double()
        .eval()
    )


@torch.no_grad()
@pytest.mark.parametrize(
    "positions", [NoPositions(), AlibiPositions(), RotaryPositions(), LearnedPositions(14)], ids=repr
)
def test_greedy_is_argmax_by_hand(positions):
    net, ids = model(positions), torch.randint(WORDS, (3, 5))
    wanted = ids
    for _ in range(10):
        wanted = torch.cat([wanted, net(wanted)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(net.generate(ids, 10, sampling=GREEDY), wanted)


@torch.no_grad()
def test_translation_is_argmax_by_hand():
    net, source = translator(), torch.randint(7, (2, 6))
    start = wanted = torch.zeros(2, 1, dtype=torch.long)
    lengths = r.Padding(torch.tensor([[6], [2]]))
    for _ in range(6):
        wanted = torch.cat(
            [wanted, net(source, wanted, source_support=lengths)[:, -1].argmax(-1, keepdim=True)], 1
        )
    assert torch.equal(net.generate(source, start, 6, source_support=lengths), wanted)
    sampled = [net.generate(source, start, 6, sampling=Sampling(3.0), seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(sampled[0], sampled[1])
    assert not torch.equal(sampled[1], sampled[2])


LOGITS = torch.tensor([[0.0, 2.0, 1.0, -1.0], [3.0, 3.0, 0.0, 0.5]], dtype=torch.float64)


def softmax(values):
    weights = [math.exp(value) for value in values]
    return [weight / sum(weights) for weight in weights]


LAWS = {
    "plain": (Sampling(), [0.0, 2.0, 1.0, -1.0], [0, 1, 2, 3]),
    "hot": (Sampling(2.0), [0.0, 1.0, 0.5, -0.5], [0, 1, 2, 3]),
    "cold": (Sampling(0.5), [0.0, 4.0, 2.0, -2.0], [0, 1, 2, 3]),
    "top 2": (Sampling(top_k=2), [2.0, 1.0], [1, 2]),
    "top 9": (Sampling(top_k=9), [0.0, 2.0, 1.0, -1.0], [0, 1, 2, 3]),
    "top 2 hot": (Sampling(2.0, top_k=2), [1.0, 0.5], [1, 2]),
    "one is enough": (Sampling(top_p=0.6), [2.0], [1]),  # its probability is 0.644
    "two are needed": (Sampling(top_p=0.65), [2.0, 1.0], [1, 2]),  # together 0.881
    "three are needed": (Sampling(top_p=0.9), [0.0, 2.0, 1.0], [0, 1, 2]),  # together 0.968
    "all": (Sampling(top_p=1.0), [0.0, 2.0, 1.0, -1.0], [0, 1, 2, 3]),
    "top p of top k": (Sampling(top_k=2, top_p=0.72), [2.0], [1]),  # among two it has 0.731
    "hot first": (Sampling(2.0, top_p=0.6), [1.0, 0.5], [1, 2]),  # at temperature 2 it has 0.455, two 0.731
    "smallest temperature": (Sampling(1e-320), [2.0], [1]),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_law_is_exact(name):
    sampling, scores, kept = LAWS[name]
    wanted = torch.zeros(4, dtype=torch.float64)
    wanted[kept] = torch.tensor(softmax(scores), dtype=torch.float64)
    found = sampling.law(LOGITS)
    torch.testing.assert_close(found[0], wanted, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, dtype=torch.float64))
    assert bool((found[0] == 0).eq(wanted == 0).all())  # what is cut has no probability at all


def test_a_probability_that_is_reached_exactly_is_enough():
    assert sorted(Sampling(top_p=0.5).law(torch.zeros(1, 2))[0].tolist()) == [0.0, 1.0]
    assert sorted(Sampling(top_p=0.51).law(torch.zeros(1, 2))[0].tolist()) == [0.5, 0.5]
    assert Sampling(top_k=1).law(LOGITS[:1]).tolist() == [[0.0, 1.0, 0.0, 0.0]]
    assert GREEDY.law(LOGITS[:1]).tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_draws_follow_the_law():
    """Chi-squared with 3 degrees of freedom: above 21.1 in one run of ten thousand,
    and the run is the same each time.
    """
    sampling, count = Sampling(1.3, top_k=4), 20000
    drawn = sampling.draw(LOGITS[:1].expand(count, -1), torch.Generator().manual_seed(0))
    wanted = count * sampling.law(LOGITS[:1])[0]
    found = torch.bincount(drawn, minlength=4)
    assert float(((found - wanted).square() / wanted).sum()) < 21.1


def test_seeds():
    net, ids = model(), torch.randint(WORDS, (2, 4))
    torch.manual_seed(0)
    first = net.generate(ids, 12, seed=1)
    state = torch.get_rng_state()
    second = net.generate(ids, 12, seed=1)
    assert torch.equal(first, second)
    assert torch.equal(state, torch.get_rng_state())  # a generator of its own
    assert not torch.equal(first, net.generate(ids, 12, seed=2))
    assert not torch.equal(net.generate(ids, 12), net.generate(ids, 12))  # without a seed each run differs


def test_a_stream_is_the_same_tokens_one_at_a_time():
    net, ids = model(), torch.randint(WORDS, (2, 4))
    whole = net.generate(ids, 8, sampling=Sampling(1.5, 5), seed=7)
    parts = list(net.stream(ids, 8, sampling=Sampling(1.5, 5), seed=7))
    assert torch.equal(torch.stack(parts, 1), whole[:, 4:])
    assert torch.equal(whole[:, :4], ids)
    assert not whole.requires_grad


def test_a_stream_works_when_it_is_asked():
    net, calls = model(), []
    net.register_forward_hook(lambda *call: calls.append(1))
    stream = net.stream(torch.zeros(1, 2, dtype=torch.long), 5, seed=0)
    assert not calls
    next(stream)
    next(stream)
    assert len(calls) == 2


def test_the_end_ends_each_sequence_and_the_last_ends_all():
    net, ids = model(), torch.randint(WORDS, (4, 3))
    free = net.generate(ids, 30, seed=5)[:, 3:]
    end = int(free[0, 2])
    found = net.generate(ids, 30, seed=5, end=end)[:, 3:]
    longest = 0
    for row, full in zip(found, free, strict=True):
        stop = (full == end).nonzero()[:1].flatten().tolist() or [30]
        kept = min(stop[0] + 1, 30)
        assert row[0] == full[0]
        assert bool((row[kept:] == end).all()) or row.shape[0] <= kept
        longest = max(longest, int((row == end).nonzero()[0]) + 1 if bool((row == end).any()) else 30)
    assert found.shape[1] == longest
    assert bool((found == end).any(1).all()) or found.shape[1] == 30


def test_one_sequence_stops_at_its_end():
    net, ids = model(), torch.randint(WORDS, (1, 3))
    free = net.generate(ids, 20, sampling=GREEDY)
    end = int(free[0, 6])
    first = int((free[0, 3:] == end).nonzero()[0])
    assert torch.equal(net.generate(ids, 20, sampling=GREEDY, end=end), free[:, : 4 + first])


def test_no_tokens_are_no_work():
    ids = torch.randint(WORDS, (2, 4))
    assert torch.equal(model().generate(ids, 0), ids)


@pytest.mark.parametrize("make", ["language", "translation"])
def test_too_long_is_refused_before_the_work(make):
    net, calls = (
        (model(LearnedPositions(8)), []) if make == "language" else (translator(LearnedPositions(8)), [])
    )
    net.decoder.register_forward_hook(lambda *call: calls.append(1))
    ids = torch.zeros(1, 5, dtype=torch.long)
    ask = (
        (lambda tokens: net.stream(ids, tokens))
        if make == "language"
        else (lambda tokens: net.stream(ids, ids, tokens))
    )
    with pytest.raises(
        r.errors.ArgumentError,
        match="tokens: is 5 after 5 given ones, and 8 positions are learned; ask for at most 4",
    ):
        ask(5)
    assert not calls
    assert len(list(ask(4))) == 4  # the last token is never read


def noisy(make):
    net = make(Design(8, 2, dropout=0.5, initialization=UnitVariance())).train()
    net.decoder.layers[0].eval()  # a part that its owner keeps still
    return net, [part.training for part in net.modules()]


@pytest.mark.parametrize("kind", ["language", "translation"])
def test_dropout_is_off_while_tokens_are_made_and_on_afterwards(kind):
    language = kind == "language"
    net, modes = noisy(
        (lambda design: LanguageModel(design, WORDS, 2))
        if language
        else (lambda d: SequenceToSequence(d, WORDS, WORDS, 2))
    )
    ids, greedy = torch.randint(WORDS, (1, 3)), Sampling(temperature=0.0)
    given = (ids,) if language else (ids, ids)
    found = [net.generate(*given, 12, sampling=greedy) for _ in range(4)]
    assert [part.training for part in net.modules()] == modes
    assert all(torch.equal(tokens, net.eval().generate(*given, 12, sampling=greedy)) for tokens in found)


def test_a_stream_that_is_left_leaves_the_model_as_it_was():
    net, modes = noisy(lambda design: LanguageModel(design, WORDS, 2))
    stream = net.stream(torch.randint(WORDS, (1, 3)), 9)
    next(stream)
    assert [part.training for part in net.modules()] == modes  # between tokens too
    net.decoder.layers[1].register_forward_hook(lambda *call: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(stream)
    assert [part.training for part in net.modules()] == modes


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_ids_of_every_whole_kind(kind):
    net, ids = model(), torch.randint(WORDS, (2, 4))
    assert torch.equal(net(ids.to(kind)), net(ids))
    assert torch.equal(net.generate(ids.to(kind), 3, seed=0), net.generate(ids, 3, seed=0))


def test_small_kinds_do_not_wrap_around():
    net = LanguageModel(Design(8, 2), 300, 1)
    assert net(torch.tensor([[200, 255]], dtype=torch.uint8)).shape == (1, 2, 300)


def sick(value):
    net = model()
    net.embedding.weight.data.fill_(value)
    return net


WRONG = {
    "seed": (
        lambda: model().generate(torch.zeros(1, 2, dtype=torch.long), 2, seed="x"),
        "seed: is 'x'; give a whole number",
    ),
    "seed too large": (
        lambda: model().generate(torch.zeros(1, 2, dtype=torch.long), 2, seed=2**70),
        "seed: is 1180591620717411303424",
    ),
    "half a seed": (
        lambda: model().generate(torch.zeros(1, 2, dtype=torch.long), 2, seed=0.5),
        "seed: is 0.5",
    ),
    "end": (
        lambda: model().generate(torch.zeros(1, 2, dtype=torch.long), 2, end=99),
        "end: is 99 and the vocabulary has",
    ),
    "end below": (lambda: model().generate(torch.zeros(1, 2, dtype=torch.long), 2, end=-1), "end: is -1"),
    "end of targets": (
        lambda: translator().generate(
            torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long), 2, end=99
        ),
        "end: is 99",
    ),
    "half a token": (lambda: Sampling(top_k=2.5), "top_k: is 2.5"),
    "text": (lambda: Sampling(temperature="1"), "temperature: is '1'"),
    "text for a probability": (lambda: Sampling(top_p="1"), "top_p: is '1'"),
    "true": (lambda: model().generate(torch.zeros(1, 2, dtype=torch.long), True), "tokens: is True"),
    "no number": (
        lambda: sick(float("nan")).generate(torch.zeros(1, 2, dtype=torch.long), 2),
        "model: gave NaN",
    ),
    "no number, greedy": (
        lambda: sick(float("nan")).generate(torch.zeros(1, 2, dtype=torch.long), 2, sampling=Sampling(0.0)),
        "model: gave NaN",
    ),
    "infinite logits": (
        lambda: Sampling().draw(torch.tensor([[1.0, torch.inf]]), torch.Generator()),
        "largest is infinite",
    ),
    "temperature": (lambda: Sampling(-1.0), "temperature: is -1.0"),
    "infinite": (lambda: Sampling(float("inf")), "temperature: is inf"),
    "nan": (lambda: Sampling(float("nan")), "temperature: is nan"),
    "top_k": (lambda: Sampling(top_k=0), "top_k: is 0; keep one token or more"),
    "top_p": (lambda: Sampling(top_p=0.0), "top_p: is 0.0"),
    "top_p above": (lambda: Sampling(top_p=1.5), "top_p: is 1.5"),
    "one dimension": (
        lambda: model().generate(torch.zeros(3, dtype=torch.long), 2),
        r"ids: has shape \[3\]; give sequences",
    ),
    "nothing given": (
        lambda: model().generate(torch.zeros(2, 0, dtype=torch.long), 2),
        r"ids: has shape \[2, 0\]",
    ),
    "a list": (lambda: model(LearnedPositions(9)).generate([[1, 2]], 2), "ids: is a list"),
    "negative": (lambda: model().generate(torch.zeros(1, 2, dtype=torch.long), -1), "tokens: is -1"),
    "not whole": (lambda: model().generate(torch.zeros(1, 2, dtype=torch.long), 2.5), "tokens: is 2.5"),
    "sources": (
        lambda: translator().generate(
            torch.zeros(2, 3, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long), 2
        ),
        "one start for each",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests(name):
    call, message = WRONG[name]
    with pytest.raises(r.errors.ArgumentError, match=message):
        call()


# Padding


@torch.no_grad()
@pytest.mark.parametrize(
    "positions",
    [NoPositions(), AlibiPositions(), RotaryPositions(), XPosPositions(), LearnedPositions(14), Sinusoidal()],
    ids=repr,
)
def test_a_padded_prompt_goes_on_as_it_would_alone(positions):
    net, generator = model(positions), torch.Generator().manual_seed(1)
    prompts = [torch.randint(WORDS, (1, n), generator=generator) for n in (5, 2, 1)]
    real = torch.tensor([[True] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    for filler in (0, 7):  # what stands in the padding does not count
        ids = torch.cat([torch.nn.functional.pad(p, (5 - p.shape[-1], 0), value=filler) for p in prompts])
        found = net.generate(ids, 8, sampling=GREEDY, real=real)
        for row, prompt in zip(found, prompts, strict=True):
            alone = net.generate(prompt, 8, sampling=GREEDY)[0]
            assert torch.equal(row[-len(alone) :], alone)
    assert torch.equal(net.generate(ids, 8, sampling=GREEDY, real=real.long()), found)


@pytest.mark.parametrize(
    ("real", "message"),
    [
        (torch.tensor([[True, True, False]]), "padding at the end of a sequence"),
        (torch.tensor([[True, False, True]]), "padding between tokens"),
        (torch.ones(1, 2, dtype=torch.bool), r"has shape \[1, 2\]; give a boolean tensor \[1, 3\]"),
        (torch.ones(1, 3), "give a boolean tensor"),
        ([True], "is a list"),
    ],
)
def test_padding_stands_on_the_left(real, message):
    with pytest.raises(r.errors.ArgumentError, match=message):
        model().generate(torch.zeros(1, 3, dtype=torch.long), 2, real=real)
